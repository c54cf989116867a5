"""What a value costs against the best of the values tried, where a hyperparameter need not have an
optimum at all.

Of clipping or warmup, less is often as good: the basin is flat, or falls on to the edge, and an
optimum cannot be extrapolated. The loss can (`transfer.regret.loss_curve`), and says what each of
the values tried would gain at the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proxies.core.notation import counted
from transfer.basin.optimum import best_rate, finite_rates
from transfer.basin.shapes import Floats
from transfer.question import Point, Question, at_size, written
from transfer.regret.loss_curve import CurveRuns, loss_at_target
from transfer.regret.regret import Estimate, estimate

MIN_VALUES = 3
MIN_FREE = 2
"""Degrees of freedom of the noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedRegret:
    """The regret against the best of the values tried, at the target."""

    regret_nats: Estimate
    low_log2: float
    """Lowest and highest value tried at every size, as the rule carries them to the target."""
    high_log2: float
    transferred_log2: float
    best_log2: float
    """The best of the values tried, by the fitted loss at the target."""
    cost_of_2x_off_nats: Estimate | None
    """By a value twice or half the transferred one, whichever is worse; None where neither was
    tried."""


def judge_bounded(
    points: Sequence[Point], q: Question, *, draws: int, rng: np.random.Generator
) -> BoundedRegret | None:
    """The regret of the transferred value, or None where `obstacle` says why the runs do not give
    one.

    The regret is what the value that is best in truth would gain. So it lies under the largest of
    all values' upper bounds; and over the largest of their lower ones, if that one holds.
    """
    if obstacle(points, q) is not None:
        return None
    value = _set_at_base(points, q)
    assert value is not None and q.power is not None
    low, high = _values_tried(points, q, value)
    there = value + q.power * q.doublings
    beyond = math.log2(q.target_size / max(p.size for p in points))
    at_target = loss_at_target(_runs(points, q, value), beyond, draws, rng)
    places = [0.0, *(x for x in at_target.knots.tolist() if low <= x <= high)]
    gains = [0.0 - at_target.loss(place) for place in places]
    most = q.most_nats(points)
    twice = [at_target.loss(place) for place in (-1.0, 1.0) if low <= place <= high]
    best = int(np.argmax([gain[0] for gain in gains]))
    return BoundedRegret(
        regret_nats=_regret(gains, q.level, most),
        low_log2=there + low,
        high_log2=there + high,
        transferred_log2=there,
        best_log2=there + places[best],
        cost_of_2x_off_nats=estimate(np.maximum.reduce(twice), q.level, most) if twice else None,
    )


def obstacle(points: Sequence[Point], q: Question) -> str | None:
    """Why the runs allow no such regret, or None where they do.

    They do with a power that is given, two sizes or more, three values at each at which every run
    finished, the transferred value within all of them, and more runs than the model has numbers.
    """
    value, rates = _set_at_base(points, q), _finished(points)
    if q.power is None:
        return "measuring the exponent takes an optimum at every size"
    if value is None:
        return f"no run at {at_size(q.axis, q.base_size)} gives a value to transfer"
    if len(rates) < 2:
        return f"only one {q.axis}: there must be at least 2"
    carried = written(q.hyperparameter, value)
    for size, found in rates.items():
        where, own = at_size(q.axis, size), [p for p in points if p.size == size]
        if any(
            p.loss_nats is None and abs(_above(q, value, size, p.log2_value)) < 1e-9 for p in own
        ):
            return f"{where}: a run at the transferred value, {carried} at the base, diverged"
        if len(found) < MIN_VALUES:
            values = f"{counted(len(found), 'value')} at which every run finished"
            return f"{where}: {values}: there must be at least {MIN_VALUES}"
        if (
            not _above(q, value, size, found[0]) - 1e-9
            <= 0
            <= _above(q, value, size, found[-1]) + 1e-9
        ):
            return (
                f"{where}: the transferred value, {carried} at the base, is beyond those at "
                "which every run finished"
            )
    if _runs(points, q, value).num_free < MIN_FREE:
        return "too few runs to tell a trend from noise: add seeds or values"
    return None


def _set_at_base(points: Sequence[Point], q: Question) -> float | None:
    """The value to transfer: the question's, or the best one tried at the base."""
    if q.transferred_log2 is not None:
        return q.transferred_log2
    return best_rate([p for p in points if p.size == q.base_size])


def _finished(points: Sequence[Point]) -> dict[int, list[float]]:
    return {
        size: finite_rates([p for p in points if p.size == size])
        for size in sorted({p.size for p in points})
    }


def _above(q: Question, value: float, size: int, log2_value: float) -> float:
    """Octaves above the transferred value, as the rule carries it to a size."""
    assert q.power is not None
    return log2_value - value - q.power * math.log2(size / q.base_size)


def _values_tried(points: Sequence[Point], q: Question, value: float) -> tuple[float, float]:
    """Octaves above the transferred value, of the lowest and the highest value that every
    size has.
    """
    rates = _finished(points)
    low = max(_above(q, value, size, found[0]) for size, found in rates.items())
    high = min(_above(q, value, size, found[-1]) for size, found in rates.items())
    return min(low, 0.0), max(high, 0.0)  # last bits must not put the transferred value outside


def _regret(gains: Sequence[Floats], level: float, most: float) -> Estimate:
    """From what each value would gain. On either side one may seem better by luck: lower bounds
    share their tail.
    """
    found, surer = ([estimate(gain, of, most) for gain in gains] for of in (level, (1 + level) / 2))
    return Estimate(
        value=max(e.value for e in found),
        low=max(e.low for e in surer),
        high=max(e.high for e in found),
        most=most,
    )


def _runs(points: Sequence[Point], q: Question, value: float) -> CurveRuns:
    rates = _finished(points)
    kept = [p for p in points if p.log2_value in rates[p.size]]
    _, group = np.unique([f"{p.size} {p.seed}" for p in kept], return_inverse=True)
    return CurveRuns(
        x=np.array([_above(q, value, p.size, p.log2_value) for p in kept]).round(9),
        u=np.array([math.log2(p.size / max(rates)) for p in kept]),
        loss_nats=np.array([p.loss_nats for p in kept], dtype=np.float64),
        group=group.astype(np.int64),
    )
