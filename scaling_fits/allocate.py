"""From a compute budget to parameters and tokens.

With C = 6 N D and a law of inner terms A N^-alpha + B D^-beta the optimum is (arXiv 2203.15556, section 3.3)

    N* = G (C / 6)^(beta / (alpha + beta)),   D* = C / (6 N*),   G = (alpha A / (beta B))^(1 / (alpha + beta)),

with or without an outer exponent, which does not move it. Pooled laws have no closed form, but the log loss of
each is convex in log N along C, so their weighted mean is too and one minimum is all there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from scaling_fits import cloud
from scaling_fits.solver import Floats
from scaling_fits.uncertainty import FittedRuns, check_positive, exp_finite, pooled_interval, predict, stretched

FLAT = 0.003  # shapes within 0.3 % of the best loss are as good: below the noise of a run
_FAR = 30.0  # times the largest fitted FLOPs; beyond, held-out errors of public families exceed 4 %
_REACH = 20.0  # log N searched on each side of the members' own optima


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A value with its interval, None without a bootstrap."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Exponents:
    """How the optimum grows with compute: N* ~ C^params_vs_flops, D* ~ C^tokens_vs_flops."""

    params_vs_flops: Interval
    tokens_vs_flops: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The compute-optimal run for a budget."""

    flops: float
    params: float
    tokens: float
    loss_nats: float
    interval: tuple[float, float] | None
    """Of the loss of one run at `params` and `tokens`."""
    params_interval: tuple[float, float] | None
    tokens_interval: tuple[float, float] | None
    flat_params: tuple[float, float]
    """N whose loss at this budget is within 0.3 % of the best."""
    level: float
    extrapolation: float
    """Budget over the largest fitted 6ND."""
    warnings: tuple[str, ...]

    @property
    def tokens_per_param(self) -> float:
        """D* over N*."""
        return self.tokens / self.params


def exponents(fitted: FittedRuns) -> Exponents:
    """Exponents of the heaviest member, with intervals over the refits of all.

    Raises:
        CannotTellError: the runs identify no law.
    """
    fitted.require()
    alpha, beta = fitted.heaviest.theta[3:5]
    value = float(beta / (alpha + beta))
    shares = [fit.draws[:, 4] / (fit.draws[:, 3] + fit.draws[:, 4]) for fit in fitted.members]
    return Exponents(
        params_vs_flops=Interval(value=value, interval=pooled_interval(fitted, shares)),
        tokens_vs_flops=Interval(
            value=float(alpha / (alpha + beta)), interval=pooled_interval(fitted, [1 - share for share in shares])
        ),
    )


def log_optimal_params(theta_MP: Floats, flops: float) -> Floats:
    """Log N* of each law (M,)."""
    a, b, alpha, beta = (theta_MP[:, i] for i in (1, 2, 3, 4))
    result: Floats = (np.log(alpha / beta) + a - b + beta * math.log(flops / 6)) / (alpha + beta)
    return result


def allocate(fitted: FittedRuns, flops: float) -> Allocation:
    """N*, D* and their loss for `flops` FLOPs at 6 * N * D.

    Raises:
        LawError: a budget that is not finite and positive.
        CannotTellError: the runs identify no law.
    """
    check_positive(flops=flops)
    fitted.require()
    flops = float(flops)
    best = _best_log_params(fitted, flops)
    params = math.exp(best)
    at = predict(fitted, params, flops / (6 * params))
    interval = None if at.low is None or at.high is None else (at.low, at.high)
    n_interval = _params_interval(fitted, flops, best)
    d_interval = None if n_interval is None else (flops / (6 * n_interval[1]), flops / (6 * n_interval[0]))
    return Allocation(
        flops=flops,
        params=params,
        tokens=at.tokens,
        loss_nats=at.loss_nats,
        interval=interval,
        params_interval=n_interval,
        tokens_interval=d_interval,
        flat_params=_flat_range(fitted, flops, best),
        level=fitted.level,
        extrapolation=at.extrapolation,
        warnings=_warnings(fitted, params, at.tokens, at.extrapolation),
    )


def _pooled(fitted: FittedRuns, flops: float, log_params: float) -> float:
    n = np.array([math.exp(log_params)])
    return float(cloud.pooled_log_loss(fitted.members, fitted.weights, n, flops / (6 * n))[0])


def _best_log_params(fitted: FittedRuns, flops: float) -> float:
    """Log N*: the closed form for one law, else the minimum between the members' own optima."""
    used = [fit for fit, weight in zip(fitted.members, fitted.weights, strict=True) if weight > 0]
    optima = log_optimal_params(np.stack([fit.theta for fit in used]), flops)
    low, high = float(optima.min()), float(optima.max())
    if high - low < 1e-9:
        return low
    found = minimize_scalar(
        lambda x: _pooled(fitted, flops, x), bounds=(low, high), method="bounded", options={"xatol": 1e-9}
    )
    return float(found.x)


def _params_interval(fitted: FittedRuns, flops: float, best: float) -> tuple[float, float] | None:
    optima = [log_optimal_params(fit.draws, flops) for fit in fitted.members]
    ends = pooled_interval(fitted, optima)
    if ends is None:
        return None
    low, high = stretched(best, *ends, fitted)
    return exp_finite(low), exp_finite(high)


def _flat_range(fitted: FittedRuns, flops: float, best: float) -> tuple[float, float]:
    limit = _pooled(fitted, flops, best) + math.log1p(FLAT)

    def above(log_params: float) -> float:
        return _pooled(fitted, flops, log_params) - limit

    ends = []
    for side in (-_REACH, _REACH):
        far = best + side
        ends.append(brentq(above, best, far) if above(far) > 0 else far)
    return math.exp(min(ends)), math.exp(max(ends))


def _warnings(fitted: FittedRuns, params: float, tokens: float, extrapolation: float) -> tuple[str, ...]:
    span = fitted.span
    warnings = [
        f"{name} = {value:.4g} is {value / high:.3g} times the largest fitted ({high:.4g})"
        for name, value, (_, high) in (("params", params, span.params), ("tokens", tokens, span.tokens))
        if value > _FAR * high
    ]
    warnings += [
        f"{name} = {value:.4g} is below the smallest fitted ({low:.4g})"
        for name, value, (low, _) in (("params", params, span.params), ("tokens", tokens, span.tokens))
        if value < low
    ]
    if extrapolation > _FAR:
        warnings.append(f"the budget is {extrapolation:.3g} times the largest fitted: add rungs nearer to it")
    if fitted.status != "converged":
        warnings.append(f"the fit is {fitted.status}: {'; '.join(fitted.heaviest.warnings)}")
    return tuple(warnings)
