"""Scaling laws of loss in nats as a function of parameters N and tokens D.

A law has a form (`forms`). It is fitted by minimizing the sum over runs of weight * Huber (delta
1e-3) of log-loss residuals in log-sum-exp form (arXiv 2203.15556, section D.1).

A fit that the runs do not determine is not an error but a status with reasons: `unidentified`
(there are no numbers), `at_bound` (the optimum lies at the edge of the searched box), `degenerate`
(the optimum is unlike any known law).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from proxies.core.errors import ExitCode, InputError
from proxies.core.notation import counted
from scaling_fits.laws import search, solver
from scaling_fits.laws.forms import MIN_POINTS, SHAPES, Form, FormShape
from scaling_fits.laws.solver import Floats, Points
from scaling_fits.laws.table import RunTable
from scaling_fits.laws.weights import effective_runs as effective_runs
from scaling_fits.laws.weights import find_outliers

FitStatus = Literal["converged", "at_bound", "degenerate", "unidentified"]
LARGEST = 1e20  # parameters or tokens
MAX_BOOTSTRAP = 100_000
NEXT_RUNG = 1.25
"""Factor in FLOPs between the runs and a new one. A new run counts as one such step away even where
nothing is extrapolated."""

_NUM_STARTS = 12
_STEEPEST = 2.0  # The largest published k * alpha or k * beta is 1.1
_MIN_SPREAD = 0.02  # A spread of 2 % in N or D about the common line is rounding, not a design
_ONE_BUDGET = 1.05  # Ratio of the largest to the smallest FLOPs of runs at one budget
# Condition number of a Jacobian at which some mixture of parameters does not change any loss
_LOOSE = 1e6
_SAME_LOSS = 1e-9  # Spread of log losses that is rounding
_LOOSE_REASON = (
    "other parameters fit these runs as well: too few different sizes or token counts to "
    "tell the terms apart"
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


def exp_finite(value: float) -> float:
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


def option_problems(bootstrap: int, level: float, seed: int) -> list[str]:
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
    def has_floor(self) -> bool:
        """Whether its form has an irreducible loss."""
        return SHAPES[self.form].has_floor

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the form's own parameters."""
        return SHAPES[self.form].names

    @property
    def parameters(self) -> dict[str, float]:
        """Values by name, E in nats; empty if unidentified."""
        return {
            name: float(values[0])
            for name, values in self.name_parameters(self.theta[None, :]).items()
        }

    def name_parameters(self, theta_MP: Floats) -> dict[str, Floats]:
        """Return the values (M,) of the form's own parameters by name, from rows of theta; empty if
        unidentified.
        """
        if not self.identified:
            return {}
        return dict(zip(self.names, SHAPES[self.form].natural(theta_MP), strict=True))


def log_loss(theta_MP: Floats, params: Floats, tokens: Floats) -> Floats:
    """Compute the log of the loss in nats that each row of `theta_MP` predicts for each run (M,
    R).
    """
    return solver.log_loss(theta_MP, np.log(params), np.log(tokens))


def log_best_params(theta: Floats, log_nd: Floats | float) -> Floats:
    """Compute log N* of each law at a given N * D (arXiv 2203.15556, section 3.3); k does not
    affect it.

    The last axis of `theta` holds the coordinates: (P,) with `log_nd` (R,), or (M, P) with a
    number.
    """
    a, b, alpha, beta = (theta[..., i] for i in (1, 2, 3, 4))
    return (np.log(alpha / beta) + a - b + beta * log_nd) / (alpha + beta)


