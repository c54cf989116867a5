"""The bottom of a curve of log loss from the runs of one group: polynomials near it, many groups of
runs at once.

All groups share one window (which runs are near enough) and one degree. A window is judged by
leaving out one run at a time near the bottom, over all groups; draws mix the windows by pseudo-BMA
weights (Yao et al. 2018, Bayesian Analysis 13:917), so an interval holds what the choice leaves
open. Each group's noise is drawn to the mean over groups: a budget of six sizes hardly knows its
own. Here are the least squares, the noise and the choice; and the curves over log N, a group being
one budget: a quadratic or a cubic through the sizes about the bottom, up to some loss above the
lowest, as data choose. Real curves are lopsided, so the optimum of a quadratic through all sizes
would be biased.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MOST_OUTSIDE = 0.05
"""Share of draws with no bottom inside the values run, above which an optimum is not believed."""
LEAST_SIZES = 5
"""Distinct sizes in a budget: the coefficients of a cubic and one more."""

_PRIOR_FREEDOM = 4.0  # degrees of freedom with which a group's noise is drawn to the mean
_LEAST_SQUARE = 1e-30  # of an error: runs without noise still have a logarithm
_EXCESSES = (math.inf, 0.16, 0.08, 0.04, 0.02, 0.01)  # in log loss above the lowest size
_NUM_JUDGES = 4  # sizes per budget, the lowest: their runs judge a choice


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalFit:
    """One group of runs under one window."""

    theta: Floats
    """Coefficients (P,)."""
    root: Floats
    """(P, P), of the inverse normal matrix: theta + sd * root @ normal is a draw."""
    squares: float
    """Weighted residual sum of squares."""
    freedom: int
    """Runs beyond the number of coefficients."""
    left_out: Floats
    """Errors of the runs that judge, each predicted without itself."""


def fit_local(design: Floats, y: Floats, weight: Floats, judges: NDArray[np.bool_]) -> LocalFit:
    """Weighted least squares of `y` (R,) on `design` (R, P); `judges` (R,) are the runs near the
    bottom.
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


def chosen(
    fits: Sequence[Sequence[LocalFit]],
    bottom: Callable[[int, Floats], Floats],
    *,
    num_draws: int,
    rng: np.random.Generator,
) -> tuple[Sequence[LocalFit], list[Floats]]:
    """The fits of the window that predicts best, and draws of each group's bottom, windows mixed by
    weight.

    Args:
        fits: of every window, those of all groups.
        bottom: rows (place, log loss) of the bottoms of a group, by its number, for rows of
            coefficients.
        num_draws: in all, for each group.
        rng: behind the draws.
    """
    if not fits[0]:
        return [], []
    scores = np.array([_score(each) for each in fits])
    counts = _draws_per_window(scores, sum(len(fit.left_out) for fit in fits[0]), num_draws)
    drawn: list[list[Floats]] = [[] for _ in fits[0]]
    for each, count in zip(fits, counts, strict=True):
        for group, theta in enumerate(_theta_draws(each, count, rng)):
            drawn[group].append(bottom(group, theta))
    return fits[int(scores.argmin())], [np.concatenate(held) for held in drawn]


def _score(fits: Sequence[LocalFit]) -> float:
    """Geometric mean over groups of the mean square error of runs left out: no group's scale rules
    the others.
    """
    return math.exp(
        float(
            np.mean([math.log(max(float((fit.left_out**2).mean()), _LEAST_SQUARE)) for fit in fits])
        )
    )


def _draws_per_window(scores: Floats, num_judges: int, num_draws: int) -> list[int]:
    """Draws per window by pseudo-BMA weight, adding up to `num_draws`."""
    logs = -0.5 * num_judges * np.log(np.maximum(scores, _LEAST_SQUARE))
    weights = np.exp(logs - logs.max())
    edges = np.round(np.cumsum(weights) / weights.sum() * num_draws).astype(int)
    counts: list[int] = np.diff(edges, prepend=0).tolist()
    return counts


def _noise_sds(fits: Sequence[LocalFit]) -> list[float]:
    """Sd of a run in each group, drawn to the mean over groups."""
    pooled = sum(fit.squares for fit in fits) / sum(fit.freedom for fit in fits)
    return [
        math.sqrt((fit.squares + _PRIOR_FREEDOM * pooled) / (fit.freedom + _PRIOR_FREEDOM))
        for fit in fits
    ]


