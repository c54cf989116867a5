"""Tests of the check of one rung (a run of the ladder) at other learning rates: a planted parabola
is recovered, intervals cover the planted regret, and missing losses decide nothing.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from forerun._launcher.study.experiments.ladder import CheckedRung
from forerun._launcher.study.stages.ladder_checks import RungRate, fit_excess, judge_rung

MARGIN, LEVEL = 0.01, 0.9
SHAPE = SimpleNamespace(width=64, num_layers=2)


def make_run(octaves, seed):
    return SimpleNamespace(
        id=f"{octaves}/{seed}",
        seed=seed,
        hparams=SimpleNamespace(learning_rate=0.01 * 2**octaves),
        shape=SHAPE,
        base_shape=SHAPE,
        schedule=SimpleNamespace(num_steps=400),
    )


def judge(losses, noise=0.001):
    """Judge a rung from its losses by octaves: numbers, lists of numbers by seed, "diverged" or
    "failed".
    """
    runs, results = [], {}
    for octaves in sorted(losses):
        by_seed = losses[octaves] if isinstance(losses[octaves], list) else [losses[octaves]]
        specs = tuple(make_run(octaves, seed) for seed in range(len(by_seed)))
        runs.append((octaves, specs))
        for spec, loss in zip(specs, by_seed, strict=True):
            status = loss if isinstance(loss, str) else "finished"
            results[spec.id] = SimpleNamespace(
                loss_nats=None if isinstance(loss, str) else loss, status=status
            )
    rung = next(specs[0] for octaves, specs in runs if octaves == 0)
    checked = CheckedRung(rung=rung, runs=tuple(runs))
    return judge_rung(checked, results, noise, margin_nats=MARGIN, level=LEVEL)


def make_losses(optimum, offsets=(-1.0, 0.0, 1.0)):
    """Return the losses of a parabola that rises by 0.04 nats one octave from its minimum.

    Args:
        optimum: Offset of the minimum from the rung's rate, in octaves.
        offsets: Offsets of the rates that are run, in octaves.
    """
    return {octaves: 2.0 + 0.04 * (octaves - optimum) ** 2 for octaves in offsets}


@pytest.mark.parametrize("optimum", [0.0, 0.3, -0.7, 0.99])
@pytest.mark.parametrize(
    "offsets", [(-1.0, 0.0, 1.0), (-1.0, -0.5, 0.0, 0.5, 1.0), (-0.5, 0.0, 2.0)]
)
def test_planted_parabola_is_recovered(optimum, offsets):
    regret = judge(make_losses(optimum, offsets=offsets), noise=1e-7).excess
    inside = max(offsets[0], min(optimum, offsets[-1]))
    assert regret.optimum_octaves == pytest.approx(inside, abs=1e-5)
    # The regret is 0.04 times the difference of the squared distances from the minimum.
    assert regret.nats == pytest.approx(0.04 * (optimum**2 - (inside - optimum) ** 2), abs=1e-7)
    assert regret.interval[0] <= regret.nats <= regret.interval[1]


def test_intervals_cover_the_planted_regret_and_no_verdict_is_wrong():
    """The noise is half the margin."""
    rng, noise = np.random.default_rng(0), MARGIN / 2
    # Optimum, true outcome, and number of 200 checks that must at least reach it
    cases = (
        (0.0, "tuned", 190),
        (0.3, "tuned", 140),
        (-1.0, "mis_tuned", 140),
        (1.2, "mis_tuned", 170),
    )
    for optimum, truth, num_decided in cases:
        outcomes, num_covered = [], 0
        for _ in range(200):
            losses = {x: y + noise * rng.standard_normal() for x, y in make_losses(optimum).items()}
            check = judge(losses, noise)
            outcomes.append(check.outcome)
            planted = 0.04 * (optimum**2 - max(0.0, abs(optimum) - 1) ** 2)
            low, high = check.excess.interval
            num_covered += low - 1e-9 <= planted <= high
        wrong = {"tuned": "mis_tuned", "mis_tuned": "tuned"}[truth]
        assert outcomes.count(wrong) == 0
        assert outcomes.count(truth) >= num_decided, (optimum, outcomes.count(truth))
        assert num_covered >= 170, (optimum, num_covered)


@pytest.mark.parametrize(
    ("losses", "outcome", "words"),
    [
        (
            {-1.0: 2.02, 0.0: 2.0, 1.0: "diverged"},
            "cannot_tell",
            "ladder.check_offsets_octaves = [-1.0, 0.5]",
        ),
        ({-1.0: 1.9, 0.0: 2.0, 1.0: "diverged"}, "mis_tuned", "its rate is too high"),
        (
            {-1.0: 2.0, 0.0: "diverged", 1.0: "diverged"},
            "mis_tuned",
            "it diverged at its own rate, but not at -1",
        ),
        ({-1.0: 2.0, 0.0: "failed", 1.0: 2.0}, "cannot_tell", "no loss at its own rate"),
        (
            {-1.0: [2.02, "diverged"], 0.0: [2.0, 2.0], 1.0: [2.1, 2.1]},
            "cannot_tell",
            "no loss at -1 octaves",
        ),
    ],
)
def test_rung_with_missing_losses_is_judged_by_the_others_or_left_open(losses, outcome, words):
    check = judge(losses)
    assert (check.outcome, check.excess) == (outcome, None) and words in check.words


def test_losses_that_are_no_parabola_widen_the_interval():
    """A parabola through more than three rates can miss a loss, which counts as noise."""
    smooth = [
        RungRate(octaves=x, learning_rate=1.0, losses_nats=(y,), diverged=False)
        for x, y in make_losses(0.2, offsets=(-1.0, -0.5, 0.0, 0.5, 1.0)).items()
    ]
    kinked = [
        dataclasses.replace(
            rate, losses_nats=(rate.losses_nats[0] + (0.02 if rate.octaves == 0.5 else 0.0),)
        )
        for rate in smooth
    ]
    widths = [np.ptp(fit_excess(tried, 0.001, LEVEL).interval) for tried in (smooth, kinked)]
    assert widths[1] > 2.5 * widths[0]
