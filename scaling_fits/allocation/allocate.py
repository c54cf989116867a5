"""From a compute budget to parameters and tokens.

With C = 6 N D and a law of inner terms A N^-alpha + B D^-beta the optimum is (arXiv 2203.15556, section 3.3)

    N* = G (C / 6)^(beta / (alpha + beta)),   D* = C / (6 N*),   G = (alpha A / (beta B))^(1 / (alpha + beta)),

with or without an outer exponent, which does not move it. Pooled laws have no closed form, nor have budgets that
pay for serving or repeat their data; but the log loss of each is convex in log N along C, and so is their weighted
mean. What the law without a floor adds is the same for all sizes of a budget; where FLOPs of training vary along it
(serving, repeats) a single minimum is what all families tried have shown.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from scaling_fits import cloud
from scaling_fits.allocation import repeats
from scaling_fits.allocation.repeats import DataLimit
from scaling_fits.allocation.spending import Spending, log_best_params
from scaling_fits.sizes import exp_finite
from scaling_fits.uncertainty import FAR, FittedRuns, Prediction, predict, reach_of

FLAT = 0.003  # shapes within 0.3 % of the best loss are as good: below the noise of a run
_LEAN = 2.0
_CURVATURE_STEP = 0.7  # in log N
_LEAST_STEP = 1e-2
_LEAST_CURVATURE = 1e-3  # a valley flatter than this chooses nothing
_BEYOND = 1.5  # log N searched beyond the members' own optima where the pool has a term of its own
_REACH = 20.0  # log N searched on each side of the best


class NoRunError(ValueError):
    """A budget that pays for no run: less than one parameter, or less than one token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The best run that a budget pays for."""

    flops: float
    """The budget: of training, and of serving where that is asked for."""
    params: float
    tokens: float
    loss_nats: float
    interval: tuple[float, float] | None
    """Of the loss of one run at `params` and `tokens`."""
    params_interval: tuple[float, float] | None
    tokens_interval: tuple[float, float] | None
    flat_params: tuple[float, float]
    """N whose loss at this budget is within 0.3 % of the best."""
    flat_tokens: tuple[float, float]
    """D of the same runs, smallest first."""
    level: float
    extrapolation: float
    """6 N D over the largest fitted 6ND."""
    warnings: tuple[str, ...]
    spending: Spending
    data_limit: DataLimit | None
    """With `unique_tokens` alone."""

    @property
    def tokens_per_param(self) -> float:
        """D* over N*."""
        return self.tokens / self.params

    @property
    def training_flops(self) -> float:
        """6 N D."""
        return 6 * self.params * self.tokens

    @property
    def flat_saving(self) -> float:
        """Share of the FLOPs of every served token that the smallest model of the flat range saves (2 N each)."""
        return 1 - self.flat_params[0] / self.params


def allocate(
    fitted: FittedRuns, flops: float, *, inference_tokens: float = 0.0, inference_cost: float = 1.0,
    unique_tokens: float | None = None, max_epochs: float | None = None,
) -> Allocation:  # fmt: skip
    """N, D and their loss for a budget of `flops` FLOPs.

    It pays for 6 N D, and, with `inference_tokens` T, for 2 N T at `inference_cost` (a FLOP served over a FLOP
    trained). With `unique_tokens` what is trained beyond them repeats, in `max_epochs` at most.

    Raises:
        SpecError: budgets, tokens or epochs out of range, all at once.
        NoRunError: the budget pays for less than one parameter or one token.
        CannotTellError: the runs identify no law.
    """
    terms = {
        "flops": float(flops),
        "inference_tokens": float(inference_tokens),
        "inference_cost": float(inference_cost),
    }
    if unique_tokens is None and max_epochs is None:
        spending = Spending(**terms)
        fitted.require()
        return _allocate(fitted, spending, None)
    limited = Spending(**terms, unique_tokens=unique_tokens, max_epochs=max_epochs)
    fitted.require()
    assert limited.unique_tokens is not None  # or it would have been refused
    fitting = repeats.fitting_params(fitted, limited.unique_tokens)
    limited = dataclasses.replace(limited, unique_params=fitting)
    return _allocate(fitted, limited, _allocate(fitted, Spending(**terms), None))


def _allocate(fitted: FittedRuns, spending: Spending, unlimited: Allocation | None) -> Allocation:
    best = best_log_params(fitted, spending)
    params = exp_finite(best)
    tokens = _tokens(spending, best)
    if params < 1 or tokens < 1:
        raise NoRunError(
            f"a budget of {spending.flops:.4g} FLOPs pays for {params:.3g} parameters on {tokens:.3g} tokens: no run"
        )
    counted = tuple(math.exp(float(x[0])) for x in spending.counted(np.array([best])))
    at = predict(fitted, counted[0], counted[1])
    extrapolation = 6 * params * tokens / fitted.span.six_nd[1]
    limit = None if unlimited is None else _data_limit(fitted, spending, at, tokens, unlimited)
    flat = _range_within(fitted, spending, best, math.log1p(FLAT))
    n_interval, d_interval = _intervals(fitted, spending, best)
    warnings = _warnings(fitted, params, tokens, extrapolation)
    return Allocation(
        flops=spending.flops,
        params=params,
        tokens=tokens,
        loss_nats=at.loss_nats,
        interval=None if at.low is None or at.high is None else (at.low, at.high),
        params_interval=n_interval,
        tokens_interval=d_interval,
        flat_params=(math.exp(flat[0]), math.exp(flat[1])),
        flat_tokens=(_tokens(spending, flat[1]), _tokens(spending, flat[0])),
        level=fitted.level,
        extrapolation=extrapolation,
        warnings=warnings if limit is None else warnings + _limit_warnings(limit),
        spending=spending,
        data_limit=limit,
    )


def _tokens(spending: Spending, log_params: float) -> float:
    return exp_finite(float(spending.log_tokens(np.array([log_params]))[0]))


def pooled_along(fitted: FittedRuns, spending: Spending, log_params: float) -> float:
    """Pooled log loss of the run of this size that the budget pays for."""
    n, d = spending.counted(np.array([log_params]))
    return float(cloud.pooled_log_loss(fitted.members, fitted.weights, np.exp(n), np.exp(d))[0])


def best_log_params(fitted: FittedRuns, spending: Spending) -> float:
    """Log N*: the one law's, else the minimum of the pooled log loss between the members' own optima."""
    used = [fit for fit, weight in zip(fitted.members, fitted.size_weights, strict=True) if weight > 0]
    optima = log_best_params(np.stack([fit.theta for fit in used]), spending)
    low, high = float(optima.min()), float(optima.max())
    if high - low < 1e-9 and len(used) == sum(weight > 0 for weight in fitted.weights):
        return low
    if spending.inference_tokens or spending.unique_tokens:  # FLOPs of training vary, and the falling law with them
        low, high = max(low - _BEYOND, spending.floor), min(high + _BEYOND, spending.ceiling - 1e-9)
    elif high - low < 1e-9:
        return low
    found = minimize_scalar(
        lambda x: pooled_along(fitted, spending, x), bounds=(low, high), method="bounded", options={"xatol": 1e-9}
    )
    return float(found.x)


def _intervals(
    fitted: FittedRuns, spending: Spending, best: float
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Of N and D: over every refit's own optimum, and by how far the error that the laws share moves the optimum.

    Where that error leans by so much for a factor e in N, the optimum moves by that over the loss's curvature; how much
    it leans, twice kappa * reach, is what public isoFLOP families ask for (`benchmarks/best_sizes.py`).
    """
    if not fitted.has_draws:
        return None, None
    weights, middle_S = np.array(fitted.size_weights), np.zeros(fitted.bootstrap)
    used = [(fit, weight) for fit, weight in zip(fitted.members, weights, strict=True) if weight > 0]
    shares_SM = fitted.cloud.weight_draws[:, weights > 0]
    total_S1 = shares_SM.sum(axis=1, keepdims=True)
    shares_SM = np.where(total_S1 > 0, shares_SM / np.maximum(total_S1, 1e-12), weights[weights > 0])
    for (fit, _), share_S in zip(used, shares_SM.T, strict=True):
        middle_S += share_S * log_best_params(fit.draws, spending)
    n = np.array([math.exp(best)])
    moved_S = _LEAN * fitted.cloud.misfit_draws * reach_of(fitted, n, np.array([_tokens(spending, best)]))
    sd_S = moved_S / _curvature(fitted, spending, best)
    tail = (1 - fitted.level) / 2
    low, high = (
        float(
            np.clip(
                cloud.mixture_quantile(middle_S[:, None], sd_S[:, None], share)[0], spending.floor, spending.ceiling
            )
        )
        for share in (tail, 1 - tail)
    )
    # A size that the laws put further above the best than the loss itself is in doubt is not the best.
    at = predict(fitted, float(n[0]), _tokens(spending, best))
    assert at.high is not None
    ends = _range_within(fitted, spending, best, math.log(at.high / at.loss_nats) if at.high > at.loss_nats else FLAT)
    low, high = min(max(low, ends[0]), best), max(min(high, ends[1]), best)
    return (exp_finite(low), exp_finite(high)), (_tokens(spending, high), _tokens(spending, low))


