"""Tests of the parametrizations: numbers of each parameter, against mup's package and papers.

The numbers of a parameter are its initial std, learning rate, weight decay, and other settings.
mup compares a base model with a wider one, the delta, to find the dimensions that grow.
"""

import dataclasses
import math

import pytest
import torch
from mup_reference import build_mup_model
from parametrization_cases import (
    BASE,
    FAMILIES,
    HPARAMS,
    TrainedDecoder,
    check_completedp_is_completep,
    check_matches_mup,
    compute_table,
    draw_token_ids,
    grow,
    make_spec,
)
from proxy_cases import replace_settings

from forerun._proxies.core.canon import to_canonical_json
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.rules import NAMES
from forerun._proxies.core.shape import list_parameter_shapes
from forerun._proxies.model.decoder import Decoder
from forerun._proxies.parametrization.parametrization import (
    EMBEDDING_STD,
    POSITION_STD,
    compute_forward_numbers,
    compute_width_multipliers,
    derive_seed,
    draw_initial_tensor,
)

QUERY = "layers.0.attention.wq.weight"


@pytest.mark.parametrize(
    ("family", "growth"),
    [
        ("llama", {"heads": 7}),
        ("gpt2", {"head_dim": 2}),
        ("gpt2 with QK-norm", {"heads": 3, "head_dim": 2, "ffn": 2}),
    ],
    ids=str,
)
def test_numbers_match_the_mup_package(family, growth):
    check_matches_mup(grow(FAMILIES[family], **growth), FAMILIES[family])


def test_std_of_tied_matrices_does_not_grow_with_width():
    """It grows in mup's package (microsoft/mup#55), which `tests/anchors` shows on real models."""
    base = dataclasses.replace(BASE, tied=True)
    for heads in (1, 4, 16):
        shape = grow(base, heads=heads)
        rows = compute_table(shape, base)
        shared, forward = (
            rows["tok_embeddings.weight"],
            compute_forward_numbers(make_spec(shape, base)),
        )
        assert "lm_head.weight" not in rows
        assert (shared.kind, shared.learning_rate) == ("embedding", HPARAMS.learning_rate)
        assert shared.init_std == 1 / math.sqrt(base.width)
        assert forward.output == HPARAMS.output_multiplier / heads


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_shapes_match_the_module_in_order(family, tied):
    shape = dataclasses.replace(grow(FAMILIES[family], heads=3), tied=tied)
    decoder = Decoder(shape, device="meta")
    expected = [(name, tuple(parameter.shape)) for name, parameter in decoder.named_parameters()]
    assert list(list_parameter_shapes(shape).items()) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_standard_parametrization_scales_nothing_but_initial_stds(family):
    shape = grow(FAMILIES[family], heads=4)
    for numbers in compute_table(shape, FAMILIES[family], "sp").values():
        assert (numbers.learning_rate, numbers.settings["eps"]) == (
            HPARAMS.learning_rate,
            HPARAMS.eps,
        )
        if numbers.kind in ("hidden", "readout"):
            assert numbers.weight_decay == 0.1
            assert numbers.init_std == 1 / math.sqrt(numbers.size[-1])
        else:
            embedding_stds = {
                "tok_embeddings.weight": EMBEDDING_STD,
                "pos_embeddings.weight": POSITION_STD,
            }
            assert numbers.weight_decay == 0
            assert numbers.init_std == embedding_stds.get(numbers.name, 0.0)
    forward = compute_forward_numbers(make_spec(shape, FAMILIES[family], "sp"))
    expected = {"embedding": 1, "attention": 1 / math.sqrt(8), "residual": 1, "output": 3}
    assert dataclasses.asdict(forward) == expected


@pytest.mark.parametrize(("family", "tied"), [("llama with QK-norm", True), ("gpt2", False)])
def test_parametrizations_agree_at_the_base_shape(family, tied):
    """Logits are equal. The weights after one step are equal if the weight decay is coupled."""

    def drop_decay(rows):
        return to_canonical_json([replace_settings(row, weight_decay=0.0) for row in rows])

    base = dataclasses.replace(FAMILIES[family], tied=tied)
    ids, standard = draw_token_ids(base), TrainedDecoder.from_spec(make_spec(base, base, "sp"))
    initial_logits = standard.compute_logits(ids)
    standard.step(ids, clip_norm=1.0)
    for name in NAMES:
        spec = make_spec(base, base, name, output="multiplier")
        model = TrainedDecoder.from_spec(spec)
        assert torch.equal(model.compute_logits(ids), initial_logits), name
        model.step(ids, clip_norm=1.0)
        difference = max(
            (a - b).abs().max().item()
            for a, b in zip(model.decoder.parameters(), standard.decoder.parameters(), strict=True)
        )
        if spec.parametrization.weight_decay == "independent":
            # An independent decay is not multiplied by the rate 0.01, so the rows hold 0.1 / 0.01.
            assert difference > 1e-3
            assert {row.weight_decay for row in model.rows} == {0.0, 0.1 / 0.01}
            assert drop_decay(model.rows) == drop_decay(standard.rows)
        else:
            assert difference < 1e-12, name
            assert to_canonical_json(list(model.rows)) == to_canonical_json(list(standard.rows))


