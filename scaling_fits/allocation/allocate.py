"""Allocation of a compute budget to parameters and tokens.

N is the number of parameters of a run, D its training tokens, and C = 6 N D its training FLOPs. For
a law whose inner terms are A N^-alpha + B D^-beta, the optimum is (arXiv 2203.15556, section 3.3)

    N* = G (C / 6)^(beta / (alpha + beta)),   D* = C / (6 N*)
    G = (alpha A / (beta B))^(1 / (alpha + beta))

A law may raise the sum of these terms to an outer power, which does not move the optimum. The best
size is the median of the optima of all draws of the law. If a budget also pays for serving, or
repeats its data, the optimum has no closed form. The log loss of a law is convex in log N at a
fixed budget, so the optimum is then the only root of the derivative.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from forerun._proxies.core.errors import InputError
from forerun._proxies.core.notation import format_flops, format_significant
from forerun._scaling_fits.allocation import repeats
from forerun._scaling_fits.allocation.repeats import DataLimit
from forerun._scaling_fits.allocation.shapes import ShapeOption
from forerun._scaling_fits.allocation.spending import (
    Spending,
    compute_expected_loss,
    compute_tokens,
    find_best_log_params,
    find_log_best_params,
    find_range,
)
from forerun._scaling_fits.forecast.posterior import compute_mixture_quantile
from forerun._scaling_fits.forecast.uncertainty import Ends, FittedRuns, predict
from forerun._scaling_fits.laws.law import LARGEST, NEXT_RUNG, CannotTellError, compute_finite_exp
from forerun._scaling_fits.optima.optima_fit import predict_at

FLAT = 0.003
"""Relative excess loss up to which shapes count as equal. The difference is below the noise of a
run."""
WIDEST_SIZE = 1e3
"""Ratio of the largest to the smallest size of an interval, above which the size is not determined.
For comparison: predictions of the best sizes of public studies are off by factors below 4."""
USUAL_TOKENS_PER_PARAM = (1.0, 1e4)
"""Lower and upper bound of usual tokens per parameter. Compute-optimal values of published runs are
1.7 (arXiv 2001.08361) to some hundreds; models trained to be served reach 2,000, and tiny ones
1e4."""
LAW_BEND_SD = 0.15
"""Standard deviation of log N* per e-fold of FLOPs beyond the runs, if the runs have no isoFLOP
minima (the size with the lowest loss among runs of equal FLOPs), so that N* comes from a law of the
loss. This was the error of such laws in 91 forecasts of public studies
(`benchmarks/statistics/best_sizes.py`)."""


_NO_SIZE = (
    f"the best size is not determined: laws and refits disagree by a factor of {WIDEST_SIZE:g} or "
    "more: add runs with other tokens per parameter, at larger budgets"
)


class NoRunError(InputError):
    """The budget pays for no run: less than one parameter, or less than one token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The best run that a budget pays for."""

    flops: float
    """Budget in FLOPs: training, and serving if that is requested."""
    params: float
    tokens: float
    loss_nats: float
    interval: Ends
    """Interval of the loss of one run at `params` and `tokens`, in nats."""
    params_interval: Ends
    tokens_interval: Ends
    flat_params: tuple[float, float]
    """Range of N whose loss at this budget is within `FLAT` of the best."""
    flat_tokens: tuple[float, float]
    """Range of D of the same runs, smallest first."""
    level: float
    extrapolation: float
    """6 N D of the best run over the largest 6 N D of the fitted runs."""
    doubts: tuple[str, ...]
    """Reasons why the forecast at the best size is inconclusive
    (`forerun._scaling_fits.forecast.conclusive`)."""
    warnings: tuple[str, ...]
    spending: Spending
    data_limit: DataLimit | None
    """Effect of the limit on unique tokens; None without `unique_tokens`."""

    @property
    def tokens_per_param(self) -> float:
        """D* over N*."""
        return self.tokens / self.params

    @property
    def size_determined(self) -> bool:
        """Whether the interval determines the size: both its ends are valid runs, and they differ
        by less than a factor of `WIDEST_SIZE`.
        """
        if self.params_interval is None or self.tokens_interval is None:
            return True
        low, high = self.params_interval
        return low >= 1 and self.tokens_interval[0] >= 1 and high <= WIDEST_SIZE * low

    @property
    def training_flops(self) -> float:
        """6 N D."""
        return 6 * self.params * self.tokens


def allocate(
    fitted: FittedRuns,
    flops: float,
    *,
    inference_tokens: float = 0.0,
    unique_tokens: float | None = None,
) -> Allocation:
    """Choose N and D for a budget of `flops` FLOPs, and predict their loss.

    The budget pays for 6 N D and, with `inference_tokens` T, for 2 N T. With `unique_tokens`,
    training beyond them repeats tokens.

    Raises:
        SpecError: Budgets or tokens are out of range; all problems are listed.
        NoRunError: The budget pays for less than one parameter or one token.
        CannotTellError: The runs identify no law.
    """
    spending = Spending(
        flops=float(flops), inference_tokens=float(inference_tokens), unique_tokens=unique_tokens
    )
    fitted.require_area()
    if unique_tokens is not None:
        spending = dataclasses.replace(
            spending, unique_params=repeats.compute_fitting_params(fitted, unique_tokens)
        )
    try:
        with np.errstate(all="ignore"):
            return _allocate_spending(fitted, spending)
    except OverflowError as error:
        budget = f"a budget of {format_flops(spending.flops)} FLOPs"
        raise build_no_number_error(fitted, budget) from error


def build_no_number_error(fitted: FittedRuns, question: str) -> CannotTellError:
    """Return the error for a question to which the fit has no finite answer."""
    return CannotTellError(
        (
            f"the fit is {fitted.status} and has no finite number for {question}",
            *fitted.fit.warnings,
        )
    )


def _check_run(fitted: FittedRuns, spending: Spending, params: float, tokens: float) -> None:
    """Check that parameters and tokens are those of a valid run.

    Raises:
        CannotTellError: They are not, and the fit has not converged.
        NoRunError: They are not, by a fit that converged.
    """
    if all(1 <= size <= LARGEST for size in (params, tokens)):
        return
    run = (
        f"a budget of {format_flops(spending.flops)} FLOPs pays for {format_significant(params)} "
        f"parameters on {format_significant(tokens)} tokens"
    )
    if fitted.status != "converged":
        reasons = (
            f"{run}, by a fit that is {fitted.status} and determines no size",
            *fitted.fit.warnings,
        )
        raise CannotTellError(reasons)
    raise NoRunError(f"{run}: both must be from 1 to {LARGEST:g}")


def _allocate_spending(fitted: FittedRuns, spending: Spending) -> Allocation:
    """Return the allocation.

    Raises:
        OverflowError: Its loss is not finite.
    """
    best = find_best_log_params(fitted, spending)
    params = compute_finite_exp(best)
    tokens = compute_tokens(spending, best)
    _check_run(fitted, spending, params, tokens)
    if not math.isfinite(compute_expected_loss(fitted, spending, best)):
        raise OverflowError
    n, d = (math.exp(float(x[0])) for x in spending.discount_sizes(np.array([best])))
    prediction = predict(fitted, n, d)
    limit = None
    if spending.unique_tokens is not None:
        limit = DataLimit(
            unique_tokens=spending.unique_tokens,
            epochs=tokens / spending.unique_tokens,
            effective_tokens=prediction.tokens,
        )
    flat = find_range(fitted, spending, best, math.log1p(FLAT))
    n_interval, d_interval = _compute_intervals(fitted, spending, best)
    limit_warnings = () if limit is None else repeats.list_limit_warnings(limit)
    allocation = Allocation(
        flops=spending.flops,
        params=params,
        tokens=tokens,
        loss_nats=prediction.loss_nats,
        interval=prediction.interval,
        params_interval=n_interval,
        tokens_interval=d_interval,
        flat_params=(math.exp(flat[0]), math.exp(flat[1])),
        flat_tokens=(compute_tokens(spending, flat[1]), compute_tokens(spending, flat[0])),
        level=fitted.level,
        extrapolation=6 * params * tokens / fitted.span.six_nd[1],
        doubts=prediction.doubts + _list_ratio_doubts(tokens / params),
        warnings=prediction.warnings + limit_warnings,
        spending=spending,
        data_limit=limit,
    )
    sizes = (*allocation.flat_params, *allocation.flat_tokens)
    if not np.isfinite((allocation.loss_nats, *(allocation.interval or ()), *sizes)).all():
        raise OverflowError
    if allocation.size_determined:
        return allocation
    return dataclasses.replace(allocation, warnings=(_NO_SIZE, *allocation.warnings))


def _list_ratio_doubts(tokens_per_param: float) -> tuple[str, ...]:
    """Return a doubt if the best run has an unusual ratio of tokens to parameters."""
    min_ratio, max_ratio = USUAL_TOKENS_PER_PARAM
    if min_ratio <= tokens_per_param <= max_ratio:
        return ()
    warning = (
        f"{format_significant(tokens_per_param)} tokens per parameter: the best runs of published "
        f"studies have {min_ratio:g} to {max_ratio:g}. Check what the table's params and tokens "
        "count, and whether each row is a run that ended its schedule"
    )
    return (warning,)


def _compute_intervals(fitted: FittedRuns, spending: Spending, best: float) -> tuple[Ends, Ends]:
    """Return the intervals of N and D.

    They come from the runs' own isoFLOP minima if there are enough, or else from the optima of the
    draws, widened by `LAW_BEND_SD`.
    """
    if not fitted.has_intervals:
        return None, None
    if fitted.optima is not None:
        optimum = predict_at(fitted.optima, spending.flops)
        assert optimum.params_interval is not None
        ends = [best + math.log(end / optimum.params) for end in optimum.params_interval]
        low, high = (min(end, spending.ceiling) for end in ends)
    else:
        # Mixture over draws, each with the standard deviation of the extrapolation
        middle_S1 = find_log_best_params(fitted.require_area().theta, spending)[:, None]
        reach = math.log(NEXT_RUNG * max(spending.flops / fitted.span.six_nd[1], 1.0))
        sd_S1, tail = np.full_like(middle_S1, LAW_BEND_SD * reach), (1 - fitted.level) / 2
        ends = [float(compute_mixture_quantile(middle_S1, sd_S1, x)[0]) for x in (tail, 1 - tail)]
        low, high = (min(end, spending.ceiling) for end in ends)
        low, high = min(low, best), max(high, best)
    return (compute_finite_exp(low), compute_finite_exp(high)), (
        compute_tokens(spending, high),
        compute_tokens(spending, low),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactRun:
    """The tokens and the loss of an integer shape that the budget pays for."""

    tokens: float
    loss_nats: float
    interval: Ends


def compute_exact_run(
    fitted: FittedRuns, allocation: Allocation, option: ShapeOption
) -> ExactRun | None:
    """Return the run of the shape `option` that the allocation's budget pays for, with the shape's
    exact FLOPs per token; None if serving alone exceeds the budget.

    The approximation of 6 N FLOPs per token omits attention, and counts an untied input embedding,
    which is a look-up, as a matrix product. At long contexts and small widths this approximation is
    far off. Training costs the shape's exact FLOPs per token, and serving a third of them. The loss
    is the law's prediction for the shape's own N and these tokens. The law does not model context
    length or aspect ratio.
    """
    spending = allocation.spending
    serving_flops = spending.inference_tokens * option.flops_per_token / 3
    tokens = (spending.flops - serving_flops) / option.flops_per_token
    if tokens < 1:
        return None
    logs = np.log(np.array([float(option.params), tokens]))
    n, d = spending.discount_run(logs[:1], logs[1:])
    at = predict(fitted, math.exp(float(n[0])), math.exp(float(d[0])))
    return ExactRun(tokens=tokens, loss_nats=at.loss_nats, interval=at.interval)
