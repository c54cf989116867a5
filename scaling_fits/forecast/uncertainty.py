"""The fit of a study's runs, the forecast of a new run, and intervals of all results of the fit.

`auto` draws laws from the posterior of `forecast.posterior`: the runs, with published studies as
the prior. A form that a user chooses is fitted as it was published, with bootstrap refits as its
draws. In both cases the interval of a loss is for one new run. It includes the draws, the law's
error beyond its runs, and the noise of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forerun._proxies.core.notation import (
    format_count,
    format_factor,
    format_percent,
    format_significant,
)
from forerun._scaling_fits.forecast.backtest import (
    Backtest,
    OnStep,
    find_nearest_backtest,
    run_backtests,
)
from forerun._scaling_fits.forecast.conclusive import (
    MAX_LOSS_NATS,
    list_fit_doubts,
    list_reach_doubts,
)
from forerun._scaling_fits.forecast.path import MAX_OFF, LadderPath, find_path
from forerun._scaling_fits.forecast.posterior import LawPosterior, fit_posterior
from forerun._scaling_fits.forecast.refits import fit_form
from forerun._scaling_fits.laws import law, solver
from forerun._scaling_fits.laws.forms import FORMS, FormChoice
from forerun._scaling_fits.laws.law import (
    CannotTellError,
    FitStatus,
    LawError,
    LawFit,
    check_size,
    compute_finite_exp,
    list_option_problems,
)
from forerun._scaling_fits.laws.solver import Floats
from forerun._scaling_fits.laws.table import DroppedRow, RunTable
from forerun._scaling_fits.laws.traps import format_names
from forerun._scaling_fits.laws.weights import count_effective_runs, find_outliers
from forerun._scaling_fits.optima.isoflop import fit_isoflop
from forerun._scaling_fits.optima.optima_fit import ComputeFit, OptimaError

FORM_CHOICES = ("auto", "compute", *FORMS)
MIN_DRAWS = 200
"""Minimum number of draws of a forecast, also if no interval is requested."""
FAR = 100.0
"""Extrapolation, in multiples of the fitted range, beyond which the quality of intervals was not
back-tested."""
MAX_NOISE = 0.1
"""Scatter of log loss about a law above which the law explains nothing."""
_BACKTEST_DRAWS = 100
_MIN_GROWTH = 0.01
"""Growth of log loss over a table that triggers a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedRange:
    """The range of the fitted runs."""

    num_runs: int
    params: tuple[float, float]
    """Smallest and largest N."""
    tokens: tuple[float, float]
    """Smallest and largest D."""
    six_nd: tuple[float, float]
    """Smallest and largest 6 * N * D, whatever FLOPs the table counts."""
    best_loss_nats: float
    flops_given: bool
    """Whether the rungs are grouped by the table's own FLOPs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedRuns:
    """The fit of a study's runs: the input of `predict` and `allocate`."""

    form: FormChoice
    fit: LawFit
    """The law: the most probable one for `auto`, or the fit of the chosen form."""
    posterior: LawPosterior | None
    """Draws of the law; None if the runs identify no law."""
    path: LadderPath | None
    """The line that all runs lie on; None if they spread over an area."""
    optima: ComputeFit | None
    """Best sizes of the runs' own budgets and their law; None if the runs do not have enough
    isoFLOP minima."""
    bootstrap: int
    """Number of draws for the intervals; 0 for no intervals."""
    level: float
    seed: int
    span: FittedRange
    backtests: tuple[Backtest, ...]
    """Back-tests by distance, the nearest first."""
    dropped: tuple[DroppedRow, ...]
    warnings: tuple[str, ...]
    record_scale: float = 1.0
    """Factor on both sides of the interval of a loss, in logs, from the outcomes of earlier
    forecasts (`forerun._scaling_fits.forecast.conclusive`)."""

    @property
    def status(self) -> FitStatus:
        """The law's status."""
        return self.fit.status

    @property
    def has_intervals(self) -> bool:
        """Whether intervals can be given."""
        return self.bootstrap > 0 and self.posterior is not None

    @property
    def laws(self) -> Floats:
        """Draws of the law in the coordinates of `laws.solver` (S, P).

        Raises:
            CannotTellError: The runs identify no law.
        """
        return self.require().theta

    @property
    def backtest(self) -> Backtest | None:
        """The back-test of the largest rung; None if too few runs are left without it."""
        return self.backtests[0] if self.backtests else None

    def require(self) -> LawPosterior:
        """Return the posterior of the law.

        Raises:
            CannotTellError: The runs identify no law.
        """
        if self.posterior is None:
            raise CannotTellError(self.warnings)
        return self.posterior

    def require_area(self) -> LawPosterior:
        """Return the posterior of the law of N and D.

        Raises:
            CannotTellError: The runs identify no law, or only one along their line.
        """
        posterior = self.require()
        if self.path is not None:
            reason = (
                f"{self.path.describe()}: they tell how loss falls along that line, not which size "
                "is best; add runs of other sizes at the same FLOPs"
            )
            raise CannotTellError((reason,))
        return posterior


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The predicted loss of one new run, with its interval."""

    params: float
    tokens: float
    flops: float
    """6 * N * D."""
    loss_nats: float
    low: float | None
    """Lower end of the interval in nats; like `high`, None without a bootstrap."""
    high: float | None
    level: float
    extrapolation: float
    """Ratio of 6ND to the largest fitted 6ND."""
    doubts: tuple[str, ...] = ()
    """Reasons why the forecast is inconclusive (`forerun._scaling_fits.forecast.conclusive`)."""
    warnings: tuple[str, ...] = ()

    @property
    def interval(self) -> Ends:
        """Both ends of the interval in nats; None without a bootstrap."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def fit_runs(
    table: RunTable,
    form: FormChoice = "auto",
    bootstrap: int = 400,
    level: float = 0.9,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> FittedRuns:
    """Fit a law to the runs of one study and test it on held-out budgets.

    Args:
        table: The runs.
        form: A law; `auto` for the posterior of a law with published studies as the prior;
            `compute` for the same with runs along one line.
        bootstrap: Number of draws for the intervals; 0 for no intervals.
        level: Level of the intervals.
        seed: Seed of the draws.
        on_step: Callback with the name of each step, and the share of all work before it.

    Raises:
        LawError: The form is unknown, the number of draws or the seed is negative, or the level is
            out of range.
    """
    _check_options(form, bootstrap, level, seed)
    table = table.drop_repeats()
    report_step = on_step or (lambda name, share: None)
    report_step("fitting", 0.0)
    path = find_path(table)
    fit, posterior = _fit_part(table, form, max(bootstrap, MIN_DRAWS), seed)
    backtests: tuple[Backtest, ...] = ()
    warnings = table.warnings + fit.warnings
    if posterior is not None:
        backtests = run_backtests(
            table,
            lambda part: _fit_part(part, form, _BACKTEST_DRAWS, seed)[1],
            level=level,
            has_intervals=bootstrap > 0,
            on_step=lambda name, share: report_step(name, 0.3 + 0.7 * share),
        )
        warnings += _describe_outliers(table, fit)
        if not backtests:
            warnings += ("no back-test: without the largest rung too few runs are left",)
    return FittedRuns(
        form=form,
        fit=fit,
        posterior=posterior,
        path=path if form in ("auto", "compute") else None,
        optima=_fit_optima(table, bootstrap, level, seed)
        if form == "auto" and path is None
        else None,
        bootstrap=bootstrap,
        level=level,
        seed=seed,
        span=_compute_range(table),
        backtests=backtests,
        dropped=table.dropped,
        warnings=warnings,
    )


