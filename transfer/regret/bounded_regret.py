"""The regret of a value against the best of the values tried, for hyperparameters that may have no
optimum.

With clipping or warmup, a smaller value is often as good: the basin is flat, or falls until the
edge, and an optimum cannot be extrapolated. The loss can be (`transfer.regret.loss_curve`), and
shows how much each of the values tried would gain at the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proxies.core.notation import counted
from transfer.basin.optimum import find_best_rate, list_finite_rates
from transfer.basin.shapes import Floats
from transfer.question import Point, Question, at_size, written
from transfer.regret.loss_curve import CurveRuns, loss_at_target
from transfer.regret.regret import Estimate, estimate

MIN_VALUES = 3
MIN_FREE = 2
"""Minimum degrees of freedom of the noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedRegret:
    """The regret at the target against the best of the values tried."""

    regret_nats: Estimate
    low_log2: float
    """Lowest value tried at every size, carried to the target by the transfer rule; `high_log2` is
    the highest."""
    high_log2: float
    transferred_log2: float
    best_log2: float
    """The best of the values tried, by the fitted loss at the target."""
    cost_of_2x_off_nats: Estimate | None
    """Regret of a value twice or half the transferred one, whichever is worse; None if neither was
    tried."""


def judge_bounded(
    points: Sequence[Point], q: Question, *, draws: int, rng: np.random.Generator
) -> BoundedRegret | None:
    """Estimate the regret of the transferred value; return None if `find_obstacle` gives a reason
    why the runs do not allow it.

    The regret is the gain of the truly best value. It therefore lies below the largest of all
    values' upper bounds, and above the largest of their lower bounds if that bound holds.
    """
    if find_obstacle(points, q) is not None:
        return None
    value = _get_base_value(points, q)
    assert value is not None and q.power is not None
    low, high = _compute_common_interval(points, q, value)
    transferred = value + q.power * q.doublings
    beyond = math.log2(q.target_size / max(p.size for p in points))
    at_target = loss_at_target(_to_curve_runs(points, q, value), beyond, draws, rng)
    places = [0.0, *(x for x in at_target.knots.tolist() if low <= x <= high)]
    gains = [0.0 - at_target.loss(place) for place in places]
    most = q.most_nats(points)
    twice = [at_target.loss(place) for place in (-1.0, 1.0) if low <= place <= high]
    best = int(np.argmax([gain[0] for gain in gains]))
    return BoundedRegret(
        regret_nats=_combine_gains(gains, q.level, most),
        low_log2=transferred + low,
        high_log2=transferred + high,
        transferred_log2=transferred,
        best_log2=transferred + places[best],
        cost_of_2x_off_nats=estimate(np.maximum.reduce(twice), q.level, most) if twice else None,
    )


def find_obstacle(points: Sequence[Point], q: Question) -> str | None:
    """Return the reason why the runs do not allow this regret; None if they do.

    The runs allow it if the power is given, there are two sizes or more with three values each at
    which every run finished, the transferred value lies within all of them, and there are more runs
    than parameters of the model.
    """
    value, rates = _get_base_value(points, q), _group_finished_rates(points)
    if q.power is None:
        return "measuring the exponent takes an optimum at every size"
    if value is None:
        return f"no run at {at_size(q.axis, q.base_size)} gives a value to transfer"
    if len(rates) < 2:
        return f"only one {q.axis}: there must be at least 2"
    carried = written(q.hyperparameter, value)
    for size, finished_rates in rates.items():
        where, size_runs = at_size(q.axis, size), [p for p in points if p.size == size]
        if any(
            p.loss_nats is None and abs(_compute_octaves_above(q, value, size, p.log2_value)) < 1e-9
            for p in size_runs
        ):
            return f"{where}: a run at the transferred value, {carried} at the base, diverged"
        if len(finished_rates) < MIN_VALUES:
            values = f"{counted(len(finished_rates), 'value')} at which every run finished"
            return f"{where}: {values}: there must be at least {MIN_VALUES}"
        if (
            not _compute_octaves_above(q, value, size, finished_rates[0]) - 1e-9
            <= 0
            <= _compute_octaves_above(q, value, size, finished_rates[-1]) + 1e-9
        ):
            return (
                f"{where}: the transferred value, {carried} at the base, is beyond those at "
                "which every run finished"
            )
    if _to_curve_runs(points, q, value).num_free < MIN_FREE:
        return "too few runs to tell a trend from noise: add seeds or values"
    return None


def _get_base_value(points: Sequence[Point], q: Question) -> float | None:
    """Return the log2 of the value to transfer: the question's, or the best one tried at the
    base.
    """
    if q.transferred_log2 is not None:
        return q.transferred_log2
    return find_best_rate([p for p in points if p.size == q.base_size])


def _group_finished_rates(points: Sequence[Point]) -> dict[int, list[float]]:
    return {
        size: list_finite_rates([p for p in points if p.size == size])
        for size in sorted({p.size for p in points})
    }


def _compute_octaves_above(q: Question, value: float, size: int, log2_value: float) -> float:
    """Compute the octaves of a value above the transferred one, which the transfer rule carries to
    its size.
    """
    assert q.power is not None
    return log2_value - value - q.power * math.log2(size / q.base_size)


def _compute_common_interval(
    points: Sequence[Point], q: Question, value: float
) -> tuple[float, float]:
    """Return the interval of values that every size has, in octaves above the transferred value."""
    rates = _group_finished_rates(points)
    low = max(
        _compute_octaves_above(q, value, size, size_rates[0]) for size, size_rates in rates.items()
    )
    high = min(
        _compute_octaves_above(q, value, size, size_rates[-1]) for size, size_rates in rates.items()
    )
    # Rounding errors must not put the transferred value outside
    return min(low, 0.0), max(high, 0.0)


def _combine_gains(gains: Sequence[Floats], level: float, most: float) -> Estimate:
    """Combine the gains of all values into one regret."""
    estimates = [estimate(gain, level, most) for gain in gains]
    # A value on either side may look better by chance, so the lower bounds share their tail
    strict_estimates = [estimate(gain, (1 + level) / 2, most) for gain in gains]
    return Estimate(
        value=max(e.value for e in estimates),
        low=max(e.low for e in strict_estimates),
        high=max(e.high for e in estimates),
        most=most,
    )


def _to_curve_runs(points: Sequence[Point], q: Question, value: float) -> CurveRuns:
    rates = _group_finished_rates(points)
    finished_runs = [p for p in points if p.log2_value in rates[p.size]]
    _, group = np.unique([f"{p.size} {p.seed}" for p in finished_runs], return_inverse=True)
    return CurveRuns(
        x=np.array(
            [_compute_octaves_above(q, value, p.size, p.log2_value) for p in finished_runs]
        ).round(9),
        u=np.array([math.log2(p.size / max(rates)) for p in finished_runs]),
        loss_nats=np.array([p.loss_nats for p in finished_runs], dtype=np.float64),
        group=group.astype(np.int64),
    )
