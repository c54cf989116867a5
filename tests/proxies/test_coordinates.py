import dataclasses
import math
from pathlib import Path

import mup.coord_check
import numpy as np
import planted
import pytest
import torch
from anchors import overwritten_rates
from mup_reference import mup_model
from planted import (
    BASE,
    WIDTHS,
    check,
    checked,
    flagged,
    plain_factory,
    planted_table,
    runs_of,
)
from proxy_cases import run_spec
from torch import nn
from torch.nn import functional

from proxies.coordinates.activations import ActivationProbe, attention_logits
from proxies.coordinates.coordinates import CoordinateCheck
from proxies.coordinates.verdict import (
    CheckSettings,
    Measured,
    alignment_slope,
    fit_slope,
    judge_layer,
)
from proxies.core import canon
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.external.factory import build_model, load
from proxies.parametrization.parametrization import parameter_table
from proxies.training.solo import Solo

HIDDEN_RATE = "hidden matrices' learning rate does not shrink with width"
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


@pytest.fixture(scope="module")
def right(store):
    return check(store)


def test_mup_passes(right):
    assert (right.outcome, right.mistakes, right.notes, flagged(right)) == ("passes", (), (), {})
    assert [layer.layer for layer in right.layers] == LAYERS
    assert (right.parametrization, right.axis, right.widths, right.depths) == (
        "mup",
        "width",
        WIDTHS,
        (1,) * 4,
    )
    assert (right.num_steps, right.num_seeds) == (4, 3)
    assert canon.decode(CoordinateCheck, canon.parse(canon.canonical(right))) == right


def test_the_interval_is_a_t_interval_over_seeds():
    """Slopes 1 and 2 per doubling: their mean, and 6.314 standard errors at 90 % with one degree of
    freedom.
    """
    slope = fit_slope(np.array([[1.0, 1.0], [2.0, 4.0], [4.0, 16.0]]), (16, 32, 64), 0.9)
    assert slope.slope == pytest.approx(1.5)
    assert slope.interval == pytest.approx((1.5 - 6.3138 * 0.5, 1.5 + 6.3138 * 0.5), rel=1e-4)
    assert fit_slope(np.zeros((3, 2)), (16, 32, 64), 0.9) is None


def test_the_standard_parametrization_blows_up_and_so_does_each_model_its_own_base(store):
    """Silent: every width calls itself the base. Bit by bit it is `sp`."""
    standard = check(store, parametrization="sp")
    assert standard.outcome == "blows_up"
    assert any(HIDDEN_RATE in mistake for mistake in standard.mistakes)
    assert any("unscaled readout" in mistake for mistake in standard.mistakes)
    assert check(store, bases=[BASE.at_width(width) for width in WIDTHS]).layers == standard.layers


def test_root_head_dim_is_no_mistake_at_a_fixed_head_dim(store):
    assert (
        check(store, parametrization=named("mup", attention="inverse_sqrt_head_dim")).outcome
        == "passes"
    )
    assert check(store, grow_head=True).outcome == "passes"


@pytest.mark.parametrize(
    ("kind", "power", "outcome", "mistake"),
    [
        ("hidden", 0.5, "blows_up", HIDDEN_RATE),
        ("hidden", -1, "vanishes", "hidden matrices' learning rate shrinks too fast with width"),
        ("embedding", 1, "blows_up", "the embedding's learning rate grows with width"),
    ],
)
def test_a_rate_scaled_the_wrong_way_is_named(store, monkeypatch, kind, power, outcome, mistake):
    planted_table(
        monkeypatch, kind, learning_rate=lambda row, ratio: row.learning_rate * ratio**power
    )
    found = check(store)
    assert found.outcome == outcome
    assert [m.split(" (")[0] for m in found.mistakes] == [mistake]


