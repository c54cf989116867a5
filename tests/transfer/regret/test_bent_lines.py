"""Tests of a line through the optima of several sizes, where the line may bend.

Some planted paths of the optimum bend, and a straight line would miss them. On straight paths, a
prior that allows a bend must cost little. Intervals have a level of 0.9. The bounds on coverage lie
below 0.9, because the share varies by chance over the planted lines.
"""

import math

import numpy as np
import pytest

from forerun._transfer.question import AXES, Point, Question
from forerun._transfer.regret import extrapolation
from forerun._transfer.regret.extrapolation import (
    LINE_PRIORS,
    LinePrior,
    compute_line_covariance,
    extend_line_to_target,
)
from forerun._transfer.verdict.joint_verdict import judge_axes_together
from forerun._transfer.verdict.summary import summarize_verdict
from forerun._transfer.verdict.verdict import judge

NOISE = 0.03
"""Standard deviation of the error of each optimum, in octaves."""
STRAIGHT = LinePrior(bend_probability=0.0, slope_octaves=0.2, lasting_octaves=4.0)
"""Prior of a line that cannot bend."""
DURATIONS = np.array([0.0, 1.0, 2.0, 3.0])
"""Four durations, each twice the one before, in doublings."""


def compute_saturating_fall(doublings):
    """Return an optimum in octaves that falls by 0.6 and then stays."""
    return -0.6 * (1 - np.exp(-doublings))


def extend_path(path, sizes, beyond, seed, axis="duration"):
    """Extend a line through noisy optima of a path. Return the line, and the true value of the path
    at the target.

    Args:
        path: True optimum in octaves, as a function of log2 of the size.
        sizes: Log2 of the sizes that are run.
        beyond: Doublings from the last size to the target.
        seed: Seed of the noise.
        axis: Axis whose prior is used.
    """
    rng = np.random.default_rng(seed)
    draws = (
        path(sizes)
        + NOISE * rng.standard_normal(len(sizes))
        + NOISE * rng.standard_normal((801, len(sizes)))
    )
    draws[0] = draws[1:].mean(axis=0)  # Row 0 is the estimate
    target = sizes[-1] + beyond
    line = extend_line_to_target(
        draws, sizes, log2_target=target, log2_base=sizes[0], axis=axis, rng=rng
    )
    return line, float(path(np.array([target]))[0])


def measure_coverage(path, sizes, beyond):
    """Return the share of 90 % intervals that contain the target's optimum, the mean error of the
    estimate, and the mean probability of a bend.
    """
    lines = [extend_path(path, sizes, beyond, seed) for seed in range(60)]
    inside = [
        np.quantile(line.at_target[1:], 0.05) <= truth <= np.quantile(line.at_target[1:], 0.95)
        for line, truth in lines
    ]
    errors = [abs(float(line.at_target[0]) - truth) for line, truth in lines]
    return np.mean(inside), np.mean(errors), np.mean([line.bend_probability for line, _ in lines])


@pytest.mark.parametrize("beyond", [2.0, 4.0])
def test_bend_is_covered_where_the_straight_line_misses_it(beyond, monkeypatch):
    share, error, bend_probability = measure_coverage(compute_saturating_fall, DURATIONS, beyond)
    assert share >= 0.85 and bend_probability > 0.6
    monkeypatch.setitem(LINE_PRIORS, "duration", STRAIGHT)
    straight_share, straight_error, straight_probability = measure_coverage(
        compute_saturating_fall, DURATIONS, beyond
    )
    assert straight_share < 0.6 and error < straight_error / 2 and straight_probability == 0


@pytest.mark.parametrize("slope", [0.0, -0.3, -1.0])
def test_straight_line_is_not_judged_a_bend(slope):
    """Intervals cover, the error is small, and a bend is less likely than the prior says (0.5).

    A line that is flat everywhere looks like a bent line whose slope is about 0.
    """
    share, error, bend_probability = measure_coverage(lambda u: slope * u, DURATIONS, beyond=2.0)
    assert share >= 0.87 and error < 0.15 and bend_probability < 0.5
    assert slope == 0 or bend_probability < 0.2


