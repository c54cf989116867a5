"""A line through optima that may bend: planted truths that the straight line misses, and what it
costs to allow it.
"""

import math

import numpy as np
import pytest

from transfer.question import Point, Question
from transfer.regret import drift
from transfer.regret.drift import LINES, Prior, extend_line, line_covariance
from transfer.verdict.joint_verdict import judge_together
from transfer.verdict.summary import verdict_summary
from transfer.verdict.verdict import examine, judge

NOISE = 0.03
STRAIGHT = Prior(0.0, 0.2, 4.0)
HALVES = np.array([0.0, 1.0, 2.0, 3.0])
"""Four durations, each twice the one before."""


def falls_then_stays(doublings):
    return -0.6 * (1 - np.exp(-doublings))


def extended(path, sizes, beyond, seed, axis="duration"):
    """A line through noisy optima of a path, and the truth so many doublings beyond the last."""
    rng = np.random.default_rng(seed)
    rows = (
        path(sizes)
        + NOISE * rng.standard_normal(len(sizes))
        + NOISE * rng.standard_normal((801, len(sizes)))
    )
    rows[0] = rows[1:].mean(axis=0)
    there = sizes[-1] + beyond
    return extend_line(rows, sizes, there, sizes[0], axis, rng), float(path(np.array([there]))[0])


def covered(path, sizes, beyond, num=60):
    """Share of 90 % intervals that hold the target's optimum, mean distance of the estimate, mean
    probability.
    """
    found = [extended(path, sizes, beyond, seed) for seed in range(num)]
    inside = [
        np.quantile(line.at_target[1:], 0.05) <= at <= np.quantile(line.at_target[1:], 0.95)
        for line, at in found
    ]
    off = [abs(float(line.at_target[0]) - at) for line, at in found]
    share, distance, bends = (
        np.mean(inside),
        np.mean(off),
        np.mean([line.bends for line, _ in found]),
    )
    print(f"covered {share:.2f}, off {distance:.2f} octaves, bends {bends:.2f}")
    return share, distance, bends


@pytest.mark.parametrize("beyond", [2.0, 4.0])
def test_a_bend_is_covered_where_the_straight_line_misses_it(beyond, monkeypatch):
    share, off, bends = covered(falls_then_stays, HALVES, beyond)
    assert share >= 0.85 and bends > 0.6
    monkeypatch.setitem(LINES, "duration", STRAIGHT)
    straight, further, none = covered(falls_then_stays, HALVES, beyond)
    assert straight < 0.6 and off < further / 2 and none == 0


@pytest.mark.parametrize("slope", [0.0, -0.3, -1.0])
def test_a_straight_line_stays_one(slope):
    """From four durations on the bend is ruled out; its intervals cover, and the estimate is the
    line's.
    """
    share, off, bends = covered(lambda u: slope * u, HALVES, 2.0)
    assert share >= 0.87 and off < 0.15 and bends < 0.5
    assert slope == 0 or bends < 0.2


def test_over_width_a_line_is_as_narrow_as_a_straight_one(monkeypatch):
    def width():
        lines = [
            extended(lambda u: -0.05 * u, HALVES[:3], 2.0, seed, "width")[0] for seed in range(20)
        ]
        return np.mean([np.diff(np.quantile(line.at_target[1:], [0.05, 0.95])) for line in lines])

    averaged = width()
    monkeypatch.setitem(LINES, "width", LINES["width"]._replace(bends=0.0))
    assert averaged < 1.1 * width()


def test_two_sizes_show_no_bend_and_only_widen_the_interval(monkeypatch):
    line, _ = extended(lambda u: -0.3 * u, np.array([0.0, 2.0]), 3.0, 0)
    assert 0.3 < line.bends < 0.7
    monkeypatch.setitem(LINES, "duration", STRAIGHT)
    straight, _ = extended(lambda u: -0.3 * u, np.array([0.0, 2.0]), 3.0, 0)
    # The straight line is narrower since the prior of the scatter is (0.03 octaves).
    assert (
        1.2 * np.std(straight.at_target) < np.std(line.at_target) < 4.5 * np.std(straight.at_target)
    )
    assert straight.at_target[0] < line.at_target[0] < -0.6 + 0.1, (
        "between the straight line and the last optimum"
    )


def test_far_out_a_bent_line_wanders_as_a_root_and_its_slope_fades(monkeypatch):
    """At 64 times as far the spread is some 8 times that at once as far: neither a line's nor a
    parabola's.
    """
    far = np.array([0.0, 4.0, 16.0, 64.0])
    spread = np.sqrt(np.diag(line_covariance(far, bent=True)))
    assert spread[3] / spread[2] == pytest.approx(2.0, rel=0.05)
    assert np.sqrt(np.diag(line_covariance(far, bent=False)))[3] == pytest.approx(64.0)
    assert np.linalg.eigvalsh(line_covariance(np.linspace(0, 8, 30), bent=True)).min() > -1e-9
    monkeypatch.setitem(LINES, "duration", Prior(1.0, 0.2, 0.0))
    found = [extended(lambda u: -0.3 * u, HALVES, beyond, 0)[0] for beyond in (1.0, 4.0, 8.0)]
    near, mid, end = (float(line.at_target[0]) for line in found)
    assert -0.9 - 0.3 < mid < near < -0.9 and mid - end < 0.02


