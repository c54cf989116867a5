"""The effect of the width per layer on the loss, and the best width per layer for the main run.

A ladder over a grid of widths and depths has runs with about as many parameters but different
shapes. The log loss of such a run minus that predicted by a law of parameters and tokens is fitted
by

    a + b log2 N + c log2 D + s (x - mean) + q (x - mean)^2,    x = log2(width / layers)

by least squares. a, b, and c absorb errors of the law itself, so s and q compare runs of equal
size. Loss depends on the shape only weakly (arXiv 2001.08361, section 3.1; arXiv 2006.12467 and
2305.13035 find a parabola in the log of the aspect ratio), so few ladders determine it. The result
states if a ladder does not.
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
MIN_SPARE_RUNS = 3
"""Minimum number of runs beyond the number of terms. Fewer do not determine the noise."""
MIN_ASPECTS = 3
_MAX_CONDITION = 1e6
"""Largest condition number of the design matrix with scaled columns. Beyond it, the effects of
shape and size cannot be separated in these runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedRun:
    """A run of a ladder, with the loss that the law predicts for its size."""

    params: float
    tokens: float
    width_per_layer: float
    loss_nats: float
    predicted_nats: float
    """Loss predicted by the law of parameters and tokens, in nats."""

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
    """The effect of the width per layer on log loss, with draws of its slope and bend."""

    centre_log2: float
    reach_log2: tuple[float, float]
    """Lowest and highest log2 of the width per layer that was tried. Beyond them nothing is
    claimed."""
    point: tuple[float, float]
    """Slope and bend in log2 of the width per layer, from the centre."""
    draws: NDArray[np.float64]
    """Draws of slope and bend, [M, 2]."""
    level: float
    noise: float
    """Standard deviation of the residuals, in log loss."""
    mean: float
    """Mean of the term over the runs, which the law already contains."""
    seen: tuple[tuple[float, float], ...]
    """Pairs, one per run, of the width per layer and the residual of log loss without the shape's
    effect."""

    def best(self) -> Interval:
        """Find the width per layer with the lowest loss within reach."""
        low, high = (end - self.centre_log2 for end in self.reach_log2)
        best_log2 = (
            _find_minima(np.vstack([np.array([self.point]), self.draws]), low, high)
            + self.centre_log2
        )
        ends = np.quantile(best_log2[1:], [(1 - self.level) / 2, (1 + self.level) / 2])
        value, low_end, high_end = (float(2.0**x) for x in (best_log2[0], *ends))
        return Interval(value=value, low=min(value, low_end), high=max(value, high_end))

    @property
    def determined(self) -> bool:
        """Whether these runs determine the best width per layer: its interval is narrower than half
        of the range that was tried, in log2.
        """
        best, (low, high) = self.best(), self.reach_log2
        return math.log2(best.high / best.low) < (high - low) / 2

    def log_loss(self, width_per_layer: float) -> Interval:
        """Estimate the difference in log loss from the law's prediction. Valid only within
        reach.
        """
        return self._to_interval(self._evaluate(width_per_layer) - self.mean)

    def cost(self, width_per_layer: float, best: float) -> Interval:
        """Estimate the log loss of one width per layer above that of another."""
        return self._to_interval(self._evaluate(width_per_layer) - self._evaluate(best))

    def reaches(self, width_per_layer: float) -> bool:
        """Return whether a width per layer lies within the range that was tried."""
        return self.reach_log2[0] - 1e-9 <= math.log2(width_per_layer) <= self.reach_log2[1] + 1e-9

    def _evaluate(self, width_per_layer: float) -> NDArray[np.float64]:
        """Compute the term at the point estimate, then at every draw."""
        x = math.log2(width_per_layer) - self.centre_log2
        rows_M2 = np.vstack([np.array([self.point]), self.draws])
        values: NDArray[np.float64] = rows_M2[:, 0] * x + rows_M2[:, 1] * x * x
        return values

    def _to_interval(self, values: NDArray[np.float64]) -> Interval:
        low, high = np.quantile(values[1:], [(1 - self.level) / 2, (1 + self.level) / 2])
        return Interval(
            value=float(values[0]),
            low=min(float(low), float(values[0])),
            high=max(float(high), float(values[0])),
        )


def shaped_run(
    fit: FittedRuns, *, params: float, tokens: float, width_per_layer: float, loss_nats: float
) -> ShapedRun:
    """Return a run together with the loss that a law predicts for it.

    Raises:
        SpecError: A value is not above 0.
        LawError: Parameters or tokens are not a valid size of a run.
        CannotTellError: The runs identify no law.
    """
    return ShapedRun(
        params=params,
        tokens=tokens,
        width_per_layer=width_per_layer,
        loss_nats=loss_nats,
        predicted_nats=predict(fit, params, tokens).loss_nats,
    )


