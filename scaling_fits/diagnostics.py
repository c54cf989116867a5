"""How well a law sits on the runs it was fitted to: residuals, and whether its optimum is sharp."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaling_fits import law, search, solver
from scaling_fits.forms import SHAPES
from scaling_fits.law import LawFit
from scaling_fits.solver import Floats
from scaling_fits.table import RunTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostics:
    """Of one law on its runs. Residuals are of log loss, measured less predicted."""

    largest_residual: float
    """The one of the largest size, with its sign."""
    largest_run: int
    """Its place in the table, from 0."""
    num_beyond_delta: int
    """Runs more than the Huber delta away: they pull with their weight alone, however far they are."""
    gain_left: float
    """Share of the objective that one more Newton step promises to gain: next to 0 at an optimum."""
    condition: float
    """Above 1 for every mixture of parameters that is looser than one alone; above 1e4 few digits mean anything."""


def residuals(table: RunTable, fit: LawFit) -> Floats:
    """Log of measured less log of predicted loss of every run (R,).

    Raises:
        LawError: the fit is unidentified.
    """
    law.require_identified(fit, "residuals")
    result: Floats = np.log(table.loss) - law.log_loss(fit.theta[None, :], table.params, table.tokens)[0]
    return result


def diagnose(table: RunTable, fit: LawFit) -> Diagnostics:
    """How well the law sits on its runs.

    Raises:
        LawError: the fit is unidentified.
    """
    missed = residuals(table, fit)
    points, centre = law.centred_points(table)
    shape, theta = SHAPES[fit.form], law.centred(fit.theta[None, :], centre)
    largest = int(np.abs(missed).argmax())
    return Diagnostics(
        largest_residual=float(missed[largest]),
        largest_run=largest,
        num_beyond_delta=int((np.abs(missed) > solver.HUBER_DELTA).sum()),
        gain_left=float(search.gain_left(theta, points, law.shares_of(table.weight)[None, :], shape)[0]),
        condition=search.condition(theta[0], points, shape),
    )
