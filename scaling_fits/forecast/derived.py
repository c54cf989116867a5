"""Intervals of what follows from a fit: parameters, exponents, sizes, costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaling_fits.forecast import cloud
from scaling_fits.forecast.uncertainty import FittedRuns
from scaling_fits.laws.solver import Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A value with its interval, None without a bootstrap."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Exponents:
    """How the optimum grows with compute: N* ~ C^params_vs_flops, D* ~ C^tokens_vs_flops."""

    params_vs_flops: Interval
    tokens_vs_flops: Interval


def exponents(fitted: FittedRuns) -> Exponents:
    """Exponents of the heaviest law that chooses sizes, with intervals over the refits of those that do.

    The arms are lengthened as hindcasts ask, and end at 0 and 1: both terms fall, so N* and D* both grow.

    Raises:
        CannotTellError: the runs identify no law.
    """
    fitted.require()
    alpha, beta = fitted.chooser.theta[3:5]
    value = float(beta / (alpha + beta))
    ends = pooled_interval(fitted, [fit.draws[:, 4] / (fit.draws[:, 3] + fit.draws[:, 4]) for fit in fitted.members])
    if ends is not None:
        low, high = stretched(value, *ends, fitted)
        ends = max(low, 0.0), min(high, 1.0)
    return Exponents(
        params_vs_flops=Interval(value=value, interval=ends),
        tokens_vs_flops=Interval(value=1 - value, interval=None if ends is None else (1 - ends[1], 1 - ends[0])),
    )


def stretched(centre: float, low: float, high: float, fitted: FittedRuns) -> tuple[float, float]:
    """An interval about `centre` of something else than a loss, its arms lengthened as hindcasts ask."""
    return (
        centre - fitted.inflation * max(centre - low, 0.0),
        centre + fitted.inflation * max(high - centre, 0.0),
    )


def draw_intervals(fitted: FittedRuns) -> dict[str, tuple[float, float]] | None:
    """Percentile intervals of the heaviest member's parameters over its refits; None without any.

    They say how far the runs pin down this law's numbers, and so are not stretched for the law being wrong.
    """
    fit = fitted.heaviest
    if len(fit.draws) == 0:
        return None
    tail = (1 - fitted.level) / 2
    ends = {name: np.quantile(values, [tail, 1 - tail]) for name, values in fit.named(fit.draws).items()}
    return {name: (float(low), float(high)) for name, (low, high) in ends.items()}


def pooled_interval(fitted: FittedRuns, values: list[Floats]) -> tuple[float, float] | None:
    """Central `level` of what follows from a choice of size, over the members' refits by weight. None without any.

    One array of values per member.
    """
    kept = [(v, w) for v, w in zip(values, fitted.size_weights, strict=True) if w > 0 and len(v)]
    if not kept:
        return None
    mass = np.concatenate([np.full(len(v), w / len(v)) for v, w in kept])
    column = np.concatenate([v for v, _ in kept])[:, None]
    tail = (1 - fitted.level) / 2
    return (
        float(cloud.weighted_quantile(column, mass, tail)[0]),
        float(cloud.weighted_quantile(column, mass, 1 - tail)[0]),
    )
