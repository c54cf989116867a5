"""Tables of runs: files of any common dialect in, checked arrays out.

Columns `params` (N), `tokens` (D) and `loss` (nats per token) must be there, under one of the names that
`proxies.core.tables.columns` lists; `flops` (default 6 * N * D), `budget`, `weight` and `seed` are optional, and any
others may be asked for; the rest are only looked at for what `traps` knows. A run whose loss is not finite, and one
that did not finish, is set aside with its row and the reason; every other bad cell is a mistake in the table, and all
of them are reported at once. Everything is counted in floats: 6 * N * D of whole numbers overflows 64 bits from 1.5e18
on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from proxies.core.notation import format_count
from proxies.core.tables import columns as column_names
from proxies.core.tables.table_files import Cells, Rows, Source, TableError, read_cells
from scaling_fits.laws import traps

Floats = NDArray[np.float64]

_WANTED = ("params", "tokens", "loss")
_OPTIONAL = ("flops", "budget", "weight", "seed")

TRUNK = "trunk"
"""A column of a study's own: runs with one number in it are decay branches of one stable phase, and share its noise."""

_LIMITS = {
    "params": (1e-12, 1e100), "tokens": (1e-12, 1e100), "loss": (1e-12, 1e12), "flops": (1e-24, 1e200),
    "weight": (1e-12, 1e12), "budget": (1e-24, 1e200), "seed": (0.0, 1e100),
}  # fmt: skip
"""Whatever the unit: a cell beyond is a slip, and products and logs of what is within stay numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedRow:
    """A run set aside: its row in the file and why."""

    row: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunTable:
    """Runs as columns, all of one length, finite and positive (seeds may be 0)."""

    params: Floats
    tokens: Floats
    loss: Floats
    """Nats per token."""
    flops: Floats
    weight: Floats
    """Share of each run in the objective; 1 unless the table says otherwise."""
    budget: Floats | None = None
    seed: Floats | None = None
    dropped: tuple[DroppedRow, ...] = ()
    flops_given: bool = False
    """Whether the FLOPs are the table's own rather than 6 * N * D."""
    extra: Mapping[str, Floats] = field(default_factory=dict)
    """Other columns that were asked for and are there, by the table's names. NaN: an empty cell."""
    column_names: Mapping[str, str] = field(default_factory=dict)
    """The table's own names of its columns, by ours."""
    lines: tuple[int, ...] | None = None
    """File line of each run; None for runs that came from no file."""
    warnings: tuple[str, ...] = ()
    """What is odd about the runs, though every cell is a number."""

    def __post_init__(self) -> None:
        """Check lengths and cells.

        Raises:
            TableError: columns of different lengths, or a value that is not finite and positive.
        """
        columns = {name: getattr(self, name) for name in (*_WANTED, *_OPTIONAL)}
        given = {name: column for name, column in columns.items() if column is not None}
        lengths = {name: len(column) for name, column in (given | dict(self.extra)).items()}
        if self.lines is not None:
            lengths["lines"] = len(self.lines)
        if len(set(lengths.values())) > 1:
            raise TableError([f"columns of different lengths: {lengths}"])
        problems = [
            f"row {index} of column {name!r} is {column[index]:g}: must be finite and positive"
            for name, column in given.items()
            for index in np.flatnonzero(~(np.isfinite(column) & (column >= 0 if name == "seed" else column > 0)))
        ]
        if problems:
            raise TableError(problems)

    @property
    def num_runs(self) -> int:
        """Runs that count."""
        return len(self.loss)

    def name(self, place: int) -> str:
        """A run as a reader finds it: by its row in the file, or by its size and tokens."""
        if self.lines is not None:
            return f"row {self.lines[place]}"
        return f"the run of {format_count(self.params[place])} params and {format_count(self.tokens[place])} tokens"

    def distinct(self) -> RunTable:
        """Return each run once, by its lowest loss: rows alike in every column are one run entered again.

        Losses within `traps.SAME_LOSS` of each other are alike: no two seeds agree so closely.
        """
        columns = [getattr(self, name) for name in (*_WANTED, *_OPTIONAL) if name != "loss"]
        cells = np.stack([column for column in (*columns, *self.extra.values()) if column is not None])
        _, group = np.unique(cells, axis=1, return_inverse=True)
        log_loss, places = np.log(self.loss), np.arange(self.num_runs)
        order = np.lexsort((places, log_loss, group))
        is_new = (np.diff(group[order], prepend=-1) != 0) | (
            np.diff(log_loss[order], prepend=-np.inf) > traps.SAME_LOSS
        )
        first = order[is_new]  # the lowest loss of each run, whatever the order of rows
        if len(first) == self.num_runs:
            return self
        kept = np.isin(np.arange(self.num_runs), first)
        return dataclasses.replace(self.rows(kept), dropped=self.dropped, warnings=self.warnings)

    def rows(self, keep: NDArray[np.bool_]) -> RunTable:
        """The runs where `keep` is true; of such a part nothing is dropped and no warning is repeated."""
        columns = {name: getattr(self, name) for name in (*_WANTED, *_OPTIONAL)}
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
    flops: Iterable[float] | None = None,
    extra: Mapping[str, Sequence[float]] | None = None,
) -> RunTable:
    """A table of runs already in memory, with any `extra` columns. Without `flops` they are 6 * N * D, in floats.

    Raises:
        TableError: a value that is not finite and positive, or columns of different lengths.
    """
    n, d, nats = (np.array([float(x) for x in column]) for column in (params, tokens, loss))
    if not len(n) == len(d) == len(nats):
        raise TableError([f"columns of different lengths: {len(n)}, {len(d)} and {len(nats)}"])
    counted = 6.0 * n * d if flops is None else np.array([float(x) for x in flops])
    return RunTable(params=n, tokens=d, loss=nats, flops=counted, weight=np.ones(len(n)),
                    extra={name: np.array(column, dtype=np.float64) for name, column in (extra or {}).items()},
                    flops_given=flops is not None)  # fmt: skip