def test_completedp_at_the_base_batch_is_completep_with_absorbed_multiplier():
    base = FAMILIES["gpt2 with QK-norm"]
    check_completedp_is_completep(grow(base, heads=4).at_depth(4), base)


def test_completedp_numbers_follow_batch_and_duration():
    """The run has 4 times the base's width and batch, twice its depth and 9 times its tokens.

    The base's values are those of `HPARAMS`: rate 0.01, weight decay 0.1, eps 1e-9, beta1 0.85 and
    beta2 0.95. The std of its hidden matrices is 1 / sqrt(fan-in), 1 / 4.
    """
    shape, ratios = grow(BASE, heads=4).at_depth(4), {"batch_ratio": 4, "duration_ratio": 9}
    rows = compute_table(shape, BASE, "completedp", **ratios)
    root = math.sqrt(4 / 9)
    row = rows[QUERY]
    assert row.init_std == pytest.approx(1 / 4 / 2)
    assert row.learning_rate == pytest.approx(0.01 / 4 * root)
    assert row.weight_decay == pytest.approx(0.1 * 4 * root)
    assert row.settings["eps"] == pytest.approx(1e-9 / 4 / 2 / root)
    assert (1 - row.settings["beta1"], 1 - row.settings["beta2"]) == pytest.approx(
        (0.15 * 4 / 9, 0.05 * 4 / 9)
    )
    # The absorbed readout's std is divided by the whole width ratio.
    assert rows["lm_head.weight"].init_std == pytest.approx(1 / 4 / 4)
    assert compute_forward_numbers(make_spec(shape, BASE, "completedp", **ratios)).residual == 0.5
    independent = compute_table(shape, BASE, "completedp", weight_decay="independent", **ratios)[
        QUERY
    ]
    assert independent.learning_rate * independent.weight_decay == pytest.approx(0.1 * 4 / 9)


def test_initial_values_depend_only_on_seed_and_name():
    numbers = compute_table(BASE)
    drawn = {name: draw_initial_tensor(row, 5) for name, row in numbers.items()}
    torch.manual_seed(99)
    drawn_in_reverse = {name: draw_initial_tensor(numbers[name], 5) for name in reversed(numbers)}
    assert all(torch.equal(drawn[name], drawn_in_reverse[name]) for name in numbers)
    assert not torch.equal(drawn[QUERY], draw_initial_tensor(numbers[QUERY], 6))
    assert not torch.equal(drawn[QUERY], drawn["layers.0.attention.wo.weight"])
    seeds = {derive_seed(seed, name) for seed in range(20) for name in numbers}
    assert len(seeds) == 20 * len(numbers)
    # Stored runs depend on these seeds. Never change the expected value.
    assert derive_seed(1, "a") == 53794261220561053


def test_equal_base_and_delta_are_refused():
    """The mup package accepts them silently and then scales nothing."""
    shape, mup_model = grow(BASE, heads=4), build_mup_model(BASE, BASE, delta_shape=BASE)
    assert mup_model.lm_head.width_mult() == 1
    assert dict(mup_model.named_parameters())[QUERY].infshape.ninf() == 0
    with pytest.raises(
        SpecError, match="base and delta are of equal width, so nothing would scale"
    ):
        compute_width_multipliers(
            list_parameter_shapes(shape), list_parameter_shapes(BASE), list_parameter_shapes(BASE)
        )


def test_all_sizes_that_cannot_be_compared_are_named():
    sizes = {"a": (8, 4), "b": (8,), "c": (8, 4), "d": (3,)}
    base = {"a": (4, 2), "b": (4,), "c": (4,), "e": (3,)}
    delta = {"a": (8, 2), "b": (8,), "c": (8,), "d": (3,)}
    with pytest.raises(SpecError) as caught:
        compute_width_multipliers(sizes, base, delta)
    assert caught.value.problems == [
        "d is not in all of model, base and delta",
        "e is not in all of model, base and delta",
        "a: dimension 1 is 4 here and 2 at the base, but does not vary between base and delta",
        "c has 2 dimensions, 1 at the base and 1 in delta",
    ]


def test_base_of_another_model_is_refused():
    gpt2 = FAMILIES["gpt2"]
    other_base = dataclasses.replace(gpt2, tied=True, qk_norm=True, seq_len=24)
    with pytest.raises(
        SpecError, match="shape and base_shape differ in tied, qk_norm, seq_len: only width"
    ):
        make_spec(grow(gpt2, heads=2), other_base)
    # The llama family has no parameter with the dimension seq_len.
    assert make_spec(BASE, dataclasses.replace(BASE, seq_len=6))
