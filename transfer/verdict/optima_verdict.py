"""A verdict from published optima alone. Without losses, the regret in nats is unknown.

The distance of the transferred value from the target's optimum, in octaves, decides the outcome. An
optimum that was read off a grid is known to half a step at best, so the noise of an optimum is the
larger of the scatter about the line and the rounding of the grid (step / sqrt(12)). Intervals use
Student's t distribution.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from forerun._proxies.core.checks import Interval
from forerun._proxies.core.notation import format_counted
from forerun._transfer.question import Outcome, Question, TransferError, format_size
from forerun._transfer.regret.extrapolation import LINE_PRIORS, draw_walk_end
from forerun._transfer.regret.reach import describe_assumption, describe_reach, find_largest_ratio
from forerun._transfer.verdict.verdict import Verdict

MIN_OPTIMA = 3
"""Minimum number of optima: any two lie on a line."""
TOLERANCE_OCTAVES = 0.5
"""Largest offset that is allowed, in octaves. Measured loss basins have a curvature of about 0.06
nats / octave**2, so half an octave costs about 0.01 nats or less."""
ROUNDING_OCTAVES = 0.01
"""Distance in octaves below which two optima count as one grid point with different rounding."""
WALK_DRAWS = 20_000
"""Number of draws of the walk beyond the runs, for its quantile."""
USUAL_STEP_OCTAVES = 1.0
"""Grid step in octaves that is assumed if all optima are equal."""


def judge_optima(optima: Sequence[tuple[int, float]], question: Question) -> Verdict:
    """Judge whether a value transfers, by pairs of (size, log2 of the optimal value).

    The outcome is `holds` if the whole interval of the offset lies within half an octave of 0,
    `drifts` if the whole interval lies beyond and the drift's interval excludes 0, and else
    `cannot_tell`. The verdict has no regret, and the margin of the question is not used.

    Args:
        optima: Pairs of (size, log2 of the optimal value).
        question: The question of the verdict.

    Raises:
        TransferError: The optima do not answer the question; all problems are listed.
    """
    base = question.transferred_log2
    if base is None:
        at_base = [log2_value for size, log2_value in optima if size == question.base_size]
        # If there are several optima at the base, use their mean
        base = statistics.fmean(at_base) if at_base else None
    _check_optima(optima, question, base)
    assert base is not None
    drift, at_target = _fit_line(optima, question)
    power = drift.estimate if question.power is None else question.power
    value = base + power * question.doublings
    offset = Interval(
        estimate=value - at_target.estimate,
        low=value - at_target.high,
        high=value - at_target.low,
        level=question.level,
    )
    outcome = _decide(drift, offset)
    reasons = _explain(drift, offset, question)
    largest_size = max(size for size, _ in optima)
    assumption, ratio = describe_assumption(question, largest_size), None
    if outcome != "drifts":
        ratio = find_largest_ratio(
            lambda size: _holds_at(size, optima, question, base),
            largest_size,
            question.target_size,
            outcome,
        )
        if assumption is not None:
            reasons.append(f"{assumption}; {describe_reach(ratio, question, largest_size)}")
    return Verdict(
        question=question,
        outcome=outcome,
        drift=drift,
        power=power,
        offset=offset,
        transferred_log2=value,
        reasons=tuple(reasons),
        assumption=assumption,
        largest_ratio=ratio,
    )


def _explain(drift: Interval, offset: Interval, question: Question) -> list[str]:
    """Return the reasons of a verdict: drift and offset with their intervals."""
    drift_octaves, offset_octaves = (
        f"{interval.estimate:+.2f} octaves [{interval.low:+.2f}, {interval.high:+.2f}]"
        for interval in (drift, offset)
    )
    target = format_size(question.axis, question.target_size)
    return [
        f"per doubling the optimum moves by {drift_octaves}",
        (
            f"at {target} the transferred value lies {offset_octaves} from it; the tolerance is "
            f"{TOLERANCE_OCTAVES:g}"
        ),
        "no losses were given, so the cost in nats is not known: octaves decide the outcome",
    ]


def _holds_at(
    size: int, optima: Sequence[tuple[int, float]], question: Question, base: float
) -> bool:
    """Return whether the value would hold at a target of another size."""
    question_at_size = dataclasses.replace(question, target_size=size)
    drift, at_target = _fit_line(optima, question_at_size)
    power = drift.estimate if question.power is None else question.power
    value = base + power * question_at_size.doublings
    return max(abs(value - at_target.low), abs(value - at_target.high)) <= TOLERANCE_OCTAVES


def _check_optima(
    optima: Sequence[tuple[int, float]], question: Question, base: float | None
) -> None:
    num_sizes = len({size for size, _ in optima})
    are_valid = all(size >= 1 and math.isfinite(log2_value) for size, log2_value in optima)
    checks = [
        (
            num_sizes >= MIN_OPTIMA,
            (
                f"optima at {format_counted(num_sizes, 'size')}: there must be at least "
                f"{MIN_OPTIMA}, to see their scatter"
            ),
        ),
        (are_valid, "sizes must be at least 1, and values finite"),
        (
            base is not None,
            (
                f"{format_size(question.axis, question.base_size)} has no optimum: give the value "
                "to transfer"
            ),
        ),
    ]
    problems = [problem for is_met, problem in checks if not is_met]
    if problems:
        raise TransferError(problems)


def _fit_line(optima: Sequence[tuple[int, float]], question: Question) -> tuple[Interval, Interval]:
    """Fit a line to log2 of the optima against log2 of the size, by ordinary least squares. Return
    the intervals of the slope and of the optimum at the target.
    """
    # The target lies at 0, so the intercept is the optimum there
    x = np.log2([size for size, _ in optima]) - math.log2(question.target_size)
    y = np.array([log2_value for _, log2_value in optima])
    design = np.stack([np.ones_like(x), x], axis=1)
    covariance = np.linalg.inv(design.T @ design)
    coefficients = covariance @ design.T @ y
    num_free = len(y) - 2
    # Noise variance: the larger of scatter and grid rounding. The smallest gap between optima may
    # be several steps of the grid, so it counts as one usual step at most
    gaps = np.diff(np.unique(y))
    gaps = gaps[gaps > ROUNDING_OCTAVES]
    step = float(gaps.min()) if gaps.size else USUAL_STEP_OCTAVES
    scatter = float(((y - design @ coefficients) ** 2).sum()) / num_free
    variance = max(scatter, min(step, USUAL_STEP_OCTAVES) ** 2 / 12)
    half_width = stdtrit(num_free, (1 + question.level) / 2) * np.sqrt(
        variance * np.diag(covariance)
    )
    # Beyond the largest size, at -x.max() doublings, the line may follow a random walk, which the
    # optima cannot rule out. A fixed seed gives the same verdict each time
    walk = draw_walk_end(
        WALK_DRAWS,
        float(-x.max()),
        LINE_PRIORS[question.axis].walk_octaves,
        np.random.default_rng(0),
    )
    half_width[0] = math.hypot(half_width[0], float(np.quantile(walk, (1 + question.level) / 2)))
    low, high = (coefficients - half_width).tolist(), (coefficients + half_width).tolist()
    at_target, slope = (
        Interval(estimate=value, low=low[i], high=high[i], level=question.level)
        for i, value in enumerate(coefficients.tolist())
    )
    return slope, at_target


def _decide(drift: Interval, offset: Interval) -> Outcome:
    """Return the outcome that the intervals allow, by the rules of `judge_optima`."""
    if max(abs(offset.low), abs(offset.high)) <= TOLERANCE_OCTAVES:
        return "holds"
    is_moving = not drift.low <= 0 <= drift.high
    is_beyond = offset.low > TOLERANCE_OCTAVES or offset.high < -TOLERANCE_OCTAVES
    return "drifts" if is_moving and is_beyond else "cannot_tell"
