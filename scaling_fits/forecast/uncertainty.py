"""A fit that knows what it does not know: laws pooled, refitted, weighed by hindcast, and wrong by what it says.

An interval is for one new run. It mixes the bootstrap refits of every law by weight (as uncertain as held-out
budgets leave them), and adds the error that all laws share, which grows with the extrapolation, and the noise of a
run. Where residuals show that no law fits everywhere, runs count by their nearness to the frontier (`laws.weights`).
What follows from a fit beside losses (parameters, exponents, sizes, costs) has its intervals here too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from proxies.core.notation import format_factor, format_percent
from scaling_fits.forecast import cloud, pooling
from scaling_fits.forecast.cloud import Cloud
from scaling_fits.forecast.conclusive import fit_doubts, reach_doubts
from scaling_fits.forecast.hindcast import Backtest, OnStep, hindcast, skip_step
from scaling_fits.forecast.pooling import Drift
from scaling_fits.laws import law
from scaling_fits.laws.forms import SHAPES, Form, FormChoice
from scaling_fits.laws.lack_of_fit import Trend, p_value
from scaling_fits.laws.law import (
    CannotTellError,
    FitStatus,
    LawError,
    LawFit,
    check_size,
    exp_finite,
    option_problems,
)
from scaling_fits.laws.solver import Floats
from scaling_fits.laws.table import DroppedRow, RunTable
from scaling_fits.laws.traps import listed
from scaling_fits.laws.weights import near_frontier

FORM_CHOICES = ("auto", *SHAPES)
Weighting = Literal["even", "near_frontier"]
FAR = 30.0  # times what was fitted; beyond, no back-test says how good intervals are
_FITTED, _REFITTED = 0.2, 0.45
"""Shares of the time that fitting takes, and fitting with refits; hold-outs take the rest (profile of 5,000 runs)."""
_NO_MISFIT = 0.1  # chance of residuals so smooth under a true law, above which all runs count alike


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedRange:
    """What the fitted runs reach."""

    num_runs: int
    params: tuple[float, float]
    """Smallest and largest N."""
    tokens: tuple[float, float]
    """Smallest and largest D."""
    six_nd: tuple[float, float]
    """Smallest and largest 6 * N * D, whatever FLOPs the table counts."""
    best_loss_nats: float
    flops_given: bool
    """Whether the rungs go by the table's own FLOPs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedRuns:
    """Everything `predict` and `allocate` need; the runs themselves stay behind."""

    form: FormChoice
    members: tuple[LawFit, ...]
    """One fit per law, with its draws."""
    weights: tuple[float, ...]
    """Of the members, adding up to 1; all 0 when nothing is identified."""
    cloud: Cloud
    """Draws beside those of the members: weights, the laws' common error, the noise of a run."""
    inflation: float
    """Factor on both arms of an interval of something else than a loss, from hindcasts."""
    weighting: Weighting
    """How the runs were weighed, beside their own weights; even also where too few runs were left to weigh any less."""
    bootstrap: int
    """Refits per member."""
    level: float
    seed: int
    span: FittedRange
    backtest: Backtest | None
    dropped: tuple[DroppedRow, ...]
    warnings: tuple[str, ...]
    drift: Drift | None = None
    """The error of larger runs that goes one way; None where nothing is identified."""
    trend: Trend | None = None
    """Among the largest runs; None where they are too few to tell."""
    record_scale: float = 1.0
    """Factor on both arms of the interval of a loss, in logs, from what became of earlier forecasts
    (`scaling_fits.forecast.conclusive`)."""

    @property
    def heaviest(self) -> LawFit:
        """The member of the largest weight, the first of equals."""
        return self.members[int(np.argmax(self.weights))]

    @property
    def size_weights(self) -> tuple[float, ...]:
        """Weights of the laws that choose a size. One without an irreducible loss lays it far off: beside others, none.

        On public isoFLOP families the best size at 3 to 30 times the fitted FLOPs is missed by 0.1 to 0.3 in log N by
        laws with a floor, and by 1.3 by the one without (medians; `benchmarks/best_sizes.py`).
        """
        floored = [weight * fit.has_floor for fit, weight in zip(self.members, self.weights, strict=True)]
        total = sum(floored)
        return tuple(weight / total for weight in floored) if total > 0 else self.weights

    @property
    def chooser(self) -> LawFit:
        """The heaviest of the laws that choose a size."""
        return self.members[int(np.argmax(self.size_weights))]

    @property
    def status(self) -> FitStatus:
        """The heaviest member's."""
        return self.heaviest.status

    @property
    def has_draws(self) -> bool:
        """Whether intervals can be given."""
        return any(len(fit.draws) for fit, weight in zip(self.members, self.weights, strict=True) if weight > 0)

    def require(self) -> None:
        """Refuse to continue without an identified law.

        Raises:
            CannotTellError: with the reasons.
        """
        if self.status == "unidentified":
            raise CannotTellError(self.warnings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The loss of one new run."""

    params: float
    tokens: float
    flops: float
    """6 * N * D."""
    loss_nats: float
    low: float | None
    """Ends of the interval; None without a bootstrap."""
    high: float | None
    level: float
    extrapolation: float
    """6ND over the largest 6ND fitted."""
    doubts: tuple[str, ...] = ()
    """Why the forecast is inconclusive (`scaling_fits.forecast.conclusive`)."""
    warnings: tuple[str, ...] = ()

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def fit_runs(
    table: RunTable,
    form: FormChoice = "auto",
    bootstrap: int = 400,
    level: float = 0.9,
    seed: int = 0,
    on_step: OnStep = skip_step,
) -> FittedRuns:
    """Fit, refit, weigh and stretch. `auto` pools every form the runs can carry.

    Args:
        table: The runs.
        form: A law, or `auto`.
        bootstrap: Refits behind the intervals; 0: none.
        level: Level of the intervals.
        seed: Seed of the refits.
        on_step: Called with the name of each step, and the share of all work before it.

    Raises:
        LawError: an unknown form, a negative number of refits or seed, or a level outside (0, 1).
    """
    problems = [] if form in FORM_CHOICES else [f"form = {form!r}: must be one of {', '.join(FORM_CHOICES)}"]
    if problems := problems + option_problems(bootstrap, level, seed):
        raise LawError("; ".join(problems))
    table = table.distinct()
    forms: tuple[Form, ...] = tuple(SHAPES) if form == "auto" else (form,)
    on_step("fitting", 0.0)
    members = tuple(law.fit_law(table, each) for each in forms)
    near = form == "auto" and _misfit(table, members)
    weighed = table
    if near:
        weighed = near_frontier(table)
        near = bool((weighed.weight != table.weight).any())
        members = tuple(law.fit_law(weighed, each) for each in forms)
    on_step("refitting", _FITTED)
    if members[0].identified:
        members = tuple(cloud.with_draws(weighed, fit, bootstrap, seed) for fit in members)

    def on_cut(name: str, share: float) -> None:
        on_step(name, _REFITTED + (1 - _REFITTED) * share)

    return _pooled(table, form, members, near=near, bootstrap=bootstrap, level=level, seed=seed, on_step=on_cut)


def _misfit(table: RunTable, members: tuple[LawFit, ...]) -> bool:
    """Whether the residuals of every law with an irreducible loss are too smooth to be noise."""
    bounded = [fit for fit in members if fit.identified and fit.has_floor]
    return bool(bounded) and max(p_value(table, fit) for fit in bounded) < _NO_MISFIT


def _pooled(
    table: RunTable, form: FormChoice, members: tuple[LawFit, ...], *, near: bool, bootstrap: int, level: float,
    seed: int, on_step: OnStep,
) -> FittedRuns:  # fmt: skip
    """The members with what hindcasts say of them. Without the first law there are no numbers at all."""
    known = [index for index, fit in enumerate(members) if fit.identified and members[0].identified]
    weights = np.zeros(len(members))
    weights_SM = np.zeros((bootstrap if known else 0, len(members)))
    misfit_S = noise_S = np.zeros(0)
    drift, trend, drift_S = None, None, np.zeros(0)
    inflation, backtest, warnings = 1.0, None, table.warnings + tuple(w for fit in members for w in fit.warnings)
    if known:
        fits = tuple(members[index] for index in known)
        learned = hindcast(table, fits, near=near, num_draws=bootstrap, level=level, seed=seed, on_step=on_step)
        weights[known], weights_SM[:, known] = learned.pool.weights, learned.pool.weight_draws
        misfit_S, noise_S = learned.pool.misfit_draws, cloud.noise_draws(fits, bootstrap, seed)
        drift, trend, drift_S = learned.pool.drift, learned.trend, learned.pool.drift_draws
        inflation, backtest, warnings = learned.inflation, learned.backtest, warnings + learned.warnings
        warnings += _outliers_said(table, members[int(np.argmax(weights))])
    return FittedRuns(
        form=form,
        members=members,
        weights=tuple(weights.tolist()),
        cloud=Cloud(weight_draws=weights_SM, misfit_draws=misfit_S, noise_draws=noise_S, drift_draws=drift_S),
        inflation=inflation,
        weighting="near_frontier" if near else "even",
        bootstrap=bootstrap,
        level=level,
        seed=seed,
        span=_span(table),
        backtest=backtest,
        dropped=table.dropped,
        warnings=warnings,
        drift=drift,
        trend=trend,
    )


def _outliers_said(table: RunTable, fit: LawFit) -> tuple[str, ...]:
    """The runs that are off the heaviest law by more than noise, by name."""
    if not fit.outliers:
        return ()
    places = np.array(fit.outliers)
    missed = np.log(table.loss) - law.log_loss(fit.theta[None, :], table.params, table.tokens)[0]
    places = places[np.argsort(-np.abs(missed[places]))]
    named = listed([table.name(place) for place in places])
    text = (
        f"{named} {'is' if len(places) == 1 else 'are'} off the {fit.form} law by more than noise explains (the "
        f"furthest by {format_percent(math.expm1(missed[places[0]]), is_signed=True)} in loss): the fit gives these "
        "runs little weight, intervals use the noise of the others; check that they were trained like the others"
    )
    return (text,)


def _span(table: RunTable) -> FittedRange:
    six_nd = 6.0 * table.params * table.tokens

    def reach(column: Floats) -> tuple[float, float]:
        return float(column.min()), float(column.max())

    return FittedRange(
        num_runs=table.num_runs,
        params=reach(table.params),
        tokens=reach(table.tokens),
        six_nd=reach(six_nd),
        best_loss_nats=float(table.loss.min()),
        flops_given=table.flops_given,
    )


def expected_log_loss(fitted: FittedRuns, params: Floats, tokens: Floats) -> Floats:
    """The pool's log loss at each (N, D), less the drift that larger runs showed (R,)."""
    pooled = cloud.pooled_log_loss(fitted.members, fitted.weights, params, tokens)
    if fitted.drift is None:
        return pooled
    return pooled - fitted.drift.applied * pooling.beyond(_flops_beyond(fitted.span, params, tokens))


def predict(fitted: FittedRuns, params: float, tokens: float) -> Prediction:
    """Loss of one new run of `params` parameters on `tokens` tokens.

    Raises:
        LawError: what is no size of a run.
        CannotTellError: the runs identify no law.
    """
    check_size(params=params, tokens=tokens)
    fitted.require()
    n, d = np.array([float(params)]), np.array([float(tokens)])
    beyond = _beyond(fitted.span, n, d)
    centre = float(expected_log_loss(fitted, n, d)[0])
    low = high = None
    if fitted.has_draws:
        log_best = math.log(fitted.span.best_loss_nats)
        ends = cloud.new_run_quantiles(
            fitted.members, fitted.cloud, n, d, np.max(list(beyond.values()), axis=0), log_best, fitted.level,
            beyond_R=pooling.beyond(beyond["FLOPs"]), doubt_R=_trend_doubt(fitted.trend, n, d),
        )  # fmt: skip
        low, high = (exp_finite(centre + fitted.record_scale * (float(end[0]) - centre)) for end in ends)
    extrapolation = float(beyond["FLOPs"][0])
    interval = None if low is None or high is None else (low, high)
    return Prediction(
        params=float(params),
        tokens=float(tokens),
        flops=6.0 * float(params) * float(tokens),
        loss_nats=math.exp(centre),
        low=low,
        high=high,
        level=fitted.level,
        extrapolation=extrapolation,
        doubts=fit_doubts(fitted) + reach_doubts(math.exp(centre), interval, extrapolation),
        warnings=tuple(
            f"{name} lie {format_factor(times[0])} times beyond the fitted runs: intervals were back-tested up to "
            f"{FAR:g} times"
            for name, times in beyond.items()
            if times[0] > FAR
        ),
    )


def _trend_doubt(found: Trend | None, params: Floats, tokens: Floats) -> Floats | float:
    """Sd of log loss for larger runs doing worse than the law: the next need not, or may do worse still."""
    if found is None or found.slope <= 0:
        return 0.0
    return found.size * np.log(np.maximum(6.0 * params * tokens / found.from_flops, 1.0))


def reach_of(fitted: FittedRuns, params: Floats, tokens: Floats) -> Floats:
    """How far runs lie beyond what was fitted: in FLOPs, or in N or D alone where that is further."""
    return pooling.reach(np.max(list(_beyond(fitted.span, params, tokens).values()), axis=0))


def _flops_beyond(span: FittedRange, params: Floats, tokens: Floats) -> Floats:
    return 6.0 * params * tokens / span.six_nd[1]


def _beyond(span: FittedRange, params: Floats, tokens: Floats) -> dict[str, Floats]:
    """Factors by which runs lie outside what was fitted, by what they are outside of."""
    return {
        "FLOPs": _flops_beyond(span, params, tokens),
        "params": np.maximum(params / span.params[1], span.params[0] / params),
        "tokens": np.maximum(tokens / span.tokens[1], span.tokens[0] / tokens),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A value with its interval, None without a bootstrap."""

    value: float
    interval: tuple[float, float] | None


def exponents(fitted: FittedRuns) -> tuple[Interval, Interval]:
    """How the optimum grows with compute: the powers of C that N* and D* go as, with intervals.

    Values are those of the heaviest law that chooses sizes, intervals over the refits of all that do, by weight. The
    arms are lengthened as hindcasts ask, and end at 0 and 1: both terms fall, so N* and D* both grow.

    Raises:
        CannotTellError: the runs identify no law.
    """
    fitted.require()
    alpha, beta = fitted.chooser.theta[3:5]
    value, ends = float(beta / (alpha + beta)), None
    weighed = zip(fitted.members, fitted.size_weights, strict=True)
    if kept := [(fit.draws, weight) for fit, weight in weighed if weight > 0 and len(fit.draws)]:
        shares = np.concatenate([draws[:, 4] / (draws[:, 3] + draws[:, 4]) for draws, _ in kept])
        mass = np.concatenate([np.full(len(draws), weight / len(draws)) for draws, weight in kept])
        tail = (1 - fitted.level) / 2
        order = np.argsort(shares, kind="stable")
        below = np.cumsum(mass[order]) / mass.sum()
        places = (min(int((below < share).sum()), len(shares) - 1) for share in (tail, 1 - tail))
        low, high = (float(shares[order[place]]) for place in places)
        arms = (fitted.inflation * max(arm, 0.0) for arm in (value - low, high - value))
        ends = max(value - next(arms), 0.0), min(value + next(arms), 1.0)
    tokens = None if ends is None else (1 - ends[1], 1 - ends[0])
    return Interval(value=value, interval=ends), Interval(value=1 - value, interval=tokens)


def draw_intervals(fitted: FittedRuns) -> dict[str, tuple[float, float]] | None:
    """Percentile intervals of the heaviest member's parameters over its refits; None without any.

    They say how far the runs pin down this law's numbers, and so are not stretched for the law being wrong.
    """
    fit = fitted.heaviest
    if len(fit.draws) == 0:
        return None
    tail = (1 - fitted.level) / 2
    ends = {name: np.quantile(values, [tail, 1 - tail]) for name, values in fit.named(fit.draws).items()}
    return {name: (float(low), float(high)) for name, (low, high) in ends.items()}
