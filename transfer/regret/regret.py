"""Drift, offset, and regret at the target, each as an estimate with its interval.

The drift is the change of the optimum with size, in octaves per doubling. The offset is the number
of octaves by which the transferred value lies above the target's optimum. The regret is the loss at
the transferred value minus the loss at that optimum, in nats.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun._proxies.core.checks import Interval
from forerun._transfer.basin.optimum import Optima, Optimum, compute_bounds
from forerun._transfer.basin.shapes import Floats, Ints, compute_rise
from forerun._transfer.question import Question
from forerun._transfer.regret.extrapolation import (
    OptimumLine,
    extend_curvature,
    extend_line_to_target,
)

MIN_BEND_OPTIMA = 3
"""Number of optima that can show a bend: there is a straight line through any two."""


class TargetExtrapolation(NamedTuple):
    """The extrapolation of optimum and loss basin to the target. Arrays have rows: row 0 is the
    point estimate, and every other row is one draw of the posterior.
    """

    line: OptimumLine
    curvature: Floats
    """(rows,) curvature of the target's basin, nats per octave squared."""
    curvature_trend: Floats
    """(rows,) change of the natural log of the curvature per doubling of size."""
    shape: Ints
    """(rows,) index of the basin's shape (`forerun._transfer.basin.shapes.compute_rise`)."""
    sds: tuple[float, ...]
    """Standard deviation of each usable optimum in octaves, without `BasinPosterior.off_shape`,
    which more seeds do not reduce."""
    drift: Interval
    """Change of the optimum over the sizes that were run, octaves per doubling."""
    power: float
    """Exponent used for the transferred value, in addition to `Question.built_in`. A measured
    exponent is that from the base to the target."""
    transferred_log2: float | None
    """Log2 of the transferred value at the target; None if there is no value to transfer."""
    bend: Interval | None
    """Difference between the slope beyond the largest size and the drift, octaves per doubling;
    None if the runs cannot show a bend."""
    most_nats: float
    """Largest regret that can be determined, in nats (`Question.compute_max_regret`). A regret that
    reaches it is known only to be at least this large."""

    def compute_regret(self, log2_value: float) -> Floats:
        """Compute the regret of a value at the target, in nats: one entry per row."""
        nats = compute_rise(log2_value - self.line.at_target, self.curvature, self.shape)
        return np.minimum(nats, self.most_nats)


def extrapolate(
    optima: Optima, question: Question, most_nats: float, *, rng: np.random.Generator
) -> TargetExtrapolation | None:
    """Extrapolate optimum and basin to the target of a question: which hyperparameter, over which
    axis, from which size to which. Return None if fewer than two optima are usable.
    """
    usable = [o for o in optima.optima if o.status == "ok"]
    if len(usable) < 2 or optima.basins is None:
        return None
    basins = optima.basins
    columns = get_columns(optima, usable)
    log2_target = math.log2(question.target_size)
    log2_size = np.log2([o.size for o in usable])
    log2_base = math.log2(question.base_size)
    line = extend_line_to_target(
        basins.optimum[:, columns], log2_size, log2_target, log2_base, question.axis, rng
    )
    curvature, curvature_trend = extend_curvature(
        basins.curvature[:, columns], log2_size, log2_target, rng
    )
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
    return TargetExtrapolation(
        line=line,
        curvature=curvature,
        curvature_trend=curvature_trend,
        shape=basins.shape,
        sds=tuple(
            np.std((basins.optimum - basins.off_shape[:, None])[1:, columns], axis=0).tolist()
        ),
        drift=build_interval(line.slope, question.level),
        power=power,
        transferred_log2=None if base is None else base + power * question.doublings,
        bend=build_interval(line.bend, question.level)
        if len(usable) >= MIN_BEND_OPTIMA and log2_target > log2_size[-1]
        else None,
        most_nats=most_nats,
    )


def estimate_offset(at_target: TargetExtrapolation, level: float) -> Interval:
    """Estimate the octaves by which the transferred value lies above the target's optimum."""
    assert at_target.transferred_log2 is not None
    return build_interval(at_target.transferred_log2 - at_target.line.at_target, level)


def estimate_regret(at_target: TargetExtrapolation, log2_value: float, level: float) -> Interval:
    """Estimate the regret of a value at the target, in nats."""
    return estimate_regret_interval(
        at_target.compute_regret(log2_value),
        log2_value - at_target.line.at_target,
        level,
        at_target.most_nats,
    )


def estimate_regret_interval(
    regret: Floats, offset: Floats, level: float, most_nats: float
) -> Interval:
    """Estimate a regret from rows of regrets and offsets. If the interval of the offset includes 0,
    the value may be the optimum, so the interval of the regret then includes 0 as well.
    """
    regret_nats = build_interval(regret, level, most_nats)
    offset_octaves = build_interval(offset, level)
    if offset_octaves.low <= 0 <= offset_octaves.high:
        return dataclasses.replace(regret_nats, low=0.0)
    return regret_nats


def build_interval(rows: Floats, level: float, most: float | None = None) -> Interval:
    """Return the estimate in row 0 with the interval of the draws in the other rows. All rows are
    capped at `most`.
    """
    capped = rows if most is None else np.minimum(rows, most)
    low, high = compute_bounds(capped, level)
    return Interval(estimate=float(capped[0]), low=low, high=high, level=level)


def estimate_cost_of_2x(optima: Optima, level: float, most_nats: float) -> Interval | None:
    """Estimate the regret of a value twice or half the optimum, whichever is worse, at the largest
    usable size; None without one.
    """
    usable = [o for o in optima.optima if o.status == "ok"]
    if not usable or optima.basins is None:
        return None
    curvature = optima.basins.curvature[:, get_columns(optima, usable)[-1]]
    shape = optima.basins.shape
    octave = np.ones_like(curvature)
    nats = np.maximum(
        compute_rise(octave, curvature, shape), compute_rise(-octave, curvature, shape)
    )
    return build_interval(nats, level, most_nats)


def get_columns(optima: Optima, usable: Sequence[Optimum]) -> list[int]:
    """Return the columns of the usable optima in the arrays of `Optima.basins`."""
    return [optima.fitted.index(o.size) for o in usable]
