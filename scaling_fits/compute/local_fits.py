"""Polynomials fitted near a bottom, many groups of runs at once: least squares, noise, and the choice of a window.

A window is judged by leaving out one run at a time near the bottom, over all groups; draws mix the windows by
pseudo-BMA weights (Yao et al. 2018, Bayesian Analysis 13:917), so an interval holds what the choice leaves open. Each
group's noise is drawn to the mean over groups: a budget of six sizes hardly knows its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_PRIOR_FREEDOM = 4.0  # degrees of freedom with which a group's noise is drawn to the mean
_LEAST_SQUARE = 1e-30  # of an error: runs without noise still have a logarithm


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
    """Weighted least squares of `y` (R,) on `design` (R, P); `judges` (R,) are the runs near the bottom."""
    theta, root = least_squares(design, y, weight)
    residuals = y - design @ theta
    leverage = weight * ((design @ root) ** 2).sum(axis=1)
    return LocalFit(
        theta=theta,
        root=root,
        squares=float((weight * residuals**2).sum()),
        freedom=len(y) - len(theta),
        left_out=residuals[judges] / np.maximum(1 - leverage[judges], 1e-9),
    )


def least_squares(design: Floats, y: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Coefficients (P,), and a root (P, P) of the inverse normal matrix."""
    root = np.sqrt(weight)
    q, r = np.linalg.qr(design * root[:, None])
    inverse = np.asarray(np.linalg.inv(r), dtype=np.float64)
    return inverse @ (q.T @ (y * root)), inverse


def score(fits: Sequence[LocalFit]) -> float:
    """Geometric mean over groups of the mean square error of runs left out: no group's scale rules the others."""
    return math.exp(float(np.mean([math.log(max(float((fit.left_out**2).mean()), _LEAST_SQUARE)) for fit in fits])))


def draws_per_window(scores: Floats, num_judges: int, num_draws: int) -> list[int]:
    """Draws per window by pseudo-BMA weight, adding up to `num_draws`."""
    logs = -0.5 * num_judges * np.log(np.maximum(scores, _LEAST_SQUARE))
    weights = np.exp(logs - logs.max())
    edges = np.round(np.cumsum(weights) / weights.sum() * num_draws).astype(int)
    counts: list[int] = np.diff(edges, prepend=0).tolist()
    return counts


def noise_sds(fits: Sequence[LocalFit]) -> list[float]:
    """Sd of a run in each group, drawn to the mean over groups."""
    pooled = sum(fit.squares for fit in fits) / sum(fit.freedom for fit in fits)
    return [math.sqrt((fit.squares + _PRIOR_FREEDOM * pooled) / (fit.freedom + _PRIOR_FREEDOM)) for fit in fits]


def theta_draws(fits: Sequence[LocalFit], count: int, rng: np.random.Generator) -> list[Floats]:
    """Draws (count, P) of each group's coefficients, of a noise that is itself drawn: so quantiles are Student's."""
    total = sum(fit.freedom for fit in fits)
    drawn = []
    for fit, sd in zip(fits, noise_sds(fits), strict=True):
        freedom = fit.freedom + min(_PRIOR_FREEDOM, total - fit.freedom)
        sds = sd * np.sqrt(freedom / rng.chisquare(freedom, size=(count, 1)))
        drawn.append(fit.theta + sds * (rng.standard_normal((count, len(fit.theta))) @ fit.root.T))
    return drawn