def test_allowed_bend_hardly_widens_the_interval_over_width(monkeypatch):
    def measure_interval_width():
        lines = [
            extend_path(lambda u: -0.05 * u, DURATIONS[:3], 2.0, seed, axis="width")[0]
            for seed in range(20)
        ]
        return np.mean([np.diff(np.quantile(line.at_target[1:], [0.05, 0.95])) for line in lines])

    with_bend = measure_interval_width()
    monkeypatch.setitem(LINE_PRIORS, "width", LINE_PRIORS["width"]._replace(bend_probability=0.0))
    assert with_bend < 1.1 * measure_interval_width()


def test_two_sizes_cannot_show_a_bend_and_widen_the_interval(monkeypatch):
    line, _ = extend_path(lambda u: -0.3 * u, np.array([0.0, 2.0]), beyond=3.0, seed=0)
    assert 0.3 < line.bend_probability < 0.7
    monkeypatch.setitem(LINE_PRIORS, "duration", STRAIGHT)
    straight, _ = extend_path(lambda u: -0.3 * u, np.array([0.0, 2.0]), beyond=3.0, seed=0)
    sd_ratio = np.std(line.at_target) / np.std(straight.at_target)
    assert 1.2 < sd_ratio < 4.5
    assert straight.at_target[0] < line.at_target[0] < -0.6 + 0.1, (
        "between the straight line and the last optimum"
    )


def test_bent_line_spreads_as_the_square_root_of_a_large_distance():
    """Four times the distance doubles the spread. A straight line spreads as the distance."""
    far = np.array([0.0, 4.0, 16.0, 64.0])
    spread = np.sqrt(np.diag(compute_line_covariance(far, bent=True)))
    assert spread[3] / spread[2] == pytest.approx(2.0, rel=0.05)
    assert np.sqrt(np.diag(compute_line_covariance(far, bent=False)))[3] == pytest.approx(64.0)


def test_covariance_of_a_bent_line_has_no_negative_eigenvalue():
    covariance = compute_line_covariance(np.linspace(0, 8, 30), bent=True)
    assert np.linalg.eigvalsh(covariance).min() > -1e-9


def test_slope_of_a_bent_line_fades_beyond_the_runs(monkeypatch):
    always_bent = LinePrior(bend_probability=1.0, slope_octaves=0.2, lasting_octaves=0.0)
    monkeypatch.setitem(LINE_PRIORS, "duration", always_bent)
    lines = [
        extend_path(lambda u: -0.3 * u, DURATIONS, beyond, seed=0)[0] for beyond in (1.0, 4.0, 8.0)
    ]
    near, middle, distant = (float(line.at_target[0]) for line in lines)
    last_optimum = -0.3 * DURATIONS[-1]
    assert last_optimum - 0.3 < middle < near < last_optimum
    assert middle - distant < 0.02


def test_interval_near_a_run_uses_that_run():
    """A target a hundredth of a doubling beyond the last optimum has the line at that optimum. The
    correction by Matheron's rule sees to this.
    """
    line, _ = extend_path(compute_saturating_fall, DURATIONS, beyond=0.01, seed=3)
    far, _ = extend_path(compute_saturating_fall, DURATIONS, beyond=4.0, seed=3)
    assert np.std(line.at_target - line.target_scatter) < 0.25 * np.std(far.at_target)
    assert np.std(line.at_target) > 1.1 * np.std(line.at_target - line.target_scatter), (
        "the target's own scatter is part of the interval"
    )
    assert line.at_target[0] == pytest.approx(compute_saturating_fall(3.0), abs=2 * NOISE)
    assert line.slope[0] == pytest.approx(compute_saturating_fall(3.0) / 3, abs=0.05)


def make_runs(path, durations=(100, 200, 400, 800), noise=0.003):
    """Return runs over durations in tokens. Their optimum is 2^-6 at 100 tokens and follows a path
    from there: octaves as a function of the doublings.
    """
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


def make_question(target, **more):
    """Return a question over durations from 100 tokens, with a measured exponent."""
    return Question(base_size=100, target_size=target, **{"axis": "duration", "power": None} | more)


