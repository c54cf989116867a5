"""What a verdict must not say: costs that no training can have, ends that the runs speak against;
and what it costs.
"""

import dataclasses
import math

import pytest
from planted_valleys import WIDE, rng

from transfer.question import Point, Question
from transfer.verdict.summary import verdict_summary
from transfer.verdict.verdict import judge

UNTRAINED_NATS = math.log(256)


def one_seed(excesses, noise_nats=0.0):
    """Runs of one seed at whole octaves from 2^-10 on, at two sizes with the same losses."""
    draw = rng(0)
    return [
        Point(size=size, log2_value=-10.0 + i, loss_nats=3 + excess + noise_nats * draw.normal())
        for size in (64, 128)
        for i, excess in enumerate(excesses)
    ]


@pytest.mark.parametrize("untrained_nats", [None, UNTRAINED_NATS])
def test_no_cost_is_more_than_training_can_lose(untrained_nats):
    """The optimum falls by an octave a doubling, the target is 12 doublings off: shapes alone give
    hundreds of nats.
    """
    world = dataclasses.replace(WIDE, target_size=2**20, drift_octaves=-1.0, curvature=0.1)
    points, _ = world.draw(rng(5))
    losses = [p.loss_nats for p in points]
    most = max(untrained_nats or 0.0, *losses) - min(losses)
    verdict = judge(
        points, dataclasses.replace(world.question, untrained_nats=untrained_nats), draws=400
    )
    assert verdict.outcome == "drifts"
    assert (
        verdict.regret_nats.high == pytest.approx(most)
        and f"more than {most:.4g} nats" in verdict.reasons[0]
    )
    assert verdict.cost_of_2x_off_nats.high <= most
    summary = verdict_summary(verdict)["regret_nats"]
    assert (
        summary["more_than"] == pytest.approx(most)
        and max(summary["interval"]) <= summary["more_than"]
    )


def test_an_unknown_noise_is_said_to_be_unknown():
    """One seed, six rates, and a lower end 0.1 nats worse than the best: nothing says that the
    optimum lies there.
    """
    verdict = judge(
        one_seed((0.101, 0.0, 0.063, 0.065, 0.171, 0.423)), Question(target_size=256, base_size=64)
    )
    assert verdict.outcome == "cannot_tell" and not verdict.noise_is_known
    assert all(o.status == "edge" for o in verdict.optima)
    # a difference of two runs is luck beyond that one time in twenty
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
