"""The loss at the target as a function of a hyperparameter that may have no optimum among the
values tried.

Let x be the octaves above the transferred value, and u the doublings of size above the largest size
that was run. Then

    loss = a[size, seed] + (b + b' u) x + (k + k' u) g(x) + d(x)
    g(x) = (exp(s x) - 1 - s x) / s**2

is linear for a given s, and k may have either sign. d(x) is the deviation from such a curve, for
example at a kink. d is the same at all sizes and free at every value tried, with a variance that
the runs determine.

Letters in shapes: n runs, K values tried, S shapes s, M models (each combination of s and of the
variance of d).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun._transfer.basin.noise import MIN_NOISE_NATS
from forerun._transfer.basin.shapes import Floats, Ints
from forerun._transfer.regret.extrapolation import (
    CURVATURE_TREND_SD,
    SCATTER_OCTAVES,
    WALK_OCTAVES,
    draw_walk_end,
)

SHAPES = np.linspace(-2.85, 2.85, 20)
"""Grid of s times the largest |x|. Either side may be the steep one. 0 is left out, because g is
0 / 0 there."""
MIN_BEND_NATS = 1e-3
"""Smallest k in the prior of its trend, nats per octave squared, so that a flat basin can become
slightly curved."""
NUM_SMOOTH = 4
"""Number of coefficients of the smooth curve. They come first, in the order b, b', k, k'; the
deviations d at the values tried follow."""
RIDGE = 1e-12
"""Value added to the diagonal of information matrices, to keep them invertible."""
D_VARIANCES = np.array([1e-3, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1e3, 1e4])
"""Grid of the variance of d, in multiples of the noise variance."""
STEADY_SHARE = 0.5
"""Share of the draws in which trends with size continue unchanged beyond the runs. In the other
draws the trends weaken with each doubling."""


class CurveRuns(NamedTuple):
    """Runs about a transferred value, as columns of the same length n."""

    x: Floats
    """Octaves above the transferred value."""
    u: Floats
    """Doublings of size above the largest size; never positive."""
    loss_nats: Floats
    group: Ints
    """Index of each combination of size and seed, 0 ... G-1, which has its own intercept."""

    @property
    def num_free(self) -> int:
        """Degrees of freedom of the noise: the number of runs minus that of the intercepts, minus 3
        for b, b', and k. Parameters with a prior take no degree of freedom.
        """
        return len(self.x) - int(self.group.max()) - 1 - 3

    @property
    def shapes(self) -> Floats:
        """Grid of s, per octave."""
        return SHAPES / np.abs(self.x).max()

    def subtract_group_means(self, values: Floats) -> Floats:
        """Subtract the mean of each run's group, along the last axis."""
        member = (
            np.equal.outer(np.arange(int(self.group.max()) + 1), self.group)
            / np.bincount(self.group)[:, None]
        )
        return values - (values @ member.T)[..., self.group]


class LossAtTarget(NamedTuple):
    """The loss at the target. Row 0 of an array is the estimate, and every other row is a draw of
    the posterior.
    """

    slope: Floats
    """(rows,) slope at the transferred value, nats per octave."""
    bend: Floats
    """(rows,) k, nats per octave squared."""
    s: Floats
    """(rows,) s, per octave."""
    knots: Floats
    """(K,) values tried, octaves above the transferred one."""
    off: Floats
    """(rows, K) d at each of the knots, interpolated linearly between them."""

    def compute_loss(self, x: float) -> Floats:
        """Compute the loss `x` octaves above the transferred value, minus the loss at that value,
        in nats: one entry per row.
        """
        off = (
            self.off
            @ (_interpolate_weights(self.knots, [x]) - _interpolate_weights(self.knots, [0.0]))[0]
        )
        return self.slope * x + self.bend * _compute_g(self.s, x) + off


def _compute_g(s: Floats, x: Floats | float) -> Floats:
    """Compute g(x)."""
    return (np.expm1(s * x) - s * x) / s**2


def _interpolate_weights(knots: Floats, x: Floats | list[float]) -> Floats:
    """Compute the weights of the knots in linear interpolation: (len(x), K)."""
    return np.stack([np.interp(x, knots, unit) for unit in np.eye(len(knots))], axis=-1)