def _check_options(form: FormChoice, bootstrap: int, level: float, seed: int) -> None:
    """Check the options of a fit.

    Raises:
        LawError: Some are invalid; all problems are listed.
    """
    problems = list_option_problems(bootstrap, level, seed)
    if form not in FORM_CHOICES:
        problems = [f"form = {form!r}: must be one of {', '.join(FORM_CHOICES)}", *problems]
    if problems:
        raise LawError("; ".join(problems))


def _fit_part(
    table: RunTable, form: FormChoice, num_draws: int, seed: int
) -> tuple[LawFit, LawPosterior | None]:
    """Fit all runs of a study, or those below a cut; the posterior is None if they identify no
    law.
    """
    if form not in ("auto", "compute"):
        return fit_form(table, form, num_draws, seed)
    reasons = law.list_forecast_obstacles(table)
    if form == "compute" and not reasons and find_path(table) is None:
        reasons = ("form compute needs runs on one line in N and D, and these spread over an area",)
    if reasons:
        return law.build_unidentified_fit(table, "coupled", reasons), None
    posterior = fit_posterior(table, num_draws=num_draws, seed=seed)
    return _build_law_fit(table, posterior), posterior


def _fit_optima(table: RunTable, bootstrap: int, level: float, seed: int) -> ComputeFit | None:
    """Return the law of the best sizes of isoFLOP budgets, with FLOPs of 6 N D; None if the runs do
    not identify one.
    """
    try:
        optima = fit_isoflop(table, bootstrap=bootstrap, level=level, seed=seed, flops_from="6nd")
    except OptimaError:
        return None
    return optima if optima.status == "converged" else None