def _curvature(fitted: FittedRuns, spending: Spending, best: float) -> float:
    """Second derivative of log loss in log N along the budget, as the flat range meets it."""
    step = min(_CURVATURE_STEP, best - spending.floor, spending.ceiling - best)
    if step < _LEAST_STEP:  # held at an end of what the budget or the epochs allow: nothing moves it
        return math.inf
    ends = sum(pooled_along(fitted, spending, best + side * step) for side in (-1, 1))
    return max((ends - 2 * pooled_along(fitted, spending, best)) / step**2, _LEAST_CURVATURE)


def _range_within(fitted: FittedRuns, spending: Spending, best: float, excess: float) -> tuple[float, float]:
    """Log N between which log loss is within `excess` of the best, no further than the budget and the epochs allow."""
    limit = pooled_along(fitted, spending, best) + excess

    def above(log_params: float) -> float:
        return pooled_along(fitted, spending, log_params) - limit

    reach = (max(best - _REACH, spending.floor), min(best + _REACH, spending.ceiling - 1e-9))
    ends = [float(brentq(above, best, far)) if above(far) > 0 else far for far in reach]
    return min(ends), max(ends)


def _data_limit(
    fitted: FittedRuns, spending: Spending, at: Prediction, tokens: float, unlimited: Allocation
) -> DataLimit:
    assert spending.unique_tokens is not None
    cost = max(at.loss_nats - unlimited.loss_nats, 0.0)
    return DataLimit(
        unique_tokens=spending.unique_tokens,
        epochs=tokens / spending.unique_tokens,
        effective_tokens=at.tokens,
        effective_params=at.params,
        unlimited_params=unlimited.params,
        unlimited_tokens=unlimited.tokens,
        loss_cost_nats=cost,
        loss_cost_interval=repeats.loss_cost(
            fitted, (at.params, at.tokens), (unlimited.params, unlimited.tokens), cost
        ),
    )


