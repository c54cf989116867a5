"""Scaling laws: loss in nats as a function of parameters N and tokens D.

A law has a form (`forms`) and is fitted by the sum over runs of weight * Huber (delta 1e-3) of
log-loss residuals in log-sum-exp form (arXiv 2203.15556, section D.1).

A fit that the runs cannot carry is not an error but a status, with its reasons: `unidentified` (no
number is given), `at_bound` (the optimum wants to leave the searched box), `degenerate` (an optimum
no law looks like).
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
from scaling_fits.laws.weights import outliers

FitStatus = Literal["converged", "at_bound", "degenerate", "unidentified"]
LARGEST = 1e20  # parameters or tokens
MAX_BOOTSTRAP = 100_000
NEXT_RUNG = 1.25
"""Factor in FLOPs of the step to a new run, which is one step away even where nothing is
extrapolated."""

_NUM_STARTS = 12
_STEEPEST = 2.0  # k * alpha or k * beta of no published loss law is above 1.1
_LEAST_SPREAD = 0.02  # a step of 2 % in N or D, off the common line, is rounding and no design
_ONE_BUDGET = 1.05  # largest over smallest FLOPs of runs meant to cost the same
_LOOSE = 1e6  # condition of a Jacobian: a mixture of parameters that moves no loss
_SAME_LOSS = 1e-9  # spread of log losses that is rounding
_LOOSE_SAID = (
    "other parameters fit these runs as well: too few different sizes or token counts to "
    "tell the terms apart"
)


class LawError(InputError):
    """A question that no law answers: an unknown form, or a size that is not positive."""


class CannotTellError(InputError):
    """The runs identify no law, so there is no number to give. `reasons` says why and what to
    run.
    """

    exit_code = ExitCode.CANNOT_TELL

    def __init__(self, reasons: tuple[str, ...]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


def exp_finite(value: float) -> float:
    """Exp that stays finite: an end that says "anything" must still be a number a record may
    hold.
    """
    return math.exp(min(max(value, -700.0), 700.0))


def check_size(**values: float) -> None:
    """Refuse what is no size of a run.

    Raises:
        LawError: naming every such value.
    """
    problems = [
        f"{name} = {value:g}: must be a number from 1 to {LARGEST:g}"
        for name, value in values.items()
        if not 1 <= value <= LARGEST
    ]
    if problems:
        raise LawError("; ".join(problems))


def option_problems(bootstrap: int, level: float, seed: int) -> list[str]:
    """What is wrong with the options that every fit takes."""
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
    """One law fitted to one table."""

    form: Form
    status: FitStatus
    theta: Floats
    """(log E, log A, log B, alpha, beta, k) whatever the form; empty when unidentified."""
    objective: float | None
    """Sum over runs of weight * Huber; None when unidentified."""
    residual_sd: float | None
    """Sd of log-loss residuals without outliers, with the degrees of freedom the parameters
    took."""
    num_runs: int
    num_effective_runs: float
    """Runs of one weight that would say as much: fewer than `num_runs` where some hardly count."""
    warnings: tuple[str, ...] = ()
    outliers: tuple[int, ...] = ()
    """Places in the table of runs too far off this law to be noise; they are fitted, and leave the
    noise alone."""
    num_unconverged: int = 0
    """Number of bootstrap refits whose search stopped before it converged; they are kept."""

    @property
    def identified(self) -> bool:
        """Whether there are numbers at all."""
        return self.status != "unidentified"

    @property
    def degrees_of_freedom(self) -> float:
        """Effective runs beyond the number of parameters, at least 1."""
        return _freedom(self.num_effective_runs, self.form)

    @property
    def has_floor(self) -> bool:
        """Whether its form has an irreducible loss."""
        return SHAPES[self.form].has_floor

    @property
    def names(self) -> tuple[str, ...]:
        """The form's own parameters."""
        return SHAPES[self.form].names

    @property
    def parameters(self) -> dict[str, float]:
        """Values by name, E in nats; empty when unidentified."""
        return {name: float(values[0]) for name, values in self.named(self.theta[None, :]).items()}

    def named(self, theta_MP: Floats) -> dict[str, Floats]:
        """Values (M,) of the form's own parameters by name, from rows of theta; empty when
        unidentified.
        """
        if not self.identified:
            return {}
        return dict(zip(self.names, SHAPES[self.form].natural(theta_MP), strict=True))