def _build_law_fit(table: RunTable, posterior: LawPosterior) -> LawFit:
    """Return the most probable law, with warnings for the reader."""
    residual = (
        np.log(table.loss)
        - law.compute_log_loss(posterior.mode[None, :], table.params, table.tokens)[0]
    )
    warnings = _describe_nonsense(table, posterior)
    is_outlier = find_outliers(
        posterior.left_out, solver.NUM_COORDINATES, table.num_runs - solver.NUM_COORDINATES
    )
    return LawFit(
        form="coupled",
        status="degenerate" if warnings else "converged",
        theta=posterior.mode,
        objective=float((table.weight * solver.compute_huber(residual[None, :])[0]).sum()),
        residual_sd=posterior.noise_sd,
        num_runs=table.num_runs,
        num_effective_runs=count_effective_runs(table.weight),
        warnings=warnings,
        outliers=tuple(np.flatnonzero(is_outlier).tolist())
        if len(is_outlier) == table.num_runs
        else (),
    )


def _describe_nonsense(table: RunTable, posterior: LawPosterior) -> tuple[str, ...]:
    """Return the reasons why no law describes these losses; empty if one can."""
    high = table.loss[table.loss > MAX_LOSS_NATS]
    if 2 * len(high) > table.num_runs:
        ends = " to ".join(
            format_significant(end) for end in (float(table.loss.min()), float(table.loss.max()))
        )
        reason = (
            f"values of {ends} are no losses in nats per token: most are above {MAX_LOSS_NATS:g}, "
            "the loss of a uniform guess among 163,000 tokens; check the column: it may be an "
            "accuracy, a percentage, or a perplexity (take its log)"
        )
        return (reason,)
    warnings = []
    n, d = np.log(table.params), np.log(table.tokens)
    columns = {"6 N D": n + d} if find_path(table) else {"parameters": n, "tokens": d}
    logs = np.stack([np.ones(table.num_runs), *columns.values()], axis=1)
    slopes = np.linalg.lstsq(logs, np.log(table.loss), rcond=None)[0][1:]
    for (name, column), slope in zip(columns.items(), slopes, strict=True):
        growth = float(slope * np.ptp(column))
        if growth > max(3 * posterior.noise_sd, _MIN_GROWTH):
            warnings.append(
                f"losses grow with {name} (by {format_percent(math.expm1(growth))} over the "
                "table): a law of loss falls; check the columns, and whether every run was tuned "
                "and ended its schedule"
            )
    if posterior.noise_sd > MAX_NOISE:
        warnings.append(
            f"runs scatter about the law by {format_percent(posterior.noise_sd)} of the loss: no "
            "law describes these values; check that the column is a loss in nats per token"
        )
    return tuple(warnings)


def _describe_outliers(table: RunTable, fit: LawFit) -> tuple[str, ...]:
    """Return a warning that names the runs that are off the law by more than noise."""
    if not fit.outliers:
        return ()
    places = np.array(fit.outliers)
    residuals = (
        np.log(table.loss) - law.compute_log_loss(fit.theta[None, :], table.params, table.tokens)[0]
    )
    places = places[np.argsort(-np.abs(residuals[places]))]
    names = format_names([table.name_run(place) for place in places])
    text = (
        f"{names} {'is' if len(places) == 1 else 'are'} off the {fit.form} law by more than noise "
        "explains (the furthest by "
        f"{format_percent(math.expm1(residuals[places[0]]), is_signed=True)} in loss): the fit "
        "gives these runs little weight, and intervals use the noise of the others; check that "
        "they were trained like the others"
    )
    return (text,)


def _compute_range(table: RunTable) -> FittedRange:
    columns = (table.params, table.tokens, 6.0 * table.params * table.tokens)
    params, tokens, flops = ((float(column.min()), float(column.max())) for column in columns)
    return FittedRange(
        num_runs=table.num_runs,
        params=params,
        tokens=tokens,
        six_nd=flops,
        best_loss_nats=float(table.loss.min()),
        flops_given=table.flops_given,
    )


def compute_expected_log_loss(fitted: FittedRuns, params: Floats, tokens: Floats) -> Floats:
    """Return the mean over draws of the law's log loss at each (N, D), shape (T,), without the
    departure from the law.
    """
    return law.compute_log_loss(fitted.laws, params, tokens).mean(axis=0)


