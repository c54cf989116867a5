"""Tests of the coordinate check: it passes correct parametrizations and names planted mistakes.

The check trains small models of several widths or depths for a few steps. It fits the slopes with
which the size of each layer's output, and the size of its change, grow per doubling. Some slopes
are negative without a mistake, and the check must not report them. In small models, for example, an
update changes the output less at larger widths, because the update aligns less with the inputs.
"""

import dataclasses
from pathlib import Path

import coordinate_cases
import pytest
from anchors import plant_overwritten_rates
from coordinate_cases import (
    BASE,
    WIDTHS,
    check_runs,
    list_flagged_layers,
    load_user_factory,
    make_runs,
    plant_in_table,
    run_check,
)

from forerun._proxies.coordinates.coordinate_check import CoordinateCheck
from forerun._proxies.core import canon
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.external.factory import build_model, load_factory

HIDDEN_RATE_MISTAKE = "hidden matrices' learning rate does not shrink with width"
LAYERS = [
    "tok_embeddings",
    *(
        f"layers.0.{name}"
        for name in (
            "attention_norm",
            "attention.wq",
            "attention.wk",
            "attention.wv",
            "attention_logits",
            "attention.wo",
            "ffn_norm",
            "feed_forward.w1",
            "feed_forward.w3",
            "feed_forward.w2",
            "stream",
        )
    ),
    "norm",
    "lm_head",
]
"""Layers of a model with one block, in the order in which a check lists them."""


def name_mistakes(check):
    """Return the mistakes of a check without the layers and figures in parentheses."""
    return [mistake.split(" (")[0] for mistake in check.mistakes]


@pytest.fixture(scope="module")
def mup_check(store):
    """The coordinate check of the parametrization mup."""
    return run_check(store)


def test_mup_passes(mup_check):
    assert (mup_check.outcome, mup_check.mistakes, mup_check.notes) == ("passes", (), ())
    assert list_flagged_layers(mup_check) == {}
    assert [layer.layer for layer in mup_check.layers] == LAYERS
    assert (mup_check.parametrization, mup_check.axis, mup_check.widths, mup_check.depths) == (
        "mup",
        "width",
        WIDTHS,
        (1,) * 4,
    )
    assert (mup_check.num_steps, mup_check.num_seeds) == (4, 3)
    text = canon.to_canonical_json(mup_check)
    assert canon.decode(CoordinateCheck, canon.parse(text)) == mup_check


def test_standard_parametrization_blows_up(store):
    """If every model is its own base, mup gives the same results as `sp`, bit by bit."""
    standard_check = run_check(store, parametrization="sp")
    assert standard_check.outcome == "blows_up"
    assert any(HIDDEN_RATE_MISTAKE in mistake for mistake in standard_check.mistakes)
    assert any("unscaled readout" in mistake for mistake in standard_check.mistakes)
    own_bases = [BASE.at_width(width) for width in WIDTHS]
    assert run_check(store, bases=own_bases).layers == standard_check.layers


def test_inverse_sqrt_head_dim_passes_at_a_fixed_head_dim(store):
    rules = get_parametrization("mup", attention="inverse_sqrt_head_dim")
    assert run_check(store, parametrization=rules).outcome == "passes"
    assert run_check(store, grow_head=True).outcome == "passes"


@pytest.mark.parametrize(
    ("kind", "power", "outcome", "mistake"),
    [
        ("hidden", 0.5, "blows_up", HIDDEN_RATE_MISTAKE),
        ("hidden", -1, "vanishes", "hidden matrices' learning rate shrinks too fast with width"),
        ("embedding", 1, "blows_up", "the embedding's learning rate grows with width"),
    ],
)
def test_wrong_power_of_a_rate_is_named(store, monkeypatch, kind, power, outcome, mistake):
    plant_in_table(
        monkeypatch, kind, learning_rate=lambda row, ratio: row.learning_rate * ratio**power
    )
    check = run_check(store)
    assert check.outcome == outcome
    assert name_mistakes(check) == [mistake]


