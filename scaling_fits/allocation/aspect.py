"""The effect of the width per layer on the loss, and the best width per layer for the main run.

A ladder over a grid of widths and depths has runs with about as many parameters but different
shapes. The log loss of such a run minus that predicted by a law of parameters and tokens is fitted
by

    a + b log2 N + c log2 D + s (x - mean) + q (x - mean)^2,    x = log2(width / layers)

by least squares, with N the parameters and D the tokens of a run. a, b, and c absorb errors of the
law itself, so the slope s and the bend q compare runs of equal size. Loss depends on the shape only
weakly (arXiv 2001.08361, section 3.1; arXiv 2006.12467 and 2305.13035 find a parabola in the log of
the aspect ratio), so few ladders determine s and q. The result states whether a ladder does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forerun._proxies.core.checks import Interval, SpecError
from forerun._proxies.core.notation import format_counted
from forerun._scaling_fits.forecast.uncertainty import FittedRuns, predict
from forerun._scaling_fits.laws.solver import Floats

NUM_DRAWS = 2000
NUM_TERMS = 5  # a, b, c, s, and q, in this order
MIN_SPARE_RUNS = 3
"""Minimum number of runs beyond the number of terms. Fewer do not determine the noise."""
MIN_ASPECTS = 3
_MAX_CONDITION = 1e6
"""Largest condition number of the design matrix with scaled columns. Beyond it, the effects of
shape and size cannot be separated in these runs."""


class ShapedRun(NamedTuple):
    """A run of a ladder, with the loss that the law predicts for its size."""

    params: float
    tokens: float
    width_per_layer: float
    loss_nats: float
    predicted_nats: float
    """Loss predicted by the law of parameters and tokens, in nats."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AspectTerm:
    """The effect of the width per layer on log loss, with draws of the slope and bend of the
    effect. x is log2 of the width per layer from the center.
    """

    center_log2: float
    reach_log2: tuple[float, float]
    """Lowest and highest log2 of the width per layer of any run. The term is not valid
    beyond these ends."""
    point: tuple[float, float]
    """Estimate of the slope s and of the bend q of s x + q x^2."""
    draws: Floats
    """Draws of slope and bend, [M, 2] for M draws."""
    level: float
    noise: float
    """Standard deviation of the residuals, in log loss."""
    mean: float
    """Mean of the term over the runs, which the law already contains."""
    residuals: tuple[tuple[float, float], ...]
    """Pairs, one per run, of the width per layer and of log loss minus the part that the size of
    the run explains."""

    def find_best(self) -> Interval:
        """Find the width per layer with the lowest loss within reach."""
        low, high = (end - self.center_log2 for end in self.reach_log2)
        best_log2 = (
            _find_minima(np.vstack([np.array([self.point]), self.draws]), low, high)
            + self.center_log2
        )
        interval = self._to_interval(best_log2)
        return Interval(
            estimate=2.0**interval.estimate,
            low=2.0**interval.low,
            high=2.0**interval.high,
            level=self.level,
        )

    @property
    def determined(self) -> bool:
        """Whether these runs determine the best width per layer: its interval is narrower than half
        of the range that was tried, in log2.
        """
        best, (low, high) = self.find_best(), self.reach_log2
        return math.log2(best.high / best.low) < (high - low) / 2

    def estimate_shift(self, width_per_layer: float) -> Interval:
        """Estimate the shift of log loss from the law's prediction, within reach only."""
        return self._to_interval(self._evaluate(width_per_layer) - self.mean)

    def estimate_cost(self, width_per_layer: float, best: float) -> Interval:
        """Estimate the log loss at one width per layer minus that at another, the best."""
        return self._to_interval(self._evaluate(width_per_layer) - self._evaluate(best))

    def is_within_reach(self, width_per_layer: float) -> bool:
        """Return whether a width per layer lies within the range that was tried."""
        # 1e-9 allows for rounding
        return self.reach_log2[0] - 1e-9 <= math.log2(width_per_layer) <= self.reach_log2[1] + 1e-9

    def _evaluate(self, width_per_layer: float) -> Floats:
        """Compute the term at the point estimate, then at every draw."""
        x = math.log2(width_per_layer) - self.center_log2
        rows_M2 = np.vstack([np.array([self.point]), self.draws])
        values: Floats = rows_M2[:, 0] * x + rows_M2[:, 1] * x * x
        return values

    def _to_interval(self, values: Floats) -> Interval:
        low, high = np.quantile(values[1:], [(1 - self.level) / 2, (1 + self.level) / 2])
        return Interval(
            estimate=float(values[0]),
            low=min(float(low), float(values[0])),
            high=max(float(high), float(values[0])),
            level=self.level,
        )


