"""The width per layer: what it adds to the loss that parameters and tokens predict, and the best
one for the main run.

A ladder over a grid of widths and depths has runs of about as many parameters and unlike shapes.
What a law of parameters and tokens leaves of their log losses is fitted by

    a + b log2 N + c log2 D + s (x - mean) + q (x - mean)^2,    x = log2(width / layers)

by least squares: a, b, c take up what the law itself could be off by, so that s and q are of runs
of equal size. Loss depends on the shape weakly (arXiv 2001.08361, section 3.1; a parabola in the
log of the aspect ratio is what arXiv 2006.12467 and 2305.13035 find), so few ladders determine it,
and this says when one does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proxies.core.checks import Checks, SpecError
from proxies.core.notation import counted
from scaling_fits.forecast.uncertainty import FittedRuns, predict

NUM_DRAWS = 2000
NUM_TERMS = 5
LEAST_SPARE = 3
"""Runs beyond the terms: fewer say nothing of the noise."""
LEAST_ASPECTS = 3
_MOST_CONDITION = 1e6
"""Of the design, its columns scaled: beyond it, shape and size cannot be told apart in these
runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedRun:
    """A run of a ladder."""

    params: float
    tokens: float
    width_per_layer: float
    loss_nats: float
    predicted_nats: float
    """By the law of parameters and tokens."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        for name in ("params", "tokens", "width_per_layer", "loss_nats", "predicted_nats"):
            checks.number(name, above=0)
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A value with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AspectTerm:
    """What the width per layer adds to log loss, with draws of its slope and bend."""

    centre_log2: float
    reach_log2: tuple[float, float]
    """Between which it was tried: beyond, nothing is claimed."""
    point: tuple[float, float]
    """Slope and bend in log2 of the width per layer, from the centre."""
    draws: NDArray[np.float64]
    """[M, 2], slope and bend."""
    level: float
    noise: float
    """Standard deviation of what remains, in log loss."""
    mean: float
    """Of the term over the runs: the law has it in it."""
    seen: tuple[tuple[float, float], ...]
    """Of each run its width per layer, and what the law, but for the shape, leaves of its log
    loss."""

    def best(self) -> Interval:
        """The width per layer of the lowest loss within reach."""
        low, high = (end - self.centre_log2 for end in self.reach_log2)
        found = (
            _lowest(np.vstack([np.array([self.point]), self.draws]), low, high) + self.centre_log2
        )
        ends = np.quantile(found[1:], [(1 - self.level) / 2, (1 + self.level) / 2])
        value, least, most = (float(2.0**x) for x in (found[0], *ends))
        return Interval(value=value, low=min(value, least), high=max(value, most))

    @property
    def determined(self) -> bool:
        """Whether these runs say which is best: its interval is narrower than half of what was
        tried, in log2.
        """
        best, (low, high) = self.best(), self.reach_log2
        return math.log2(best.high / best.low) < (high - low) / 2

    def log_loss(self, width_per_layer: float) -> Interval:
        """What it adds to the log loss that the law predicts. Within reach alone."""
        return self._span(self._values(width_per_layer) - self.mean)

    def cost(self, width_per_layer: float, best: float) -> Interval:
        """Log loss of one width per layer above that of another."""
        return self._span(self._values(width_per_layer) - self._values(best))

    def reaches(self, width_per_layer: float) -> bool:
        """Whether it lies between those that were tried."""
        return self.reach_log2[0] - 1e-9 <= math.log2(width_per_layer) <= self.reach_log2[1] + 1e-9

    def _values(self, width_per_layer: float) -> NDArray[np.float64]:
        """At the point, then at every draw."""
        x = math.log2(width_per_layer) - self.centre_log2
        rows_M2 = np.vstack([np.array([self.point]), self.draws])
        found: NDArray[np.float64] = rows_M2[:, 0] * x + rows_M2[:, 1] * x * x
        return found

    def _span(self, values: NDArray[np.float64]) -> Interval:
        low, high = np.quantile(values[1:], [(1 - self.level) / 2, (1 + self.level) / 2])
        return Interval(
            value=float(values[0]),
            low=min(float(low), float(values[0])),
            high=max(float(high), float(values[0])),
        )


def shaped_run(
    fit: FittedRuns, *, params: float, tokens: float, width_per_layer: float, loss_nats: float
) -> ShapedRun:
    """A run beside what a law predicts of it.

    Raises:
        SpecError: a value is not above 0.
        LawError: what is no size of a run.
        CannotTellError: the runs identify no law.
    """
    return ShapedRun(
        params=params,
        tokens=tokens,
        width_per_layer=width_per_layer,
        loss_nats=loss_nats,
        predicted_nats=predict(fit, params, tokens).loss_nats,
    )


def aspect_term(runs: Sequence[ShapedRun], level: float) -> AspectTerm:
    """Fit it.

    Raises:
        SpecError: too few runs or aspect ratios, or a ladder in which shape and size grow together.
    """
    x = np.log2([run.width_per_layer for run in runs])
    num_aspects = len({round(float(value), 6) for value in x})
    if len(runs) < NUM_TERMS + LEAST_SPARE or num_aspects < LEAST_ASPECTS:
        said = f"{counted(len(runs), 'run')} of {counted(num_aspects, 'width')} per layer"
        raise SpecError(
            "aspect ratio",
            [f"{said}: must be {NUM_TERMS + LEAST_SPARE} of {LEAST_ASPECTS}, at least"],
        )
    left = np.log([run.loss_nats / run.predicted_nats for run in runs])
    centre = float(x.mean())
    columns = [
        np.log2([run.params for run in runs]),
        np.log2([run.tokens for run in runs]),
        x - centre,
    ]
    design = np.stack(
        [np.ones_like(x), *(c - c.mean() for c in columns[:2]), columns[2], columns[2] ** 2], axis=1
    )
    scaled = design / np.maximum(np.abs(design).max(axis=0), 1e-12)
    if (
        np.linalg.cond(scaled) > _MOST_CONDITION
        or np.ptp(columns[0]) == 0
        or np.ptp(columns[1]) == 0
    ):
        raise SpecError(
            "aspect ratio",
            ["shape and size grow together in these runs: ladder.depths must be a grid"],
        )
    found, *_ = np.linalg.lstsq(design, left, rcond=None)
    spare = len(runs) - NUM_TERMS
    remains = left - design @ found
    noise = math.sqrt(float((remains**2).sum()) / spare)
    effect = _design_effect(remains, [(run.params, run.width_per_layer) for run in runs])
    covariance = np.linalg.inv(design.T @ design)[3:, 3:] * max(noise, 1e-9) ** 2 * effect
    generator = np.random.default_rng(0)
    # Student's t: the noise is these runs' own.
    normal = generator.standard_normal((NUM_DRAWS, 2)) @ np.linalg.cholesky(covariance).T
    draws = found[3:] + normal / np.sqrt(generator.chisquare(spare, NUM_DRAWS) / spare)[:, None]
    return AspectTerm(
        centre_log2=centre,
        reach_log2=(float(x.min()), float(x.max())),
        point=(float(found[3]), float(found[4])),
        draws=draws,
        level=level,
        noise=noise,
        mean=float((design[:, 3:] @ found[3:]).mean()),
        seen=tuple(
            (run.width_per_layer, float(value))
            for run, value in zip(runs, left - design[:, :3] @ found[:3], strict=True)
        ),
    )


def _design_effect(remains: NDArray[np.float64], shapes: Sequence[tuple[float, float]]) -> float:
    """By how much runs of one shape that depart together make a variance larger than independent
    ones would: 1 and (runs a shape - 1) times their correlation, by the analysis of variance; 1 at
    least.
    """
    groups = [remains[[shape == each for shape in shapes]] for each in dict.fromkeys(shapes)]
    number, per_shape = len(groups), len(remains) / len(groups)
    if per_shape <= 1 or number < 2:
        return 1.0
    between = sum(len(g) * float(g.mean() - remains.mean()) ** 2 for g in groups) / (number - 1)
    within = sum(float(((g - g.mean()) ** 2).sum()) for g in groups) / (len(remains) - number)
    total = between + (per_shape - 1) * within
    return max(1.0, 1 + (per_shape - 1) * (between - within) / total) if total > 0 else 1.0


def _lowest(rows_M2: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """Where parabolas of these slopes and bends through 0 are lowest in [low, high]."""
    slope, bend = rows_M2[:, 0], rows_M2[:, 1]
    ends = np.where(slope * low + bend * low**2 < slope * high + bend * high**2, low, high)
    inside = np.clip(-slope / np.where(bend > 0, 2 * bend, 1.0), low, high)
    found: NDArray[np.float64] = np.where(bend > 0, inside, ends)
    return found