def log_loss(theta_MP: Floats, params: Floats, tokens: Floats) -> Floats:
    """Log of the loss in nats that each row of `theta_MP` gives each run (M, R)."""
    return solver.log_loss(theta_MP, np.log(params), np.log(tokens))


def log_best_params(theta: Floats, log_nd: Floats | float) -> Floats:
    """Log N* of each law where N * D is given (arXiv 2203.15556, section 3.3); k does not move it.

    `theta` has the coordinates last: (P,) with `log_nd` (R,), or (M, P) with a number.
    """
    a, b, alpha, beta = (theta[..., i] for i in (1, 2, 3, 4))
    return (np.log(alpha / beta) + a - b + beta * log_nd) / (alpha + beta)


def whyunidentified(table: RunTable, form: Form) -> tuple[str, ...]:
    """What keeps these runs from identifying this law; empty when nothing does."""
    size = SHAPES[form].dim
    reasons: list[str] = []
    if table.num_runs <= size:
        reasons.append(
            f"{counted(table.num_runs, 'run')} for the {counted(size, 'parameter')} of {form}: "
            "there must be at "
            f"least {size + 1}"
        )
    logs = np.stack([np.log(table.params), np.log(table.tokens)])
    places = len(np.unique(logs, axis=1).T)
    if places < size < table.num_runs:
        reasons.append(
            f"{places} different pairs of size and tokens for the {counted(size, 'parameter')} of "
            f"{form}: add others"
        )
    centred = logs - logs.mean(axis=1, keepdims=True)
    spread = np.abs(centred).max(axis=1)
    if np.ptp(np.log(table.loss)) < _SAME_LOSS:
        reasons.append("all losses are the same: there is nothing to fit")
    if spread[0] < _LEAST_SPREAD:
        reasons.append("all runs have one size: add runs of other sizes")
    if spread[1] < _LEAST_SPREAD:
        reasons.append("all runs have one number of tokens: add shorter or longer runs")
    one_budget = table.budget is not None and len(np.unique(table.budget)) == 1
    if one_budget or table.flops.max() < _ONE_BUDGET * table.flops.min():
        reasons.append("all runs have one budget: add runs at another")
    if not reasons:
        direction = np.linalg.svd(centred, full_matrices=False)[0][:, 1]
        if np.abs(direction @ centred).max() < _LEAST_SPREAD:
            reasons.append("sizes and tokens lie on one line: vary tokens per parameter")
    return tuple(reasons)


