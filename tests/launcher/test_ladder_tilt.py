"""What mis-tuned rungs do to a forecast: planted laws, planted losses of the rate."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from launcher.answers.texts import ladder_text
from launcher.experiments.ladder import Excess, RungCheck, Tried
from launcher.study import ladder_tilt
from launcher.study.gates import Gate, tuned_gate
from launcher.study.ladder_tilt import LadderChecks, checks_body, tilt
from proxies.core import canon
from proxies.core.shape import Shape
from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.laws.table import from_columns

WIDTHS, STEPS = (32, 48, 64, 96, 128), (150, 400, 1000)


def a_rung(width, steps):
    shape = Shape(
        num_layers=2, width=width, num_heads=2, num_kv_heads=2, ffn_width=2 * width, vocab_size=256, seq_len=64
    )
    return SimpleNamespace(id=f"{width}/{steps}", shape=shape, num_tokens=steps * 1024,
                           schedule=SimpleNamespace(num_steps=steps), seed=100)  # fmt: skip


RUNGS = [a_rung(width, steps) for width in WIDTHS for steps in STEPS]
SIX_ND = np.array([ladder_tilt.six_nd(rung) for rung in RUNGS])
N = SIX_ND / 6 / np.array([rung.num_tokens for rung in RUNGS])
D = np.array([float(rung.num_tokens) for rung in RUNGS])
TRUTH = 1.1 + 60 / N**0.42 + 90 / D**0.4


def a_check(index, nats, spread=0.0, better=None, outcome="tuned"):
    """A checked rung that loses so many nats, and knows that to `spread`."""
    rng = np.random.default_rng(index)
    excess = Excess(
        nats=nats, interval=(max(0.0, nats - 2 * spread), nats + 2 * spread), optimum_octaves=0.1,
        optimum_interval=(-0.1, 0.2), reach=(-1.0, 1.0), draws=np.maximum(nats + spread * rng.standard_normal(2000), 0),
    )  # fmt: skip
    own = 2.0
    losses = {-1.0: own + 0.05, 0.0: own, 1.0: own + 0.04 if better is None else better}
    tried = tuple(
        Tried(octaves=x, learning_rate=0.01 * 2**x, losses_nats=(loss,), diverged=False) for x, loss in losses.items()
    )
    return RungCheck(rung=RUNGS[index], tried=tried, noise_nats=0.005, excess=excess, outcome=outcome, words="words")


@functools.cache
def true_fit():
    return fitted(TRUTH)


def fitted(loss):
    table = from_columns(params=N, tokens=D, loss=loss)
    fit = fit_runs(table, form="chinchilla", bootstrap=50)
    return table, fit, predict(fit, 10 * N.max(), 10 * D.max())


@pytest.mark.parametrize("ends", [(0.0, 0.02), (0.02, 0.0), (0.01, 0.01)])
def test_a_planted_tilt_is_found(ends):
    """What the rate costs grows along the ladder: the forecast's own error by that is what is reported."""
    small, large = int(SIX_ND.argmin()), int(SIX_ND.argmax())
    x = np.log(SIX_ND / SIX_ND.min()) / np.log(SIX_ND.max() / SIX_ND.min())
    table, fit, target = fitted(TRUTH + ends[0] + (ends[1] - ends[0]) * x)
    true = predict(true_fit()[1], target.params, target.tokens).loss_nats
    found = tilt([a_check(small, ends[0], 0.001), a_check(large, ends[1], 0.001)], RUNGS, table, fit, target)
    assert abs(true - target.loss_nats) > 0.005, "or there is nothing to be found"
    assert found.shift_nats == pytest.approx(true - target.loss_nats, rel=0.25)
    assert found.interval[0] <= found.shift_nats <= found.interval[1]
    assert found.with_neighbours_nats is None


@pytest.mark.parametrize("largest", [4, 7, 14])
def test_a_loss_alike_on_all_rungs_shifts_by_itself(largest):
    """However far up the checked rungs reach: a line through two equal excesses is level."""
    order = np.argsort(SIX_ND)
    table, fit, target = fitted(TRUTH + 0.01)
    checks = [a_check(int(order[0]), 0.01, 0.001), a_check(int(order[largest]), 0.01, 0.001)]
    assert tilt(checks, RUNGS, table, fit, target).shift_nats == pytest.approx(-0.01, rel=0.1)


def test_rungs_at_their_optimum_shift_nothing():
    table, fit, target = true_fit()
    found = tilt([a_check(0, 0.0), a_check(14, 0.0)], RUNGS, table, fit, target)
    assert found.shift_nats == 0 == found.interval[0] == found.interval[1]


def test_the_better_neighbour_is_told_and_not_used():
    """Its loss in the fit shifts the forecast; the fit itself is as it was."""
    table, fit, target = true_fit()
    before = table.loss.copy()
    found = tilt([a_check(14, 0.01, better=1.9)], RUNGS, table, fit, target)
    assert found.with_neighbours_nats not in (None, 0.0)
    assert (table.loss == before).all()
    row = TRUTH.copy()
    row[14] = 1.9
    theirs = predict(fitted(row)[1], target.params, target.tokens).loss_nats
    assert found.with_neighbours_nats == pytest.approx(theirs - target.loss_nats, abs=1e-6)


def test_checked_rungs_of_like_cost_say_one_loss_for_all():
    table, fit, target = true_fit()
    order = np.argsort(SIX_ND)
    pairs = [(i, j) for i, j in itertools.pairwise(order) if np.log(SIX_ND[j] / SIX_ND[i]) < 0.5]
    i, j = map(int, pairs[0])
    found = tilt([a_check(i, 0.01), a_check(j, 0.01)], RUNGS, table, fit, target)
    assert -0.06 < found.shift_nats < 0, "no line through two near points is drawn on to the ends"