def test_a_fixed_initial_std_is_named(store, monkeypatch):
    planted_table(monkeypatch, "hidden", init_std=lambda row, ratio: 0.02)
    found = check(store)
    assert found.outcome == "blows_up"
    assert [m.split(" (")[0] for m in found.mistakes] == [
        "hidden matrices' initial std does not shrink with fan-in"
    ]


@pytest.fixture
def learned_base(learned_store, monkeypatch):
    """The models of the checks get the learned vocabulary, and sequences of 32 tokens."""
    base = dataclasses.replace(BASE, vocab_size=learned_store.manifest.vocab_size, seq_len=32)
    assert base.vocab_size == 4096
    monkeypatch.setattr(planted, "BASE", base)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_learned_vocabulary_passes_though_alignment_fades(learned_store, learned_base, optimizer):
    """An update's effect is mostly noise in small models, and fades; its size follows the rule
    exactly.
    """
    rules = named("mup", muon_rate="original") if optimizer == "muon" else "mup"
    verdict = check(learned_store, parametrization=rules, optimizer=optimizer)
    assert (verdict.outcome, verdict.mistakes) == ("passes", ())
    layers = {layer.layer: layer for layer in verdict.layers}
    for layer in layers.values():
        assert (layer.rate is not None) == (layer.role in ("embedding", "hidden", "readout"))
        assert layer.rate is None or layer.rate.slope == pytest.approx(0, abs=0.12)
    if optimizer == "adamw":
        assert layers["layers.0.attention.wk"].update.slope < -0.2
        assert layers["lm_head"].expected[0] < -0.1


@pytest.mark.parametrize(("power", "outcome"), [(-0.5, "vanishes"), (0.5, "blows_up")])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_hidden_rate_wrong_by_a_root_is_named_on_a_learned_vocabulary(
    learned_store, learned_base, monkeypatch, optimizer, power, outcome
):
    planted_table(
        monkeypatch, "hidden", learning_rate=lambda row, ratio: row.learning_rate * ratio**power
    )
    rules = named("mup", muon_rate="original") if optimizer == "muon" else "mup"
    verdict = check(learned_store, parametrization=rules, optimizer=optimizer)
    assert verdict.outcome == outcome
    assert verdict.mistakes[0].startswith("hidden matrices' learning rate")


def test_a_right_rate_that_is_overwritten_later_is_seen_in_the_last_updates_size(
    learned_store, learned_base, monkeypatch
):
    overwritten_rates(monkeypatch, from_step=1)
    verdict = check(learned_store)
    wq = next(layer for layer in verdict.layers if layer.layer == "layers.0.attention.wq")
    assert wq.rate.slope == pytest.approx(0, abs=0.1) and wq.outcome == "blows_up"


def test_an_embedding_that_fades_by_choice_passes(store):
    found = check(store, parametrization="umup")
    assert (found.outcome, found.mistakes) == ("passes", ())
    embedding = found.layers[0]
    assert embedding.expected == (-0.5, -0.5) and embedding.slope == pytest.approx(-0.5, abs=0.1)


def test_a_layer_that_does_not_move_is_not_passed(store, monkeypatch):
    """No change at all has a slope of zero and no spread: it must not look like the best of
    layers.
    """
    planted_table(monkeypatch, "embedding", learning_rate=lambda row, ratio: 0.0)
    found = check(store)
    assert (found.layers[0].outcome, found.layers[0].change) == ("cannot_tell", (0.0,) * 4)
    assert "did not move at width 16, 32, 64, 128" in found.layers[0].cause
    assert found.outcome == "cannot_tell"


def test_a_run_that_leaves_the_finite_numbers_is_a_blow_up_and_located(store):
    runs = runs_of(store, num_seeds=2)
    wild = dataclasses.replace(runs[-1][0].hparams, learning_rate=1e30)
    runs[-1] = [dataclasses.replace(run, hparams=wild) for run in runs[-1]]
    told = []
    found = checked(runs, store, progress=told.append)
    assert (found.outcome, found.not_finite_width, found.not_finite_depth) == ("blows_up", 128, 1)
    assert found.not_finite_step in (1, 2)
    assert found.mistakes[0].startswith(
        "width 128 (1 layer, seed 0) became NaN or infinite at step "
    )
    assert told == [16, 32, 64] and all(len(layer.change) == 3 for layer in found.layers)
    first = checked(runs[2:], store)
    assert (first.outcome, first.not_finite_width, first.layers) == ("blows_up", 128, ())


