"""Tests of the joint verdict over several scaling axes at one target.

Intervals have a level of 0.9. A bound on coverage below 0.9 leaves room for chance over the draws.
"""

import dataclasses
import statistics

import numpy as np
import pytest
from planted_axes import DOUBLINGS, SIZES, Axes
from planted_basins import compute_linex

from forerun._transfer.question import Point, Question
from forerun._transfer.verdict.joint_verdict import judge_axes_together, needs_test
from forerun._transfer.verdict.summary import summarize_joint_verdict
from forerun._transfer.verdict.verdict import judge

MARGIN = 0.01  # the default margin of a question, in nats
# Planted drifts of the optimum by axis, octaves per doubling. The exponent over duration is
# measured, so its drift is followed and causes no regret.
EVEN = {"width": 0.0, "duration": -0.3, "depth": 0.0}
STEEP = {"width": -0.5, "duration": -0.3, "depth": 0.5}
CANCELLING = {"width": -0.4, "duration": -0.3, "depth": 0.4}


@pytest.fixture(scope="module")
def single_axes():
    """Verdicts on the axes of one world in which only the measured axis moves the optimum."""
    world = Axes(drift=EVEN)
    return world.judge(world.draw(np.random.default_rng(1))[0])


def simulate(world, num_draws):
    """Yield the joint verdicts of planted worlds, each with the true offset and regret."""
    for seed in range(num_draws):
        points, at_base = world.draw(np.random.default_rng(seed))
        joint = judge_axes_together(world.judge(points, seed), DOUBLINGS)
        optimum, curvature = world.get_target_basin(at_base)
        octaves_off = joint.transferred_log2 - optimum
        yield joint, octaves_off, compute_linex(octaves_off, curvature)


def measure_error_rates(draws):
    """Return the shares of wrong verdicts, covered regrets and covered offsets, and all outcomes,
    over simulated draws.
    """
    wrong, regret_covered, offset_covered, outcomes = [], [], [], []
    for joint, octaves_off, true_regret in draws:
        outcomes.append(joint.outcome)
        wrong.append(joint.outcome == ("holds" if true_regret > MARGIN else "drifts"))
        regret_covered.append(joint.regret_nats.low <= true_regret <= joint.regret_nats.high)
        offset_covered.append(joint.offset.low <= octaves_off <= joint.offset.high)
    return (
        statistics.mean(wrong),
        statistics.mean(regret_covered),
        statistics.mean(offset_covered),
        outcomes,
    )


def test_rate_holds_where_only_the_measured_axis_moves_the_optimum():
    world = Axes(drift=EVEN)
    wrong, regret_share, offset_share, outcomes = measure_error_rates(simulate(world, 15))
    assert wrong == 0 and regret_share >= 0.9 and offset_share >= 0.9
    assert outcomes.count("holds") >= 0.6 * 15