def test_fixed_initial_std_is_named(store, monkeypatch):
    plant_in_table(monkeypatch, "hidden", init_std=lambda row, ratio: 0.02)
    check = run_check(store)
    assert check.outcome == "blows_up"
    assert name_mistakes(check) == ["hidden matrices' initial std does not shrink with fan-in"]


@pytest.fixture
def base_for_learned_vocabulary(learned_store, monkeypatch):
    """Replace the base shape of `make_runs` by one that fits the learned vocabulary."""
    base = dataclasses.replace(BASE, vocab_size=learned_store.manifest.vocab_size, seq_len=32)
    monkeypatch.setattr(coordinate_cases, "BASE", base)


@pytest.mark.usefixtures("base_for_learned_vocabulary")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_learned_vocabulary_passes_though_updates_align_less_with_width(learned_store, optimizer):
    """The size of each update follows the rule exactly, but its effect on the output shrinks."""
    rules = get_parametrization("mup", muon_rate="original") if optimizer == "muon" else "mup"
    check = run_check(learned_store, parametrization=rules, optimizer=optimizer)
    assert (check.outcome, check.mistakes) == ("passes", ())
    layers = {layer.layer: layer for layer in check.layers}
    for layer in layers.values():
        assert (layer.rate is not None) == (layer.role in ("embedding", "hidden", "readout"))
        assert layer.rate is None or layer.rate.slope == pytest.approx(0, abs=0.12)
    if optimizer == "adamw":
        assert layers["layers.0.attention.wk"].update.slope < -0.2
        assert layers["lm_head"].expected[0] < -0.1


@pytest.mark.usefixtures("base_for_learned_vocabulary")
@pytest.mark.parametrize(
    ("optimizer", "power", "outcome"),
    [
        ("adamw", -0.5, "vanishes"),
        ("muon", 0.5, "blows_up"),
        pytest.param("adamw", 0.5, "blows_up", marks=pytest.mark.slow),
        pytest.param("muon", -0.5, "vanishes", marks=pytest.mark.slow),
    ],
)
def test_square_root_error_in_a_hidden_rate_is_named_on_a_learned_vocabulary(
    learned_store, monkeypatch, optimizer, power, outcome
):
    plant_in_table(
        monkeypatch, "hidden", learning_rate=lambda row, ratio: row.learning_rate * ratio**power
    )
    rules = get_parametrization("mup", muon_rate="original") if optimizer == "muon" else "mup"
    check = run_check(learned_store, parametrization=rules, optimizer=optimizer)
    assert check.outcome == outcome
    assert check.mistakes[0].startswith("hidden matrices' learning rate")


@pytest.mark.usefixtures("base_for_learned_vocabulary")
def test_rate_overwritten_after_the_first_step_shows_in_the_last_update(learned_store, monkeypatch):
    """The slope of the first update is that of a correct run, so only the total change shows it."""
    plant_overwritten_rates(monkeypatch, from_step=1)
    check = run_check(learned_store)
    wq = next(layer for layer in check.layers if layer.layer == "layers.0.attention.wq")
    assert wq.rate.slope == pytest.approx(0, abs=0.1) and wq.outcome == "blows_up"


def test_embedding_rate_of_umup_passes_though_it_shrinks_with_width(store):
    """The rule of u-muP: the embedding's rate is divided by the square root of the width."""
    check = run_check(store, parametrization="umup")
    assert (check.outcome, check.mistakes) == ("passes", ())
    embedding = check.layers[0]
    assert embedding.expected == (-0.5, -0.5) and embedding.slope == pytest.approx(-0.5, abs=0.1)


def test_layer_that_does_not_move_does_not_pass(store, monkeypatch):
    """A layer without any change has a slope of zero and no spread, as a perfect layer has."""
    plant_in_table(monkeypatch, "embedding", learning_rate=lambda row, ratio: 0.0)
    check = run_check(store)
    assert (check.layers[0].outcome, check.layers[0].change) == ("cannot_tell", (0.0,) * 4)
    assert "did not move at width 16, 32, 64, 128" in check.layers[0].cause
    assert check.outcome == "cannot_tell"


