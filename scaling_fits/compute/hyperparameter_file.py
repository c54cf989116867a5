"""Hyperparameter laws as data: tables of optima in, the JSON that is printed and the file that carries a law out."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from proxies.core.canon import Json
from proxies.core.table_files import FormatError, read_cells
from scaling_fits.compute import optima_file
from scaling_fits.compute.hyperparameter_laws import HyperparameterFit, HyperparameterPrediction, fit_optima_law
from scaling_fits.compute.options import OptimaError
from scaling_fits.compute.published_laws import Hyperparameter

OPTIMUM_COLUMNS: dict[Hyperparameter, tuple[str, ...]] = {
    "learning_rate": ("learning_rate_optimum", "lr_optimum"),
    "batch": ("batch_tokens_optimum", "batch_optimum"),
}
"""Names of the column of each in a table of optima."""

Pair = tuple[float, float]


def optimum_column(path: Path, form: Hyperparameter) -> str | None:
    """The column of optima in a table, None where it has none and so must be a table of runs.

    Raises:
        OptimaError: the file cannot be read.
    """
    try:
        columns = read_cells(path).columns
    except FormatError as error:
        raise OptimaError([str(error)]) from error
    return next((name for name in OPTIMUM_COLUMNS[form] if name in columns), None)


def fit_optima_file(
    path: Path, form: Hyperparameter, column: str, *, params_column: str = "params", level: float = 0.9
) -> HyperparameterFit:
    """The law of a table of optima: columns params, tokens and `column`, one optimum a row.

    Raises:
        OptimaError: a column is missing, or cells are not numbers above zero; all are listed.
    """
    try:
        cells = read_cells(path)
    except FormatError as error:
        raise OptimaError([str(error)]) from error
    wanted = (params_column, "tokens", column)
    problems = [f"{path.name} has no column {name!r}" for name in wanted if name not in cells.columns]
    problems += [f"{path.name} has the column {name!r} twice: remove one"
                 for name in wanted if cells.columns.count(name) > 1]  # fmt: skip
    problems += cells.problems + [
        f"row {line}, column {name!r}: {record.get(name)!r}: a finite number > 0 is wanted"
        for line, record in cells.rows
        for name in wanted
        if name in cells.columns and not _positive(record.get(name))
    ]
    if not cells.rows:
        problems.append(f"{path.name} has no rows")
    if problems:
        raise OptimaError(problems)
    columns = np.array([[record[name] for name in wanted] for _, record in cells.rows], dtype=np.float64).T
    return fit_optima_law(form, *columns, column=column, level=level)


def _positive(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool) and math.isfinite(cell) and cell > 0


def fit_body(fit: HyperparameterFit) -> dict[str, Json]:
    """What `fit --form learning_rate|batch --json` prints. An exponent that is not identified is null."""
    law = fit.law
    names = ("coefficient", "params_exponent", "tokens_exponent")
    values: dict[str, float | None] = dict.fromkeys(names)
    intervals: dict[str, Pair | None] = dict.fromkeys(names)
    if law is not None:
        values["coefficient"] = law.coefficient
        intervals["coefficient"] = law.coefficient_interval(fit.level) if fit.bootstrap else None
        for index, name in enumerate(law.inputs):
            values[f"{name}_exponent"] = law.exponents[index]
            intervals[f"{name}_exponent"] = law.exponent_interval(index, fit.level) if fit.bootstrap else None
    empty: dict[str, Json] = {"value": None, "interval": None}
    return {
        "form": fit.form,
        "column": fit.column,
        "status": fit.status,
        "parameters": dict(values),
        "members": [],
        "intervals": {name: None if ends is None else list(ends) for name, ends in intervals.items()},
        "level": fit.level,
        "exponents": {"params_vs_flops": empty, "tokens_vs_flops": empty},
        "num_runs": fit.num_runs,
        "dropped": [{"row": row.row, "reason": row.reason} for row in fit.dropped],
        "backtest": None,
        "warnings": list(fit.warnings),
        "design": fit.design,
        "cells": [_cell(fit, index) for index in range(len(fit.cells))],
        "scatter": None if law is None else law.scatter,
        "bootstrap": {"draws": fit.bootstrap},
    }


def _cell(fit: HyperparameterFit, index: int) -> Json:
    cell = fit.cells[index]
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
    return {
        "params": prediction.params,
        "tokens": prediction.tokens,
        "form": fit.form,
        "column": fit.column,
        "value": prediction.value,
        "interval": None if prediction.interval is None else list(prediction.interval),
        "level": prediction.level,
        "published": [
            {"name": name, "source": source, "value": value, "note": note}
            for name, source, value, note in prediction.published
        ],
        "warnings": list(prediction.warnings),
    }


def to_file(fit: HyperparameterFit) -> dict[str, Json]:
    """The law as plain JSON data, floats in full."""
    return optima_file.write(fit)


def from_file(data: Json) -> HyperparameterFit:
    """The law that `to_file` wrote.

    Raises:
        OptimaError: no such law, or one that was changed; the message says what is wrong with it.
    """
    return optima_file.read(HyperparameterFit, data)