def test_somebody_elses_model_is_checked_by_its_own_names(store):
    """At a growing head dim torch's own scale, 1 / sqrt(head_dim), is the one mistake of a model
    otherwise right.
    """
    factory, build = plain_factory()
    fine = check(store, build=build, factory=factory)
    assert (fine.outcome, fine.mistakes) == ("passes", ())
    names = {layer.layer: layer.role for layer in fine.layers}
    assert (
        names["embed"] == "embedding"
        and names["head"] == "readout"
        and names["blocks.0.stream"] == "stream"
    )
    assert (
        names["blocks.0.qkv"] == "hidden"
        and names["blocks.0.attention_logits"] == "attention_logits"
    )
    (mistake,) = check(store, build=build, factory=factory, grow_head=True).mistakes
    assert "1 / sqrt(head_dim)" in mistake


@pytest.mark.parametrize("corpus_name", ["store", "learned_store"])
def test_sizes_are_those_of_mups_own_coord_check(corpus_name, request):
    """Our model, engine and recorder against mup's model, MuAdamW and `get_coord_data`, on the same
    batches.
    """
    store = request.getfixturevalue(corpus_name)
    num_steps, width = 4, 64
    base = dataclasses.replace(BASE, vocab_size=store.manifest.vocab_size)
    shape = base.at_width(width)
    spec = run_spec(
        store.manifest.data_id,
        shape=shape,
        base_shape=base,
        num_slots=1,
        dtype="float64",
        learning_rate=0.01,
        schedule=Schedule(kind="constant", num_steps=num_steps),
        parametrization="mup",
        beta2=0.999,
        clip_norm=None,
    )
    batches = [
        torch.from_numpy(
            store.train_batch(
                seed=0, first_sequence=4 * step, num_sequences=4, seq_len=shape.seq_len
            )
        )
        for step in range(num_steps)
    ]
    solo = Solo(store)
    solo.admit(0, spec)
    weights = {name: p.detach().clone() for name, p in solo.model.named_parameters()}

    def theirs():
        model = mup_model(shape, base).double()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(weights[name])
        return model

    table = mup.coord_check.get_coord_data(
        {width: theirs},
        [(batch[:, :-1], batch[:, 1:].flatten()) for batch in batches],
        optimizer="adamw",
        lr=0.01,
        nsteps=num_steps,
        flatten_output=True,
        fix_data=False,
        cuda=False,
        show_progress=False,
    )
    found = {(row.module, row.t): row.l1 for row in table.itertuples()}
    probe = ActivationProbe(solo.model, {row.name: row.kind for row in parameter_table(spec)})
    for step, batch in enumerate(batches, start=1):
        readings = probe.record(solo.predict, batch[:, :-1])
        for layer, reading in readings.items():
            if reading.role != "attention_logits":
                wanted = found[layer.removesuffix(".stream"), step]
                assert reading.size == pytest.approx(wanted, rel=1e-6), (layer, step)
        solo.advance(1)


DEPTHS = (2, 4, 8)


def test_completep_keeps_the_streams_size_over_depths(store):
    found = check(store, depths=DEPTHS, parametrization="completep")
    assert (found.outcome, found.mistakes, found.axis, found.depths) == (
        "passes",
        (),
        "depth",
        DEPTHS,
    )
    names = [layer.layer for layer in found.layers]
    assert "layers.first.stream" in names and "layers.last.stream" in names and "norm" in names


