"""Scaling laws of loss in nats as a function of parameters N and tokens D.

A law has a form (`forms`). It is fitted by minimizing the sum over runs of weight * Huber (delta
1e-3) of log-loss residuals in log-sum-exp form (arXiv 2203.15556, section D.1).

A fit that the runs do not determine is not an error but a status with reasons: `unidentified`
(the fit has no numbers), `at_bound` (the optimum lies at a bound of the search), `degenerate` (the
optimum is unlike any known law).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forerun._proxies.core.errors import ExitCode, InputError
from forerun._proxies.core.notation import format_counted
from forerun._scaling_fits.laws import search, solver
from forerun._scaling_fits.laws.forms import FORMS, MIN_POINTS, Form, FormSpec
from forerun._scaling_fits.laws.solver import Floats, Origin, Points
from forerun._scaling_fits.laws.table import RunTable
from forerun._scaling_fits.laws.weights import count_effective_runs, find_outliers

FitStatus = Literal["converged", "at_bound", "degenerate", "unidentified"]
LARGEST = 1e20  # Maximum number of parameters, and of tokens, of a run
MAX_BOOTSTRAP = 100_000
NEXT_RUNG = 1.25
"""Minimum factor in FLOPs by which a new run lies beyond the fitted ones. A run within their range
counts as this far away too, so that the error of a law beyond its runs is never 0."""

_NUM_STARTS = 12
_STEEPEST = 2.0  # The largest published k * alpha or k * beta is 1.1
_MIN_SPREAD = 0.02  # A spread of 2 % in N or D about the common line is rounding, not a design
_ONE_BUDGET = 1.05  # Ratio of the largest to the smallest FLOPs of runs at one budget
# Condition number of a Jacobian at which some mixture of parameters does not change any loss
_LOOSE_CONDITION = 1e6
_SAME_LOSS = 1e-9  # Spread of log losses that is rounding
_LOOSE_REASON = (
    "other parameters fit these runs as well: too few different sizes or token counts to tell the "
    "terms apart"
)


class LawError(InputError):
    """A question that no law answers: an unknown form, or a size that is not positive."""


class CannotTellError(InputError):
    """The runs identify no law, so there are no numbers. `reasons` says why, and which runs to
    add.
    """

    exit_code = ExitCode.CANNOT_TELL

    def __init__(self, reasons: tuple[str, ...]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


def compute_finite_exp(value: float) -> float:
    """Compute exp, clipped to a finite number, so that a record can store an unbounded end."""
    return math.exp(min(max(value, -700.0), 700.0))


def check_size(**values: float) -> None:
    """Check that values are valid sizes of a run.

    Raises:
        LawError: Some are not; all of them are named.
    """
    problems = [
        f"{name} = {value:g}: must be a number from 1 to {LARGEST:g}"
        for name, value in values.items()
        if not 1 <= value <= LARGEST
    ]
    if problems:
        raise LawError("; ".join(problems))


def list_option_problems(bootstrap: int, level: float, seed: int) -> list[str]:
    """Return the problems of the options that every fit takes."""
    problems = []
    if not 0 <= bootstrap <= MAX_BOOTSTRAP:
        problems.append(f"bootstrap = {bootstrap}: must be from 0 to {MAX_BOOTSTRAP} refits")
    if not 0.01 <= level <= 0.999:
        problems.append(f"level = {level}: must be a number from 0.01 to 0.999")
    if seed < 0:
        problems.append(f"seed = {seed}: must be a whole number, at least 0")
    return problems


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LawFit:
    """A law of one form, fitted to one table."""

    form: Form
    status: FitStatus
    theta: Floats
    """Coordinates (log E, log A, log B, alpha, beta, k) for every form; empty if unidentified."""
    objective: float | None
    """Sum over runs of weight * Huber; None if unidentified."""
    residual_sd: float | None
    """Standard deviation of log-loss residuals without outliers, corrected for the degrees of
    freedom of the parameters."""
    num_runs: int
    num_effective_runs: float
    """Equivalent number of runs of equal weight; smaller than `num_runs` if some runs have little
    weight."""
    warnings: tuple[str, ...] = ()
    outliers: tuple[int, ...] = ()
    """Indices in the table of runs that are too far off this law to be noise. They are fitted, but
    not counted in the noise."""
    num_unconverged: int = 0
    """Number of bootstrap refits whose search stopped before it converged. They are kept."""

    @property
    def identified(self) -> bool:
        """Whether the fit has numbers."""
        return self.status != "unidentified"

    @property
    def degrees_of_freedom(self) -> float:
        """Effective runs beyond the number of parameters, at least 1."""
        return _count_free(self.num_effective_runs, self.form)

    @property
    def parameters(self) -> dict[str, float]:
        """Values of the parameters by name, E in nats; empty if unidentified."""
        return {
            name: float(values[0])
            for name, values in self.name_parameters(self.theta[None, :]).items()
        }

    def name_parameters(self, theta_MP: Floats) -> dict[str, Floats]:
        """Return the values (M,) of the form's own parameters by name, from rows of theta. The
        result is empty if the fit is unidentified.
        """
        return FORMS[self.form].name_parameters(theta_MP) if self.identified else {}


def compute_log_loss(theta_MP: Floats, params: Floats, tokens: Floats) -> Floats:
    """Compute the log of the loss in nats that each row of `theta_MP` predicts for each run (M,
    R).
    """
    return solver.compute_log_loss(theta_MP, np.log(params), np.log(tokens))


def find_log_best_params(theta: Floats, log_nd: Floats | float) -> Floats:
    """Compute log N* of each law at a given N * D (arXiv 2203.15556, section 3.3). k does not
    affect N*.

    The last axis of `theta` has the coordinates. `theta` is (P,) with `log_nd` (R,), or (M, P) with
    a number.
    """
    a, b, alpha, beta = (theta[..., i] for i in (1, 2, 3, 4))
    return (np.log(alpha / beta) + a - b + beta * log_nd) / (alpha + beta)


def list_identification_problems(table: RunTable, form: Form) -> tuple[str, ...]:
    """Return the reasons why these runs do not identify this law; empty if they do."""
    num_parameters = FORMS[form].num_free
    parameters = f"the {format_counted(num_parameters, 'parameter')} of {form}"
    reasons: list[str] = []
    if table.num_runs <= num_parameters:
        reasons.append(
            f"{format_counted(table.num_runs, 'run')} for {parameters}: there must be at least "
            f"{num_parameters + 1}"
        )
    num_places = table.num_places
    if num_places < num_parameters < table.num_runs:
        reasons.append(
            f"{format_counted(num_places, 'different pair')} of size and tokens for "
            f"{parameters}: add others"
        )
    logs = np.stack([np.log(table.params), np.log(table.tokens)])
    centered = logs - logs.mean(axis=1, keepdims=True)
    size_spread, tokens_spread = np.abs(centered).max(axis=1)
    same_losses, same_budget = _list_missing_contrasts(table)
    reasons += same_losses
    if size_spread < _MIN_SPREAD:
        reasons.append("all runs have one size: add runs of other sizes")
    if tokens_spread < _MIN_SPREAD:
        reasons.append("all runs have one number of tokens: add shorter or longer runs")
    reasons += same_budget
    if not reasons:
        direction = np.linalg.svd(centered, full_matrices=False)[0][:, 1]
        if np.abs(direction @ centered).max() < _MIN_SPREAD:
            reasons.append("sizes and tokens lie on one line: vary tokens per parameter")
    return tuple(reasons)


def list_forecast_obstacles(table: RunTable) -> tuple[str, ...]:
    """Return the reasons why these runs allow no forecast, even with published studies as the
    prior; empty if they do.
    """
    reasons: list[str] = []
    if table.num_places < MIN_POINTS:
        reasons.append(
            f"{format_counted(table.num_places, 'different pair')} of size and tokens: there "
            f"must be at least {MIN_POINTS}"
        )
    same_losses, same_budget = _list_missing_contrasts(table)
    return (*reasons, *same_losses, *same_budget)


def _list_missing_contrasts(table: RunTable) -> tuple[list[str], list[str]]:
    """Return two lists of at most one problem each: that all losses are the same, and that all runs
    have one budget.
    """
    is_one_loss = np.ptp(np.log(table.loss)) < _SAME_LOSS
    is_one_budget = table.budget is not None and len(np.unique(table.budget)) == 1
    is_one_budget |= bool(table.flops.max() < _ONE_BUDGET * table.flops.min())
    return (
        ["all losses are the same: there is nothing to fit"] if is_one_loss else [],
        ["all runs have one budget: add runs at another"] if is_one_budget else [],
    )


def fit_law(table: RunTable, form: Form) -> LawFit:
    """Fit one law from the best cells of a grid of starting points. The result is deterministic."""
    if reasons := list_identification_problems(table, form):
        return build_unidentified_fit(table, form, reasons)
    points, origin = center_runs(table)
    spec, shares = FORMS[form], normalize_weights(table.weight)
    grid = search.build_grid_starts(points, shares, spec, _NUM_STARTS)
    solutions = search.polish_best(grid, points, shares, spec)
    best = int(solutions.objective.argmin())
    theta = solutions.theta[best]
    residuals = solver.compute_residuals(theta[None, :], points)[0]
    is_outlier = find_outliers(
        np.sqrt(shares) * residuals,
        spec.num_free,
        _count_free(count_effective_runs(table.weight), form),
    )
    effective = count_effective_runs(table.weight[~is_outlier])
    sd = float(
        np.sqrt(
            (shares * residuals**2)[~is_outlier].mean() * effective / _count_free(effective, form)
        )
    )
    status, warnings = _judge_optimum(theta, points, spec, sd)
    if status == "converged" and search.compute_condition(theta, points, spec) > _LOOSE_CONDITION:
        return build_unidentified_fit(table, form, (_LOOSE_REASON,))
    if not solutions.converged[best]:
        status = "degenerate" if status == "converged" else status
        warnings.append("the search stopped before it converged: the optimum lies in a flat region")
    return LawFit(
        form=form,
        status=status,
        theta=spec.to_theta(solver.uncenter(theta[None, :], origin)[:, spec.free_coordinates])[0],
        objective=float(solutions.objective[best] * table.weight.mean()),
        residual_sd=sd,
        num_runs=table.num_runs,
        num_effective_runs=effective,
        warnings=tuple(f"{form}: {warning}" for warning in warnings),
        outliers=tuple(np.flatnonzero(is_outlier).tolist()),
    )


def build_unidentified_fit(table: RunTable, form: Form, reasons: tuple[str, ...]) -> LawFit:
    """Return a fit without numbers, with its reasons."""
    return LawFit(
        form=form,
        status="unidentified",
        theta=np.empty(0),
        objective=None,
        residual_sd=None,
        num_runs=table.num_runs,
        num_effective_runs=count_effective_runs(table.weight),
        warnings=tuple(f"{form}: {reason}" for reason in reasons),
    )


def _count_free(num_effective_runs: float, form: Form) -> float:
    """Return the effective runs beyond the number of free coordinates, at least 1."""
    return max(num_effective_runs - FORMS[form].num_free, 1.0)


def normalize_weights(weight: Floats) -> Floats:
    """Scale weights to a mean of 1, so that the search does not depend on their unit."""
    return weight / weight.mean(axis=-1, keepdims=True)


def refit_law(table: RunTable, fit: LawFit, blocks: Iterable[Floats]) -> search.Solutions:
    """Fit an identified law again under each row of weights. The weights come in blocks, ideally of
    `search.BLOCK` rows.

    Blocks limit the memory. Problems of one block share starting points. The ends of the blocks
    therefore change results, within the tolerance of the search.
    """
    points, origin = center_runs(table)
    spec = FORMS[fit.form]
    start = solver.center(fit.theta[None, :], origin)[0]
    solutions = []
    for weight_MR in blocks:
        solution = search.refit_rows(start, points, normalize_weights(weight_MR), spec)
        solutions.append(
            (
                spec.to_theta(solver.uncenter(solution.theta, origin)[:, spec.free_coordinates]),
                solution.objective * weight_MR.mean(axis=1),
                solution.converged,
            )
        )
    return search.Solutions(*map(np.concatenate, zip(*solutions, strict=True)))


def center_runs(table: RunTable) -> tuple[Points, Origin]:
    """Return the runs in logs relative to their mean, and the mean."""
    return solver.center_points(np.log(table.params), np.log(table.tokens), np.log(table.loss))


def _judge_optimum(
    theta: Floats, points: Points, spec: FormSpec, residual_sd: float
) -> tuple[FitStatus, list[str]]:
    """Return the status of an optimum in centered coordinates, with warnings for the reader."""
    lower, upper = spec.compute_bounds(points)
    free = theta[spec.free_coordinates]
    is_at_bound = (free <= lower + 1e-9) | (free >= upper - 1e-9)
    bound_warnings = [
        f"{name} is at the bound of the search"
        for name, is_hit in zip(spec.names, is_at_bound, strict=True)
        if is_hit
    ]
    prefix = "" if spec.has_unit_k else "k * "
    oddities = [
        f"{prefix}{name} = {slope:.3g} is steeper than any known law (at most about 1.1)"
        for name, slope in zip(("alpha", "beta"), theta[5] * theta[3:5], strict=True)
        if slope > _STEEPEST
    ]
    # The effect of N or D is the change of the fitted losses if all runs had the mean N or D
    fitted_log_loss = solver.compute_log_loss(theta[None, :], points.n, points.d)
    zeros = np.zeros_like(points.n)
    for name, n, d in (("params", zeros, points.d), ("tokens", points.n, zeros)):
        effect = np.sqrt(
            ((solver.compute_log_loss(theta[None, :], n, d) - fitted_log_loss) ** 2).mean()
        )
        if effect <= 2 * residual_sd / np.sqrt(len(n)):
            oddities.append(
                f"the effect of {name} is below the noise: its exponent is not determined"
            )
    status: FitStatus = "degenerate" if oddities else "at_bound" if bound_warnings else "converged"
    return status, oddities + bound_warnings