class _Fits(NamedTuple):
    """Least-squares fits for every s and every variance of d on their grids: M models."""

    coefficients: Floats
    """(M, NUM_SMOOTH + K) estimates of b, b', k, k', and d."""
    covariance: Floats
    """(M, NUM_SMOOTH + K, NUM_SMOOTH + K) covariance of the coefficients for unit noise."""
    variance: Floats
    """(M,) noise variance of one run."""
    weight: Floats
    """(M,) posterior probability of each model."""


def _fit_models(runs: CurveRuns, knots: Floats) -> _Fits:
    """Fit every model to the runs. The models are ordered by s, then by the variance of d."""
    y = runs.subtract_group_means(runs.loss_nats)
    columns = _build_columns(runs, knots)
    num = NUM_SMOOTH + len(knots)
    # Information matrix with the priors on k' and on d, whose precision is relative to the noise
    d_precision = 1 / np.tile(D_VARIANCES, len(SHAPES))  # (M,)
    information = np.swapaxes(columns, 1, 2) @ columns + RIDGE * np.eye(num)
    smooth, d_indices = slice(NUM_SMOOTH), range(NUM_SMOOTH, num)
    information[:, 3, 3] += _compute_trend_precision(columns[:, :, smooth], y, runs)  # k'
    log_det_without_d = np.linalg.slogdet(information[:, smooth, smooth])[1]
    information[:, d_indices, d_indices] += d_precision[:, None]
    covariance = np.linalg.inv(information)
    products = np.swapaxes(columns, 1, 2) @ y
    # Posterior mean of the coefficients
    coefficients = (covariance @ products[..., None])[..., 0]
    # Noise: the residual variance, or that of the mean residual of each value if it is larger
    squares = y @ y - (products * coefficients).sum(axis=1)
    d_covariance = covariance[:, NUM_SMOOTH:, NUM_SMOOTH:]
    d_degrees = len(knots) - d_precision * np.trace(d_covariance, axis1=1, axis2=2)
    shared_variance = _compute_shared_variance(
        y - (columns @ coefficients[..., None])[..., 0], runs, d_degrees
    )
    variance = np.maximum(np.maximum(squares / runs.num_free, shared_variance), MIN_NOISE_NATS**2)
    # Log evidence of each model
    log_weight = -0.5 * (
        runs.num_free * np.log(variance) + np.linalg.slogdet(information)[1] - log_det_without_d
    )
    log_weight += 0.5 * len(knots) * np.log(d_precision)
    weight = np.exp(log_weight - log_weight.max())
    return _Fits(
        coefficients=coefficients,
        covariance=np.asarray(covariance, np.float64),
        variance=variance,
        weight=weight / weight.sum(),
    )


def _compute_shared_variance(residual: Floats, runs: CurveRuns, d_degrees: Floats) -> Floats:
    """Compute the mean square (M,) of the residuals that all seeds of a value share, where d takes
    `d_degrees` degrees of freedom.

    This mean square exceeds the residual variance if the shape changes with size in ways that the
    model does not allow. More seeds do not average out such a misfit.
    """
    _, cell = np.unique(np.stack([runs.u, runs.x]), axis=1, return_inverse=True)
    counts = np.bincount(cell.reshape(-1))
    by_cell = residual @ np.equal.outer(cell.reshape(-1), np.arange(len(counts)))
    num_free = len(counts) - len(np.unique(runs.u)) - 3 - d_degrees
    return (by_cell**2 / counts).sum(axis=1) / np.maximum(num_free, 1.0)


