"""Scaling laws: loss in nats as a function of parameters N and tokens D.

- `chinchilla`: E + A / N^alpha + B / D^beta (arXiv 2203.15556, section 3.3), by the sum over runs of weight *
  Huber (delta 1e-3) of log-loss residuals in log-sum-exp form.
- `coupled`: E + (A N^-alpha + B D^-beta)^k, by the same objective; k = 1 is the first.

A fit that the runs cannot carry is not an error but a status, with its reasons: `unidentified` (no number is
given), `at_bound` (the optimum wants to leave the searched box), `degenerate` (an optimum no law looks like).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from scaling_fits import solver
from scaling_fits.solver import Floats
from scaling_fits.table import RunTable

Form = Literal["chinchilla", "coupled"]
FORMS: tuple[Form, ...] = get_args(Form)
FitStatus = Literal["converged", "at_bound", "degenerate", "unidentified"]
NUM_PARAMETERS: dict[str, int] = {"chinchilla": 5, "coupled": 6}

_NUM_STARTS = 12
_STEEPEST = 2.0  # k * alpha or k * beta of no published loss law is above 1.1
_LEAST_SPREAD = 0.02  # a step of 2 % in N or D, off the common line, is rounding and no design
_ONE_BUDGET = 1.05  # largest over smallest FLOPs of runs meant to cost the same


class LawError(ValueError):
    """A question no law of this room answers: an unknown form, or a size that is not positive."""


class CannotTellError(ValueError):
    """The runs identify no law, so there is no number to give. `reasons` says why and what to run."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LawFit:
    """One law fitted to one table."""

    form: Form
    status: FitStatus
    theta: Floats
    """(log E, log A, log B, alpha, beta, k); empty when unidentified."""
    objective: float | None
    """Sum over runs of weight * Huber; None when unidentified."""
    residual_sd: float | None
    """Sd of log-loss residuals, with the degrees of freedom the parameters took."""
    num_runs: int
    warnings: tuple[str, ...] = ()
    draws: Floats = dataclasses.field(default_factory=lambda: np.empty((0, solver.NUM_COORDINATES)))
    """Bootstrap refits, one `theta` a row."""
    num_unconverged: int = 0
    """Of the draws, those whose search had not settled when it stopped; they are kept."""

    @property
    def identified(self) -> bool:
        """Whether there are numbers at all."""
        return self.status != "unidentified"

    @property
    def degrees_of_freedom(self) -> int:
        """Runs beyond the number of parameters."""
        return self.num_runs - NUM_PARAMETERS[self.form]

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters in the order of `theta`."""
        return ("E", "A", "B", "alpha", "beta", "k")[: NUM_PARAMETERS[self.form]]

    @property
    def parameters(self) -> dict[str, float]:
        """Values by name, E in nats; empty when unidentified."""
        return dict(zip(self.names, natural(self.theta[None, :])[0].tolist(), strict=False)) if self.identified else {}


def natural(theta_MP: Floats) -> Floats:
    """(E, A, B, alpha, beta, k) of rows (log E, log A, log B, alpha, beta, k)."""
    values = theta_MP.copy()
    values[:, :3] = np.exp(values[:, :3])
    return values


def log_loss(theta_MP: Floats, params: Floats, tokens: Floats) -> Floats:
    """Log of the loss in nats that each row of `theta_MP` gives each run (M, R)."""
    return solver.log_loss(theta_MP, np.log(params), np.log(tokens))


def why_unidentified(table: RunTable, form: Form) -> tuple[str, ...]:
    """What keeps these runs from identifying this law; empty when nothing does."""
    least = NUM_PARAMETERS[form] + 1
    reasons: list[str] = []
    if table.num_runs < least:
        reasons.append(f"{table.num_runs} runs for the {least - 1} parameters of {form}: at least {least} are wanted")
    logs = np.stack([np.log(table.params), np.log(table.tokens)])
    centred = logs - logs.mean(axis=1, keepdims=True)
    spread = np.abs(centred).max(axis=1)
    if spread[0] < _LEAST_SPREAD:
        reasons.append("all runs have one size: add runs of other sizes")
    if spread[1] < _LEAST_SPREAD:
        reasons.append("all runs have one number of tokens: add shorter or longer runs")
    if table.flops.max() < _ONE_BUDGET * table.flops.min() or _same(table.budget):
        reasons.append("all runs have one budget: add runs at another")
    if not reasons:
        direction = np.linalg.svd(centred, full_matrices=False)[0][:, 1]
        if np.abs(direction @ centred).max() < _LEAST_SPREAD:
            reasons.append("sizes and tokens lie on one line: vary tokens per parameter")
    return tuple(reasons)


def _same(column: Floats | None) -> bool:
    return column is not None and len(np.unique(column)) == 1


def fit_law(table: RunTable, form: Form) -> LawFit:
    """Fit one law, from the best cells of a grid and never from one start; deterministic.

    Raises:
        LawError: no law has this name.
    """
    if form not in FORMS:
        raise LawError(f"form = {form!r}: one of {', '.join(FORMS)} is wanted")
    reasons = why_unidentified(table, form)
    if reasons:
        return LawFit(form=form, status="unidentified", theta=np.empty(0), objective=None, residual_sd=None,
                      num_runs=table.num_runs, warnings=tuple(f"{form}: {reason}" for reason in reasons))  # fmt: skip
    points, centre = centred_points(table)
    starts = solver.grid_starts(points, table.weight, coupled=form == "coupled", num_starts=_NUM_STARTS)
    solutions = solver.polish_best(starts, points, table.weight, dim=NUM_PARAMETERS[form])
    best = int(solutions.objective.argmin())
    theta = solutions.theta[best]
    residuals = solver.log_loss(theta[None, :], points.n, points.d)[0] - points.y
    shares = table.weight / table.weight.mean()
    sd = float(np.sqrt((shares * residuals**2).sum() / (table.num_runs - NUM_PARAMETERS[form])))
    status, warnings = _judge(theta, points, form, sd)
    if not solutions.converged[best]:
        warnings.append("the search stopped before it settled: the optimum lies in a flat valley")
    return LawFit(
        form=form,
        status=status,
        theta=uncentred(theta[None, :], centre)[0],
        objective=float(solutions.objective[best]),
        residual_sd=sd,
        num_runs=table.num_runs,
        warnings=tuple(f"{form}: {warning}" for warning in warnings),
    )


def refit(table: RunTable, fit: LawFit, weight_MR: Floats, num_starts: int = 4) -> solver.Solutions:
    """Fit the law again under each row of weights, from the fit and the grid's best cells (one row a problem).

    Raises:
        LawError: the fit is unidentified: there is nothing to start from.
    """
    if not fit.identified:
        raise LawError(f"{fit.form} is unidentified: it has no refits")
    points, centre = centred_points(table)
    grid = solver.grid_starts(points, table.weight, coupled=fit.form == "coupled", num_starts=num_starts - 1)
    starts = np.concatenate([uncentred(fit.theta[None, :], (-centre[0], -centre[1])), grid])
    problems, count = len(weight_MR), len(starts)
    found = solver.polish(
        np.tile(starts, (problems, 1)), points, np.repeat(weight_MR, count, axis=0), dim=NUM_PARAMETERS[fit.form]
    )
    objective = found.objective.reshape(problems, count)
    best = np.arange(problems) * count + objective.argmin(axis=1)
    return solver.Solutions(
        theta=uncentred(found.theta[best], centre),
        objective=found.objective[best],
        converged=found.converged[best],
    )


def centred_points(table: RunTable) -> tuple[solver.Points, tuple[float, float]]:
    """The runs in logs about their mean, and that mean of log N and log D."""
    n, d = np.log(table.params), np.log(table.tokens)
    centre = (float(n.mean()), float(d.mean()))
    return solver.Points(n=n - centre[0], d=d - centre[1], y=np.log(table.loss)), centre


def uncentred(theta_MP: Floats, centre: tuple[float, float]) -> Floats:
    """Coordinates about the origin of log N and log D from coordinates about `centre`."""
    moved = theta_MP.copy()
    moved[:, 1] += theta_MP[:, 3] * centre[0]
    moved[:, 2] += theta_MP[:, 4] * centre[1]
    return moved


def _judge(theta: Floats, points: solver.Points, form: Form, residual_sd: float) -> tuple[FitStatus, list[str]]:
    """Status of an optimum in centred coordinates, with what a reader must know."""
    dim = NUM_PARAMETERS[form]
    k = float(theta[5])
    names = ("E", "A", "B", "alpha", "beta", "k")
    at = (theta <= points.lower + 1e-9) | (theta >= points.upper - 1e-9)
    bounds = [f"{name} is at the bound of the search" for name, hit in zip(names[:dim], at[:dim], strict=True) if hit]
    strange = [
        f"k * {name} = {k * value:.3g} is steeper than any known law (at most about 1.1)"
        if form == "coupled"
        else f"{name} = {value:.3g} is steeper than any known law (at most about 1.1)"
        for name, value in (("alpha", float(theta[3])), ("beta", float(theta[4])))
        if k * value > _STEEPEST
    ]
    at_hand = solver.log_loss(theta[None, :], points.n, points.d)
    zeros = np.zeros_like(points.n)
    for name, n, d in (("params", zeros, points.d), ("tokens", points.n, zeros)):
        effect = np.sqrt(((solver.log_loss(theta[None, :], n, d) - at_hand) ** 2).mean())
        if effect < 2 * residual_sd / np.sqrt(len(n)):
            strange.append(f"the effect of {name} is below the noise: its exponent means nothing")
    status: FitStatus = "degenerate" if strange else "at_bound" if bounds else "converged"
    return status, strange + bounds
