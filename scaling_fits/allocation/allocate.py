"""From a compute budget to parameters and tokens.

With C = 6 N D and a law of inner terms A N^-alpha + B D^-beta the optimum is (arXiv 2203.15556,
section 3.3)

    N* = G (C / 6)^(beta / (alpha + beta)),   D* = C / (6 N*),   G = (alpha A / (beta B))^(1 /
    (alpha + beta)),

with or without an outer exponent, which does not move it. The best size is the median of the optima
of all draws of the law. Budgets that pay for serving or repeat their data have no closed form; but
the log loss of a law is convex in log N along C, so its optimum is the one root of its derivative.
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

FLAT = 0.003  # shapes within 0.3 % of the best loss are as good: below the noise of a run
WIDEST_SIZE = 1e3
"""Largest over smallest size of an interval that tells one: public isoFLOP families are missed by
factors below 4."""
USUAL_TOKENS_PER_PARAM = (1.0, 1e4)
"""Compute-optimal tokens per parameter that published runs ask for are 1.7 (arXiv 2001.08361) to
some hundreds; models trained to be served reach 2,000, and tiny ones 1e4."""
LAW_BEND_SD = 0.15
"""Standard deviation of log N* for each factor e of FLOPs beyond the runs, of a law of loss without
isoFLOP minima: how far laws were off over 91 tasks of public families
(`benchmarks/statistics/best_sizes.py`).
"""


_NO_SIZE = (
    f"the best size is not determined: laws and refits disagree by a factor of {WIDEST_SIZE:g} or "
    "more: add runs with "
    "other tokens per parameter, at larger budgets"
)


class NoRunError(InputError):
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
    doubts: tuple[str, ...]
    """Why the forecast at the best size is inconclusive (`scaling_fits.forecast.conclusive`)."""
    warnings: tuple[str, ...]
    spending: Spending
    data_limit: DataLimit | None
    """With `unique_tokens` alone."""

    @property
    def tokens_per_param(self) -> float:
        """D* over N*."""
        return self.tokens / self.params

    @property
    def size_determined(self) -> bool:
        """Whether the interval of the size tells one: it holds runs only, over less than a factor
        of a thousand.
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
    """N, D and their loss for a budget of `flops` FLOPs.

    It pays for 6 N D, and, with `inference_tokens` T, for 2 N T. With `unique_tokens` what is
    trained beyond them repeats.

    Raises:
        SpecError: budgets or tokens out of range, all at once.
        NoRunError: the budget pays for less than one parameter or one token.
        CannotTellError: the runs identify no law.
    """
    spending = Spending(
        flops=float(flops), inference_tokens=float(inference_tokens), unique_tokens=unique_tokens
    )
    fitted.require_area()
    if unique_tokens is not None:
        spending = dataclasses.replace(
            spending, unique_params=repeats.fitting_params(fitted, unique_tokens)
        )
    try:
        with np.errstate(all="ignore"):
            found = _allocate(fitted, spending)
    except OverflowError as error:
        raise no_number(fitted, f"a budget of {format_flops(spending.flops)} FLOPs") from error
    if not all(
        map(
            math.isfinite,
            (found.loss_nats, *(found.interval or ()), *found.flat_params, *found.flat_tokens),
        )
    ):
        raise no_number(fitted, f"a budget of {format_flops(spending.flops)} FLOPs")
    return found


