"""Tables of runs: `.csv`, `.parquet` or `.jsonl` in, checked arrays out.

Columns `params` (N), `tokens` (D) and `loss` (nats per token) must be there; `flops` (default 6 * N * D), `budget`,
`weight` and `seed` are optional, and any others may be asked for by name; the rest are only looked at for what
`traps` knows. A run whose loss is not finite is set aside with its row and the reason; every other bad cell is a
mistake in the table, and all of them are reported at once. Everything is counted in floats: 6 * N * D of whole numbers
overflows 64 bits from 1.5e18 on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from proxies.core.table_files import Cells, FormatError, Rows, Source, read_cells
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


class TableError(ValueError):
    """A table that cannot be fitted as it is. `problems` lists everything that is wrong with it."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


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
    """Other columns that were asked for and are there. NaN: an empty cell."""
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
        return f"the run of {self.params[place]:.4g} params and {self.tokens[place]:.4g} tokens"

    def distinct(self) -> RunTable:
        """Each run once, in its first place: rows that are alike in every column are one run entered again."""
        columns = [getattr(self, name) for name in (*_WANTED, *_OPTIONAL)]
        cells = np.stack([column for column in (*columns, *self.extra.values()) if column is not None])
        _, first = np.unique(cells, axis=1, return_index=True)
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


def read_runs(path: Source | str, params_column: str = "params", extra: Sequence[str] = ()) -> RunTable:
    """Read a table of runs.

    Args:
        path: a `.csv`, `.jsonl` or `.parquet` file, or cells already read.
        params_column: the column that holds N.
        extra: further columns to keep, where the file has them. Their cells are finite numbers or empty.

    Raises:
        TableError: the file cannot be read or is of another kind, a column is missing or there twice, or cells
            are bad: text, zero, negative or missing. All problems are listed.
    """
    path = Path(path) if isinstance(path, str) else path
    try:
        cells = read_cells(path)
    except FormatError as error:
        raise TableError([str(error)]) from error
    source = {name: name for name in (*_WANTED, *_OPTIONAL)} | {"params": params_column}
    there = [name for name in dict.fromkeys(extra) if name in cells.columns]
    problems = _column_problems(cells.columns, source, there, path.name) + cells.problems
    source = {name: column for name, column in source.items() if column in cells.columns}
    rows, dropped, bad = _judged(cells, source)
    of_extra = {name: _extra_column(rows, name, bad) for name in there}
    problems += bad
    if not problems and not rows:
        problems.append(f"{path.name} holds no run with a finite loss ({len(dropped)} dropped)")
    if problems:
        raise TableError(problems)
    columns = {name: np.array([_number(record[theirs]) for _, record in rows], dtype=np.float64)
               for name, theirs in source.items()}  # fmt: skip
    six_nd, lines = 6.0 * columns["params"] * columns["tokens"], tuple(line for line, _ in rows)
    return RunTable(
        **{"flops": six_nd, "weight": np.ones(len(six_nd)), **columns},
        dropped=tuple(dropped),
        flops_given="flops" in columns,
        extra=of_extra,
        lines=lines,
        warnings=traps.warnings_of(columns, [record for _, record in rows], lines, params_column),
    ).distinct()


def _column_problems(columns: list[str], source: dict[str, str], extra: list[str], file: str) -> list[str]:
    missing = [source[name] for name in _WANTED if source[name] not in columns]
    twice = sorted({name for name in (*source.values(), *extra) if columns.count(name) > 1})
    found = ", ".join(map(repr, columns)) or "none"
    return [f"{file} has no column {name!r} (it has {found})" for name in missing] + [
        f"{file} has the column {name!r} twice: remove one" for name in twice
    ]


def _judged(cells: Cells, source: dict[str, str]) -> tuple[Rows, list[DroppedRow], list[str]]:
    """The rows to keep, those set aside, and every bad cell of the columns in `source` (ours to theirs)."""
    kept: Rows = []
    dropped: list[DroppedRow] = []
    problems: list[str] = []
    for line, record in cells.rows:
        values = {name: _number(record.get(column)) for name, column in source.items()}
        bad = [
            f"row {line}, column {column!r}: {_shown(record.get(column))}: must be a number {_limit(name)}"
            for name, column in source.items()
            if not _good(name, values[name])
        ]
        problems += bad
        loss = values.get("loss")
        if loss is not None and not math.isfinite(loss):
            dropped.append(DroppedRow(row=line, reason=f"loss is {loss}: not finite"))
        elif not bad:
            kept.append((line, record))
    return kept, dropped, problems


def _extra_column(rows: Sequence[tuple[int, dict[str, object]]], name: str, problems: list[str]) -> Floats:
    """An optional column; adds what is wrong with it to `problems`."""
    values = [(line, cell, _number(cell)) for line, record in rows if (cell := record.get(name)) not in (None, "")]
    problems += [
        f"row {line}, column {name!r}: {cell!r}: must be a finite number"
        for line, cell, number in values
        if number is None or not math.isfinite(number)
    ]
    numbers = [_number(record.get(name)) for _, record in rows]
    return np.array([math.nan if number is None else number for number in numbers])


def _number(cell: object) -> float | None:
    """A cell as a float; None for what is missing or no number (JSON's "1" is text).

    Sums of whole numbers come out of a database as decimals in Parquet.
    """
    if isinstance(cell, bool) or not isinstance(cell, int | float | Decimal):
        return None
    try:
        return float(cell)
    except OverflowError:
        return math.inf


def _good(name: str, value: float | None) -> bool:
    if value is None:
        return False
    if name == "loss" and not math.isfinite(value):
        return True  # set aside with its reason, not a mistake in the table
    least, most = _LIMITS[name]
    return math.isfinite(value) and least <= value <= most


def _limit(name: str) -> str:
    return "from {:g} to {:g}".format(*_LIMITS[name])


def _shown(cell: object) -> str:
    return "missing" if cell is None or cell == "" else repr(cell)
