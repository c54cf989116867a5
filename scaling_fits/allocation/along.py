"""The pooled log loss along a budget: where it is least, how it curves there, and how far it stays near the least."""

from __future__ import annotations

import math

import numpy as np

from scaling_fits.allocation.spending import Spending, log_best_params
from scaling_fits.forecast.uncertainty import FittedRuns, expected_log_loss
from scaling_fits.laws.law import exp_finite

_CURVATURE_STEP = 0.7  # in log N
_LEAST_STEP = 1e-2
_LEAST_CURVATURE = 1e-3  # a valley flatter than this chooses nothing
_BEYOND = 1.5  # log N searched beyond the members' own optima where the pool has a term of its own
_REACH = 20.0  # log N searched on each side of the best


def tokens_at(spending: Spending, log_params: float) -> float:
    """D that the budget leaves at this size."""
    return exp_finite(float(spending.log_tokens(np.array([log_params]))[0]))


def pooled_along(fitted: FittedRuns, spending: Spending, log_params: float) -> float:
    """Pooled log loss of the run of this size that the budget pays for."""
    n, d = spending.counted(np.array([log_params]))
    return float(expected_log_loss(fitted, np.exp(n), np.exp(d))[0])


def best_log_params(fitted: FittedRuns, spending: Spending) -> float:
    """Log N*: the one law's, else the minimum of the pooled log loss between the members' own optima."""
    used = [fit for fit, weight in zip(fitted.members, fitted.size_weights, strict=True) if weight > 0]
    optima = log_best_params(np.stack([fit.theta for fit in used]), spending)
    low, high = float(optima.min()), float(optima.max())
    if high - low < 1e-9 and len(used) == sum(weight > 0 for weight in fitted.weights):
        return low
    most = math.log(spending.flops / 6) + 1.0  # a degenerate law's optimum may lie anywhere: beyond, there is no run
    low, high = (min(max(end, -1.0), most) for end in (low, high))
    if spending.inference_tokens or spending.unique_tokens:  # FLOPs of training vary, and the falling law with them
        low, high = max(low - _BEYOND, spending.floor), min(high + _BEYOND, spending.ceiling - 1e-9)
    if high - low < 1e-9:
        return min(low, high)
    from scipy.optimize import minimize_scalar  # here: it takes 0.3 s, and `fit` does without

    found = minimize_scalar(
        lambda x: pooled_along(fitted, spending, x), bounds=(low, high), method="bounded", options={"xatol": 1e-9}
    )
    return float(found.x)


def curvature(fitted: FittedRuns, spending: Spending, best: float) -> float:
    """Second derivative of log loss in log N along the budget, as the flat range meets it."""
    step = min(_CURVATURE_STEP, best - spending.floor, spending.ceiling - best)
    if step < _LEAST_STEP:  # held at an end of what the budget or the epochs allow: nothing moves it
        return math.inf
    ends = sum(pooled_along(fitted, spending, best + side * step) for side in (-1, 1))
    return max((ends - 2 * pooled_along(fitted, spending, best)) / step**2, _LEAST_CURVATURE)


def range_within(fitted: FittedRuns, spending: Spending, best: float, excess: float) -> tuple[float, float]:
    """Log N between which log loss is within `excess` of the best, no further than the budget and the epochs allow."""
    from scipy.optimize import brentq

    limit = pooled_along(fitted, spending, best) + excess

    def above(log_params: float) -> float:
        return pooled_along(fitted, spending, log_params) - limit

    reach = (max(best - _REACH, spending.floor), min(best + _REACH, spending.ceiling - 1e-9))
    ends = [float(brentq(above, best, far)) if above(far) > 0 else far for far in reach]
    return min(ends), max(ends)
