"""Allocation of a compute budget to parameters and tokens.

With C = 6 N D and a law whose inner terms are A N^-alpha + B D^-beta, the optimum is (arXiv
2203.15556, section 3.3)

    N* = G (C / 6)^(beta / (alpha + beta)),   D* = C / (6 N*)
    G = (alpha A / (beta B))^(1 / (alpha + beta))

An outer exponent does not move it. The best size is the median of the optima of all draws of the
law. Budgets that pay for serving or repeat their data have no closed form. The log loss of a law is
convex in log N along C, so its optimum is the only root of its derivative.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from proxies.core.errors import InputError
from proxies.core.notation import format_flops, format_significant
from scaling_fits.allocation import repeats
from scaling_fits.allocation.repeats import DataLimit
from scaling_fits.allocation.shapes import ShapeOption
from scaling_fits.allocation.spending import (
    Spending,
    best_log_params,
    expected_along,
    log_best_params,
    range_within,
    tokens_at,
)
from scaling_fits.compute.optima import predict_at
from scaling_fits.forecast.posterior import mixture_quantile
from scaling_fits.forecast.uncertainty import FittedRuns, predict
from scaling_fits.laws.law import LARGEST, NEXT_RUNG, CannotTellError, exp_finite

# Shapes within 0.3 % of the best loss count as equal: the difference is below the noise of a run
FLAT = 0.003
WIDEST_SIZE = 1e3
"""Ratio of the largest to the smallest size of an interval, above which the size is not determined.
Public isoFLOP families are missed by factors below 4."""
USUAL_TOKENS_PER_PARAM = (1.0, 1e4)
"""Lower and upper bound of usual tokens per parameter. Compute-optimal values of published runs are
1.7 (arXiv 2001.08361) to some hundreds; models trained to be served reach 2,000, and tiny ones
1e4."""
LAW_BEND_SD = 0.15
"""Standard deviation of log N* per e-fold of FLOPs beyond the runs, for a law of the loss without
isoFLOP minima. This was the error of laws over 91 tasks of public families
(`benchmarks/statistics/best_sizes.py`)."""


_NO_SIZE = (
    f"the best size is not determined: laws and refits disagree by a factor of {WIDEST_SIZE:g} or "
    "more: add runs with "
    "other tokens per parameter, at larger budgets"
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
    interval: tuple[float, float] | None
    """Interval of the loss of one run at `params` and `tokens`, in nats."""
    params_interval: tuple[float, float] | None
    tokens_interval: tuple[float, float] | None
    flat_params: tuple[float, float]
    """Range of N whose loss at this budget is within 0.3 % of the best."""
    flat_tokens: tuple[float, float]
    """Range of D of the same runs, smallest first."""
    level: float
    extrapolation: float
    """6 N D over the largest fitted 6ND."""
    doubts: tuple[str, ...]
    """Reasons why the forecast at the best size is inconclusive
    (`scaling_fits.forecast.conclusive`)."""
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
        """Whether the interval determines the size: all of it is valid runs, and it spans less than
        a factor of a thousand.
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
            allocation = _allocate_spending(fitted, spending)
    except OverflowError as error:
        raise no_number(fitted, f"a budget of {format_flops(spending.flops)} FLOPs") from error
    if not all(
        map(
            math.isfinite,
            (
                allocation.loss_nats,
                *(allocation.interval or ()),
                *allocation.flat_params,
                *allocation.flat_tokens,
            ),
        )
    ):
        raise no_number(fitted, f"a budget of {format_flops(spending.flops)} FLOPs")
    return allocation


def no_number(fitted: FittedRuns, question: str) -> CannotTellError:
    """Return the error for a question to which the fit has no finite answer."""
    return CannotTellError(
        (
            f"the fit is {fitted.status} and has no finite number for {question}",
            *fitted.fit.warnings,
        )
    )


def _check_run(fitted: FittedRuns, spending: Spending, params: float, tokens: float) -> None:
    if all(1 <= size <= LARGEST for size in (params, tokens)):
        return
    run = (
        f"a budget of {format_flops(spending.flops)} FLOPs pays for {format_significant(params)} "
        "parameters on "
        f"{format_significant(tokens)} tokens"
    )
    if fitted.status != "converged":
        reasons = (
            f"{run}, by a fit that is {fitted.status} and determines no size",
            *fitted.fit.warnings,
        )
        raise CannotTellError(reasons)
    raise NoRunError(f"{run}: both must be from 1 to {LARGEST:g}")


