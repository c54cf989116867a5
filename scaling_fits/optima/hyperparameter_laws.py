"""Laws of the best learning rate or batch size: log value = c + a log N + b log D.

N is the number of parameters, D the number of tokens, and a cell is all runs of one (N, D). The
laws are fitted to the best value of each cell of a grid of runs with columns learning_rate or lr,
and batch_tokens or batch. If all cells have one N, one D, or one ratio D / N, they do not identify
both exponents, and one is left out. The law then predicts only for that N, D, or ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_counted, format_factor
from forerun._proxies.core.tables.columns import COLUMN_NAMES
from forerun._scaling_fits.laws.law import CannotTellError, check_size, list_option_problems
from forerun._scaling_fits.laws.solver import Floats
from forerun._scaling_fits.laws.table import RunTable
from forerun._scaling_fits.optima.hyperparameter_cells import AXES, CellOptimum, find_cell_optima
from forerun._scaling_fits.optima.optima_fit import OptimaError, OptimaFit
from forerun._scaling_fits.optima.power_laws import (
    Pair,
    PowerLaw,
    fit_power_law,
    summarize_law,
)

Hyperparameter = Literal["learning_rate", "batch"]

_MIN_SPREAD = 0.05  # Spread of log N or log D above which cells count as different
# Standard deviation of log D about its line over log N, below which the two exponents cannot be
# separated
_MIN_SEPARATION = 0.1
# Factor within which N, D, or D / N counts as that of the cells, if the law leaves it out
_NEAR = 1.25
# Extrapolation, in multiples of the largest N or D of a cell, above which a warning is given
_FAR = 30.0
_LEFT_OUT = {"params": "D", "tokens": "N", "ratio": "the ratio D / N"}
"""The quantity whose effect the cells do not show, by design."""

Design = Literal["both", "params", "tokens", "ratio", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperparameterFit(OptimaFit):
    """The law of one hyperparameter, with the optima it was fitted to."""

    form: Hyperparameter
    column: str
    """Column it came from, which determines its unit."""
    design: Design
    """Quantities that vary over the cells. `ratio`: N and D vary together, so one exponent stands
    for both."""
    law: PowerLaw | None
    cells: tuple[CellOptimum, ...]

    @property
    def used(self) -> tuple[CellOptimum, ...]:
        """Cells with an optimum of this hyperparameter."""
        return tuple(cell for cell in self.cells if self.form in cell.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperparameterPrediction:
    """The best value at one size and duration, with its interval."""

    params: float
    tokens: float
    value: float
    interval: Pair | None
    """Interval of the optimum itself, from the law's error and the scatter of optima about it."""
    level: float
    warnings: tuple[str, ...]


def fit_runs_law(
    table: RunTable, form: Hyperparameter, bootstrap: int = 400, level: float = 0.9, seed: int = 0
) -> HyperparameterFit:
    """Fit the law to runs over learning rates and batch sizes, whose columns are in the table's
    `extra`.

    Raises:
        OptimaError: The column is missing or has values that are not above zero, or options are
            out of range.
    """
    problems = list_option_problems(bootstrap, level, seed)
    names = {
        axis: name for axis in AXES if (name := table.column_names.get(axis, axis)) in table.extra
    }
    if form not in names:
        problems.append(
            f"no column {' or '.join(map(repr, COLUMN_NAMES[form]))}: the table must have each "
            f"run's {form}, under one of these names or by --column {form}=NAME"
        )
    columns = {axis: table.extra[name] for axis, name in names.items()}
    problems += [
        problem
        for axis, name in names.items()
        for problem in _find_bad_values(table, name, columns[axis])
    ]
    if problems:
        raise OptimaError(problems)
    cells, warnings = find_cell_optima(table, columns, bootstrap=bootstrap, level=level, seed=seed)
    law, design, law_warnings = _fit_law(form, cells)
    return HyperparameterFit(
        form=form,
        column=names[form],
        status="converged" if law else "unidentified",
        design=design,
        law=law,
        cells=tuple(cells),
        level=level,
        bootstrap=bootstrap,
        seed=seed,
        num_runs=table.num_runs,
        dropped=table.dropped,
        warnings=(*table.warnings, *warnings, *law_warnings),
    )


def _find_bad_values(table: RunTable, name: str, column: Floats) -> list[str]:
    """Return a problem for each value of a column that is missing or not above zero."""
    lines = table.lines or tuple(range(len(column)))
    return [
        f"row {lines[i]}, column {name!r}: "
        f"{'missing' if math.isnan(column[i]) else f'{column[i]:g}'}: must be a number above 0"
        for i in np.flatnonzero(~(column > 0))
    ]


def _fit_law(
    form: Hyperparameter, cells: list[CellOptimum]
) -> tuple[PowerLaw | None, Design, list[str]]:
    """Fit the law through the cells that have an optimum. Return it with the quantities that vary,
    and warnings about the other cells.
    """
    used = [cell for cell in cells if form in cell.values]
    warnings = [
        f"cell N = {cell.params:.3g}, D = {cell.tokens:.3g}: "
        f"{cell.reason or f'does not vary {form}'}"
        for cell in cells
        if form not in cell.values
    ]
    design, inputs, notes = _choose_design(used)
    min_cells = len(inputs) + 2
    if not inputs or len(used) < min_cells:
        missing = f"{len(used)} of {format_counted(len(cells), 'cell')} with an optimum of {form}"
        needed = f"at least {min_cells} are needed for a law in {' and '.join(inputs)}"
        obstacle = notes[0] if notes and not inputs else needed
        warnings.append(f"{missing}: {obstacle}; run cells at other N and D")
        return None, "none", warnings
    logs = np.log([cell.values[form] for cell in used])
    law = fit_power_law(inputs, logs, np.array([cell.log_variances[form] for cell in used]))
    return law, design, warnings + notes


