"""Laws of the best learning rate or batch against size and duration: log value = c + a log N + b log D.

From runs over a grid, with columns learning_rate or lr, and batch_tokens or batch. An exponent that the cells do not
identify, since they have one N, one D or a fixed D / N, is left out, and the law then answers only where that still
holds.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from proxies.core import canon
from proxies.core.canon import Json
from scaling_fits.compute.hyperparameter_cells import CellOptimum, cell_optima
from scaling_fits.compute.optima import OptimaError, OptimaFit
from scaling_fits.compute.power_laws import Floats, PowerLaw, fit_power_law, told
from scaling_fits.laws.law import CannotTellError, check_size, option_problems
from scaling_fits.laws.table import RunTable

Hyperparameter = Literal["learning_rate", "batch"]
COLUMNS: dict[Hyperparameter, tuple[str, ...]] = {
    "learning_rate": ("learning_rate", "lr"),
    "batch": ("batch_tokens", "batch"),
}
"""Names of the column of each, the first that is there counting."""

_LEAST_SPREAD = 0.05  # log N or log D of cells that count as different
_LEAST_APART = 0.1  # sd of log D off its line over log N, below which their exponents cannot be told apart
_NEAR = 1.25  # factor within which a quantity left out of the law counts as the same
_FAR = 30.0  # times the largest N or D of a cell

Design = Literal["both", "params", "tokens", "ratio", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperparameterFit(OptimaFit):
    """The law of one hyperparameter, with the optima behind it."""

    form: Hyperparameter
    column: str
    """The column it came from, which gives its unit."""
    design: Design
    """What varies over the cells: `ratio`: N and D in step, so that one exponent stands for both."""
    law: PowerLaw | None
    cells: tuple[CellOptimum, ...]

    @property
    def used(self) -> tuple[CellOptimum, ...]:
        """Cells with an optimum of this hyperparameter."""
        return tuple(cell for cell in self.cells if self.form in cell.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperparameterPrediction:
    """The best value at one size and duration."""

    params: float
    tokens: float
    value: float
    interval: tuple[float, float] | None
    """Of the optimum itself: the law's error and the scatter of optima about it."""
    level: float
    warnings: tuple[str, ...]


def fit_runs_law(
    table: RunTable, form: Hyperparameter, bootstrap: int = 400, level: float = 0.9, seed: int = 0
) -> HyperparameterFit:
    """The law from runs over learning rates and batches; the table's `extra` holds their columns.

    Raises:
        OptimaError: the column is missing or has cells that are not above zero, or options out of range.
    """
    problems = option_problems(bootstrap, level, seed)
    names = {axis: next((name for name in COLUMNS[axis] if name in table.extra), None) for axis in COLUMNS}
    if names[form] is None:
        problems.append(f"no column {' or '.join(map(repr, COLUMNS[form]))}: the runs' {form} is wanted")
    columns = {axis: table.extra[name] for axis, name in names.items() if name is not None}
    problems += [problem for axis, name in names.items() if name for problem in _bad_cells(table, name, columns[axis])]
    if problems:
        raise OptimaError(problems)
    by_axis = {str(axis): column for axis, column in columns.items()}
    cells, warnings = cell_optima(table, by_axis, bootstrap=bootstrap, level=level, seed=seed)
    law, design, more = _law_of(form, cells)
    return HyperparameterFit(
        form=form, column=str(names[form]), status="converged" if law else "unidentified", design=design, law=law,
        cells=tuple(cells), level=level, bootstrap=bootstrap, seed=seed, num_runs=table.num_runs,
        dropped=table.dropped, warnings=(*table.warnings, *warnings, *more),
    )  # fmt: skip


def _bad_cells(table: RunTable, name: str, column: Floats) -> list[str]:
    lines = table.lines or tuple(range(len(column)))
    return [
        f"row {lines[i]}, column {name!r}: {'missing' if math.isnan(column[i]) else f'{column[i]:g}'}: a number > 0 is"
        " wanted"
        for i in np.flatnonzero(~(column > 0))
    ]


def _law_of(form: Hyperparameter, cells: list[CellOptimum]) -> tuple[PowerLaw | None, Design, list[str]]:
    """The law through the cells that have an optimum, what they vary, and what to know of the others."""
    used = [cell for cell in cells if form in cell.values]
    warnings = [
        f"cell N = {cell.params:.3g}, D = {cell.tokens:.3g}: {cell.reason or f'does not vary {form}'}"
        for cell in cells
        if form not in cell.values
    ]
    design, inputs, why = _design_of(used)
    wanted = len(inputs) + 2
    if not inputs or len(used) < wanted:
        missing = f"{len(used)} of {len(cells)} cells have an optimum of {form}"
        warnings.append(f"{missing}: {why[0] if why and not inputs else f'at least {wanted} are wanted for a law in '}"
                        f"{' and '.join(inputs)}; run cells at other N and D")  # fmt: skip
        return None, "none", warnings
    logs = np.log([cell.values[form] for cell in used])
    law = fit_power_law(inputs, logs, np.array([cell.log_variances[form] for cell in used]))
    return law, design, warnings + why