def aspect_term(runs: Sequence[ShapedRun], level: float) -> AspectTerm:
    """Fit the effect of the width per layer to the runs of a ladder.

    Raises:
        SpecError: There are too few runs or aspect ratios, or shape and size grow together.
    """
    x = np.log2([run.width_per_layer for run in runs])
    num_aspects = len({round(float(value), 6) for value in x})
    if len(runs) < NUM_TERMS + MIN_SPARE_RUNS or num_aspects < MIN_ASPECTS:
        counts = f"{counted(len(runs), 'run')} of {counted(num_aspects, 'width')} per layer"
        raise SpecError(
            "aspect ratio",
            [f"{counts}: must be {NUM_TERMS + MIN_SPARE_RUNS} of {MIN_ASPECTS}, at least"],
        )
    residual = np.log([run.loss_nats / run.predicted_nats for run in runs])
    centre = float(x.mean())
    design = _build_design(runs, x - centre)
    # Least squares, with the covariance of s and q inflated by the design effect
    coefficients, *_ = np.linalg.lstsq(design, residual, rcond=None)
    num_free = len(runs) - NUM_TERMS
    errors = residual - design @ coefficients
    noise = math.sqrt(float((errors**2).sum()) / num_free)
    effect = _compute_design_effect(errors, [(run.params, run.width_per_layer) for run in runs])
    covariance = np.linalg.inv(design.T @ design)[3:, 3:] * max(noise, 1e-9) ** 2 * effect
    generator = np.random.default_rng(0)
    # Draws from Student's t distribution, because the noise is estimated from the same runs
    normal = generator.standard_normal((NUM_DRAWS, 2)) @ np.linalg.cholesky(covariance).T
    draws = (
        coefficients[3:]
        + normal / np.sqrt(generator.chisquare(num_free, NUM_DRAWS) / num_free)[:, None]
    )
    return AspectTerm(
        centre_log2=centre,
        reach_log2=(float(x.min()), float(x.max())),
        point=(float(coefficients[3]), float(coefficients[4])),
        draws=draws,
        level=level,
        noise=noise,
        mean=float((design[:, 3:] @ coefficients[3:]).mean()),
        seen=tuple(
            (run.width_per_layer, float(value))
            for run, value in zip(runs, residual - design[:, :3] @ coefficients[:3], strict=True)
        ),
    )


def _build_design(runs: Sequence[ShapedRun], shape: NDArray[np.float64]) -> NDArray[np.float64]:
    """Build the design matrix [R, 5] of runs with a centered log2 width per layer."""
    # Design matrix with centered columns
    columns = [
        np.log2([run.params for run in runs]),
        np.log2([run.tokens for run in runs]),
        shape,
    ]
    design = np.stack(
        [np.ones_like(shape), *(c - c.mean() for c in columns[:2]), columns[2], columns[2] ** 2],
        axis=1,
    )
    scaled = design / np.maximum(np.abs(design).max(axis=0), 1e-12)
    if (
        np.linalg.cond(scaled) > _MAX_CONDITION
        or np.ptp(columns[0]) == 0
        or np.ptp(columns[1]) == 0
    ):
        raise SpecError(
            "aspect ratio",
            ["shape and size grow together in these runs: ladder.depths must be a grid"],
        )
    return design


def _compute_design_effect(
    errors: NDArray[np.float64], shapes: Sequence[tuple[float, float]]
) -> float:
    """Compute the design effect: the factor by which correlated errors of runs of one shape enlarge
    a variance.
    """
    groups = [errors[[shape == each for shape in shapes]] for each in dict.fromkeys(shapes)]
    number, per_shape = len(groups), len(errors) / len(groups)
    if per_shape <= 1 or number < 2:
        return 1.0
    between = sum(len(g) * float(g.mean() - errors.mean()) ** 2 for g in groups) / (number - 1)
    within = sum(float(((g - g.mean()) ** 2).sum()) for g in groups) / (len(errors) - number)
    total = between + (per_shape - 1) * within
    return max(1.0, 1 + (per_shape - 1) * (between - within) / total) if total > 0 else 1.0


def _find_minima(rows_M2: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """Find the minima of parabolas through 0 with these slopes and bends in [low, high]."""
    slope, bend = rows_M2[:, 0], rows_M2[:, 1]
    ends = np.where(slope * low + bend * low**2 < slope * high + bend * high**2, low, high)
    inside = np.clip(-slope / np.where(bend > 0, 2 * bend, 1.0), low, high)
    minima: NDArray[np.float64] = np.where(bend > 0, inside, ends)
    return minima