def why_no_forecast(table: RunTable) -> tuple[str, ...]:
    """Return what keeps these runs from any forecast, even with published studies as the prior;
    empty if nothing.
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
    """Fit one law, from the best cells of a grid and never from one start; deterministic."""
    if reasons := whyunidentified(table, form):
        return unidentified(table, form, reasons)
    points, centre = centred_points(table)
    shape, shares = SHAPES[form], shares_of(table.weight)
    grid = search.grid_starts(points, shares, shape, _NUM_STARTS)
    solutions = search.best_of(grid, points, shares, shape, most_steps)
    best = int(solutions.objective.argmin())
    theta = solutions.theta[best]
    missed = solver.residuals(theta[None, :], points)[0]
    off = outliers(
        np.sqrt(shares) * missed, SHAPES[form].dim, _freedom(effective_runs(table.weight), form)
    )
    effective = effective_runs(table.weight[~off])
    sd = float(np.sqrt((shares * missed**2)[~off].mean() * effective / _freedom(effective, form)))
    status, warnings = _judge(theta, points, shape, sd)
    if status == "converged" and search.condition(theta, points, shape) > _LOOSE:
        return unidentified(table, form, (_LOOSE_SAID,))
    if not solutions.converged[best]:
        status = "degenerate" if status == "converged" else status
        warnings.append("the search stopped before it converged: the optimum lies in a flat region")
    return LawFit(
        form=form,
        status=status,
        theta=uncentred(theta[None, :], centre, shape)[0],
        objective=float(solutions.objective[best] * table.weight.mean()),
        residual_sd=sd,
        num_runs=table.num_runs,
        num_effective_runs=effective,
        warnings=tuple(f"{form}: {warning}" for warning in warnings),
        outliers=tuple(np.flatnonzero(off).tolist()),
    )


def unidentified(table: RunTable, form: Form, reasons: tuple[str, ...]) -> LawFit:
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


def _freedom(num_effective_runs: float, form: Form) -> float:
    return max(num_effective_runs - SHAPES[form].dim, 1.0)


def shares_of(weight: Floats) -> Floats:
    """Weights about 1: the search is the same whatever their unit."""
    return np.asarray(weight / weight.mean(axis=-1, keepdims=True))


def refits(table: RunTable, fit: LawFit, blocks: Iterable[Floats]) -> search.Solutions:
    """Fit an identified law again under each row of weights, given in blocks, best of
    `search.BLOCK` rows.

    So memory is flat. Problems of one block help each other: results depend, within the tolerance,
    on where blocks end.
    """
    points, centre = centred_points(table)
    shape = SHAPES[fit.form]
    start = centred(fit.theta[None, :], centre)[0]
    found = []
    for weight_MR in blocks:
        ended = search.refits(start, points, shares_of(weight_MR), shape)
        found.append(
            (
                uncentred(ended.theta, centre, shape),
                ended.objective * weight_MR.mean(axis=1),
                ended.converged,
            )
        )
    theta, objective, converged = (np.concatenate(column) for column in zip(*found, strict=True))
    return search.Solutions(theta=theta, objective=objective, converged=converged)


def centred_points(table: RunTable) -> tuple[Points, tuple[float, float, float]]:
    """The runs in logs about their mean, and that mean of log N, log D and log loss."""
    n, d, y = np.log(table.params), np.log(table.tokens), np.log(table.loss)
    centre = (float(n.mean()), float(d.mean()), float(y.mean()))
    return Points(n=n - centre[0], d=d - centre[1], y=y - centre[2]), centre


def centred(theta_MP: Floats, centre: tuple[float, float, float]) -> Floats:
    """Coordinates about `centre` from coordinates about the origin of log N, log D and log loss."""
    moved = theta_MP.copy()
    lift = centre[2] / theta_MP[:, 5]  # c * L = (c^(1/k) * inner sum)^k
    moved[:, 0] -= centre[2]
    moved[:, 1] -= theta_MP[:, 3] * centre[0] + lift
    moved[:, 2] -= theta_MP[:, 4] * centre[1] + lift
    return moved


def uncentred(theta_MP: Floats, centre: tuple[float, float, float], shape: FormShape) -> Floats:
    """Coordinates about the origin of log N, log D and log loss from coordinates about `centre`."""
    moved = centred(theta_MP, (-centre[0], -centre[1], -centre[2]))
    return shape.theta(moved[:, shape.first])  # what a form fixes stays where it is


def _judge(
    theta: Floats, points: Points, shape: FormShape, residual_sd: float
) -> tuple[FitStatus, list[str]]:
    """Status of an optimum in centred coordinates, with what a reader must know."""
    lower, upper = search.bounds(shape, points)
    free = theta[shape.first]
    at = (free <= lower + 1e-9) | (free >= upper - 1e-9)
    hit = [
        f"{name} is at the bound of the search"
        for name, held in zip(shape.names, at, strict=True)
        if held
    ]
    slopes = dict(zip(shape.slope_names, (theta[5] * theta[3:5]).tolist(), strict=True))
    strange = [
        f"{name} = {slope:.3g} is steeper than any known law (at most about 1.1)"
        for name, slope in slopes.items()
        if slope > _STEEPEST
    ]
    at_hand = solver.log_loss(theta[None, :], points.n, points.d)
    zeros = np.zeros_like(points.n)
    for name, n, d in (("params", zeros, points.d), ("tokens", points.n, zeros)):
        effect = np.sqrt(((solver.log_loss(theta[None, :], n, d) - at_hand) ** 2).mean())
        if effect <= 2 * residual_sd / np.sqrt(len(n)):
            strange.append(
                f"the effect of {name} is below the noise: its exponent is not determined"
            )
    status: FitStatus = "degenerate" if strange else "at_bound" if hit else "converged"
    return status, strange + hit
