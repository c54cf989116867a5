"""Planted truths for the pruner: what it must give up, what it must not, and what it must not look
at.
"""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest

from sweeps.search import forecasts, pruning
from sweeps.search.pruning import EarlierTrial, rungs, told_nats, verdict
from tests.sweeps.spaces import SPACE

NUM_STEPS, STARTUP = 200, 12


def trial(point, final, early, status="finished"):
    """A run at `early` nats over its end until the decay, its last fifth; every batch has its own
    difficulty.
    """
    noise = np.random.default_rng(7).normal(0, 0.05, NUM_STEPS)
    curve = final + early * np.minimum(1, (NUM_STEPS - np.arange(NUM_STEPS)) / (NUM_STEPS / 5))
    curve = curve + 2 * np.exp(-np.arange(NUM_STEPS) / 10) + noise
    return EarlierTrial(
        point=point, status=status, losses_nats=tuple(map(float, curve)), loss_nats=float(final)
    )


def point_at(octave, warmup=0.1, clip=1.0):
    return {"learning_rate": 2.0**octave, "warmup_fraction": warmup, "clip_norm": clip}


def decaying(num, seed=0):
    """High rates end ahead and are behind till the decay: the trap. The optimum lies at 2^-5."""
    rng = np.random.default_rng(seed)
    return [
        late(point_at(*at))
        for at in zip(rng.uniform(-11, -3, num), rng.uniform(0, 0.3, num), strict=True)
    ]


def late(point):
    octave = math.log2(point["learning_rate"])
    final = 2 + 0.02 * (octave + 5) ** 2 + 0.1 * (point["warmup_fraction"] - 0.2) ** 2
    return trial(point, final, early=0.2 * 2 ** ((octave + 5) / 2) + 0.3 * point["warmup_fraction"])


def asked(one, seen, step=None, **more):
    step = step or rungs(NUM_STEPS)[-1]
    arguments = {
        "space": SPACE,
        "point": one.point,
        "num_steps": NUM_STEPS,
        "losses_nats": one.losses_nats[:step],
        "seen": seen,
        "num_startup": STARTUP,
    }
    return verdict(**{**arguments, **more})


def told(one, seen, step):
    return told_nats(SPACE, one.point, one.losses_nats[:step], seen)


def shifted(one, nats):
    """The same run, `nats` worse all along."""
    losses = tuple(loss + nats for loss in one.losses_nats)
    return EarlierTrial(
        point=one.point, status=one.status, losses_nats=losses, loss_nats=one.loss_nats + nats
    )


def cut(one, step, status="pruned"):
    return EarlierTrial(
        point=one.point, status=status, losses_nats=one.losses_nats[:step], loss_nats=None
    )


def test_what_is_far_behind_is_given_up_and_the_leader_is_not():
    seen = decaying(30)
    best = min(seen, key=lambda one: one.loss_nats)
    assert asked(shifted(best, 2.0), seen)
    # Alone of its kind ahead at every step: nobody gives it up.
    assert asked(shifted(best, -2.0), seen) == ""


def winner():
    """At the optimum, with a long warmup: the best, and behind the most of the others until the
    decay.
    """
    return late(point_at(-5, warmup=0.2))


@pytest.mark.parametrize("seed", range(5))
def test_the_later_winner_is_kept_by_the_curve_rule_at_every_rung(seed):
    seen = decaying(30, seed)
    assert winner().loss_nats < min(one.loss_nats for one in seen)
    assert [asked(winner(), seen, step) for step in rungs(NUM_STEPS)] == ["", "", ""]


def test_a_rule_that_knows_no_decay_gives_the_later_winner_up():
    """The mutant: it takes the loss at a step for what is to come."""
    seen = decaying(30)

    def undecayed(space, point, losses_nats, seen):
        drops = [
            loss - one.loss_nats for one in seen for loss in [pruning.smoothed(one.losses_nats, 50)]
        ]
        here = pruning.smoothed(losses_nats, 50) - min(drops)
        return forecasts.Forecast(loss_nats=here, error_nats=0.02, num_freedom=20)

    with mock.patch.object(pruning, "_forecast_end", undecayed):
        assert asked(winner(), seen, 50)
    laggard = late(point_at(-4, warmup=0.3))
    assert asked(laggard, [one for one in seen if one.loss_nats > laggard.loss_nats], 100) == ""


def test_a_rule_that_looks_ahead_is_found_out():
    """Only the curve up to the rung counts, of the run in question and of those it is held
    against.
    """
    seen, one = decaying(30), late(point_at(-6.2))
    for step in rungs(NUM_STEPS):
        torn = [
            EarlierTrial(
                point=s.point,
                status=s.status,
                losses_nats=(*s.losses_nats[:step], *[9.9] * (200 - step)),
                loss_nats=s.loss_nats,
            )
            for s in seen
        ]
        assert asked(one, seen, step) == asked(one, torn, step)


def test_too_few_finished_and_nothing_is_given_up():
    bad = shifted(late(point_at(-11)), 3.0)
    seen = decaying(30)
    few = seen[: STARTUP - 1]
    unfinished = [cut(one, 100) for one in seen] + [cut(one, 20, "diverged") for one in seen]
    assert asked(bad, []) == asked(bad, few) == asked(bad, few + unfinished) == ""
    assert asked(bad, unfinished, num_startup=0) == ""
    assert asked(bad, seen[:STARTUP]) != ""


def test_runs_given_up_are_not_fitted_on():
    seen = decaying(40)
    one = late(point_at(-9.5))
    odd = [cut(shifted(trial, 5.0), 100) for trial in decaying(20, seed=9)]
    diverged = [cut(shifted(trial, -5.0), 150, "diverged") for trial in decaying(20, seed=8)]
    said = asked(one, seen, 100)
    assert said and asked(one, seen[:20] + odd + diverged + seen[20:], 100) == said
    assert told(one, seen + odd + diverged, 100) == told(one, seen, 100)


def test_a_run_that_may_come_near_the_best_goes_on():
    """Within the margin another seed may turn the two round; without one it would have been given
    up.
    """
    seen = decaying(40)
    best = min(one.loss_nats for one in seen)
    near = forecasts.Forecast(loss_nats=best + 0.003, error_nats=0.001, num_freedom=30)
    with mock.patch.object(pruning, "_forecast_end", lambda *args: near):
        assert asked(winner(), seen, 100) == ""
        with mock.patch.object(pruning, "MARGIN_SHARE", 0.0):
            assert "within 0 of the best" in asked(winner(), seen, 100)
