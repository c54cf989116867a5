"""The minimum of a curve of log loss from the runs of one group, by local polynomials, for many
groups at once.

All groups share one window (the runs that are near enough) and one degree. A window is scored by
leaving out one run at a time near the minimum, over all groups. Draws mix the windows by pseudo-BMA
weights (Yao et al. 2018, Bayesian Analysis 13:917), so intervals include the uncertainty of this
choice. Each group's noise is shrunk toward the mean over groups, since a budget of six sizes hardly
determines its own. This module holds the least squares, the noise, and the choice, and the curves
over log N, where a group is one budget: a quadratic or a cubic through the sizes near the minimum,
up to an excess loss that the data choose. Real curves are asymmetric, so the optimum of a quadratic
through all sizes would be biased.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MAX_OUTSIDE_SHARE = 0.05
"""Share of draws without a minimum inside the values run, above which an optimum is not used."""
MIN_SIZES = 5
"""Minimum number of distinct sizes in a budget: the coefficients of a cubic and one more."""

_PRIOR_FREEDOM = 4.0  # Degrees of freedom with which a group's noise is shrunk toward the mean
_MIN_SQUARE = 1e-30  # Smallest squared error, so that runs without noise have a logarithm
_EXCESSES = (math.inf, 0.16, 0.08, 0.04, 0.02, 0.01)  # Windows in log loss above the lowest size
_NUM_JUDGES = 4  # Number of lowest sizes per budget whose runs score a window


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalFit:
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
    """Leave-one-out errors of the runs that score the window."""


def fit_local(design: Floats, y: Floats, weight: Floats, judges: NDArray[np.bool_]) -> LocalFit:
    """Fit `y` (R,) to `design` (R, P) by weighted least squares. `judges` (R,) marks the runs near
    the minimum.
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
        left_out=residuals[judges] / np.maximum(1 - leverage[judges], 1e-9),
    )


def choose_window(
    fits: Sequence[Sequence[LocalFit]],
    bottom: Callable[[int, Floats], Floats],
    *,
    num_draws: int,
    rng: np.random.Generator,
) -> tuple[Sequence[LocalFit], list[Floats]]:
    """Choose the window that predicts best. Return its fits, and draws of each group's minimum that
    mix the windows by weight.

    Args:
        fits: Fits of all groups, for every window.
        bottom: Function of a group's number and rows of coefficients that returns rows (place, log
            loss) of the minima.
        num_draws: Total number of draws for each group.
        rng: Random generator of the draws.
    """
    if not fits[0]:
        return [], []
    scores = np.array([_compute_score(each) for each in fits])
    counts = _count_draws_per_window(scores, sum(len(fit.left_out) for fit in fits[0]), num_draws)
    drawn: list[list[Floats]] = [[] for _ in fits[0]]
    for each, count in zip(fits, counts, strict=True):
        for group, theta in enumerate(_draw_theta(each, count, rng)):
            drawn[group].append(bottom(group, theta))
    return fits[int(scores.argmin())], [np.concatenate(held) for held in drawn]


def _compute_score(fits: Sequence[LocalFit]) -> float:
    """Compute the geometric mean over groups of the mean squared leave-one-out error, so that no
    group's scale dominates.
    """
    return math.exp(
        float(
            np.mean([math.log(max(float((fit.left_out**2).mean()), _MIN_SQUARE)) for fit in fits])
        )
    )


def _count_draws_per_window(scores: Floats, num_judges: int, num_draws: int) -> list[int]:
    """Return the number of draws per window by pseudo-BMA weight; they add up to `num_draws`."""
    logs = -0.5 * num_judges * np.log(np.maximum(scores, _MIN_SQUARE))
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