def list_identification_problems(table: RunTable, form: Form) -> tuple[str, ...]:
    """Return the reasons why these runs do not identify this law; empty if they do."""
    num_parameters = SHAPES[form].dim
    reasons: list[str] = []
    if table.num_runs <= num_parameters:
        reasons.append(
            f"{counted(table.num_runs, 'run')} for the {counted(num_parameters, 'parameter')} of "
            f"{form}: there must be at least {num_parameters + 1}"
        )
    logs = np.stack([np.log(table.params), np.log(table.tokens)])
    num_places = len(np.unique(logs, axis=1).T)
    if num_places < num_parameters < table.num_runs:
        reasons.append(
            f"{counted(num_places, 'different pair')} of size and tokens for the "
            f"{counted(num_parameters, 'parameter')} of {form}: add others"
        )
    centered = logs - logs.mean(axis=1, keepdims=True)
    spread = np.abs(centered).max(axis=1)
    if np.ptp(np.log(table.loss)) < _SAME_LOSS:
        reasons.append("all losses are the same: there is nothing to fit")
    if spread[0] < _MIN_SPREAD:
        reasons.append("all runs have one size: add runs of other sizes")
    if spread[1] < _MIN_SPREAD:
        reasons.append("all runs have one number of tokens: add shorter or longer runs")
    one_budget = table.budget is not None and len(np.unique(table.budget)) == 1
    if one_budget or table.flops.max() < _ONE_BUDGET * table.flops.min():
        reasons.append("all runs have one budget: add runs at another")
    if not reasons:
        direction = np.linalg.svd(centered, full_matrices=False)[0][:, 1]
        if np.abs(direction @ centered).max() < _MIN_SPREAD:
            reasons.append("sizes and tokens lie on one line: vary tokens per parameter")
    return tuple(reasons)


def why_no_forecast(table: RunTable) -> tuple[str, ...]:
    """Return the reasons why these runs allow no forecast, even with published studies as the
    prior; empty if they do.
    """
    reasons: list[str] = []
    num_points = len(np.unique(np.stack([table.params, table.tokens]), axis=1).T)
    if num_points < MIN_POINTS:
        reasons.append(
            f"{counted(num_points, 'different pair')} of size and tokens: there must be at least "
            f"{MIN_POINTS}"
        )
    if np.ptp(np.log(table.loss)) < _SAME_LOSS:
        reasons.append("all losses are the same: there is nothing to fit")
    one_budget = table.budget is not None and len(np.unique(table.budget)) == 1
    if one_budget or table.flops.max() < _ONE_BUDGET * table.flops.min():
        reasons.append("all runs have one budget: add runs at another")
    return tuple(reasons)


def fit_law(table: RunTable, form: Form, most_steps: int = search.STEPS) -> LawFit:
    """Fit one law from the best cells of a grid of starting points. The result is deterministic."""
    if reasons := list_identification_problems(table, form):
        return build_unidentified_fit(table, form, reasons)
    points, centre = center_points(table)
    shape, shares = SHAPES[form], normalize_weights(table.weight)
    grid = search.grid_starts(points, shares, shape, _NUM_STARTS)
    solutions = search.best_of(grid, points, shares, shape, most_steps)
    best = int(solutions.objective.argmin())
    theta = solutions.theta[best]
    residuals = solver.residuals(theta[None, :], points)[0]
    is_outlier = find_outliers(
        np.sqrt(shares) * residuals,
        SHAPES[form].dim,
        _count_free(effective_runs(table.weight), form),
    )
    effective = effective_runs(table.weight[~is_outlier])
    sd = float(
        np.sqrt(
            (shares * residuals**2)[~is_outlier].mean() * effective / _count_free(effective, form)
        )
    )
    status, warnings = _judge_optimum(theta, points, shape, sd)
    if status == "converged" and search.condition(theta, points, shape) > _LOOSE:
        return build_unidentified_fit(table, form, (_LOOSE_REASON,))
    if not solutions.converged[best]:
        status = "degenerate" if status == "converged" else status
        warnings.append("the search stopped before it converged: the optimum lies in a flat region")
    return LawFit(
        form=form,
        status=status,
        theta=uncenter_coordinates(theta[None, :], centre, shape)[0],
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
        num_effective_runs=effective_runs(table.weight),
        warnings=tuple(f"{form}: {reason}" for reason in reasons),
    )


def _count_free(num_effective_runs: float, form: Form) -> float:
    return max(num_effective_runs - SHAPES[form].dim, 1.0)


