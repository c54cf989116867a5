"""Tables of runs, read from files of any common dialect into checked arrays.

The columns `params` (N), `tokens` (D), and `loss` (nats per token) are required, under one of the
names that `forerun._proxies.core.tables.columns` lists. `flops` (default 6 * N * D), `budget`,
`weight`, and `seed` are optional, and a caller may request more columns. All other columns are read
only by the checks of `traps`. A run whose loss is not finite, or that did not finish, is dropped,
and its row and the reason are kept. Every other bad cell is an error, and all errors are reported
at once. All numbers are floats, because 6 * N * D of integers overflows 64 bits from 1.5e18 on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from forerun._proxies.core.notation import format_count
from forerun._proxies.core.tables import columns as column_names
from forerun._proxies.core.tables.table_files import Cells, Rows, Source, TableError, read_cells
from forerun._scaling_fits.laws import traps
from forerun._scaling_fits.laws.solver import Bools, Floats

_REQUIRED = ("params", "tokens", "loss")
_OPTIONAL = ("flops", "budget", "weight", "seed")

TRUNK = "trunk"
"""Name of a column in the tables of studies. Runs with the same number in this column are decay
branches of one stable phase, and share the noise of that phase."""

_LIMITS = {
    "params": (1e-12, 1e100),
    "tokens": (1e-12, 1e100),
    "loss": (1e-12, 1e12),
    "flops": (1e-24, 1e200),
    "weight": (1e-12, 1e12),
    "budget": (1e-24, 1e200),
    "seed": (0.0, 1e100),
}
"""Limits of a cell in any unit. A cell beyond them is a typing mistake. Within the limits, products
and logs stay finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedRow:
    """A run that was dropped: its row in the file, and the reason."""

    row: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunTable:
    """Runs as columns of the same length, finite and positive (seeds may be 0)."""

    params: Floats
    tokens: Floats
    loss: Floats
    """Loss in nats per token."""
    flops: Floats
    weight: Floats
    """Weight of each run in the objective; 1 unless the table gives another."""
    budget: Floats | None = None
    seed: Floats | None = None
    dropped: tuple[DroppedRow, ...] = ()
    flops_given: bool = False
    """Whether the FLOPs are from the table rather than 6 * N * D."""
    extra: Mapping[str, Floats] = field(default_factory=dict)
    """Other requested columns that the table has, by its names. NaN marks an empty cell."""
    column_names: Mapping[str, str] = field(default_factory=dict)
    """The table's column names, by role."""
    lines: tuple[int, ...] | None = None
    """File line of each run; None for runs that were not read from a file."""
    warnings: tuple[str, ...] = ()
    """Warnings about suspicious runs."""

    def __post_init__(self) -> None:
        """Check lengths and cells.

        Raises:
            TableError: Columns have different lengths, or a value is not finite and positive.
        """
        columns = {name: getattr(self, name) for name in (*_REQUIRED, *_OPTIONAL)}
        given = {name: column for name, column in columns.items() if column is not None}
        lengths = {name: len(column) for name, column in (given | dict(self.extra)).items()}
        if self.lines is not None:
            lengths["lines"] = len(self.lines)
        if len(set(lengths.values())) > 1:
            raise TableError([f"columns of different lengths: {lengths}"])
        problems = [
            f"row {index} of column {name!r} is {column[index]:g}: must be finite and positive"
            for name, column in given.items()
            for index in np.flatnonzero(
                ~(np.isfinite(column) & (column >= 0 if name == "seed" else column > 0))
            )
        ]
        if problems:
            raise TableError(problems)

    @property
    def num_runs(self) -> int:
        """Number of runs."""
        return len(self.loss)

    @property
    def num_places(self) -> int:
        """Number of different pairs of size and tokens."""
        return len(np.unique(np.stack([self.params, self.tokens]), axis=1).T)

    def name_run(self, index: int) -> str:
        """Return a run's name for messages: its row in the file, or its size and tokens."""
        if self.lines is not None:
            return f"row {self.lines[index]}"
        return (
            f"the run of {format_count(self.params[index])} params and "
            f"{format_count(self.tokens[index])} tokens"
        )

    def drop_repeats(self) -> RunTable:
        """Return each run once. Rows with nearly the same loss that are equal in every other column
        are one run entered several times. The row with the lowest loss is kept.

        Losses within `traps.SAME_LOSS` of each other count as equal, because two seeds never agree
        so closely.
        """
        columns = [getattr(self, name) for name in (*_REQUIRED, *_OPTIONAL) if name != "loss"]
        cells = np.stack(
            [column for column in (*columns, *self.extra.values()) if column is not None]
        )
        _, group = np.unique(cells, axis=1, return_inverse=True)
        log_loss, places = np.log(self.loss), np.arange(self.num_runs)
        # Sort by group, then by loss, then by place. A run is new if its group is, or its loss
        order = np.lexsort((places, log_loss, group))
        is_new = (np.diff(group[order], prepend=-1) != 0) | (
            np.diff(log_loss[order], prepend=-np.inf) > traps.SAME_LOSS
        )
        first_rows = order[is_new]  # The lowest loss of each run, whatever the order of rows
        if len(first_rows) == self.num_runs:
            return self
        distinct = self.select_runs(np.isin(np.arange(self.num_runs), first_rows))
        return dataclasses.replace(distinct, dropped=self.dropped, warnings=self.warnings)

    def select_runs(self, keep: Bools) -> RunTable:
        """Return the runs where `keep` is true, without the dropped rows and the warnings of the
        whole table.
        """
        columns = {name: getattr(self, name) for name in (*_REQUIRED, *_OPTIONAL)}
        return dataclasses.replace(
            self,
            **{name: column[keep] for name, column in columns.items() if column is not None},
            extra={name: column[keep] for name, column in self.extra.items()},
            lines=None if self.lines is None else tuple(np.array(self.lines)[keep].tolist()),
            dropped=(),
            warnings=(),
        )


