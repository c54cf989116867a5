"""What the optima say about the target: drift, offset and regret, each an estimate with its
interval.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transfer.basin.optimum import Optima, Optimum, interval
from transfer.basin.shapes import Floats, Ints, rise
from transfer.question import Question, TransferError
from transfer.regret.drift import Curvature, OptimumLine, extend_curvature, extend_line

LEAST_BENT = 3
"""Through two optima there is always a straight line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number with its interval, at the verdict's level."""

    value: float
    low: float
    high: float
    most: float | None = None
    """A cost that reaches this is more than this, and by how much is not known
    (`Question.most_nats`)."""

    def __post_init__(self) -> None:
        if not -math.inf < self.low <= self.value <= self.high < math.inf:
            raise TransferError(
                [f"{self.value} must be finite, and within {self.low} ... {self.high}"]
            )

    def at_bound(self, nats: float) -> bool:
        """Whether one of its numbers reaches the bound."""
        return self.most is not None and nats >= self.most


@dataclass(frozen=True, kw_only=True, slots=True)
class AtTarget:
    """The extrapolation to the target, as rows: row 0 the point estimate, the others draws of the
    posterior.
    """

    line: OptimumLine
    curvature: Curvature
    shape: Ints
    """(rows,) of the basin (`transfer.basin.shapes.rise`)."""
    sds: tuple[float, ...]
    """Standard deviation of each usable optimum, octaves, by what seeds can sharpen."""
    drift: Estimate
    """Octaves per doubling."""
    power: float
    """Used for the transferred value, beyond what is built in; measured, it is that from base to
    target."""
    transferred_log2: float | None
    """At the target; None when there is no value to transfer."""
    bend: Estimate | None
    """Octaves per doubling by which the slope beyond the largest size differs; None where runs
    cannot show a bend."""
    most_nats: float
    """What a value can cost at all."""

    def cost(self, log2_value: float) -> Floats:
        """Nats lost at the target by a value: one entry per row."""
        nats = rise(log2_value - self.line.at_target, self.curvature.at_target, self.shape)
        return np.minimum(nats, self.most_nats)


def extrapolate(
    found: Optima, question: Question, most_nats: float, *, rng: np.random.Generator
) -> AtTarget | None:
    """Extend optimum and basin to the target; None with fewer than two usable optima."""
    usable = [o for o in found.optima if o.status == "ok"]
    if len(usable) < 2 or found.basins is None:
        return None
    basins, columns, log2_target = (
        found.basins,
        columns_of(found, usable),
        math.log2(question.target_size),
    )
    log2_size = np.log2([o.size for o in usable])
    log2_base = math.log2(question.base_size)
    line = extend_line(
        basins.optimum[:, columns], log2_size, log2_target, log2_base, question.axis, rng
    )
    curvature = extend_curvature(basins.curvature[:, columns], log2_size, log2_target, rng)
    power = question.power
    # of a bent line that from base to target, so that the value at the target is right
    if power is None:
        power = (
            float(line.shift[0]) / question.doublings
            if question.doublings
            else float(line.slope[0])
        )
    base = question.transferred_log2
    if base is None:
        base = next((o.log2_value for o in usable if o.size == question.base_size), None)
    return AtTarget(
        line=line,
        curvature=curvature,
        shape=basins.shape,
        sds=tuple(
            np.std((basins.optimum - basins.off_shape[:, None])[1:, columns], axis=0).tolist()
        ),
        drift=estimate(line.slope, question.level),
        power=power,
        transferred_log2=None if base is None else base + power * question.doublings,
        bend=estimate(line.bend, question.level)
        if len(usable) >= LEAST_BENT and log2_target > log2_size[-1]
        else None,
        most_nats=most_nats,
    )


def offset_of(at_target: AtTarget, level: float) -> Estimate:
    """Octaves from the target's optimum up to the transferred value."""
    assert at_target.transferred_log2 is not None
    return estimate(at_target.transferred_log2 - at_target.line.at_target, level)


def regret_of(at_target: AtTarget, log2_value: float, level: float) -> Estimate:
    """Nats that a value costs at the target."""
    return regret(
        at_target.cost(log2_value),
        log2_value - at_target.line.at_target,
        level,
        at_target.most_nats,
    )


def regret(cost: Floats, offset: Floats, level: float, most_nats: float) -> Estimate:
    """A cost's interval, down to nothing where that of the offset says that this may be the very
    optimum.
    """
    found, reach = estimate(cost, level, most_nats), estimate(offset, level)
    return dataclasses.replace(found, low=0.0) if reach.low <= 0 <= reach.high else found


def estimate(rows: Floats, level: float, most: float | None = None) -> Estimate:
    """Row 0 with the interval of the other rows, none of which exceeds `most`."""
    capped = rows if most is None else np.minimum(rows, most)
    low, high = interval(capped, level)
    return Estimate(value=float(capped[0]), low=low, high=high, most=most)


def cost_of_2x(found: Optima, level: float, most_nats: float) -> Estimate | None:
    """Nats lost by a value twice or half the optimum, whichever is worse, at the largest usable
    size.
    """
    usable = [o for o in found.optima if o.status == "ok"]
    if not usable or found.basins is None:
        return None
    curvature, shape = found.basins.curvature[:, columns_of(found, usable)[-1]], found.basins.shape
    octave = np.ones_like(curvature)
    nats = np.maximum(rise(octave, curvature, shape), rise(-octave, curvature, shape))
    return estimate(nats, level, most_nats)


def columns_of(found: Optima, usable: Sequence[Optimum]) -> list[int]:
    """Where these optima are in the posterior."""
    return [found.fitted.index(o.size) for o in usable]