def spread_of(logs_MA: Floats, level: float) -> tuple[Floats, Floats]:
    """Compute the ends (A, 2) of central intervals and the standard deviations (A,) of quantities
    from draws of their logs, one column each.
    """
    tail = (1 - level) / 2
    ends = np.quantile(logs_MA, [tail, 1 - tail], axis=0).T
    return ends, np.diff(np.quantile(logs_MA, [0.1587, 0.8413], axis=0), axis=0)[0] / 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BudgetRuns:
    """The runs of one budget."""

    x: Floats
    """Log N (R,)."""
    y: Floats
    """Log loss in nats (R,)."""
    weight: Floats
    """Weight of each run (R,), with mean 1."""

    @property
    def sizes(self) -> Floats:
        """Distinct log N in ascending order."""
        return np.unique(self.x)

    @property
    def size_means(self) -> Floats:
        """Mean log loss of each size."""
        return np.array(
            [np.average(self.y[self.x == x], weights=self.weight[self.x == x]) for x in self.sizes]
        )

    @property
    def pilot(self) -> float:
        """First guess of the minimum, about which polynomials are expanded: the lowest size."""
        return float(self.sizes[self.size_means.argmin()])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CurveMinimum:
    """The minimum of the curve of one budget, with draws."""

    log_params: float
    """Log N of the minimum; NaN if the polynomial has none."""
    log_loss: float
    draws: Floats
    """Draws (draws, 2) of log N and log loss; NaN where a draw has no minimum."""


def bottoms(budgets: Sequence[BudgetRuns], *, num_draws: int, seed: int) -> list[CurveMinimum]:
    """Find the minimum of each budget's curve. Every budget must have at least `MIN_SIZES`
    sizes.
    """
    windows = [(excess, degree) for excess in _EXCESSES for degree in (2, 3)]
    pilots = [runs.pilot for runs in budgets]
    fits = [
        [_fit_window(runs, pilot, *window) for runs, pilot in zip(budgets, pilots, strict=True)]
        for window in windows
    ]
    best, drawn = choose_window(
        fits,
        lambda group, theta: _find_minimum(pilots[group], theta),
        num_draws=num_draws,
        rng=np.random.default_rng([seed, 0]),
    )
    minima = []
    for pilot, fit, draws in zip(pilots, best, drawn, strict=True):
        log_params, log_loss = _find_minimum(pilot, fit.theta[None, :])[0].tolist()
        minima.append(CurveMinimum(log_params=log_params, log_loss=log_loss, draws=draws))
    return minima


def _fit_window(runs: BudgetRuns, pilot: float, window: float, degree: int) -> LocalFit:
    """Fit a polynomial through the sizes up to `window` log loss above the lowest, and through at
    least one size more than it has coefficients.
    """
    excess = _compute_excess(runs)
    inside = excess <= max(window, _compute_nth_excess(runs, excess, degree + 2))
    design = np.vander(runs.x[inside] - pilot, degree + 1, increasing=True)
    judges = excess[inside] <= _compute_nth_excess(runs, excess, _NUM_JUDGES)
    return fit_local(design, runs.y[inside], runs.weight[inside], judges)


def _compute_excess(runs: BudgetRuns) -> Floats:
    """Compute the log loss of each run's size above the lowest size's, made monotonic outward (R,),
    so that windows have no gaps.
    """
    means = runs.size_means
    low = int(means.argmin())
    left = np.maximum.accumulate(means[: low + 1][::-1])[::-1]
    rising = np.concatenate([left, np.maximum.accumulate(means[low:])[1:]]) - means[low]
    return np.asarray(rising[np.searchsorted(runs.sizes, runs.x)])


def _compute_nth_excess(runs: BudgetRuns, excess: Floats, num_sizes: int) -> float:
    """Return the excess that includes the `num_sizes` lowest sizes."""
    by_size = np.array([excess[runs.x == x][0] for x in runs.sizes])
    return float(np.sort(by_size)[num_sizes - 1])


def _find_minimum(pilot: float, theta_MP: Floats) -> Floats:
    """Compute log N and log loss (M, 2) of the local minimum of each row's polynomial; NaN if there
    is none.
    """
    first, second = theta_MP[:, 1], theta_MP[:, 2]
    third = theta_MP[:, 3] if theta_MP.shape[1] > 3 else np.zeros_like(first)
    inside = second**2 - 3 * first * third
    root = np.sqrt(np.maximum(inside, 0.0))
    # The root of the slope where half the curvature is `root` is the minimum
    below = second + root
    exists = (inside > 0) & (below > 0)
    z = np.where(exists, -first / np.where(exists, below, 1.0), np.nan)
    loss = theta_MP[:, 0] + first * z + second * z**2 + third * z**3
    return np.stack([pilot + z, loss], axis=1)