def from_columns(
    params: Iterable[float],
    tokens: Iterable[float],
    loss: Iterable[float],
    extra: Mapping[str, Sequence[float]] | None = None,
) -> RunTable:
    """Build a table of runs already in memory, with any `extra` columns. FLOPs are 6 * N * D, in
    floats.

    Raises:
        TableError: A value is not finite and positive, or columns have different lengths.
    """
    n, d, nats = (np.array([float(x) for x in column]) for column in (params, tokens, loss))
    if not len(n) == len(d) == len(nats):
        raise TableError([f"columns of different lengths: {len(n)}, {len(d)} and {len(nats)}"])
    return RunTable(
        params=n,
        tokens=d,
        loss=nats,
        flops=6.0 * n * d,
        weight=np.ones(len(n)),
        extra={name: np.array(column, dtype=np.float64) for name, column in (extra or {}).items()},
    )


def read_runs(
    path: Source | str,
    extra: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
) -> RunTable:
    """Read a table of runs.

    Args:
        path: A file or pipe (`forerun._proxies.core.tables.table_files.read_cells`), or cells
            already read.
        extra: Roles of other columns to keep if the table has them. Cells of such a column are
            finite numbers or empty.
        columns: The table's column name by role, where the user chose one.

    Raises:
        TableError: The file cannot be read or is of another kind, a column is missing or there
            twice, or cells are bad: text, zero, negative or missing. All problems are listed.
    """
    given = columns or {}
    cells = read_cells(Path(path) if isinstance(path, str) else path)
    choice = _choose_columns(cells, given, extra)
    finished = column_names.drop_unfinished_rows(cells, choice.columns)
    names = {
        name: column
        for name, column in choice.columns.items()
        if name not in column_names.STATE_ROLES
    }
    numbers = _read_numbers(cells, finished.rows, names)
    diverged = numbers.is_number["loss"] & ~np.isfinite(numbers.values["loss"])
    dropped = finished.dropped + [
        (finished.rows[place][0], f"loss is {numbers.values['loss'][place]}: not finite")
        for place in np.flatnonzero(diverged)
    ]
    problems = cells.problems + numbers.doubts
    bad_cells = _find_bad_cells(finished.rows, numbers, diverged) + finished.bad_cells
    if not problems and not bad_cells and diverged.all():
        problems.append(f"{cells.name} holds no run with a finite loss ({len(dropped)} dropped)")
    if problems or bad_cells:
        raise TableError(problems, bad_cells)
    kept = [
        row
        for row, is_diverged in zip(finished.rows, diverged.tolist(), strict=True)
        if not is_diverged
    ]
    table = _build_table(kept, numbers, ~diverged, extra, "params" in given)
    return dataclasses.replace(
        table,
        dropped=tuple(DroppedRow(row=line, reason=reason) for line, reason in sorted(dropped)),
        warnings=(*choice.notes, *finished.warnings, *table.warnings),
    ).drop_repeats()