def test_no_rung_is_taken_to_lose_less_than_nothing_or_more_than_three_times_what_a_checked_one_does():
    """A line through two rungs in the middle, drawn on to both ends."""
    order = np.argsort(SIX_ND)
    log_flops = np.log(SIX_ND)
    i = int(order[5])
    j = next(int(k) for k in order if log_flops[k] > log_flops[i] + ladder_tilt.LEAST_SPREAD)
    line = 0.004 * (log_flops - log_flops[i]) / (log_flops[j] - log_flops[i])
    table, fit, target = true_fit()

    def shift(lost):
        moved = fit_runs(from_columns(params=N, tokens=D, loss=TRUTH - lost), form="chinchilla", bootstrap=0)
        same = dataclasses.replace(moved, drift=fit.drift)  # held: a tilt is of the laws
        return predict(same, target.params, target.tokens).loss_nats - target.loss_nats

    told, unbounded = shift(np.clip(line, 0.0, 3 * 0.004)), shift(np.maximum(line, 0.0))
    assert abs(told / unbounded - 1) > 0.1 and abs(told / shift(np.minimum(line, 0.012)) - 1) > 0.1
    found = tilt([a_check(i, 0.0), a_check(j, 0.004)], RUNGS, table, fit, target)
    assert found.shift_nats == pytest.approx(told, rel=1e-3)


def test_the_noise_of_a_run_is_the_largest_that_tests_of_the_rate_found():
    def a_test(hyperparameter, noise):
        verdict = SimpleNamespace(noise_nats=noise)
        return SimpleNamespace(hyperparameter=hyperparameter), SimpleNamespace(verdict=verdict)

    rates = [a_test("learning_rate", noise) for noise in (0.003, None, 0.005, 0.004)]
    assert ladder_tilt.noise_of(SimpleNamespace(tests=[*rates, a_test("clip_norm", 0.1)])) == 0.005
    assert ladder_tilt.noise_of(SimpleNamespace(tests=[rates[1], a_test("clip_norm", 0.1)])) is None


def test_without_numbers_there_is_no_tilt():
    table, fit, target = true_fit()
    nothing = dataclasses.replace(a_check(0, 0.0), excess=None)
    assert tilt([], RUNGS, table, fit, target) is None
    assert tilt([nothing], RUNGS, table, fit, target) is None


def checks(*outcomes, wanted=None, reaches=1.0, share=None):
    rungs = tuple(
        dataclasses.replace(a_check(index, 0.001), outcome=outcome, words=f"rung {index} says")
        for index, outcome in enumerate(outcomes)
    )
    return LadderChecks(
        rungs=rungs, wanted=len(rungs) if wanted is None else wanted, reaches=reaches, share_for_largest=share
    )


@pytest.mark.parametrize(
    ("found", "outcome", "said"),
    [
        (None, "cannot_tell", "no rung is checked at other rates"),
        (checks(), "cannot_tell", "no rung is checked at other rates"),
        (checks("tuned", "tuned"), "passed", "rung 0 says; rung 1 says"),
        (checks("tuned", "mis_tuned"), "failed", "test it up to that size"),
        (checks("tuned", "cannot_tell"), "cannot_tell", "rung 1 says"),
        (checks("cannot_tell", "mis_tuned"), "failed", "what carries the rate does not hold there"),
        (checks("tuned", wanted=2), "cannot_tell", "1 of 2 rungs are not checked yet: `forerun ladder PLAN` does"),
        (checks("tuned", reaches=0.29, share=0.301), "passed", "FLOPs (ladder.check_share = 0.31 checks that too)"),
    ],
)  # fmt: skip
def test_the_gate(found, outcome, said):
    gate = tuned_gate(found, None)
    assert (gate.name, gate.outcome) == ("ladder_tuned", outcome)
    assert said in gate.reason


def test_the_gate_names_the_shift():
    moved = ladder_tilt.Tilt(shift_nats=-0.0123, interval=(-0.02, 0.001), with_neighbours_nats=None)
    reason = tuned_gate(checks("tuned"), moved).reason
    assert "without that excess the forecast would move by -0.0123 nats [-0.0200, +0.0010]" in reason


def test_the_body_is_plain_data_and_reads_as_a_table():
    moved = ladder_tilt.Tilt(shift_nats=-0.0123, interval=(-0.02, 0.001), with_neighbours_nats=-0.004)
    gate = Gate(name="ladder_tuned", outcome="passed", reason="because")
    found = LadderChecks(rungs=(a_check(0, 0.001, better=1.99),), wanted=1, reaches=1.0, share_for_largest=None)
    body = checks_body(found, moved, [gate])
    canon.canonical(body)
    assert set(body) == {"checks", "tuned", "sensitivity"}
    (one,) = body["checks"]
    assert {"width", "params", "tokens", "offsets", "excess_nats", "outcome", "words"} <= set(one)
    assert [tried["octaves"] for tried in one["offsets"]] == [-1.0, 0.0, 1.0] and one["better_octaves"] == 1.0
    assert one["excess_nats"] == {"value": 0.001, "interval": [0.001, 0.001]}
    assert body["tuned"] == {"outcome": "passed", "reason": "because"}
    text = ladder_text({"rungs": [], **body})
    assert "checked at other rates:" in text and "the forecast moves by -0.0123 [-0.0200, +0.0010] nats" in text
    assert "better neighbours' losses in the fit it moves by -0.0040" in text
    assert "checked" not in ladder_text({"rungs": []}), "a report from before there were checks"
    assert checks_body(None, None, ()) == {"checks": [], "tuned": None, "sensitivity": None}
