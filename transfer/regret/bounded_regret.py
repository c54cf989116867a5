"""The regret of a value against the best of the values tried, for hyperparameters that may have no
optimum.

With clipping or warmup, a smaller value is often as good: the loss is flat, or falls until the edge
of the values tried, and an optimum cannot be extrapolated to the target size. The loss itself can
be extrapolated (`forerun._transfer.regret.loss_curve`). The extrapolated loss shows how much better
than the transferred value each of the values tried would be at the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun._proxies.core.checks import Interval
from forerun._proxies.core.notation import format_counted
from forerun._transfer.basin.optimum import find_best_rate, list_finite_rates
from forerun._transfer.basin.shapes import Floats
from forerun._transfer.question import Point, Question, format_size, format_value
from forerun._transfer.regret.loss_curve import CurveRuns, draw_loss_at_target
from forerun._transfer.regret.regret import build_interval

MIN_VALUES = 3
"""Minimum number of values of each size at which every run finished."""
MIN_FREE = 2
"""Minimum degrees of freedom of the noise."""
ROUNDING_DIGITS, ROUNDING_OCTAVES = 9, 1e-9
"""Decimal places, and distance in octaves, within which two values are equal apart from rounding
errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedRegret:
    """The regret at the target against the best of the values tried."""

    regret_nats: Interval
    low_log2: float
    """Lowest value tried at every size, carried to the target by the transfer rule (the value grows
    as size^power). `high_log2` is the highest such value."""
    high_log2: float
    transferred_log2: float
    best_log2: float
    """The best of the values tried, by the fitted loss at the target."""
    cost_of_2x_off_nats: Interval | None
    """Regret of a value twice or half the transferred one, whichever is worse; None if neither was
    tried."""


def judge_bounded(
    points: Sequence[Point], question: Question, *, draws: int, rng: np.random.Generator
) -> BoundedRegret:
    """Estimate the regret of the transferred value from runs for which `find_obstacle` returns
    None.

    The gain of a value is the loss at the transferred value minus the loss at that value, and the
    regret is the gain of the truly best value. Each gain has an interval. If the intervals cover,
    the regret lies between the largest of their lower bounds and the largest of their upper bounds.

    Args:
        points: Runs to judge.
        question: The question of the verdict.
        draws: Number of posterior draws.
        rng: Random generator of the draws.
    """
    value = _get_base_value(points, question)
    assert value is not None and question.power is not None
    low, high = _compute_common_interval(points, question, value)
    transferred = value + question.power * question.doublings
    beyond = math.log2(question.target_size / max(p.size for p in points))
    at_target = draw_loss_at_target(_to_curve_runs(points, question, value), beyond, draws, rng)
    # Candidates in octaves above the transferred value; 0 is the transferred value itself
    candidates = [0.0, *(x for x in at_target.knots.tolist() if low <= x <= high)]
    # The difference from 0.0 avoids gains of -0.0
    gains = [0.0 - at_target.compute_loss(octaves) for octaves in candidates]
    most = question.compute_max_regret(points)
    losses_2x_off = [
        at_target.compute_loss(octaves) for octaves in (-1.0, 1.0) if low <= octaves <= high
    ]
    best = int(np.argmax([gain[0] for gain in gains]))
    return BoundedRegret(
        regret_nats=_combine_gains(gains, question.level, most),
        low_log2=transferred + low,
        high_log2=transferred + high,
        transferred_log2=transferred,
        best_log2=transferred + candidates[best],
        cost_of_2x_off_nats=build_interval(np.maximum.reduce(losses_2x_off), question.level, most)
        if losses_2x_off
        else None,
    )