def _design_of(used: list[CellOptimum]) -> tuple[Design, dict[str, Floats], list[str]]:
    """What the cells vary, the law's inputs by that, and what is left out."""
    params, tokens = (np.array([getattr(cell, name) for cell in used]) for name in ("params", "tokens"))
    if len(used) < 2:
        return "none", {}, ["one cell draws no law"]
    n, d = np.log(params) - np.log(params).mean(), np.log(tokens) - np.log(tokens).mean()
    varied = np.ptp(n) > _LEAST_SPREAD, np.ptp(d) > _LEAST_SPREAD
    if not any(varied):
        return "none", {}, ["all have one N and one D"]
    if not varied[1]:
        return "params", {"params": params}, [f"all cells have D = {tokens[0]:.3g}: the exponent of D is left out"]
    if not varied[0]:
        return "tokens", {"tokens": tokens}, [f"all cells have N = {params[0]:.3g}: the exponent of N is left out"]
    off = d - n * (n @ d) / (n @ n)
    if math.sqrt(float((off**2).mean())) < _LEAST_APART:
        why = "N and D grow in step over the cells: the one exponent is of N with D in step"
        return "ratio", {"params": params}, [why]
    return "both", {"params": params, "tokens": tokens}, []


def predict_value(fit: HyperparameterFit, params: float, tokens: float) -> HyperparameterPrediction:
    """The best value at N and D, with an interval.

    Raises:
        LawError: what is no size of a run.
        CannotTellError: no law was identified, or none that holds at this N and D.
    """
    sizes = {"params": float(params), "tokens": float(tokens)}
    check_size(**sizes)
    if fit.law is None:
        raise CannotTellError(fit.warnings)
    _refuse_outside(fit, sizes)
    at = [sizes[name] for name in fit.law.inputs]
    largest = {name: max(getattr(cell, name) for cell in fit.used) for name in sizes}
    far = [f"{name} = {size:.3g} is {size / largest[name]:.3g} times the largest of any cell"
           for name, size in sizes.items() if size > _FAR * largest[name]]  # fmt: skip
    return HyperparameterPrediction(
        **sizes, value=fit.law.at(*at), interval=fit.law.interval_at(*at, level=fit.level) if fit.bootstrap else None,
        level=fit.level, warnings=(*fit.warnings, *far),
    )  # fmt: skip


def _refuse_outside(fit: HyperparameterFit, sizes: dict[str, float]) -> None:
    """A law without D says nothing at another D, one of a fixed D / N nothing off that ratio."""

    def value(name: str, of: dict[str, float]) -> float:
        if name != "D at this N":
            return of[name]
        n, d = (np.log([getattr(cell, what) for cell in fit.used]) for what in ("params", "tokens"))
        slope = float(np.polyfit(n, d, 1)[0])
        return math.exp(math.log(of["tokens"]) - slope * math.log(of["params"]))

    left_out = {"params": "tokens", "tokens": "params", "ratio": "D at this N"}.get(fit.design)
    if left_out is None:
        return
    known = [value(left_out, {"params": cell.params, "tokens": cell.tokens}) for cell in fit.used]
    asked = value(left_out, sizes)
    if not min(known) / _NEAR <= asked <= max(known) * _NEAR:
        off = max(asked / max(known), min(known) / asked)
        reason = f"the cells do not say how {fit.form} moves with {left_out}, and this one is off theirs by a factor of"
        raise CannotTellError((f"{reason} {off:.3g}: run cells that vary it",))


def fit_body(fit: HyperparameterFit) -> dict[str, Json]:
    """What `fit --form learning_rate|batch --json` prints. An exponent that is not identified is null."""
    law, names = fit.law, ("coefficient", "params_exponent", "tokens_exponent")
    known = ("coefficient", *(f"{name}_exponent" for name in law.inputs)) if law else ()
    values, intervals = told(law, known, fit.level if fit.bootstrap else None)
    empty: dict[str, Json] = {"value": None, "interval": None}
    return fit.body(fit.form, dict.fromkeys(names) | values, dict.fromkeys(names) | intervals, [empty, empty]) | {
        "column": fit.column,
        "design": fit.design,
        "cells": [_cell(cell) for cell in fit.cells],
        "scatter": None if law is None else law.scatter,
    }


def _cell(cell: CellOptimum) -> Json:
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


def prediction_body(fit: HyperparameterFit, prediction: HyperparameterPrediction) -> dict[str, Json]:
    """What `predict FIT --params N --tokens D --json` prints of such a law."""
    values = {field.name: canon.to_json(getattr(prediction, field.name)) for field in dataclasses.fields(prediction)}
    return {"form": fit.form, "column": fit.column, **values}