def test_no_depth_rule_is_named(store):
    found = check(store, depths=DEPTHS, parametrization="mup")
    assert found.outcome == "blows_up" and "layers.last.stream" in flagged(found)
    assert any(
        m.startswith("no depth rule: the residual stream's updates grow with depth")
        for m in found.mistakes
    )


def test_blocks_that_grow_lazy_by_choice_pass(store):
    found = check(store, depths=DEPTHS, parametrization=named("completep", depth_alpha=0.5))
    assert (found.outcome, found.mistakes) == ("passes", ())


def test_a_branch_multiplier_on_a_users_last_matrix_is_no_wrong_initial_std(store):
    """Hugging Face's Llama scales its branches in hooks on `o_proj` and `down_proj`: over depths
    their output fades.
    """
    pytest.importorskip("transformers")
    folder = Path(__file__).parents[2] / "examples" / "own_model"
    factory = load("models:llama", folder)[1]
    found = check(
        store,
        depths=DEPTHS,
        parametrization="completep",
        factory=factory,
        build=lambda spec: build_model(spec, folder),
    )
    assert (found.outcome, found.mistakes) == ("passes", ())
    scaled = next(
        layer for layer in found.layers if layer.layer == "model.layers.first.self_attn.o_proj"
    )
    assert scaled.start.slope < -0.75


class Affine(nn.Module):
    """A hidden matrix with a bias, and one whose fan-in is none of its input's last dimension."""

    def __init__(self):
        super().__init__()
        self.linear, self.convolution = nn.Linear(96, 80), nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x_BCF):
        return self.linear(x_BCF), self.convolution(x_BCF)


def test_the_size_of_an_update_is_its_elements_times_the_fan_in():
    generator = torch.Generator().manual_seed(1)
    module = Affine()
    kinds = {
        name: "hidden" if name.endswith("weight") else "block_bias"
        for name, _ in module.named_parameters()
    }
    x_BCF = torch.randn(32, 16, 96, generator=generator) + 1
    probe = ActivationProbe(module, kinds)

    def predict(x):
        return module(x)[0].flatten(0, 1)

    assert probe.record(predict, x_BCF)["linear"].rate == 0
    update = 0.01 * torch.randn(80, 96, generator=generator)
    with torch.no_grad():
        module.linear.weight += update
        module.linear.bias += 1.0
        module.convolution.weight += 0.01
    reading = probe.record(predict, x_BCF)
    # Mean absolute values: of Gaussian outputs sqrt(2 / pi) of the root mean square
    entering_rms = x_BCF.square().mean().sqrt().item()
    wanted = math.sqrt(2 / math.pi) * update.square().mean().sqrt().item() * 96 * entering_rms
    assert reading["linear"].rate == pytest.approx(wanted / x_BCF.abs().mean().item(), rel=0.03)
    assert reading["convolution"].rate is None and reading["convolution"].update > 0