def _theta_draws(fits: Sequence[LocalFit], count: int, rng: np.random.Generator) -> list[Floats]:
    """Draws (count, P) of each group's coefficients, of a noise that is itself drawn: so quantiles
    are Student's.
    """
    total = sum(fit.freedom for fit in fits)
    drawn = []
    for fit, sd in zip(fits, _noise_sds(fits), strict=True):
        freedom = fit.freedom + min(_PRIOR_FREEDOM, total - fit.freedom)
        sds = sd * np.sqrt(freedom / rng.chisquare(freedom, size=(count, 1)))
        drawn.append(fit.theta + sds * (rng.standard_normal((count, len(fit.theta))) @ fit.root.T))
    return drawn


def spread_of(logs_MA: Floats, level: float) -> tuple[Floats, Floats]:
    """Ends (A, 2) of central intervals and sds (A,) of quantities by draws of their logs, one
    column each.
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
    """Share of each run (R,), of mean 1."""

    @property
    def sizes(self) -> Floats:
        """Distinct log N, ascending."""
        return np.unique(self.x)

    @property
    def size_means(self) -> Floats:
        """Mean log loss of each size."""
        return np.array(
            [np.average(self.y[self.x == x], weights=self.weight[self.x == x]) for x in self.sizes]
        )

    @property
    def pilot(self) -> float:
        """A first guess of the bottom, for polynomials to run in log N about it: the lowest
        size.
        """
        return float(self.sizes[self.size_means.argmin()])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CurveMinimum:
    """Where the curve of one budget is lowest, and draws of it."""

    log_params: float
    """NaN where the polynomial has no minimum."""
    log_loss: float
    draws: Floats
    """(draws, 2) of both, NaN where a draw has no minimum."""


def bottoms(budgets: Sequence[BudgetRuns], *, num_draws: int, seed: int) -> list[CurveMinimum]:
    """The bottom of each budget's curve; every budget must hold at least `LEAST_SIZES` sizes."""
    windows = [(excess, degree) for excess in _EXCESSES for degree in (2, 3)]
    pilots = [runs.pilot for runs in budgets]
    fits = [
        [_fit(runs, pilot, *window) for runs, pilot in zip(budgets, pilots, strict=True)]
        for window in windows
    ]
    best, drawn = chosen(
        fits,
        lambda group, theta: _minimum(pilots[group], theta),
        num_draws=num_draws,
        rng=np.random.default_rng([seed, 0]),
    )
    found = []
    for pilot, fit, draws in zip(pilots, best, drawn, strict=True):
        log_params, log_loss = _minimum(pilot, fit.theta[None, :])[0].tolist()
        found.append(CurveMinimum(log_params=log_params, log_loss=log_loss, draws=draws))
    return found


def _fit(runs: BudgetRuns, pilot: float, window: float, degree: int) -> LocalFit:
    """A polynomial through the sizes up to `window` log loss above the lowest, one more at least
    than its numbers.
    """
    excess = _excess(runs)
    inside = excess <= max(window, _nth_size(runs, excess, degree + 2))
    design = np.vander(runs.x[inside] - pilot, degree + 1, increasing=True)
    judges = excess[inside] <= _nth_size(runs, excess, _NUM_JUDGES)
    return fit_local(design, runs.y[inside], runs.weight[inside], judges)


def _excess(runs: BudgetRuns) -> Floats:
    """Log loss of each run's size above the lowest size's, rising outwards (R,): windows are
    without holes.
    """
    means = runs.size_means
    low = int(means.argmin())
    left = np.maximum.accumulate(means[: low + 1][::-1])[::-1]
    rising = np.concatenate([left, np.maximum.accumulate(means[low:])[1:]]) - means[low]
    return np.asarray(rising[np.searchsorted(runs.sizes, runs.x)])


def _nth_size(runs: BudgetRuns, excess: Floats, num_sizes: int) -> float:
    """The excess that holds the `num_sizes` lowest sizes."""
    by_size = np.array([excess[runs.x == x][0] for x in runs.sizes])
    return float(np.sort(by_size)[num_sizes - 1])


def _minimum(pilot: float, theta_MP: Floats) -> Floats:
    """Log N and log loss (M, 2) of the local minimum of each row's polynomial; NaN where there is
    none.
    """
    first, second = theta_MP[:, 1], theta_MP[:, 2]
    third = theta_MP[:, 3] if theta_MP.shape[1] > 3 else np.zeros_like(first)
    inside = second**2 - 3 * first * third
    root = np.sqrt(np.maximum(inside, 0.0))
    # half the curvature there is `root`, so this root of the slope is the minimum
    below = second + root
    exists = (inside > 0) & (below > 0)
    z = np.where(exists, -first / np.where(exists, below, 1.0), np.nan)
    loss = theta_MP[:, 0] + first * z + second * z**2 + third * z**3
    return np.stack([pilot + z, loss], axis=1)