def predict(fitted: FittedRuns, params: float, tokens: float) -> Prediction:
    """Predict the loss of one new run of `params` parameters on `tokens` tokens.

    Raises:
        LawError: Parameters or tokens are not a valid size of a run.
        CannotTellError: The runs identify no law, or none at this ratio of tokens to parameters.
    """
    check_size(params=params, tokens=tokens)
    posterior = fitted.require()
    _check_path(fitted, params, tokens)
    tail = (1 - fitted.level) / 2
    n, d = np.array([float(params)]), np.array([float(tokens)])
    quantiles = posterior.compute_quantiles(n, d, (0.5, tail, 1 - tail))
    middle, *ends = (float(quantile[0]) for quantile in quantiles)
    low = high = None
    if fitted.has_intervals:
        low, high = (
            compute_finite_exp(middle + fitted.record_scale * (end - middle)) for end in ends
        )
    beyond = _compute_extrapolations(fitted.span, float(params), float(tokens))
    extrapolation = beyond["FLOPs"]
    interval = None if low is None or high is None else (low, high)
    loss = compute_finite_exp(middle)
    backtest = find_nearest_backtest(fitted.backtests, extrapolation)
    return Prediction(
        params=float(params),
        tokens=float(tokens),
        flops=6.0 * float(params) * float(tokens),
        loss_nats=loss,
        low=low,
        high=high,
        level=fitted.level,
        extrapolation=extrapolation,
        doubts=list_fit_doubts(fitted, backtest) + list_reach_doubts(loss, interval, extrapolation),
        warnings=tuple(
            f"{name} lie {format_factor(times)} times beyond the fitted runs: intervals were "
            f"back-tested up to {FAR:g} times"
            for name, times in beyond.items()
            if times > FAR
        ),
    )


def _check_path(fitted: FittedRuns, params: float, tokens: float) -> None:
    """Check that a question lies near the line that all runs lie on.

    Raises:
        CannotTellError: It does not; the error says what the runs have in common.
    """
    if fitted.path is None:
        return
    distance = fitted.path.compute_distance(params, tokens)
    if distance <= MAX_OFF:
        return
    off, most = (math.exp(math.sqrt(2) * logs) for logs in (distance, MAX_OFF))
    reason = (
        f"{fitted.path.describe()}, and a run of {format_count(params)} parameters on "
        f"{format_count(tokens)} tokens lies off that line by a factor of {off:.2g} (at most "
        f"{most:.2g}): add runs of other tokens per parameter"
    )
    raise CannotTellError((reason,))


def _compute_extrapolations(span: FittedRange, params: float, tokens: float) -> dict[str, float]:
    """Return the factors by which a run lies outside the fitted range, by quantity."""
    return {
        "FLOPs": 6.0 * params * tokens / span.six_nd[1],
        "params": max(params / span.params[1], span.params[0] / params),
        "tokens": max(tokens / span.tokens[1], span.tokens[0] / tokens),
    }


Ends = tuple[float, float] | None
"""Both ends of an interval; None without a bootstrap."""


def compute_exponents(fitted: FittedRuns) -> tuple[tuple[float, Ends], tuple[float, Ends]]:
    """Return the exponents of C with which N* and D* grow, each with its interval.

    Raises:
        CannotTellError: The runs identify no law, or only one along a line.
    """
    fitted.require_area()
    shares_S = fitted.laws[:, 4] / (fitted.laws[:, 3] + fitted.laws[:, 4])
    alpha, beta = fitted.fit.theta[3:5]
    share = float(beta / (alpha + beta))
    return (
        (share, _compute_interval(fitted, shares_S)),
        (1 - share, _compute_interval(fitted, 1 - shares_S)),
    )


def draw_intervals(fitted: FittedRuns) -> dict[str, tuple[float, float]] | None:
    """Return intervals of the law's parameters over its draws; None without any."""
    if not fitted.has_intervals:
        return None
    values = (
        fitted.path.compute_parameters(fitted.laws)
        if fitted.path
        else fitted.fit.name_parameters(fitted.laws)
    )
    ends = {name: _compute_interval(fitted, draws) for name, draws in values.items()}
    return {name: interval for name, interval in ends.items() if interval is not None}


def _compute_interval(fitted: FittedRuns, values_S: Floats) -> Ends:
    """Return the central interval of draws at the fit's level; None without intervals."""
    if not fitted.has_intervals:
        return None
    tail = (1 - fitted.level) / 2
    low, high = np.quantile(values_S, [tail, 1 - tail])
    return float(low), float(high)