class Fused(nn.Module):
    """A block that owns a matrix, calls a child, and attends: its forward must be recorded once."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Parameter(torch.randn(48, 16) / 4), nn.Linear(16, 16)

    def forward(self, x_BTD):
        q, k, v = (y[:, None] for y in functional.linear(x_BTD, self.qkv).chunk(3, dim=-1))
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def test_what_a_measured_module_calls_is_recorded_once():
    module = nn.Sequential(Fused())
    probe = ActivationProbe(
        module, dict.fromkeys(("0.qkv", "0.out.weight", "0.out.bias"), "hidden")
    )
    x_BTD = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        readings = probe.record(lambda x: module(x).flatten(0, 1), x_BTD)
        assert list(readings) == ["attention_logits", "0.out", "0"]
    assert readings["0"].update == readings["0.out"].rate == 0
    # attention is not linear: the size of its update is not known by sampling
    assert readings["0"].rate is None


def measured_at(*, rate=None, effect=(1.0, 1.0, 1.0), change=(1.0, 1.0, 1.0)):
    """A hidden matrix at three widths, after one update; sizes by width, the same for two seeds."""

    def by_step(sizes):
        one_PK = np.array([sizes, sizes], dtype=float).T
        return np.stack([np.ones_like(one_PK), one_PK])

    return Measured(
        layer="wq",
        role="hidden",
        size=by_step((1, 1, 1)),
        change=by_step(change),
        update=by_step(effect),
        gain=by_step((1, 1, 1)),
        rate=by_step((np.nan,) * 3 if rate is None else rate),
    )


FADED = (1.0, 0.707, 0.5)
STEEP = (1.0, 0.5, 0.25)


@pytest.mark.parametrize(
    ("measured", "outcome"),
    [
        # noise: the rate is right
        (measured_at(rate=(1, 1, 1), effect=FADED, change=FADED), "passes"),
        (measured_at(rate=FADED, effect=STEEP, change=STEEP), "vanishes"),  # the rate is not
        (measured_at(rate=(1, 1, 1), change=FADED), "vanishes"),  # no noise explains the change
        # nor all of this one
        (measured_at(rate=(1, 1, 1), effect=STEEP, change=STEEP), "vanishes"),
        (measured_at(effect=FADED, change=FADED), "passes"),  # of unknown size: all may be noise
        (measured_at(effect=(1.0, 1.5, 2.25), change=(1, 1, 1)), "blows_up"),
        (measured_at(effect=(1.0, 0.41, 0.17), change=FADED), "vanishes"),
    ],
)
def test_fading_is_a_mistake_only_where_noise_does_not_explain_it(measured, outcome):
    setting = CheckSettings(
        axis="width",
        points=(32, 64, 128),
        level=0.9,
        parametrization=named("mup"),
        head_dim_power=0.0,
    )
    verdict = judge_layer(measured, setting, alignment_slope(measured, setting))
    assert verdict.outcome == outcome


def test_the_probe_leaves_a_run_as_it_was(store):
    """Watched or not, the same losses: hooks are gone, weights untouched, and no gradient is
    left.
    """
    spec = run_spec(store.manifest.data_id, shape=BASE, num_slots=1, num_steps=3)
    curves = []
    for watched in (True, False):
        solo = Solo(store)
        solo.admit(0, spec)
        ids_BT = torch.from_numpy(
            store.validation_batch(num_sequences=2, seq_len=BASE.seq_len)[:, :-1]
        )
        probe = ActivationProbe(solo.model, {row.name: row.kind for row in parameter_table(spec)})
        for _ in range(2 if watched else 0):
            probe.record(solo.predict, ids_BT)
            assert not any(
                module._forward_hooks or module._forward_pre_hooks
                for module in solo.model.modules()
            )
        ((_, _, curve),) = solo.advance(3)
        curves.append(curve)
    assert curves[0] == curves[1]


def test_attention_logits_are_those_that_are_allowed():
    """By hand: two heads on one key head, a causal mask or any other, torch's default scale."""
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(1, 2, 3, 4, generator=generator),
        torch.randn(1, 1, 3, 4, generator=generator),
    )
    causal = attention_logits(q, k, k, is_causal=True, enable_gqa=True)
    wanted = [
        float(q[0, h, i] @ k[0, 0, j]) / 2
        for h in range(2)
        for i in (2, 1, 0)
        for j in range(i + 1)
    ]
    assert causal[0].tolist() == pytest.approx(wanted, rel=1e-5)
    mask = torch.ones(3, 3).tril().bool()
    assert attention_logits(q, k, k, mask, scale=0.5, enable_gqa=True).tolist() == causal.tolist()
    added = torch.zeros(3, 3).masked_fill(~mask, -torch.inf)
    assert attention_logits(q, k, k, added, enable_gqa=True).tolist() == causal.tolist()
    long = torch.randn(4, 1, 200, 4, generator=generator)
    assert attention_logits(long, long, long).shape == (1, 4 * 34 * 200)