def no_number(fitted: FittedRuns, what: str) -> CannotTellError:
    """The refusal of a question that a fit has no finite answer to."""
    return CannotTellError(
        (f"the fit is {fitted.status} and has no finite number for {what}", *fitted.fit.warnings)
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


def _allocate(fitted: FittedRuns, spending: Spending) -> Allocation:
    best = best_log_params(fitted, spending)
    params = exp_finite(best)
    tokens = tokens_at(spending, best)
    _check_run(fitted, spending, params, tokens)
    if not math.isfinite(expected_along(fitted, spending, best)):
        raise no_number(fitted, f"a budget of {format_flops(spending.flops)} FLOPs")
    counted = tuple(math.exp(float(x[0])) for x in spending.counted(np.array([best])))
    at = predict(fitted, counted[0], counted[1])
    extrapolation = 6 * params * tokens / fitted.span.six_nd[1]
    limit = None
    if spending.unique_tokens is not None:
        limit = DataLimit(
            unique_tokens=spending.unique_tokens,
            epochs=tokens / spending.unique_tokens,
            effective_tokens=at.tokens,
        )
    flat = range_within(fitted, spending, best, math.log1p(FLAT))
    n_interval, d_interval = _intervals(fitted, spending, best)
    warnings = at.warnings
    found = Allocation(
        flops=spending.flops,
        params=params,
        tokens=tokens,
        loss_nats=at.loss_nats,
        interval=at.interval,
        params_interval=n_interval,
        tokens_interval=d_interval,
        flat_params=(math.exp(flat[0]), math.exp(flat[1])),
        flat_tokens=(tokens_at(spending, flat[1]), tokens_at(spending, flat[0])),
        level=fitted.level,
        extrapolation=extrapolation,
        doubts=at.doubts + _ratio_doubts(tokens / params),
        warnings=warnings if limit is None else warnings + repeats.limit_warnings(limit),
        spending=spending,
        data_limit=limit,
    )
    return (
        found
        if found.size_determined
        else dataclasses.replace(found, warnings=(_NO_SIZE, *found.warnings))
    )


def _ratio_doubts(tokens_per_param: float) -> tuple[str, ...]:
    """Return the doubt about a best run that nobody would build."""
    least, most = USUAL_TOKENS_PER_PARAM
    if least <= tokens_per_param <= most:
        return ()
    warning = (
        f"{format_significant(tokens_per_param)} tokens per parameter: the best runs of published "
        "studies have "
        f"{least:g} to {most:g}. Check what the table's params and tokens count, and whether each "
        "row is a run that "
        "ended its schedule"
    )
    return (warning,)


def _intervals(
    fitted: FittedRuns, spending: Spending, best: float
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Return the intervals of N and D: of the runs' own minima, or of the draws' optima and how
    sizes' laws bend.
    """
    if not fitted.has_intervals:
        return None, None
    if fitted.optima is not None:
        there = predict_at(fitted.optima, spending.flops)
        assert there.params_interval is not None
        low, high = (best + math.log(end / there.params) for end in there.params_interval)
        low, high = min(low, spending.ceiling), min(high, spending.ceiling)
        return (exp_finite(low), exp_finite(high)), (
            tokens_at(spending, high),
            tokens_at(spending, low),
        )
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
    """An integer shape, and the tokens the budget pays for."""

    tokens: float
    loss_nats: float
    interval: tuple[float, float] | None


def exact_run(fitted: FittedRuns, allocation: Allocation, option: ShapeOption) -> ExactRun | None:
    """The run of `option` that the allocation's budget pays for, exactly counted; None when serving
    alone eats it.

    6 N leaves the attention out and counts an untied input embedding, a look-up, as a product: at
    long contexts and small widths it is far off. Training costs the shape's own FLOPs per token,
    serving a third of them. The loss is of the law at the shape's own N and these tokens; the law
    knows nothing of contexts or aspects.
    """
    spending = allocation.spending
    served = spending.inference_tokens * option.flops_per_token / 3
    tokens = (spending.flops - served) / option.flops_per_token
    if tokens < 1:
        return None
    logs = np.log(np.array([float(option.params), tokens]))
    n, d = spending.worth(logs[:1], logs[1:])
    at = predict(fitted, math.exp(float(n[0])), math.exp(float(d[0])))
    return ExactRun(tokens=tokens, loss_nats=at.loss_nats, interval=at.interval)