def test_run_that_becomes_infinite_is_a_blow_up_at_its_width(store):
    runs = make_runs(store, num_seeds=2)
    diverging = dataclasses.replace(runs[-1][0].hparams, learning_rate=1e30)
    runs[-1] = [dataclasses.replace(run, hparams=diverging) for run in runs[-1]]
    finished_widths = []
    check = check_runs(runs, store, progress=finished_widths.append)
    assert (check.outcome, check.not_finite_width, check.not_finite_depth) == ("blows_up", 128, 1)
    assert check.not_finite_step in (1, 2)
    assert check.mistakes[0].startswith(
        "width 128 (1 layer, seed 0) became NaN or infinite at step "
    )
    assert finished_widths == [16, 32, 64]
    assert all(len(layer.change) == 3 for layer in check.layers)
    # One finite width is too few for a fit.
    short_check = check_runs(runs[2:], store)
    assert (short_check.outcome, short_check.not_finite_width) == ("blows_up", 128)
    assert short_check.layers == ()


def test_user_model_is_checked_by_its_own_layer_names(store):
    """The user's model is correct except for torch's attention scale, 1 / sqrt(head_dim).

    This scale is a mistake only if the head dim grows with width.
    """
    factory, build = load_user_factory()
    check = run_check(store, build=build, factory=factory)
    assert (check.outcome, check.mistakes) == ("passes", ())
    roles = {layer.layer: layer.role for layer in check.layers}
    assert roles["embed"] == "embedding"
    assert roles["head"] == "readout"
    assert roles["blocks.0.stream"] == "stream"
    assert roles["blocks.0.qkv"] == "hidden"
    assert roles["blocks.0.attention_logits"] == "attention_logits"
    (mistake,) = run_check(store, build=build, factory=factory, grow_head=True).mistakes
    assert "1 / sqrt(head_dim)" in mistake


# ---- Depth ----


DEPTHS = (2, 4, 8)
"""Numbers of layers of the models in checks over depth."""


def test_completep_passes_over_depths(store):
    check = run_check(store, depths=DEPTHS, parametrization="completep")
    assert (check.outcome, check.mistakes) == ("passes", ())
    assert (check.axis, check.depths) == ("depth", DEPTHS)
    names = [layer.layer for layer in check.layers]
    assert "layers.first.stream" in names and "layers.last.stream" in names and "norm" in names


def test_missing_depth_rule_is_named(store):
    check = run_check(store, depths=DEPTHS, parametrization="mup")
    assert check.outcome == "blows_up" and "layers.last.stream" in list_flagged_layers(check)
    mistake = "no depth rule: the residual stream's updates grow with depth"
    assert any(text.startswith(mistake) for text in check.mistakes)


def test_depth_alpha_of_one_half_passes_though_blocks_move_less(store):
    rules = get_parametrization("completep", depth_alpha=0.5)
    check = run_check(store, depths=DEPTHS, parametrization=rules)
    assert (check.outcome, check.mistakes) == ("passes", ())


def assert_pass_with_shrinking_layer(check, name):
    """Assert that a check passes though the initial output of one layer shrinks with depth."""
    assert (check.outcome, check.mistakes) == ("passes", ())
    layer = next(layer for layer in check.layers if layer.layer == name)
    assert layer.start.slope < -0.75


def test_branch_multiplier_in_a_hook_is_not_mistaken_for_a_wrong_initial_std(store):
    """The hooks divide the output of each branch's last matrix by the ratio of depths."""
    factory, build = load_user_factory("build_user_model_with_branch_hooks")
    check = run_check(
        store, depths=DEPTHS, parametrization="completep", factory=factory, build=build
    )
    assert_pass_with_shrinking_layer(check, "blocks.first.out")


@pytest.mark.slow
def test_example_with_hugging_face_llama_passes_over_depths(store):
    """The example scales branches in hooks on `o_proj` and `down_proj`."""
    pytest.importorskip("transformers")
    folder = Path(__file__).parents[3] / "examples" / "own_model"
    factory = load_factory("models:llama", folder)[1]
    check = run_check(
        store,
        depths=DEPTHS,
        parametrization="completep",
        factory=factory,
        build=lambda spec: build_model(spec, folder),
    )
    assert_pass_with_shrinking_layer(check, "model.layers.first.self_attn.o_proj")
