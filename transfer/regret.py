"""What the optima say about the target: drift, offset and regret, each an estimate with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proxies.checks import Checks
from transfer.drift import Line, extend_curvature, extend_line
from transfer.optimum import Optima, Optimum, TransferError, interval
from transfer.valley import Floats, rise


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number with its interval, at the verdict's level."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        checks = Checks(self)
        for name in ("value", "low", "high"):
            checks.number(name)
        if checks.fine:
            checks.that(self.low <= self.value <= self.high, f"{self.value} is outside {self.low} ... {self.high}")
        if checks.problems:
            raise TransferError(checks.problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class AtTarget:
    """The extrapolation to the target; offset and regret are None when there is no rate to transfer."""

    line: Line
    drift: Estimate
    """Octaves per doubling."""
    offset: Estimate | None
    """Transferred rate above the target's optimum, octaves."""
    regret_nats: Estimate | None
    sds: tuple[float, ...]
    """Of each usable optimum, octaves."""
    curvature: float
    """Of the target's valley, nats per octave squared."""


def extrapolate(
    found: Optima, *, target_width: int, transferred: float | None, level: float, rng: np.random.Generator
) -> AtTarget | None:
    """Extend optimum and valley to the target width; None with fewer than two usable optima."""
    usable = [o for o in found.optima if o.status == "ok"]
    if len(usable) < 2 or found.valleys is None:
        return None
    valleys, columns, log2_target = found.valleys, _columns(found, usable), math.log2(target_width)
    log2_width = np.log2([o.width for o in usable])
    line = extend_line(valleys.optimum[:, columns], log2_width, log2_target, rng)
    curvature = extend_curvature(valleys.curvature[:, columns], log2_width, log2_target, rng)
    offset, regret = None, None
    if transferred is not None:
        octaves = transferred - line.at_target  # the shape error is second order in a loss, and left out
        offset = estimate(octaves, level)
        regret = estimate(rise(octaves, curvature, valleys.asymmetry), level)
        if offset.low <= 0 <= offset.high:  # this very rate may be the target's optimum: nothing is lost then
            regret = Estimate(value=regret.value, low=0.0, high=regret.high)
    return AtTarget(
        line=line,
        drift=estimate(line.slope, level),
        offset=offset,
        regret_nats=regret,
        sds=tuple(np.std(valleys.optimum[1:, columns], axis=0).tolist()),
        curvature=float(curvature[0]),
    )


def estimate(rows: Floats, level: float) -> Estimate:
    """Row 0 with the interval of the other rows."""
    low, high = interval(rows, level)
    return Estimate(value=float(rows[0]), low=low, high=high)


def cost_of_2x(found: Optima, level: float) -> Estimate | None:
    """Nats lost by a rate twice or half the optimum, whichever is worse, at the largest usable width."""
    usable = [o for o in found.optima if o.status == "ok"]
    if not usable or found.valleys is None:
        return None
    curvature, asymmetry = found.valleys.curvature[:, _columns(found, usable)[-1]], found.valleys.asymmetry
    octave = np.ones_like(curvature)
    return estimate(np.maximum(rise(octave, curvature, asymmetry), rise(-octave, curvature, asymmetry)), level)


def _columns(found: Optima, usable: Sequence[Optimum]) -> list[int]:
    return [found.fitted.index(o.width) for o in usable]