def normalize_weights(weight: Floats) -> Floats:
    """Scale weights to a mean of 1, so that the search does not depend on their unit."""
    return np.asarray(weight / weight.mean(axis=-1, keepdims=True))


def refits(table: RunTable, fit: LawFit, blocks: Iterable[Floats]) -> search.Solutions:
    """Fit an identified law again under each row of weights. The weights come in blocks, ideally of
    `search.BLOCK` rows.

    Blocks limit the memory. Problems of one block share starting points, so results depend, within
    the tolerance, on where blocks end.
    """
    points, centre = center_points(table)
    shape = SHAPES[fit.form]
    start = center_coordinates(fit.theta[None, :], centre)[0]
    solutions = []
    for weight_MR in blocks:
        solution = search.refits(start, points, normalize_weights(weight_MR), shape)
        solutions.append(
            (
                uncenter_coordinates(solution.theta, centre, shape),
                solution.objective * weight_MR.mean(axis=1),
                solution.converged,
            )
        )
    theta, objective, converged = (
        np.concatenate(column) for column in zip(*solutions, strict=True)
    )
    return search.Solutions(theta=theta, objective=objective, converged=converged)


def center_points(table: RunTable) -> tuple[Points, tuple[float, float, float]]:
    """Return the runs in logs relative to their mean, and the mean of log N, log D, and log
    loss.
    """
    n, d, y = np.log(table.params), np.log(table.tokens), np.log(table.loss)
    centre = (float(n.mean()), float(d.mean()), float(y.mean()))
    return Points(n=n - centre[0], d=d - centre[1], y=y - centre[2]), centre


def center_coordinates(theta_MP: Floats, centre: tuple[float, float, float]) -> Floats:
    """Convert coordinates about the origin of log N, log D, and log loss to coordinates about
    `centre`.
    """
    moved = theta_MP.copy()
    lift = centre[2] / theta_MP[:, 5]  # c * L = (c^(1/k) * inner sum)^k
    moved[:, 0] -= centre[2]
    moved[:, 1] -= theta_MP[:, 3] * centre[0] + lift
    moved[:, 2] -= theta_MP[:, 4] * centre[1] + lift
    return moved


def uncenter_coordinates(
    theta_MP: Floats, centre: tuple[float, float, float], shape: FormShape
) -> Floats:
    """Convert coordinates about `centre` to coordinates about the origin of log N, log D, and log
    loss.
    """
    moved = center_coordinates(theta_MP, (-centre[0], -centre[1], -centre[2]))
    return shape.theta(moved[:, shape.first])  # Fixed coordinates keep their values


def _judge_optimum(
    theta: Floats, points: Points, shape: FormShape, residual_sd: float
) -> tuple[FitStatus, list[str]]:
    """Return the status of an optimum in centered coordinates, with warnings for the reader."""
    lower, upper = search.bounds(shape, points)
    free = theta[shape.first]
    is_at_bound = (free <= lower + 1e-9) | (free >= upper - 1e-9)
    bound_warnings = [
        f"{name} is at the bound of the search"
        for name, is_hit in zip(shape.names, is_at_bound, strict=True)
        if is_hit
    ]
    slopes = dict(zip(shape.slope_names, (theta[5] * theta[3:5]).tolist(), strict=True))
    oddities = [
        f"{name} = {slope:.3g} is steeper than any known law (at most about 1.1)"
        for name, slope in slopes.items()
        if slope > _STEEPEST
    ]
    fitted_log_loss = solver.log_loss(theta[None, :], points.n, points.d)
    zeros = np.zeros_like(points.n)
    for name, n, d in (("params", zeros, points.d), ("tokens", points.n, zeros)):
        effect = np.sqrt(((solver.log_loss(theta[None, :], n, d) - fitted_log_loss) ** 2).mean())
        if effect <= 2 * residual_sd / np.sqrt(len(n)):
            oddities.append(
                f"the effect of {name} is below the noise: its exponent is not determined"
            )
    status: FitStatus = "degenerate" if oddities else "at_bound" if bound_warnings else "converged"
    return status, oddities + bound_warnings