def _limit_warnings(limit: DataLimit) -> tuple[str, ...]:
    if limit.epochs <= 1:
        return ()
    warnings = [f"tokens repeat {limit.epochs:.3g} times; their worth is after {repeats.SOURCE}"]
    if limit.epochs > repeats.SAFE_EPOCHS:
        warnings.append(
            f"{limit.epochs:.3g} epochs: beyond {repeats.SAFE_EPOCHS:g} a repeated token is worth less and less; "
            "more unique tokens are worth more than more compute"
            + ("; beyond 15 the published form itself fails, by some 10 % of the loss" if limit.epochs > 15 else "")
        )
    return tuple(warnings)


def _warnings(fitted: FittedRuns, params: float, tokens: float, extrapolation: float) -> tuple[str, ...]:
    span = fitted.span
    warnings = [
        f"{name} = {value:.4g} is {value / high:.3g} times the largest fitted ({high:.4g})"
        for name, value, (_, high) in (("params", params, span.params), ("tokens", tokens, span.tokens))
        if value > FAR * high
    ]
    warnings += [
        f"{name} = {value:.4g} is below the smallest fitted ({low:.4g})"
        for name, value, (low, _) in (("params", params, span.params), ("tokens", tokens, span.tokens))
        if value < low
    ]
    if extrapolation > FAR:
        warnings.append(f"the budget is {extrapolation:.3g} times the largest fitted: add rungs nearer to it")
    if fitted.status != "converged":
        warnings.append(f"the fit is {fitted.status}: {'; '.join(fitted.heaviest.warnings)}")
    return tuple(warnings)
