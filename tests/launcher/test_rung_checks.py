"""What a rung loses by its learning rate: planted valleys, what closes the gate, and what is asked
for then.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from launcher.experiments.ladder import CheckedRung, RungRate, check, excess_of

MARGIN, LEVEL = 0.01, 0.9
SHAPE = SimpleNamespace(width=64, num_layers=2)


def a_run(octaves, seed):
    return SimpleNamespace(
        id=f"{octaves}/{seed}",
        seed=seed,
        hparams=SimpleNamespace(learning_rate=0.01 * 2**octaves),
        shape=SHAPE,
        base_shape=SHAPE,
        schedule=SimpleNamespace(num_steps=400),
    )


def judged(losses, noise=0.001, **options):
    """The check of a rung whose losses by octaves these are: numbers, lists of them by seed,
    "diverged", "failed".
    """
    runs, results = [], {}
    for octaves in sorted(losses):
        told = losses[octaves] if isinstance(losses[octaves], list) else [losses[octaves]]
        runs.append((octaves, tuple(a_run(octaves, seed) for seed in range(len(told)))))
        for spec, loss in zip(runs[-1][1], told, strict=True):
            status = loss if isinstance(loss, str) else "finished"
            results[spec.id] = SimpleNamespace(
                loss_nats=None if isinstance(loss, str) else loss, status=status
            )
    rung = next(specs[0] for octaves, specs in runs if octaves == 0)
    checked = CheckedRung(rung=rung, runs=tuple(runs))
    return check(checked, results, noise, **{"margin_nats": MARGIN, "level": LEVEL, **options})


def valley(optimum, curvature=0.08, offsets=(-1.0, 0.0, 1.0), bottom=2.0):
    """Losses of a parabola, `curvature` nats per octave squared, whose lowest point is so far from
    the rung's rate.
    """
    return {octaves: bottom + 0.5 * curvature * (octaves - optimum) ** 2 for octaves in offsets}


@pytest.mark.parametrize("optimum", [0.0, 0.3, -0.7, 0.99])
@pytest.mark.parametrize(
    "offsets", [(-1.0, 0.0, 1.0), (-1.0, -0.5, 0.0, 0.5, 1.0), (-0.5, 0.0, 2.0)]
)
def test_a_planted_parabola_is_read_off(optimum, offsets):
    found = judged(valley(optimum, offsets=offsets), noise=1e-7).excess
    inside = max(offsets[0], min(optimum, offsets[-1]))
    assert found.optimum_octaves == pytest.approx(inside, abs=1e-5)
    assert found.nats == pytest.approx(0.04 * (optimum**2 - (inside - optimum) ** 2), abs=1e-7)
    assert found.interval[0] <= found.nats <= found.interval[1]


def test_the_excess_is_covered_and_the_verdict_not_wrong():
    """Noise of half the margin, on valleys of 0.02 nats an octave to either side, which our CPU
    ladders have.
    """
    rng, noise = np.random.default_rng(0), 0.005
    wanted = (
        (0.0, "tuned", 190),
        (0.3, "tuned", 140),
        (-1.0, "mis_tuned", 140),
        (1.2, "mis_tuned", 170),
    )
    for optimum, truth, decided in wanted:
        outcomes, covered = [], 0
        for _ in range(200):
            losses = {
                x: y + noise * rng.standard_normal() for x, y in valley(optimum, 0.08).items()
            }
            found = judged(losses, noise)
            outcomes.append(found.outcome)
            planted = 0.04 * (optimum**2 - max(0.0, abs(optimum) - 1) ** 2)
            covered += found.excess.interval[0] - 1e-9 <= planted <= found.excess.interval[1]
        wrong = {"tuned": "mis_tuned", "mis_tuned": "tuned"}[truth]
        assert outcomes.count(wrong) == 0
        assert outcomes.count(truth) >= decided, (optimum, outcomes.count(truth))
        assert covered >= 170, (optimum, covered)


@pytest.mark.parametrize(
    ("losses", "outcome", "said"),
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
def test_runs_without_a_loss(losses, outcome, said):
    found = judged(losses)
    assert (found.outcome, found.excess) == (outcome, None) and said in found.words


def test_a_curve_that_is_no_parabola_counts_as_noise():
    """With a fourth rate the curve can miss: then the interval must know."""
    smooth = [
        RungRate(octaves=x, learning_rate=1.0, losses_nats=(y,), diverged=False)
        for x, y in valley(0.2, offsets=(-1.0, -0.5, 0.0, 0.5, 1.0)).items()
    ]
    kinked = [
        dataclasses.replace(
            one, losses_nats=(one.losses_nats[0] + (0.02 if one.octaves == 0.5 else 0.0),)
        )
        for one in smooth
    ]
    widths = [np.ptp(excess_of(tried, 0.001, LEVEL).interval) for tried in (smooth, kinked)]
    assert widths[1] > 2.5 * widths[0]
