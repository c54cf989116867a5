import dataclasses
import statistics

import numpy as np
import pytest
from planted_axes import DOUBLINGS, SIZES, Axes
from planted_valleys import linex

from transfer.question import Point, Question
from transfer.verdict.joint_verdict import differs, judge_together
from transfer.verdict.summary import together_summary
from transfer.verdict.verdict import examine

MARGIN = 0.01
EVEN = {"width": 0.0, "duration": -0.3, "depth": 0.0}
STEEP = {"width": -0.5, "duration": -0.3, "depth": 0.5}
CANCELLING = {"width": -0.4, "duration": -0.3, "depth": 0.4}


@pytest.fixture(scope="module")
def one():
    world = Axes(drift=EVEN)
    return world.judged(world.draw(np.random.default_rng(1))[0])


def simulated(world, num):
    """What is said, and what the rate costs in truth."""
    for seed in range(num):
        points, at_base = world.draw(np.random.default_rng(seed))
        found = judge_together(world.judged(points, seed), DOUBLINGS)
        optimum, bend = world.truth(at_base)
        octaves = found.transferred_log2 - optimum
        yield found, octaves, linex(octaves, bend)


def rates(world, num):
    wrong, covered, reached, outcomes = [], [], [], []
    for found, octaves, cost in simulated(world, num):
        outcomes.append(found.outcome)
        wrong.append(found.outcome == ("holds" if cost > MARGIN else "drifts"))
        covered.append(found.regret_nats.low <= cost <= found.regret_nats.high)
        reached.append(found.offset.low <= octaves <= found.offset.high)
    print(
        f"{world.drift}: {statistics.mean(wrong):.2f} wrong, regret covered "
        f"{statistics.mean(covered):.2f}, offset "
        f"{statistics.mean(reached):.2f}, { ({o: outcomes.count(o) for o in set(outcomes)}) }"
    )
    return statistics.mean(wrong), statistics.mean(covered), statistics.mean(reached), outcomes


def test_where_nothing_but_the_measured_axis_moves_the_rate_holds():
    wrong, covered, reached, outcomes = rates(Axes(drift=EVEN), 15)
    assert wrong == 0 and covered >= 0.9 and reached >= 0.9
    assert outcomes.count("holds") >= 0.6 * 15


def test_a_shift_on_one_axis_is_charged_at_the_common_target():
    wrong, covered, reached, _ = rates(Axes(), 15)
    assert wrong == 0 and covered >= 0.85 and reached >= 0.85
    away = [octaves for _, octaves, _ in simulated(Axes(), 5)]
    assert statistics.mean(away) == pytest.approx(-0.3, abs=0.15)  # depth: 3 doublings of 0.1


@pytest.mark.slow
@pytest.mark.parametrize("drift", [EVEN, STEEP, CANCELLING])
def test_over_sixty_draws_few_are_wrong_and_intervals_cover(drift):
    wrong, covered, reached, _ = rates(Axes(drift=drift, noise_nats=0.01), 60)
    assert wrong < 0.05 and covered >= 0.85 and reached >= 0.85


def test_shifts_add_up_with_their_signs():
    opposite = next(iter(simulated(Axes(drift=CANCELLING, noise_nats=0.002), 1)))[0]
    alike = next(iter(simulated(Axes(drift={**CANCELLING, "width": 0.4}, noise_nats=0.002), 1)))[0]
    assert abs(opposite.offset.value) < 0.3
    assert alike.offset.value == pytest.approx(-2.4, abs=0.4) and alike.outcome == "drifts"


def test_the_valley_at_the_target_is_as_steep_as_its_axes_make_it():
    steep, shallow = (
        next(
            iter(
                simulated(
                    Axes(
                        drift={**EVEN, "width": 0.4},
                        trend=dict.fromkeys(SIZES, by),
                        noise_nats=1e-4,
                    ),
                    1,
                )
            )
        )
        for by in (0.15, -0.15)
    )
    assert steep[0].regret_nats.value > 2 * shallow[0].regret_nats.value
    for found, _, cost in (steep, shallow):
        assert found.regret_nats.low <= cost <= found.regret_nats.high