def read_runs(
    path: Source | str,
    params_column: str = "",
    extra: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
) -> RunTable:
    """Read a table of runs.

    Args:
        path: A file or pipe (`proxies.core.tables.table_files.read_cells`), or cells already read.
        params_column: The table's column of N; empty: the one that its name tells. Another spelling of `columns`.
        extra: Further columns to keep, by our names, where the table has them. Their cells are finite numbers or empty.
        columns: The table's own names by ours, where a user chose.

    Raises:
        TableError: The file cannot be read or is of another kind, a column is missing or there twice, or cells
            are bad: text, zero, negative or missing. All problems are listed.
    """
    given = dict(columns or {}) | ({"params": params_column} if params_column else {})
    cells = read_cells(Path(path) if isinstance(path, str) else path)
    choice = column_names.choose_columns(
        cells.columns, (*_WANTED, *_OPTIONAL, *column_names.STATE_ROLES, *extra), given
    )
    missing = [name for name in _WANTED if name not in choice.columns]
    problems = [f"{cells.name}: {problem}" for problem in choice.problems]
    if missing and not problems:
        problems = [f"{cells.name} {column_names.describe_missing(missing, cells.columns)}"]
    if problems:
        raise TableError(problems + cells.problems)
    finished = column_names.drop_unfinished(cells, choice.columns)
    rows, dropped = finished.rows, finished.dropped
    names = {name: column for name, column in choice.columns.items() if name not in column_names.STATE_ROLES}
    numbers = _read_numbers(cells, rows, names)
    diverged = numbers.is_number["loss"] & ~np.isfinite(numbers.values["loss"])
    dropped += [
        (rows[place][0], f"loss is {numbers.values['loss'][place]}: not finite") for place in np.flatnonzero(diverged)
    ]
    problems, bad_cells = cells.problems + numbers.doubts, _find_bad_cells(rows, numbers, diverged) + finished.bad_cells
    if not problems and not bad_cells and diverged.all():
        problems.append(f"{cells.name} holds no run with a finite loss ({len(dropped)} dropped)")
    if problems or bad_cells:
        raise TableError(problems, bad_cells)
    values = {name: column[~diverged] for name, column in numbers.values.items()}
    kept = [row for row, is_diverged in zip(rows, diverged.tolist(), strict=True) if not is_diverged]
    of_runs = {name: values[name] for name in (*_WANTED, *_OPTIONAL) if name in values}
    six_nd, lines = 6.0 * values["params"] * values["tokens"], tuple(line for line, _ in kept)
    odd = traps.warnings_of(
        of_runs, [record for _, record in kept], lines, choice.columns["params"], is_chosen="params" in given
    )
    return RunTable(
        **{"flops": six_nd, "weight": np.ones(len(six_nd)), **of_runs},
        dropped=tuple(DroppedRow(row=line, reason=reason) for line, reason in sorted(dropped)),
        flops_given="flops" in of_runs,
        extra={numbers.names[name]: values[name] for name in extra if name in values},
        column_names=numbers.names,
        lines=lines,
        warnings=(*choice.notes, *finished.warnings, *odd),
    ).distinct()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numbers:
    """The columns of a table as arrays, by our names."""

    values: dict[str, Floats]
    """NaN where a cell is no number."""
    is_number: dict[str, NDArray[np.bool_]]
    names: dict[str, str]
    """The table's own names."""
    doubts: list[str]
    """Columns whose commas have two readings."""


def _read_numbers(cells: Cells, rows: Rows, names: dict[str, str]) -> _Numbers:
    read, doubts = column_names.read_columns(cells, rows, names)
    is_number = {name: np.array([value is not None for value in column.values], bool) for name, column in read.items()}
    values = {name: np.array(column.values, dtype=np.float64) for name, column in read.items()}  # None becomes NaN
    return _Numbers(values=values, is_number=is_number, names=names, doubts=doubts)


def _find_bad_cells(rows: Rows, numbers: _Numbers, diverged: NDArray[np.bool_]) -> list[str]:
    """Return every bad cell by row and column; cells of columns in doubt are named with their doubt."""
    found: list[tuple[int, str]] = []
    for name, column in numbers.values.items():
        theirs, is_number = numbers.names[name], numbers.is_number[name]
        if name in _LIMITS:
            least, most = _LIMITS[name]
            good, limit = is_number & (column >= least) & (column <= most), f"number from {least:g} to {most:g}"
            good |= diverged if name == "loss" else False
        else:
            good, limit = is_number & np.isfinite(column), "finite number"
        for place in np.flatnonzero(~good).tolist():
            line, cell = rows[place][0], rows[place][1].get(theirs)
            is_empty = cell is None or cell == ""
            in_doubt = isinstance(cell, str) and "," in cell and any(repr(theirs) in doubt for doubt in numbers.doubts)
            if in_doubt or (is_empty and name not in _LIMITS):
                continue
            shown = "missing" if is_empty else repr(float(column[place]) if is_number[place] else cell)
            found.append((line, f"row {line}, column {theirs!r}: {shown}: must be a {limit}"))
    return [problem for _, problem in sorted(found, key=lambda of_line: of_line[0])]
