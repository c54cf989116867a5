import dataclasses
import math

import pytest
import torch
from mup_reference import mup_model
from parametrization_cases import (
    BASE,
    FAMILIES,
    HPARAMS,
    Model,
    completedp_is_completep,
    grown,
    is_mups,
    spec_of,
    table,
    token_ids,
)
from proxy_cases import with_settings

from proxies.core.canon import canonical
from proxies.core.checks import SpecError
from proxies.core.rules import NAMES
from proxies.core.shape import parameter_shapes
from proxies.model.decoder import Decoder
from proxies.parametrization.parametrization import (
    forward_numbers,
    initial_tensor,
    name_seed,
    width_multipliers,
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
def test_mup_is_mups(family, growth):
    is_mups(grown(FAMILIES[family], **growth), FAMILIES[family])


def test_tied_matrices_keep_their_std_where_mups_grows():
    """microsoft/mup#55; that mup's own do, `tests/anchors` shows on real models."""
    base = dataclasses.replace(BASE, tied=True)
    for heads in (1, 4, 16):
        shape = grown(base, heads=heads)
        rows = table(shape, base)
        shared, forward = rows["tok_embeddings.weight"], forward_numbers(spec_of(shape, base))
        assert "lm_head.weight" not in rows
        assert (shared.kind, shared.learning_rate) == ("embedding", HPARAMS.learning_rate)
        assert shared.init_std == 1 / math.sqrt(base.width)
        assert forward.output == HPARAMS.output_multiplier / heads


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_the_modules_own(family, tied):
    shape = dataclasses.replace(grown(FAMILIES[family], heads=3), tied=tied)
    module = {name: tuple(p.shape) for name, p in Decoder(shape, device="meta").named_parameters()}
    assert list(parameter_shapes(shape).items()) == list(module.items()), "in its order too"


@pytest.mark.parametrize("family", FAMILIES)
def test_standard_parametrization(family):
    shape = grown(FAMILIES[family], heads=4)
    for numbers in table(shape, FAMILIES[family], "sp").values():
        assert (numbers.learning_rate, numbers.settings["eps"]) == (
            HPARAMS.learning_rate,
            HPARAMS.eps,
        )
        matrix = numbers.kind in ("hidden", "readout")
        assert numbers.weight_decay == (0.1 if matrix else 0)
        embeddings = {"tok_embeddings.weight": 1.0, "pos_embeddings.weight": 0.5}
        assert numbers.init_std == (
            1 / math.sqrt(numbers.size[-1]) if matrix else embeddings.get(numbers.name, 0.0)
        )
    forward = forward_numbers(spec_of(shape, FAMILIES[family], "sp"))
    wanted = {"embedding": 1, "attention": 1 / math.sqrt(8), "residual": 1, "output": 3}
    assert dataclasses.asdict(forward) == wanted


@pytest.mark.parametrize(("family", "tied"), [("llama with QK-norm", True), ("gpt2", False)])
def test_at_the_base_every_parametrization_is_the_same_function(family, tied):
    base = dataclasses.replace(FAMILIES[family], tied=tied)
    ids, first = token_ids(base), Model.of(spec_of(base, base, "sp"))
    start = first.logits(ids)
    first.step(ids, clip_norm=1.0)
    for name in NAMES:
        spec = spec_of(base, base, name, output="multiplier")
        model = Model.of(spec)
        assert torch.equal(model.logits(ids), start), name
        model.step(ids, clip_norm=1.0)
        part = max(
            (a - b).abs().max().item()
            for a, b in zip(model.decoder.parameters(), first.decoder.parameters(), strict=True)
        )
        if spec.parametrization.weight_decay == "independent":
            # By definition: the decay given is the share itself, not what is multiplied by the
            # rate.
            assert part > 1e-3
            assert {row.weight_decay for row in model.rows} == {0.0, 0.1 / 0.01}
            assert canonical(
                [with_settings(row, weight_decay=0.0) for row in model.rows]
            ) == canonical([with_settings(row, weight_decay=0.0) for row in first.rows])
        else:
            assert part < 1e-12, name
            assert canonical(list(model.rows)) == canonical(list(first.rows))


def test_completedp_at_the_base_batch_is_completep_with_its_multiplier_absorbed():
    base = FAMILIES["gpt2 with QK-norm"]
    completedp_is_completep(grown(base, heads=4).at_depth(4), base)


def test_completedp_with_batch_and_duration():
    """One row in numbers: width 4, depth 2, batch 4, tokens 9 times the base's."""
    shape, ratios = grown(BASE, heads=4).at_depth(4), {"batch_ratio": 4, "duration_ratio": 9}
    rows = table(shape, BASE, "completedp", **ratios)
    root = math.sqrt(4 / 9)
    row = rows[QUERY]
    assert row.init_std == pytest.approx(1 / 8)
    assert row.learning_rate == pytest.approx(0.01 / 4 * root)
    assert row.weight_decay == pytest.approx(0.1 * 4 * root)
    assert row.settings["eps"] == pytest.approx(1e-9 / 4 / 2 / root)
    assert (1 - row.settings["beta1"], 1 - row.settings["beta2"]) == pytest.approx(
        (0.15 * 4 / 9, 0.05 * 4 / 9)
    )
    assert rows["lm_head.weight"].init_std == pytest.approx(1 / 16)
    assert forward_numbers(spec_of(shape, BASE, "completedp", **ratios)).residual == 0.5
    independent = table(shape, BASE, "completedp", weight_decay="independent", **ratios)[QUERY]
    assert independent.learning_rate * independent.weight_decay == pytest.approx(0.1 * 4 / 9)


def test_initial_values_depend_on_seed_and_name_alone():
    numbers = table(BASE)
    forward = {name: initial_tensor(row, 5) for name, row in numbers.items()}
    torch.manual_seed(99)
    backward = {name: initial_tensor(row, 5) for name, row in reversed(numbers.items())}
    assert all(torch.equal(forward[name], backward[name]) for name in numbers)
    assert not torch.equal(forward[QUERY], initial_tensor(numbers[QUERY], 6))
    assert not torch.equal(forward[QUERY], forward["layers.0.attention.wo.weight"])
    assert len({name_seed(seed, name) for seed in range(20) for name in numbers}) == 20 * len(
        numbers
    )
    assert name_seed(1, "a") == 53794261220561053


def test_what_mup_does_in_silence_is_refused():
    """With the base as delta mup holds every dimension for finite: the standard form, unsaid."""
    shape, silent = grown(BASE, heads=4), mup_model(BASE, BASE, delta_shape=BASE)
    assert silent.lm_head.width_mult() == 1
    assert dict(silent.named_parameters())[QUERY].infshape.ninf() == 0
    with pytest.raises(
        SpecError, match="base and delta are of equal width, so nothing would scale"
    ):
        width_multipliers(parameter_shapes(shape), parameter_shapes(BASE), parameter_shapes(BASE))


def test_sizes_that_cannot_be_compared_are_all_named():
    sizes = {"a": (8, 4), "b": (8,), "c": (8, 4), "d": (3,)}
    base, delta = (
        {"a": (4, 2), "b": (4,), "c": (4,), "e": (3,)},
        {"a": (8, 2), "b": (8,), "c": (8,), "d": (3,)},
    )
    with pytest.raises(SpecError) as caught:
        width_multipliers(sizes, base, delta)
    assert caught.value.problems == [
        "d is not in all of model, base and delta",
        "e is not in all of model, base and delta",
        "a: dimension 1 is 4 here and 2 at the base, but does not vary between base and delta",
        "c has 2 dimensions, 1 at the base and 1 in delta",
    ]


def test_a_base_of_another_model_is_refused_with_the_run():
    gpt2 = FAMILIES["gpt2"]
    other = dataclasses.replace(gpt2, tied=True, qk_norm=True, seq_len=24)
    with pytest.raises(
        SpecError, match="shape and base_shape differ in tied, qk_norm, seq_len: only width"
    ):
        spec_of(grown(gpt2, heads=2), other)
    # no parameter of this family has that dimension
    assert spec_of(BASE, dataclasses.replace(BASE, seq_len=6))