def build_shaped_run(
    fit: FittedRuns, *, params: float, tokens: float, width_per_layer: float, loss_nats: float
) -> ShapedRun:
    """Return a run together with the loss that a law predicts for it.

    Raises:
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


def fit_aspect_term(runs: Sequence[ShapedRun], level: float) -> AspectTerm:
    """Fit the effect of the width per layer to the runs of a ladder.

    Raises:
        SpecError: There are too few runs or aspect ratios, or shape and size grow together.
    """
    x = np.log2([run.width_per_layer for run in runs])
    num_aspects = len({round(float(value), 6) for value in x})
    if len(runs) < NUM_TERMS + MIN_SPARE_RUNS or num_aspects < MIN_ASPECTS:
        widths = format_counted(num_aspects, "width")
        counts = f"{format_counted(len(runs), 'run')} of {widths} per layer"
        raise SpecError(
            "aspect ratio",
            [f"{counts}: must be {NUM_TERMS + MIN_SPARE_RUNS} of {MIN_ASPECTS}, at least"],
        )
    residual = np.log([run.loss_nats / run.predicted_nats for run in runs])
    center = float(x.mean())
    design = _build_design(runs, x - center)
    # Least squares, with the covariance of s and q (columns 3 and 4) inflated by the design effect
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
        center_log2=center,
        reach_log2=(float(x.min()), float(x.max())),
        point=(float(coefficients[3]), float(coefficients[4])),
        draws=draws,
        level=level,
        noise=noise,
        mean=float((design[:, 3:] @ coefficients[3:]).mean()),
        residuals=tuple(
            (run.width_per_layer, float(value))
            for run, value in zip(runs, residual - design[:, :3] @ coefficients[:3], strict=True)
        ),
    )


def _build_design(runs: Sequence[ShapedRun], shape: Floats) -> Floats:
    """Build the design matrix [R, 5] of R runs: the columns of a, b, c, s, and q. `shape` is the
    centered log2 width per layer.

    Raises:
        SpecError: The columns depend on each other.
    """
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


def _compute_design_effect(errors: Floats, shapes: Sequence[tuple[float, float]]) -> float:
    """Compute the design effect: the factor by which correlated errors of runs of one shape enlarge
    a variance.
    """
    groups = [
        errors[[shape == group_shape for shape in shapes]] for group_shape in dict.fromkeys(shapes)
    ]
    num_groups, per_shape = len(groups), len(errors) / len(groups)
    if per_shape <= 1 or num_groups < 2:
        return 1.0
    # One-way analysis of variance: mean squares between and within the groups
    between = sum(len(g) * float(g.mean() - errors.mean()) ** 2 for g in groups) / (num_groups - 1)
    within = sum(float(((g - g.mean()) ** 2).sum()) for g in groups) / (len(errors) - num_groups)
    total = between + (per_shape - 1) * within
    # (between - within) / total is the correlation of two runs of one shape
    return max(1.0, 1 + (per_shape - 1) * (between - within) / total) if total > 0 else 1.0


def _find_minima(rows_M2: Floats, low: float, high: float) -> Floats:
    """Find where parabolas through 0, given by rows of (slope, bend), are lowest in [low, high]."""
    slope, bend = rows_M2[:, 0], rows_M2[:, 1]
    # A parabola that bends down is lowest at an end
    ends = np.where(slope * low + bend * low**2 < slope * high + bend * high**2, low, high)
    inside = np.clip(-slope / np.where(bend > 0, 2 * bend, 1.0), low, high)
    minima: Floats = np.where(bend > 0, inside, ends)
    return minima