def _allocate_spending(fitted: FittedRuns, spending: Spending) -> Allocation:
    best = best_log_params(fitted, spending)
    params = exp_finite(best)
    tokens = tokens_at(spending, best)
    _check_run(fitted, spending, params, tokens)
    if not math.isfinite(expected_along(fitted, spending, best)):
        raise no_number(fitted, f"a budget of {format_flops(spending.flops)} FLOPs")
    effective_sizes = tuple(
        math.exp(float(x[0])) for x in spending.discount_sizes(np.array([best]))
    )
    prediction = predict(fitted, effective_sizes[0], effective_sizes[1])
    extrapolation = 6 * params * tokens / fitted.span.six_nd[1]
    limit = None
    if spending.unique_tokens is not None:
        limit = DataLimit(
            unique_tokens=spending.unique_tokens,
            epochs=tokens / spending.unique_tokens,
            effective_tokens=prediction.tokens,
        )
    flat = range_within(fitted, spending, best, math.log1p(FLAT))
    n_interval, d_interval = _compute_intervals(fitted, spending, best)
    warnings = prediction.warnings
    allocation = Allocation(
        flops=spending.flops,
        params=params,
        tokens=tokens,
        loss_nats=prediction.loss_nats,
        interval=prediction.interval,
        params_interval=n_interval,
        tokens_interval=d_interval,
        flat_params=(math.exp(flat[0]), math.exp(flat[1])),
        flat_tokens=(tokens_at(spending, flat[1]), tokens_at(spending, flat[0])),
        level=fitted.level,
        extrapolation=extrapolation,
        doubts=prediction.doubts + _list_ratio_doubts(tokens / params),
        warnings=warnings if limit is None else warnings + repeats.list_limit_warnings(limit),
        spending=spending,
        data_limit=limit,
    )
    return (
        allocation
        if allocation.size_determined
        else dataclasses.replace(allocation, warnings=(_NO_SIZE, *allocation.warnings))
    )


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


def _compute_intervals(
    fitted: FittedRuns, spending: Spending, best: float
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Return the intervals of N and D: from the runs' own isoFLOP minima, or from the draws' optima
    widened by the bend of laws beyond the runs.
    """
    if not fitted.has_intervals:
        return None, None
    if fitted.optima is not None:
        predicted_optimum = predict_at(fitted.optima, spending.flops)
        assert predicted_optimum.params_interval is not None
        low, high = (
            best + math.log(end / predicted_optimum.params)
            for end in predicted_optimum.params_interval
        )
        low, high = min(low, spending.ceiling), min(high, spending.ceiling)
        return (exp_finite(low), exp_finite(high)), (
            tokens_at(spending, high),
            tokens_at(spending, low),
        )
    # Mixture over draws, each with the standard deviation of the extrapolation
    posterior = fitted.require_area()
    middle_S = log_best_params(posterior.theta, spending)
    reach = math.log(NEXT_RUNG * max(spending.flops / fitted.span.six_nd[1], 1.0))
    sd_S = np.full(len(middle_S), LAW_BEND_SD * reach)
    tail = (1 - fitted.level) / 2
    low, high = (
        float(
            np.clip(
                mixture_quantile(middle_S[:, None], sd_S[:, None], share)[0], None, spending.ceiling
            )
        )
        for share in (tail, 1 - tail)
    )
    low, high = min(low, best), max(high, best)
    return (exp_finite(low), exp_finite(high)), (
        tokens_at(spending, high),
        tokens_at(spending, low),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactRun:
    """The tokens and the loss of an integer shape that the budget pays for."""

    tokens: float
    loss_nats: float
    interval: tuple[float, float] | None


def exact_run(fitted: FittedRuns, allocation: Allocation, option: ShapeOption) -> ExactRun | None:
    """Return the run of `option` that the allocation's budget pays for, counted exactly; None if
    serving alone exceeds the budget.

    6 N omits attention and counts an untied input embedding, which is a look-up, as a matrix
    product. At long contexts and small widths it is far off. Training costs the shape's own FLOPs
    per token, and serving a third of them. The loss is that of the law at the shape's own N and
    these tokens. The law does not model context length or aspect ratio.
    """
    spending = allocation.spending
    serving_flops = spending.inference_tokens * option.flops_per_token / 3
    tokens = (spending.flops - serving_flops) / option.flops_per_token
    if tokens < 1:
        return None
    logs = np.log(np.array([float(option.params), tokens]))
    n, d = spending.worth(logs[:1], logs[1:])
    at = predict(fitted, math.exp(float(n[0])), math.exp(float(d[0])))
    return ExactRun(tokens=tokens, loss_nats=at.loss_nats, interval=at.interval)