def draw_loss_at_target(
    runs: CurveRuns, doublings: float, draws: int, rng: np.random.Generator
) -> LossAtTarget:
    """Draw the loss curve at the target from the posterior, extended to a number of doublings
    beyond the largest size.
    """
    knots = np.unique(runs.x)
    fits = _fit_models(runs, knots)
    # Draw a model by its evidence; row 0 takes the most probable one
    model = np.concatenate(
        [[fits.weight.argmax()], rng.choice(len(fits.weight), size=draws, p=fits.weight)]
    )
    # Draw noise variance and coefficients; row 0 keeps the estimate
    sd = np.sqrt(
        fits.variance[model] * runs.num_free / rng.chisquare(runs.num_free, size=draws + 1)
    )
    normal = rng.standard_normal((draws + 1, NUM_SMOOTH + len(knots))) * sd[:, None]
    normal[0] = 0.0
    rows = (
        fits.coefficients[model]
        + (np.linalg.cholesky(fits.covariance)[model] @ normal[..., None])[..., 0]
    )
    slope, bend = _extend_to_target(rows[:, :NUM_SMOOTH], runs, doublings, rng)
    return LossAtTarget(
        slope=slope,
        bend=bend,
        s=runs.shapes[model // len(D_VARIANCES)],  # models are ordered by s first
        knots=knots,
        off=rows[:, NUM_SMOOTH:],
    )


def _build_columns(runs: CurveRuns, knots: Floats) -> Floats:
    """Build the columns (M, n, NUM_SMOOTH + K) of b, b', k, k', and every d, minus the mean of each
    group.
    """
    bent = _compute_g(runs.shapes[:, None], runs.x)  # (S, n)
    straight = np.broadcast_to(runs.x, bent.shape)
    off = np.broadcast_to(_interpolate_weights(knots, runs.x).T[:, None], (len(knots), *bent.shape))
    columns = runs.subtract_group_means(
        np.concatenate([np.stack([straight, runs.u * straight, bent, runs.u * bent]), off])
    )
    return np.repeat(np.moveaxis(columns, 0, -1), len(D_VARIANCES), axis=0)


def _compute_trend_precision(columns: Floats, y: Floats, runs: CurveRuns) -> Floats:
    """Compute the precision of the prior on k', in units of the noise, from the k of a fit without
    trends.
    """
    columns_without_trend = columns[:, :, [0, 2]]
    information = np.swapaxes(columns_without_trend, 1, 2) @ columns_without_trend + RIDGE * np.eye(
        2
    )
    coefficients = np.linalg.solve(
        information, (np.swapaxes(columns_without_trend, 1, 2) @ y)[..., None]
    )
    variance = ((y - (columns_without_trend @ coefficients)[..., 0]) ** 2).sum(axis=1) / (
        runs.num_free + 1
    )
    trend_sd = CURVATURE_TREND_SD * np.maximum(np.abs(coefficients[:, 1, 0]), MIN_BEND_NATS)
    return np.maximum(variance, MIN_NOISE_NATS**2) / trend_sd**2


def _extend_to_target(
    rows: Floats, runs: CurveRuns, doublings: float, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Extend slope and bend (rows of b, b', k, k') from the largest size to a number of doublings
    beyond it.

    A trend with size may continue, or weaken with each doubling, and an effect that weakens must
    not be extrapolated to its opposite. In a share of the draws, a trend is therefore multiplied,
    at each doubling, by a factor drawn uniformly between 0 and 1.
    """
    # Effective number of doublings of a trend; if it weakens, the integral of factor^u over u
    factor = np.minimum(rng.uniform(size=len(rows)) / (1 - STEADY_SHARE), 1.0)
    factor[0] = 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        faded = np.expm1(doublings * np.log(factor)) / np.log(factor)
    reach = (
        np.where(factor < 1, faded, doublings) if doublings > 0 else np.full(len(rows), doublings)
    )
    # The curvature may fall to 0 but not change its sign
    middle = rows[:, 2] + rows[:, 3] * runs.u.mean()
    bend = rows[:, 2] + rows[:, 3] * reach
    bend = np.where(bend * middle > 0, bend, 0.0)
    # The target's basin deviates from the line like any size's, and beyond the runs the line itself
    # follows a random walk
    scatter = rng.standard_normal(len(rows)) * SCATTER_OCTAVES
    scatter[0] = 0.0
    jitter = (scatter + draw_walk_end(len(rows), doublings, WALK_OCTAVES, rng)) * np.abs(bend)
    return rows[:, 0] + rows[:, 1] * reach + jitter, bend
