"""Drift, offset, and regret at the target, each as an estimate with its interval."""

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

MIN_BEND_OPTIMA = 3
"""Number of optima that can show a bend: there is a straight line through any two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number with its interval, at the verdict's level."""

    value: float
    low: float
    high: float
    most: float | None = None
    """Largest regret that can be determined (`Question.most_nats`). A number that reaches it is
    known only to be at least this large."""

    def __post_init__(self) -> None:
        if not -math.inf < self.low <= self.value <= self.high < math.inf:
            raise TransferError(
                [f"{self.value} must be finite, and within {self.low} ... {self.high}"]
            )

    def at_bound(self, nats: float) -> bool:
        """Return whether one of its numbers reaches the bound."""
        return self.most is not None and nats >= self.most


@dataclass(frozen=True, kw_only=True, slots=True)
class AtTarget:
    """The extrapolation to the target, as rows: row 0 the point estimate, the others draws of the
    posterior.
    """

    line: OptimumLine
    curvature: Curvature
    shape: Ints
    """(rows,) index of the basin's shape (`transfer.basin.shapes.rise`)."""
    sds: tuple[float, ...]
    """Standard deviation of each usable optimum in octaves, as far as more seeds can reduce it."""
    drift: Estimate
    """Octaves per doubling."""
    power: float
    """Exponent used for the transferred value, beyond what is built in. If it is measured, it is
    the one from base to target."""
    transferred_log2: float | None
    """Log2 of the transferred value at the target; None if there is no value to transfer."""
    bend: Estimate | None
    """Difference between the slope beyond the largest size and the drift, octaves per doubling;
    None if the runs cannot show a bend."""
    most_nats: float
    """Largest possible regret, in nats."""

    def cost(self, log2_value: float) -> Floats:
        """Compute the regret of a value at the target, in nats: one entry per row."""
        nats = rise(log2_value - self.line.at_target, self.curvature.at_target, self.shape)
        return np.minimum(nats, self.most_nats)


def extrapolate(
    optima: Optima, question: Question, most_nats: float, *, rng: np.random.Generator
) -> AtTarget | None:
    """Extrapolate optimum and basin to the target; return None if fewer than two optima are
    usable.
    """
    usable = [o for o in optima.optima if o.status == "ok"]
    if len(usable) < 2 or optima.basins is None:
        return None
    basins, columns, log2_target = (
        optima.basins,
        get_columns(optima, usable),
        math.log2(question.target_size),
    )
    log2_size = np.log2([o.size for o in usable])
    log2_base = math.log2(question.base_size)
    line = extend_line(
        basins.optimum[:, columns], log2_size, log2_target, log2_base, question.axis, rng
    )
    curvature = extend_curvature(basins.curvature[:, columns], log2_size, log2_target, rng)
    power = question.power
    # On a bent line, use the exponent from base to target, so that the value at the target is right
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
        if len(usable) >= MIN_BEND_OPTIMA and log2_target > log2_size[-1]
        else None,
        most_nats=most_nats,
    )


def estimate_offset(at_target: AtTarget, level: float) -> Estimate:
    """Estimate the octaves from the target's optimum up to the transferred value."""
    assert at_target.transferred_log2 is not None
    return estimate(at_target.transferred_log2 - at_target.line.at_target, level)


def estimate_regret(at_target: AtTarget, log2_value: float, level: float) -> Estimate:
    """Estimate the regret of a value at the target, in nats."""
    return regret(
        at_target.cost(log2_value),
        log2_value - at_target.line.at_target,
        level,
        at_target.most_nats,
    )


def regret(cost: Floats, offset: Floats, level: float, most_nats: float) -> Estimate:
    """Estimate a regret whose interval includes 0 if the interval of the offset does, since the
    value may then be the optimum.
    """
    regret_nats = estimate(cost, level, most_nats)
    offset_octaves = estimate(offset, level)
    if offset_octaves.low <= 0 <= offset_octaves.high:
        return dataclasses.replace(regret_nats, low=0.0)
    return regret_nats


def estimate(rows: Floats, level: float, most: float | None = None) -> Estimate:
    """Return row 0 with the interval of the other rows, all capped at `most`."""
    capped = rows if most is None else np.minimum(rows, most)
    low, high = interval(capped, level)
    return Estimate(value=float(capped[0]), low=low, high=high, most=most)


def estimate_cost_of_2x(optima: Optima, level: float, most_nats: float) -> Estimate | None:
    """Estimate the regret of a value twice or half the optimum, whichever is worse, at the largest
    usable size; None without one.
    """
    usable = [o for o in optima.optima if o.status == "ok"]
    if not usable or optima.basins is None:
        return None
    curvature, shape = (
        optima.basins.curvature[:, get_columns(optima, usable)[-1]],
        optima.basins.shape,
    )
    octave = np.ones_like(curvature)
    nats = np.maximum(rise(octave, curvature, shape), rise(-octave, curvature, shape))
    return estimate(nats, level, most_nats)


def get_columns(optima: Optima, usable: Sequence[Optimum]) -> list[int]:
    """Return the columns of these optima in the posterior."""
    return [optima.fitted.index(o.size) for o in usable]
