"""Tables of optima, which is what papers publish: one row a budget, with the best loss and, if told, its N and D.

A table is of optima if it lacks `params` or `tokens`, or if somebody says so. Nothing is searched for: the laws of N, D
and the loss go through the rows as they are, and what noise a row has is taken from the losses about their law.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scaling_fits.compute import compute_laws
from scaling_fits.compute.compute_fit import FILE_KIND, ComputeFit, Optimum
from scaling_fits.compute.compute_laws import Laws, Points
from scaling_fits.compute.options import OptimaError, option_problems
from scaling_fits.compute.power_laws import Floats
from scaling_fits.laws import traps
from scaling_fits.laws.table import DroppedRow, columns_of, read_columns

_ONE_BUDGET = 1.03  # FLOPs no further apart than this are one budget, as in an isoFLOP table


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OptimaTable:
    """Optima as columns, by FLOPs."""

    flops: Floats
    loss: Floats
    params: Floats | None
    """None, like the tokens, where the table has neither."""
    tokens: Floats | None
    flops_given: bool
    dropped: tuple[DroppedRow, ...]
    warnings: tuple[str, ...]
    """What was assumed, and what is odd."""


def is_of_optima(path: Path, params_column: str = "params") -> bool:
    """Whether a table can only be of optima, for it has FLOPs and lacks `params` or `tokens`.

    Raises:
        TableError: it cannot be read.
    """
    columns = columns_of(path)
    return "flops" in columns and not {params_column, "tokens"} <= set(columns)


def read_optima(path: Path, params_column: str = "params") -> OptimaTable:
    """A table of `flops, loss[, params, tokens]`: without one of the sizes it is FLOPs over 6 times the other.

    Raises:
        TableError: the file cannot be read, a column is missing, or cells are bad.
        OptimaError: a budget with several rows.
    """
    there = set(columns_of(path))
    sizes = [name for name, column in (("params", params_column), ("tokens", "tokens")) if column in there]
    wanted = ("loss",) if len(sizes) == 2 else ("flops", "loss")
    columns, dropped, lines = read_columns(path, wanted, ("flops", *sizes), {"params": params_column})
    given = "flops" in columns
    lacking = [name for name in ("params", "tokens") if name not in columns]
    said = "every row is taken for the best of its budget"
    if lacking:
        said += f", for the table has no column {' or '.join(map(repr, lacking))}"
    if len(lacking) == 1:
        columns[lacking[0]] = columns["flops"] / (6.0 * columns[sizes[0]])
        said += f" (taken to be flops / (6 * {sizes[0]}))"
    if not lacking:
        columns.setdefault("flops", 6.0 * columns["params"] * columns["tokens"])
    order = np.argsort(columns["flops"], kind="stable")
    flops = columns["flops"][order]
    if (several := np.flatnonzero(flops[1:] < _ONE_BUDGET * flops[:-1])).size:
        rows = traps.rows_text(sorted(lines[order[place]] for place in (several[0], several[0] + 1)))
        said = f"{rows} are both of budget {flops[several[0]]:.4g}, and an optimum is one row: keep the best of each "
        raise OptimaError([said + "budget, or give params and tokens of every run without --optima"])
    odd = (
        [traps.loss_unit(columns["loss"], lines)] if len(lacking) == 2
        else traps.warnings_of(columns, [{} for _ in lines], lines, params_column)
    )  # fmt: skip
    return OptimaTable(
        flops=flops, loss=columns["loss"][order], flops_given=given, dropped=dropped,
        params=columns["params"][order] if "params" in columns else None,
        tokens=columns["tokens"][order] if "tokens" in columns else None,
        warnings=(said, *(warning for warning in odd if warning is not None)),
    )  # fmt: skip


def fit_optima(table: OptimaTable, bootstrap: int = 400, level: float = 0.9, seed: int = 0) -> ComputeFit:
    """The laws through the rows.

    Raises:
        OptimaError: options out of range.
    """
    problems = option_problems(bootstrap, level, seed)
    if problems:
        raise OptimaError(problems)
    count, warnings, laws = len(table.flops), list(table.warnings), None
    if count < compute_laws.LEAST_OPTIMA:
        warnings.append(f"{count} optima: at least {compute_laws.LEAST_OPTIMA} are wanted, each of another budget")
    else:
        laws = _laws(table, bootstrap=bootstrap, level=level, seed=seed)
        warnings += compute_laws.law_warnings(count, laws)
    return ComputeFit(
        kind=FILE_KIND, form="frontier", method=None, status="unidentified" if laws is None else "converged",
        optima=tuple(_optimum(table, place) for place in range(count)), params_law=laws.params if laws else None,
        tokens_law=laws.tokens if laws else None, loss_law=laws.loss if laws else None,
        inflation=laws.inflation if laws else compute_laws.Inflation(), level=level, bootstrap=bootstrap, seed=seed,
        num_runs=count, largest_flops=float(table.flops.max()), flops_given=table.flops_given, dropped=table.dropped,
        warnings=tuple(warnings), rows="optima",
    )  # fmt: skip


def _laws(table: OptimaTable, *, bootstrap: int, level: float, seed: int) -> Laws:
    none = np.zeros(len(table.flops))
    points = Points(
        flops=table.flops, params=table.params, tokens=table.tokens, params_variance=none, tokens_variance=none,
        loss_flops=table.flops, loss=table.loss, loss_variance=none, noise_sd=0.0,
    )  # fmt: skip
    bare = compute_laws.loss_law(points, slice(None), num_draws=0, seed=seed)
    off = np.log(table.loss) - np.log([bare.at(flops) for flops in table.flops.tolist()])
    noise_sd = math.sqrt(float((off**2).sum()) / max(len(off) - 2, 1))
    return compute_laws.fit_laws(
        dataclasses.replace(points, noise_sd=noise_sd), bootstrap=bootstrap, level=level, seed=seed
    )


def _optimum(table: OptimaTable, place: int) -> Optimum:
    return Optimum(
        flops=float(table.flops[place]), status="ok", reason=None, loss_nats=float(table.loss[place]),
        params=None if table.params is None else float(table.params[place]), params_interval=None,
        tokens=None if table.tokens is None else float(table.tokens[place]), tokens_interval=None, loss_interval=None,
        num_runs=1, num_sizes=1,
    )  # fmt: skip