def _choose_columns(
    cells: Cells, given: Mapping[str, str], extra: Sequence[str]
) -> column_names.ColumnChoice:
    """Choose the columns of a table of runs.

    Raises:
        TableError: A column is missing or there twice.
    """
    roles = (*_REQUIRED, *_OPTIONAL, *column_names.STATE_ROLES, *extra)
    choice = column_names.choose_columns(cells.columns, roles, given)
    missing = [name for name in _REQUIRED if name not in choice.columns]
    problems = [f"{cells.name}: {problem}" for problem in choice.problems]
    if missing and not problems:
        problems = [f"{cells.name} {column_names.describe_missing(missing, cells.columns)}"]
    if problems:
        raise TableError(problems + cells.problems)
    return choice


def _build_table(
    rows: Rows,
    numbers: _NumberColumns,
    keep: Bools,
    extra: Sequence[str],
    is_params_chosen: bool,
) -> RunTable:
    """Return the table of the kept runs, with warnings about suspicious ones."""
    values = {name: column[keep] for name, column in numbers.values.items()}
    run_columns = {name: values[name] for name in (*_REQUIRED, *_OPTIONAL) if name in values}
    six_nd, lines = 6.0 * values["params"] * values["tokens"], tuple(line for line, _ in rows)
    warnings = traps.find_warnings(
        run_columns,
        [record for _, record in rows],
        lines,
        numbers.names["params"],
        is_chosen=is_params_chosen,
    )
    return RunTable(
        **{"flops": six_nd, "weight": np.ones(len(six_nd)), **run_columns},
        dropped=(),
        flops_given="flops" in run_columns,
        extra={numbers.names[name]: values[name] for name in extra if name in values},
        column_names=numbers.names,
        lines=lines,
        warnings=warnings,
    )


class _NumberColumns(NamedTuple):
    """The columns of a table as arrays, by role."""

    values: dict[str, Floats]
    """Values by role; NaN where a cell is not a number."""
    is_number: dict[str, Bools]
    names: dict[str, str]
    """The table's column names, by role."""
    doubts: list[str]
    """Problems of columns whose commas may be decimal or thousands separators."""


def _read_numbers(cells: Cells, rows: Rows, names: dict[str, str]) -> _NumberColumns:
    read, doubts = column_names.read_columns(cells, rows, names)
    is_number = {
        name: np.array([value is not None for value in column.values], bool)
        for name, column in read.items()
    }
    # None becomes NaN
    values = {name: np.array(column.values, dtype=np.float64) for name, column in read.items()}
    return _NumberColumns(values=values, is_number=is_number, names=names, doubts=doubts)


def _find_bad_cells(rows: Rows, numbers: _NumberColumns, diverged: Bools) -> list[str]:
    """Return a problem for every bad cell, by row and column. Cells with a comma are left out if it
    is in doubt what commas in their column mean, because that doubt is a problem of its own.
    """
    problems_by_line: list[tuple[int, str]] = []
    for name, column in numbers.values.items():
        column_name, is_number = numbers.names[name], numbers.is_number[name]
        if name in _LIMITS:
            low, high = _LIMITS[name]
            good = is_number & (column >= low) & (column <= high)
            limit = f"number from {low:g} to {high:g}"
            good |= diverged if name == "loss" else False
        else:
            good, limit = is_number & np.isfinite(column), "finite number"
        for place in np.flatnonzero(~good).tolist():
            line, cell = rows[place][0], rows[place][1].get(column_name)
            is_empty = cell is None or cell == ""
            in_doubt = (
                isinstance(cell, str)
                and "," in cell
                and any(repr(column_name) in doubt for doubt in numbers.doubts)
            )
            if in_doubt or (is_empty and name not in _LIMITS):
                continue
            shown = (
                "missing" if is_empty else repr(float(column[place]) if is_number[place] else cell)
            )
            problems_by_line.append(
                (line, f"row {line}, column {column_name!r}: {shown}: must be a {limit}")
            )
    return [problem for _, problem in sorted(problems_by_line, key=lambda item: item[0])]