def find_obstacle(points: Sequence[Point], question: Question) -> str | None:
    """Return the reason why the runs do not allow an estimate of this regret; None if they do.

    The runs allow it if the power is given, there are two sizes or more with three values each at
    which every run finished, the transferred value lies within all of them, and there are more runs
    than parameters of the model.
    """
    value, rates = _get_base_value(points, question), _group_finished_rates(points)
    if question.power is None:
        return "measuring the exponent takes an optimum at every size"
    if value is None:
        return (
            f"no run at {format_size(question.axis, question.base_size)} gives a value to transfer"
        )
    if len(rates) < 2:
        return f"only one {question.axis}: there must be at least 2"
    carried = format_value(question.hyperparameter, value)
    for size, finished_rates in rates.items():
        where, size_runs = format_size(question.axis, size), [p for p in points if p.size == size]
        if any(
            p.loss_nats is None
            and abs(_compute_octaves_above(question, value, size, p.log2_value)) < ROUNDING_OCTAVES
            for p in size_runs
        ):
            return f"{where}: a run at the transferred value, {carried} at the base, diverged"
        if len(finished_rates) < MIN_VALUES:
            values = f"{format_counted(len(finished_rates), 'value')} at which every run finished"
            return f"{where}: {values}: there must be at least {MIN_VALUES}"
        if (
            not _compute_octaves_above(question, value, size, finished_rates[0]) - ROUNDING_OCTAVES
            <= 0
            <= _compute_octaves_above(question, value, size, finished_rates[-1]) + ROUNDING_OCTAVES
        ):
            return (
                f"{where}: the transferred value, {carried} at the base, is beyond those at which "
                "every run finished"
            )
    if _to_curve_runs(points, question, value).num_free < MIN_FREE:
        return "too few runs to tell a trend from noise: add seeds or values"
    return None


def _get_base_value(points: Sequence[Point], question: Question) -> float | None:
    """Return the log2 of the value to transfer: the question's, or the best one tried at the
    base.
    """
    if question.transferred_log2 is not None:
        return question.transferred_log2
    return find_best_rate([p for p in points if p.size == question.base_size])


def _group_finished_rates(points: Sequence[Point]) -> dict[int, list[float]]:
    """Return the values at which every run finished, in ascending order, by size."""
    return {
        size: list_finite_rates([p for p in points if p.size == size])
        for size in sorted({p.size for p in points})
    }


def _compute_octaves_above(question: Question, value: float, size: int, log2_value: float) -> float:
    """Compute the octaves by which a value at one size lies above the base's `value` (log2),
    carried to that size by the transfer rule.
    """
    assert question.power is not None
    return log2_value - value - question.power * math.log2(size / question.base_size)


def _compute_common_interval(
    points: Sequence[Point], question: Question, value: float
) -> tuple[float, float]:
    """Return the ends of the interval that the values of every size span, in octaves above the
    transferred value.
    """
    rates = _group_finished_rates(points)
    low = max(
        _compute_octaves_above(question, value, size, size_rates[0])
        for size, size_rates in rates.items()
    )
    high = min(
        _compute_octaves_above(question, value, size, size_rates[-1])
        for size, size_rates in rates.items()
    )
    # Rounding errors must not put the transferred value outside
    return min(low, 0.0), max(high, 0.0)


def _combine_gains(gains: Sequence[Floats], level: float, most: float) -> Interval:
    """Combine the gains of all values into one regret."""
    estimates = [build_interval(gain, level, most) for gain in gains]
    # Chance makes the largest of several lower bounds too high more often than a single one, so
    # each lower bound leaves out only half as many draws
    strict_estimates = [build_interval(gain, (1 + level) / 2, most) for gain in gains]
    return Interval(
        estimate=max(e.estimate for e in estimates),
        low=max(e.low for e in strict_estimates),
        high=max(e.high for e in estimates),
        level=level,
    )


def _to_curve_runs(points: Sequence[Point], question: Question, value: float) -> CurveRuns:
    rates = _group_finished_rates(points)
    finished_runs = [p for p in points if p.log2_value in rates[p.size]]
    # Number the combinations of size and seed
    _, group = np.unique([f"{p.size} {p.seed}" for p in finished_runs], return_inverse=True)
    return CurveRuns(
        x=np.array(
            [_compute_octaves_above(question, value, p.size, p.log2_value) for p in finished_runs]
        ).round(ROUNDING_DIGITS),
        u=np.array([math.log2(p.size / max(rates)) for p in finished_runs]),
        loss_nats=np.array([p.loss_nats for p in finished_runs], dtype=np.float64),
        group=group.astype(np.int64),
    )
