"""The minima of curves of log loss, one for each group of runs, by local polynomials.

A group is fitted within a window: only its runs that are near enough to the minimum count. Each
window is tried for all groups at once, and polynomials of different degrees count as different
windows. The score of a window is the error of leave-one-out predictions of the runs near the
minimum, over all groups. Draws mix the windows by pseudo-BMA weights (Yao et al. 2018, Bayesian
Analysis 13:917), so intervals include the uncertainty of the choice of a window. Each group's noise
is shrunk toward the mean over groups, since a budget of six sizes hardly determines its noise.

Shape suffixes: R runs, P coefficients, M rows (draws), A axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from forerun._scaling_fits.laws.solver import Bools, Floats

MAX_OUTSIDE_SHARE = 0.05
"""Share of draws without a minimum inside the values run, above which an optimum is not used."""
_PRIOR_FREEDOM = 4.0  # Degrees of freedom with which a group's noise is shrunk toward the mean
_MIN_SQUARE = 1e-30  # Smallest squared error, so that runs without noise have a logarithm


class LocalFit(NamedTuple):
    """The fit of one group of runs in one window."""

    theta: Floats
    """Coefficients (P,)."""
    root: Floats
    """Root of the inverse normal matrix (P, P): theta + sd * root @ normal is a draw."""
    squares: float
    """Weighted residual sum of squares."""
    freedom: int
    """Number of runs beyond the number of coefficients."""
    left_out: Floats
    """Leave-one-out errors of the runs near the minimum."""


def fit_local(design: Floats, y: Floats, weight: Floats, is_scored: Bools) -> LocalFit:
    """Fit `y` (R,) to `design` (R, P) by weighted least squares. `is_scored` (R,) marks the runs
    near the minimum, whose leave-one-out errors score the window.
    """
    scale = np.sqrt(weight)
    q, r = np.linalg.qr(design * scale[:, None])
    root = np.asarray(np.linalg.inv(r), dtype=np.float64)
    theta = root @ (q.T @ (y * scale))
    residuals = y - design @ theta
    leverage = weight * ((design @ root) ** 2).sum(axis=1)
    return LocalFit(
        theta=theta,
        root=root,
        squares=float((weight * residuals**2).sum()),
        freedom=len(y) - len(theta),
        left_out=residuals[is_scored] / np.maximum(1 - leverage[is_scored], 1e-9),
    )


def find_minima(
    fits: Sequence[Sequence[LocalFit]],
    find_minimum: Callable[[int, Floats], Floats],
    *,
    num_draws: int,
    rng: np.random.Generator,
) -> list[tuple[Floats, Floats]]:
    """Find the minimum of each group in the window that predicts best, and draws of it that mix the
    windows by weight.

    Args:
        fits: Fits of all groups, for every window.
        find_minimum: Function of a group's number and rows of coefficients that returns rows (place
            on each axis, log loss) of the minima; NaN where there is none.
        num_draws: Number of draws for each group.
        rng: Random generator of the draws.
    """
    if not fits[0]:
        return []
    scores = np.array([_compute_score(window) for window in fits])
    counts = _count_draws_per_window(scores, sum(len(fit.left_out) for fit in fits[0]), num_draws)
    draws_by_window = [
        _draw_theta(window, count, rng) for window, count in zip(fits, counts, strict=True)
    ]
    best_fits = fits[int(scores.argmin())]
    return [
        (
            find_minimum(group, fit.theta[None, :])[0],
            np.concatenate([find_minimum(group, draws[group]) for draws in draws_by_window]),
        )
        for group, fit in enumerate(best_fits)
    ]


def _compute_score(fits: Sequence[LocalFit]) -> float:
    """Compute the geometric mean over groups of the mean squared leave-one-out error, so that no
    group's scale dominates.
    """
    return math.exp(
        float(
            np.mean([math.log(max(float((fit.left_out**2).mean()), _MIN_SQUARE)) for fit in fits])
        )
    )


def _count_draws_per_window(scores: Floats, num_scored: int, num_draws: int) -> list[int]:
    """Return the number of draws per window by pseudo-BMA weight; they add up to `num_draws`."""
    logs = -0.5 * num_scored * np.log(np.maximum(scores, _MIN_SQUARE))
    weights = np.exp(logs - logs.max())
    edges = np.round(np.cumsum(weights) / weights.sum() * num_draws).astype(int)
    counts: list[int] = np.diff(edges, prepend=0).tolist()
    return counts


def _estimate_noise_sds(fits: Sequence[LocalFit]) -> list[float]:
    """Estimate the standard deviation of a run in each group, shrunk toward the mean over
    groups.
    """
    pooled = sum(fit.squares for fit in fits) / sum(fit.freedom for fit in fits)
    return [
        math.sqrt((fit.squares + _PRIOR_FREEDOM * pooled) / (fit.freedom + _PRIOR_FREEDOM))
        for fit in fits
    ]


def _draw_theta(fits: Sequence[LocalFit], count: int, rng: np.random.Generator) -> list[Floats]:
    """Draw (count, P) coefficients of each group with a noise that is itself drawn, so that
    quantiles are those of Student's t distribution.
    """
    total = sum(fit.freedom for fit in fits)
    drawn = []
    for fit, sd in zip(fits, _estimate_noise_sds(fits), strict=True):
        freedom = fit.freedom + min(_PRIOR_FREEDOM, total - fit.freedom)
        sds = sd * np.sqrt(freedom / rng.chisquare(freedom, size=(count, 1)))
        drawn.append(fit.theta + sds * (rng.standard_normal((count, len(fit.theta))) @ fit.root.T))
    return drawn


def compute_spread(logs_MA: Floats, level: float) -> tuple[Floats, Floats]:
    """Compute the ends (A, 2) of central intervals and the standard deviations (A,) of quantities
    from draws of their logs, one column each.
    """
    tail = (1 - level) / 2
    ends = np.quantile(logs_MA, [tail, 1 - tail], axis=0).T
    # Half the distance of the quantiles that lie one standard deviation from a normal mean
    return ends, np.diff(np.quantile(logs_MA, [0.1587, 0.8413], axis=0), axis=0)[0] / 2