def test_an_axis_without_a_test_cannot_be_told(one):
    found = judge_together(one[:2], DOUBLINGS)
    assert found.outcome == "cannot_tell" and found.untested == ("depth",)
    assert (
        found.regret_nats is not None
        and "depth: the target is 8 times the base" in found.reasons[-1]
    )
    assert judge_together(one[:2], {**DOUBLINGS, "depth": 0.05}).untested == ()
    assert together_summary(found)["untested"] == ["depth"]
    assert differs(16, 2) and not differs(100, 99)


def test_an_unusable_axis_is_named_and_nothing_is_made_up(one):
    world = Axes(drift=EVEN)
    points, _ = world.draw(np.random.default_rng(1))
    points["depth"] = [p for p in points["depth"] if p.size == 2 or p.log2_value <= -6]
    found = judge_together(world.judged(points), DOUBLINGS)
    assert found.outcome == "cannot_tell" and found.reasons[-1].startswith("depth: 4 layers")
    points["depth"] = [p for p in points["depth"] if p.size == 2]
    found = judge_together(world.judged(points), DOUBLINGS)
    assert found.regret_nats is None and "only one depth" in found.reasons[-1]


def test_a_doubted_verdict_on_one_axis_leaves_the_whole_open(one):
    """A cliff near the rate, or a run that alone makes the drift: the interval decides, the verdict
    does not.
    """
    near = [Point(size=128, log2_value=p.log2_value, loss_nats=None, seed=9) for p in cliff(one)]
    world = Axes(drift=EVEN)
    points, _ = world.draw(np.random.default_rng(1))
    points["width"] += near
    judged = world.judged(points)
    assert (
        judged[0].verdict.outcome == "cannot_tell" and judged[0].verdict.regret_nats.high < MARGIN
    )
    found = judge_together(judged, DOUBLINGS)
    assert found.outcome == "cannot_tell" and any(
        "diverged 0." in reason for reason in found.reasons
    )
    plain = judge_together(one, DOUBLINGS)
    assert plain.outcome == "holds"
    doubted = dataclasses.replace(
        one[2],
        verdict=dataclasses.replace(
            one[2].verdict, outcome="cannot_tell", reasons=("but without one run",)
        ),
    )
    found = judge_together([*one[:2], doubted], DOUBLINGS)
    assert found.outcome == "cannot_tell" and found.reasons[-1] == "depth: but without one run"
    assert found.regret_nats == plain.regret_nats


def cliff(judged):
    """A run half an octave or so above the optimum of the widest."""
    best = judged[0].verdict.optima[-1].log2_value
    return [Point(size=128, log2_value=best + 0.6, loss_nats=3.0)]


def test_axes_are_independent_evidence_though_judged_with_the_same_random_numbers():
    """A target smaller on one axis: equal draws would cancel, and the rate would look surer than
    either axis is.
    """

    def doubled(target):
        first, second = (
            judged_axis(axis, target if axis == "duration" else 256)
            for axis in ("width", "duration")
        )
        by = {q.axis: q.doublings for q in (first.verdict.question, second.verdict.question)}
        together = judge_together([first, second], by)
        apart = [f.at_target.line for f in (first, second)]
        # Widths and not standard deviations: the scatter has heavy tails.
        widths = [
            np.diff(np.quantile(rows, [0.05, 0.95]))[0]
            for rows in (apart[0].at_target, apart[1].shift)
        ]
        return (together.offset.high - together.offset.low) / np.hypot(*widths)

    assert 0.8 < doubled(16) < 1.3 and 0.8 < doubled(256) < 1.3


def judged_axis(axis, target):
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
    return examine(points, Question(axis=axis, base_size=64, target_size=target))
