"""Training a smaller model for longer, because it will be served (arXiv 2401.00448).

The budget pays for both: 6 N D + 2 N T. Of all (N, D) that it pays for, the one of least loss is chosen; what it
saves is told against the compute-optimal model of the same loss, which is larger and so costs more to serve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scaling_fits.allocation.allocate import Allocation
from scaling_fits.allocation.spending import LEAST_FLOPS, Spending, best_log_params, log_best_params, pooled_along
from scaling_fits.forecast.uncertainty import FittedRuns, Interval, pooled_interval, stretched
from scaling_fits.laws.law import exp_finite
from scaling_fits.laws.solver import Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """A choice against the compute-optimal one of equal loss. FLOPs served are weighed by their cost."""

    inference_tokens: float
    inference_cost: float
    """Of a FLOP served over a FLOP trained."""
    training_flops: float
    serving_flops: float
    """2 N T, weighed by `inference_cost`."""
    compute_optimal_params: float
    """Of the smallest training budget that reaches the same loss."""
    compute_optimal_tokens: float
    compute_optimal_life_flops: Interval
    """What that model costs to train and to serve."""
    extra_training_flops: Interval
    """That the choice trains for beyond it."""
    saved_share: Interval
    """Of the compute-optimal model's life cost."""


def serving(fitted: FittedRuns, allocation: Allocation) -> Serving:
    """What the serving of an allocation made with `inference_tokens` costs and saves. Needs an identified law."""
    spending = allocation.spending
    served = 2 * spending.inference_cost * spending.inference_tokens
    training = allocation.training_flops
    params, tokens = _equal_loss(fitted, allocation)
    life = 6 * params * tokens + served * params
    extra = max(training - 6 * params * tokens, 0.0)
    cost, more = _draws(fitted, spending) if spending.unique_tokens is None else ([], [])
    life_ends = _log_interval(fitted, life, cost)
    saved = None if life_ends is None else (_share(life_ends[0], spending.flops), _share(life_ends[1], spending.flops))
    return Serving(
        inference_tokens=spending.inference_tokens,
        inference_cost=spending.inference_cost,
        training_flops=training,
        serving_flops=served * allocation.params,
        compute_optimal_params=params,
        compute_optimal_tokens=tokens,
        compute_optimal_life_flops=Interval(value=life, interval=life_ends),
        extra_training_flops=Interval(value=extra, interval=_log_interval(fitted, extra, more)),
        saved_share=Interval(value=_share(life, spending.flops), interval=saved),
    )


def _share(life: float, total: float) -> float:
    return max(1 - total / life, 0.0)


def _equal_loss(fitted: FittedRuns, allocation: Allocation) -> tuple[float, float]:
    """N and D of the smallest training budget with the allocation's loss, under the same limit on data."""
    from scipy.optimize import brentq

    given = allocation.spending
    wanted = math.log(allocation.loss_nats)

    def at(log_flops: float) -> tuple[float, Spending]:
        spending = Spending(
            flops=math.exp(log_flops), unique_tokens=given.unique_tokens, unique_params=given.unique_params,
            max_epochs=given.max_epochs,
        )  # fmt: skip
        return best_log_params(fitted, spending), spending

    def above(log_flops: float) -> float:
        best, spending = at(log_flops)
        return pooled_along(fitted, spending, best) - wanted

    high = max(math.log(allocation.training_flops), math.log(LEAST_FLOPS) + 1e-6)
    low = math.log(LEAST_FLOPS) + 1e-6
    found = brentq(above, low, high, xtol=1e-10) if above(low) > 0 > above(high) else high
    best, spending = at(found)
    return math.exp(best), math.exp(float(spending.log_tokens(np.array([best]))[0]))


def _draws(fitted: FittedRuns, spending: Spending) -> tuple[list[Floats], list[Floats]]:
    """Of every refit's own choice: log life cost of its compute-optimal equal, and log of the extra training.

    Equal losses are equal inner sums s = A N^-alpha + B D^-beta, and on the compute-optimal line alpha A N^-alpha =
    beta B D^-beta, so N = (A (1 + alpha / beta) / s)^(1 / alpha): no search.
    """
    lives, extras = [], []
    for fit in fitted.members:
        a, b, alpha, beta = (fit.draws[:, i] for i in (1, 2, 3, 4))
        n = log_best_params(fit.draws, spending)
        d = spending.log_tokens(n)
        inner = np.logaddexp(a - alpha * n, b - beta * d)
        equal_n = (a + np.log1p(alpha / beta) - inner) / alpha
        equal_d = (b + np.log1p(beta / alpha) - inner) / beta
        log_flops = math.log(6) + equal_n + equal_d
        served = math.log(2 * spending.inference_cost * spending.inference_tokens) + equal_n
        lives.append(np.logaddexp(log_flops, served))
        train = math.log(6) + n + d
        extras.append(train + np.log(np.maximum(-np.expm1(np.minimum(log_flops - train, 0.0)), 1e-300)))
    return lives, extras


def _log_interval(fitted: FittedRuns, value: float, logs: list[Floats]) -> tuple[float, float] | None:
    ends = pooled_interval(fitted, logs) if logs and value > 0 else None
    if ends is None:
        return None
    low, high = stretched(math.log(value), *ends, fitted)
    return exp_finite(low), exp_finite(high)