def _choose_design(used: list[CellOptimum]) -> tuple[Design, dict[str, Floats], list[str]]:
    """Return the quantities that the cells vary, the inputs of the law, and notes on exponents that
    are left out.
    """
    params, tokens = (
        np.array([getattr(cell, name) for cell in used]) for name in ("params", "tokens")
    )
    if len(used) < 2:
        return "none", {}, ["a law needs more than one cell"]
    n, d = np.log(params) - np.log(params).mean(), np.log(tokens) - np.log(tokens).mean()
    has_sizes, has_durations = np.ptp(n) > _MIN_SPREAD, np.ptp(d) > _MIN_SPREAD
    if not has_sizes and not has_durations:
        return "none", {}, ["all cells have one N and one D"]
    note = "all cells have {0} = {1:.3g}: the exponent of {0} is left out"
    if not has_durations:
        return "params", {"params": params}, [note.format("D", tokens[0])]
    if not has_sizes:
        return "tokens", {"tokens": tokens}, [note.format("N", params[0])]
    residual = d - n * (n @ d) / (n @ n)
    if math.sqrt(float((residual**2).mean())) < _MIN_SEPARATION:
        note = "N and D grow together over the cells: the exponent of N includes the effect of D"
        return "ratio", {"params": params}, [note]
    return "both", {"params": params, "tokens": tokens}, []


def predict_value(fit: HyperparameterFit, params: float, tokens: float) -> HyperparameterPrediction:
    """Predict the best value at N and D, with an interval.

    Raises:
        LawError: N or D is not a valid size of a run.
        CannotTellError: No law was identified, or it does not hold at this N and D.
    """
    sizes = {"params": float(params), "tokens": float(tokens)}
    check_size(**sizes)
    if fit.law is None:
        raise CannotTellError(fit.warnings)
    _check_sizes(fit, sizes)
    at = [sizes[name] for name in fit.law.inputs]
    largest = {name: max(getattr(cell, name) for cell in fit.used) for name in sizes}
    far = [
        f"{name} = {size:.3g} is {format_factor(size / largest[name])} times the largest of any "
        "cell"
        for name, size in sizes.items()
        if size > _FAR * largest[name]
    ]
    return HyperparameterPrediction(
        **sizes,
        value=fit.law.compute_value(*at),
        interval=fit.law.compute_interval_at(*at, level=fit.level) if fit.bootstrap else None,
        level=fit.level,
        warnings=(*fit.warnings, *far),
    )


def _check_sizes(fit: HyperparameterFit, sizes: dict[str, float]) -> None:
    """Check that the law holds at these sizes: a law without D holds only at the cells' D, and a
    law of cells with one ratio D / N only at that ratio.
    """
    left_out = _LEFT_OUT.get(fit.design)
    if left_out is None:
        return
    n, d = (np.log([getattr(cell, name) for cell in fit.used]) for name in ("params", "tokens"))
    asked_n, asked_d = math.log(sizes["params"]), math.log(sizes["tokens"])
    if fit.design == "tokens":
        known, asked = n, asked_n
    else:
        # Where N and D grow together, what counts is the distance of log D from their common line
        slope = float(np.polyfit(n, d, 1)[0]) if fit.design == "ratio" else 0.0
        known, asked = d - slope * n, asked_d - slope * asked_n
    factor = math.exp(max(asked - float(known.max()), float(known.min()) - asked))
    if factor > _NEAR:
        reason = (
            f"the cells do not show how {fit.form} changes with {left_out}, and this run differs "
            f"from every cell by a factor of {factor:.3g} or more: run cells that vary {left_out}"
        )
        raise CannotTellError((reason,))


def summarize_fit(fit: HyperparameterFit) -> dict[str, Json]:
    """Return the output of `fit --form learning_rate|batch --json`. An exponent that is not
    identified is null.
    """
    law, names = fit.law, ("coefficient", "params_exponent", "tokens_exponent")
    known = ("coefficient", *(f"{name}_exponent" for name in law.inputs)) if law else ()
    values, intervals = summarize_law(law, known, fit.level if fit.bootstrap else None)
    empty: dict[str, Json] = {"value": None, "interval": None}
    return fit.build_summary(
        fit.form, dict.fromkeys(names) | values, dict.fromkeys(names) | intervals, [empty, empty]
    ) | {
        "column": fit.column,
        "design": fit.design,
        "cells": [_summarize_cell(cell) for cell in fit.cells],
        "scatter": None if law is None else law.scatter,
    }


def _summarize_cell(cell: CellOptimum) -> Json:
    return {
        "params": cell.params,
        "tokens": cell.tokens,
        "status": cell.status,
        "reason": cell.reason,
        **cell.values,
        **{f"{axis}_interval": list(ends) for axis, ends in cell.intervals.items()},
        "loss": cell.loss_nats,
        "num_runs": cell.num_runs,
    }


def summarize_prediction(
    fit: HyperparameterFit, prediction: HyperparameterPrediction
) -> dict[str, Json]:
    """Return the output of `predict FIT --params N --tokens D --json` for such a law."""
    values = canon.to_json(prediction)
    assert isinstance(values, dict)
    return {"form": fit.form, "column": fit.column, **values}