def test_an_interval_near_what_was_run_knows_of_the_runs():
    """Matheron's correction: within a hundredth of a doubling of an optimum the line is where that
    optimum is.
    """
    line, _ = extended(falls_then_stays, HALVES, 0.01, 3)
    far, _ = extended(falls_then_stays, HALVES, 4.0, 3)
    assert np.std(line.at_target - line.target_scatter) < 0.25 * np.std(far.at_target)
    assert np.std(line.at_target) > 1.1 * np.std(line.at_target - line.target_scatter), (
        "its own scatter is part of it"
    )
    assert line.at_target[0] == pytest.approx(falls_then_stays(3.0), abs=2 * NOISE)
    assert line.slope[0] == pytest.approx(falls_then_stays(3.0) / 3, abs=0.05)


def runs(path, durations=(100, 200, 400, 800), noise=0.003):
    rng = np.random.default_rng(5)
    return [
        Point(
            size=size,
            log2_value=float(rate),
            seed=seed,
            loss_nats=float(
                3 + 0.08 * (rate + 6 - path(math.log2(size / 100))) ** 2 + rng.normal(0, noise)
            ),
        )
        for size in durations
        for rate in range(-9, -3)
        for seed in range(3)
    ]


def asked(target, **more):
    return Question(base_size=100, target_size=target, **{"axis": "duration", "power": None} | more)


def test_the_value_at_the_target_is_right_whatever_the_power_at_another():
    """A bent line has no one exponent: the one used is that from the base to this target."""
    points = runs(falls_then_stays)
    near, far = (examine(points, asked(target)) for target in (1600, 12_800))
    for found, target in ((near, 1600), (far, 12_800)):
        truth = -6 + falls_then_stays(math.log2(target / 100))
        assert found.verdict.transferred_log2 == pytest.approx(truth, abs=0.2)
        low, high = found.verdict.drift.low, found.verdict.drift.high
        assert low <= falls_then_stays(3.0) / 3 <= high, (
            "the drift is of the durations that were run"
        )
    assert near.verdict.power < far.verdict.power - 0.03 < 0
    assert near.verdict.drift.value == pytest.approx(far.verdict.drift.value, abs=1e-9)
    straight = examine(runs(lambda u: -0.3 * u), asked(6400)).verdict
    assert straight.power == pytest.approx(-0.3, abs=0.05)


def test_the_joint_verdict_moves_by_the_bent_line_and_not_by_its_first_slope():
    points = runs(falls_then_stays)
    wide = examine(
        [p for p in runs(lambda u: 0.0) if p.size < 800], Question(base_size=100, target_size=800)
    )
    found = judge_together([wide, examine(points, asked(12_800))], {"width": 3.0, "duration": 7.0})
    assert found.transferred_log2 == pytest.approx(-6 + falls_then_stays(7.0), abs=0.25)
    assert abs(found.offset.value) < 0.15


def test_a_reader_is_told_of_a_bend_where_it_matters():
    def told(found):
        return [reason for reason in found.reasons if "bends with probability" in reason]

    bent = judge(runs(falls_then_stays), asked(3200))
    [said] = told(bent)
    assert (
        f"probability {bent.bends:.2f}: beyond 800 tokens" in said
        and f"{bent.bend.value:+.2f} octaves" in said
    )
    assert bent.bend.value == pytest.approx(-bent.drift.value, abs=0.1), (
        "the slope beyond is about none"
    )
    assert bent.bends > 0.5 and bent.bend.low < bent.bend.value < bent.bend.high
    body = verdict_summary(bent)["bend"]
    assert (
        body["probability"] == bent.bends
        and body["octaves_per_doubling"]["value"] == bent.bend.value
    )
    assert not told(judge(runs(lambda u: 0.0), asked(3200, axis="width", power=0.0)))
    for none in (
        judge(runs(falls_then_stays, durations=(100, 800)), asked(3200)),
        judge(runs(falls_then_stays), asked(400)),
    ):
        assert none.bend is None and none.bends is None and not told(none)
        assert verdict_summary(none)["bend"]["probability"] is None


def test_priors_are_proper_and_every_axis_has_one():
    assert set(LINES) == {"width", "depth", "batch", "duration", "params"}
    for grid, shares in (
        (drift.SLOPES, drift.compute_half_student(drift.SLOPES, 0.2)),
        (drift.SCATTERS, drift.OFF_THE_LINE),
    ):
        assert shares.sum() == pytest.approx(1.0)
        assert len(grid) == len(shares) and (shares > 0).all()
    shares = drift.compute_half_student(drift.SLOPES, 0.2)
    assert drift.SLOPES[np.searchsorted(np.cumsum(shares), 0.5)] == pytest.approx(0.2, rel=0.35)
