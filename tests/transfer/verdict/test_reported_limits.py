"""Tests that a verdict reports no regret that training cannot have, and that it does not suggest
runs beyond an end of the values if unknown noise is the only doubt.
"""

import dataclasses
import math

import numpy as np
import pytest
from planted_basins import WIDE

from forerun._transfer.question import Point, Question
from forerun._transfer.verdict.summary import summarize_verdict
from forerun._transfer.verdict.verdict import judge

UNTRAINED_NATS = math.log(256)


def make_runs_of_one_seed(excesses):
    """Return runs at two sizes, at whole octaves from 2^-10 up. `excesses` are their losses above 3
    nats, the same at both sizes.
    """
    return [
        Point(size=size, log2_value=-10.0 + i, loss_nats=3 + excess)
        for size in (64, 128)
        for i, excess in enumerate(excesses)
    ]


@pytest.mark.parametrize("untrained_nats", [None, UNTRAINED_NATS])
def test_regret_is_at_most_what_training_can_lose(untrained_nats):
    """The optimum falls by an octave per doubling, and the target is 12 doublings away.

    The fitted shapes alone would give hundreds of nats there.
    """
    world = dataclasses.replace(WIDE, target_size=2**20, drift_octaves=-1.0, curvature=0.1)
    points, _ = world.draw(np.random.default_rng(5))
    losses = [p.loss_nats for p in points]
    max_regret_nats = max(untrained_nats or 0.0, *losses) - min(losses)
    verdict = judge(
        points, dataclasses.replace(world.question, untrained_nats=untrained_nats), draws=400
    )
    assert verdict.outcome == "drifts"
    assert (
        verdict.regret_nats.high == pytest.approx(max_regret_nats)
        and f"more than {max_regret_nats:.4g} nats" in verdict.reasons[0]
    )
    assert verdict.cost_of_2x_off_nats.high <= max_regret_nats
    summary = summarize_verdict(verdict)["regret_nats"]
    assert summary["more_than"] == pytest.approx(max_regret_nats)
    assert max(summary["interval"]) <= summary["more_than"]


def test_unknown_noise_is_reported_and_repeats_are_suggested():
    """One seed, six rates, and a lower end 0.1 nats worse than the best do not show that the
    optimum lies at that end.
    """
    verdict = judge(
        make_runs_of_one_seed((0.101, 0.0, 0.063, 0.065, 0.171, 0.423)),
        Question(target_size=256, base_size=64),
    )
    assert verdict.outcome == "cannot_tell" and not verdict.noise_is_known
    assert all(o.status == "edge" for o in verdict.optima)
    # The difference of two runs exceeds 1.645 * sqrt(2) standard deviations one time in twenty.
    needed = 0.101 / (1.645 * math.sqrt(2))
    by_size = [reason for reason in verdict.reasons if reason.startswith("width")]
    assert len(by_size) == 2
    for reason in by_size:
        assert "the noise is unknown" in reason and f"noise is at least {needed:.2g} nats" in reason
    assert {(s.log2_value, s.num_seeds) for s in verdict.what_to_run} == {
        (-10.0, 2),
        (-9.0, 2),
        (-8.0, 2),
    }
    assert not any(
        "lies at or beyond" in s.reason or "may lie" in s.reason for s in verdict.what_to_run
    )