def test_shift_on_one_axis_counts_at_the_common_target():
    world = Axes()
    draws = list(simulate(world, 15))
    wrong, regret_share, offset_share, _ = measure_error_rates(draws)
    assert wrong == 0 and regret_share >= 0.85 and offset_share >= 0.85
    # Depth drifts by 0.1 octaves over each of 3 doublings (the default of `Axes`)
    octaves_off = [octaves for _, octaves, _ in draws[:5]]
    assert statistics.mean(octaves_off) == pytest.approx(-0.3, abs=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("drift", [EVEN, STEEP, CANCELLING])
def test_few_of_sixty_verdicts_are_wrong_and_intervals_cover(drift):
    world = Axes(drift=drift, noise_nats=0.01)
    wrong, regret_share, offset_share, _ = measure_error_rates(simulate(world, 60))
    assert wrong < 0.05 and regret_share >= 0.85 and offset_share >= 0.85


def test_shifts_of_axes_add_up_with_their_signs():
    cancelling_world = Axes(drift=CANCELLING, noise_nats=0.002)
    adding_world = Axes(drift={**CANCELLING, "width": 0.4}, noise_nats=0.002)
    [(cancelling, _, _)] = simulate(cancelling_world, 1)
    [(adding, _, _)] = simulate(adding_world, 1)
    assert abs(cancelling.offset.estimate) < 0.3
    assert adding.offset.estimate == pytest.approx(-2.4, abs=0.4) and adding.outcome == "drifts"


def simulate_trend(trend):
    """Return the joint verdict and the true regret for one curvature trend on all axes: the change
    of log curvature per doubling.
    """
    drift = {**EVEN, "width": 0.4}
    world = Axes(drift=drift, trend=dict.fromkeys(SIZES, trend), noise_nats=1e-4)
    [(joint, _, true_regret)] = simulate(world, 1)
    return joint, true_regret


def test_curvature_trends_of_all_axes_shape_the_basin_at_the_target():
    steep, steep_regret = simulate_trend(0.15)
    shallow, shallow_regret = simulate_trend(-0.15)
    assert steep.regret_nats.estimate > 2 * shallow.regret_nats.estimate
    assert steep.regret_nats.low <= steep_regret <= steep.regret_nats.high
    assert shallow.regret_nats.low <= shallow_regret <= shallow.regret_nats.high


def test_joint_verdict_is_open_while_an_axis_is_untested(single_axes):
    joint = judge_axes_together(single_axes[:2], DOUBLINGS)
    assert joint.outcome == "cannot_tell" and joint.untested == ("depth",)
    assert joint.regret_nats is not None
    assert "depth: the target is 8 times the base" in joint.reasons[-1]
    assert judge_axes_together(single_axes[:2], {**DOUBLINGS, "depth": 0.05}).untested == ()
    assert summarize_joint_verdict(joint)["untested"] == ["depth"]
    assert needs_test(16, 2) and not needs_test(100, 99)


def test_axis_without_usable_runs_is_named():
    world = Axes(drift=EVEN)
    points, _ = world.draw(np.random.default_rng(1))
    points["depth"] = [p for p in points["depth"] if p.size == 2 or p.log2_value <= -6]
    joint = judge_axes_together(world.judge(points), DOUBLINGS)
    assert joint.outcome == "cannot_tell" and joint.reasons[-1].startswith("depth: 4 layers")
    points["depth"] = [p for p in points["depth"] if p.size == 2]
    joint = judge_axes_together(world.judge(points), DOUBLINGS)
    assert joint.regret_nats is None and "only one depth" in joint.reasons[-1]


def test_divergence_near_the_rate_on_one_axis_leaves_the_joint_verdict_open(single_axes):
    """The interval of the regret is below the margin, but a run diverged 0.6 octaves above the
    optimum.
    """
    largest_width_optimum = single_axes[0].optima[-1].log2_value
    diverged_run = Point(size=128, log2_value=largest_width_optimum + 0.6, loss_nats=None, seed=9)
    world = Axes(drift=EVEN)
    points, _ = world.draw(np.random.default_rng(1))
    points["width"].append(diverged_run)
    verdicts = world.judge(points)
    assert verdicts[0].outcome == "cannot_tell" and verdicts[0].regret_nats.high < MARGIN
    joint = judge_axes_together(verdicts, DOUBLINGS)
    assert joint.outcome == "cannot_tell" and any(
        "diverged 0." in reason for reason in joint.reasons
    )


def test_drift_by_one_run_on_one_axis_leaves_the_joint_verdict_open(single_axes):
    plain = judge_axes_together(single_axes, DOUBLINGS)
    assert plain.outcome == "holds"
    open_verdict = dataclasses.replace(
        single_axes[2], outcome="cannot_tell", reasons=("but without one run",)
    )
    joint = judge_axes_together([*single_axes[:2], open_verdict], DOUBLINGS)
    assert joint.outcome == "cannot_tell" and joint.reasons[-1] == "depth: but without one run"
    assert joint.regret_nats == plain.regret_nats


@pytest.mark.parametrize("target_duration", [16, 256], ids=["below the base", "above the base"])
def test_joint_interval_treats_axes_as_independent(target_duration):
    """The axes are judged with the same random numbers, which must not make their errors cancel.

    Without shuffled draws, they would cancel for a target below the base on one axis.
    """
    assert 0.8 < compare_interval_widths(target_duration) < 1.3


def compare_interval_widths(target_duration):
    """Return the width of the joint interval over that of two independent axes."""
    width = judge_axis("width", 256)
    duration = judge_axis("duration", target_duration)
    doublings = {"width": width.question.doublings, "duration": duration.question.doublings}
    joint = judge_axes_together([width, duration], doublings)
    # Interval widths and not standard deviations, because the scatter has heavy tails
    width_interval = np.quantile(width.at_target.line.at_target, [0.05, 0.95])
    duration_interval = np.quantile(duration.at_target.line.shift, [0.05, 0.95])
    independent = np.hypot(np.diff(width_interval)[0], np.diff(duration_interval)[0])
    return (joint.offset.high - joint.offset.low) / independent


def judge_axis(axis, target):
    """Return the verdict on one axis whose optimum is 2^-5 at all sizes."""
    rng = np.random.default_rng(len(axis))
    points = [
        Point(
            size=size,
            log2_value=float(x),
            loss_nats=float(2 + 0.05 * (x + 5) ** 2 + rng.normal(0, 0.01)),
            seed=seed,
        )
        for size in (64, 128, 256)
        for x in range(-7, -2)
        for seed in range(3)
    ]
    return judge(points, Question(axis=axis, base_size=64, target_size=target))