def test_bent_line_has_a_power_for_each_target():
    """A bent line has no single exponent: the power used is the mean exponent from the base to the
    target.
    """
    points = make_runs(compute_saturating_fall)
    near, far = (judge(points, make_question(target)) for target in (1600, 12_800))
    for verdict, target in ((near, 1600), (far, 12_800)):
        truth = -6 + compute_saturating_fall(math.log2(target / 100))
        assert verdict.transferred_log2 == pytest.approx(truth, abs=0.2)
        low, high = verdict.drift.low, verdict.drift.high
        assert low <= compute_saturating_fall(3.0) / 3 <= high, (
            "the drift is that of the durations that were run"
        )
    assert near.power < far.power - 0.03 < 0
    assert near.drift.estimate == pytest.approx(far.drift.estimate, abs=1e-9)
    straight = judge(make_runs(lambda u: -0.3 * u), make_question(6400))
    assert straight.power == pytest.approx(-0.3, abs=0.05)


def test_joint_verdict_follows_the_bent_line_and_not_its_first_slope():
    points = make_runs(compute_saturating_fall)
    wide = judge(
        [p for p in make_runs(lambda u: 0.0) if p.size < 800],
        Question(base_size=100, target_size=800),
    )
    joint = judge_axes_together(
        [wide, judge(points, make_question(12_800))], {"width": 3.0, "duration": 7.0}
    )
    assert joint.transferred_log2 == pytest.approx(-6 + compute_saturating_fall(7.0), abs=0.25)
    assert abs(joint.offset.estimate) < 0.15


def list_bend_reasons(verdict):
    """Return the reasons of a verdict that report a bend."""
    return [reason for reason in verdict.reasons if "bends with probability" in reason]


def test_verdict_reports_a_bend_beyond_the_largest_run():
    bent = judge(make_runs(compute_saturating_fall), make_question(3200))
    [sentence] = list_bend_reasons(bent)
    assert (
        f"probability {bent.bend_probability:.2f}: beyond 800 tokens" in sentence
        and f"{bent.bend.estimate:+.2f} octaves" in sentence
    )
    assert bent.bend.estimate == pytest.approx(-bent.drift.estimate, abs=0.1), (
        "the slope beyond the runs is about zero"
    )
    assert bent.bend_probability > 0.5 and bent.bend.low < bent.bend.estimate < bent.bend.high
    body = summarize_verdict(bent)["bend"]
    assert (
        body["probability"] == bent.bend_probability
        and body["octaves_per_doubling"]["value"] == bent.bend.estimate
    )
    straight = judge(make_runs(lambda u: 0.0), make_question(3200, axis="width", power=0.0))
    assert not list_bend_reasons(straight)


@pytest.mark.parametrize(
    ("durations", "target"),
    [((100, 800), 3200), ((100, 200, 400, 800), 400)],
    ids=["two durations only", "target within the runs"],
)
def test_verdict_reports_no_bend_where_the_runs_cannot_show_one(durations, target):
    verdict = judge(make_runs(compute_saturating_fall, durations), make_question(target))
    assert verdict.bend is None and verdict.bend_probability is None
    assert not list_bend_reasons(verdict)
    assert summarize_verdict(verdict)["bend"]["probability"] is None


def test_every_axis_has_a_prior_of_its_line():
    assert set(LINE_PRIORS) == set(AXES)


@pytest.mark.parametrize(
    ("grid", "probabilities"),
    [
        (extrapolation.SLOPES, extrapolation.compute_half_student(extrapolation.SLOPES, 0.2)),
        (extrapolation.SCATTERS, extrapolation.OPTIMUM_SCATTER_PRIOR),
    ],
    ids=["slopes", "scatters"],
)
def test_prior_probabilities_are_positive_and_sum_to_one(grid, probabilities):
    assert probabilities.sum() == pytest.approx(1.0)
    assert len(grid) == len(probabilities) and (probabilities > 0).all()


def test_half_student_has_the_given_median_up_to_a_step_of_the_grid():
    slopes = extrapolation.SLOPES  # neighbors differ by a factor of 1.6
    probabilities = extrapolation.compute_half_student(slopes, 0.2)
    assert slopes[np.searchsorted(np.cumsum(probabilities), 0.5)] == pytest.approx(0.2, rel=0.35)
