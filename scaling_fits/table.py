"""Tables of runs: `.csv`, `.parquet` or `.jsonl` in, checked arrays out.

Columns `params` (N), `tokens` (D) and `loss` (nats per token) are wanted; `flops` (default 6 * N * D), `budget`,
`weight` and `seed` are optional; others are left alone. A run whose loss is not finite is set aside with its row
and the reason; every other bad cell is a mistake in the table, and all of them are told at once.

Rows are numbered by file line, the header being line 1: in `.jsonl`, which has none, row n is line n; the i-th
record of a `.parquet` file, counted from 0, is row i + 2.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_Rows = list[tuple[int, dict[str, object]]]

_WANTED = ("params", "tokens", "loss")
_OPTIONAL = ("flops", "budget", "weight", "seed")


class TableError(ValueError):
    """A table that cannot be fitted as it stands. `problems` lists everything that is wrong with it."""

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

    def __post_init__(self) -> None:
        """Check lengths and cells.

        Raises:
            TableError: columns of different lengths, or a value that is not finite and positive.
        """
        columns = {name: getattr(self, name) for name in (*_WANTED, *_OPTIONAL)}
        given = {name: column for name, column in columns.items() if column is not None}
        lengths = {name: len(column) for name, column in given.items()}
        if len(set(lengths.values())) > 1:
            raise TableError([f"columns of different lengths: {lengths}"])
        problems = [
            f"row {index} of column {name!r} is {column[index]:g}: a finite number {_limit(name)} is wanted"
            for name, column in given.items()
            for index in np.flatnonzero(~(np.isfinite(column) & (column >= 0 if name == "seed" else column > 0)))
        ]
        if problems:
            raise TableError(problems)

    @property
    def num_runs(self) -> int:
        """Runs that count."""
        return len(self.loss)

    def rows(self, keep: NDArray[np.bool_]) -> RunTable:
        """The runs where `keep` is true; nothing is dropped from such a part."""
        return RunTable(
            params=self.params[keep],
            tokens=self.tokens[keep],
            loss=self.loss[keep],
            flops=self.flops[keep],
            weight=self.weight[keep],
            budget=None if self.budget is None else self.budget[keep],
            seed=None if self.seed is None else self.seed[keep],
            flops_given=self.flops_given,
        )


def from_columns(
    params: Iterable[float],
    tokens: Iterable[float],
    loss: Iterable[float],
    flops: Iterable[float] | None = None,
) -> RunTable:
    """A table of runs already in memory. Without `flops` they are 6 * N * D, in floats.

    Raises:
        TableError: a value that is not finite and positive, or columns of different lengths.
    """
    n, d, nats = (np.array([float(x) for x in column]) for column in (params, tokens, loss))
    if not len(n) == len(d) == len(nats):
        raise TableError([f"columns of different lengths: {len(n)}, {len(d)} and {len(nats)}"])
    counted = 6.0 * n * d if flops is None else np.array([float(x) for x in flops])
    return RunTable(params=n, tokens=d, loss=nats, flops=counted, weight=np.ones(len(n)),
                    flops_given=flops is not None)  # fmt: skip


def read_runs(path: Path | str, params_column: str = "params") -> RunTable:
    """Read a table of runs; `params_column` names the column that holds N.

    Raises:
        TableError: the file cannot be read or is of another kind, a column is missing or there twice, or cells
            are bad: text, zero, negative or missing. All problems are listed.
    """
    path = Path(path)
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise TableError([f"{path.name}: a table of runs is one of {', '.join(readers)}"])
    try:
        columns, rows, problems = readers[path.suffix](path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError([f"{path.name} cannot be read: {error}"]) from error
    source = {name: name for name in (*_WANTED, *_OPTIONAL)} | {"params": params_column}
    problems = _column_problems(columns, source, path.name) + problems
    return _assemble(rows, {name: column for name, column in source.items() if column in columns}, problems, path.name)


def _column_problems(columns: list[str], source: dict[str, str], file: str) -> list[str]:
    missing = [source[name] for name in _WANTED if source[name] not in columns]
    twice = sorted({name for name in source.values() if columns.count(name) > 1})
    found = ", ".join(map(repr, columns)) or "none"
    return [f"{file} has no column {name!r} (it has {found})" for name in missing] + [
        f"{file} has the column {name!r} twice: remove one" for name in twice
    ]


def _read_csv(path: Path) -> tuple[list[str], _Rows, list[str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        columns = [name.strip() for name in next(reader, [])]
        rows: _Rows = []
        problems: list[str] = []
        for cells in reader:
            if not cells:
                continue
            if len(cells) > len(columns):
                problems.append(f"row {reader.line_num} has {len(cells)} cells: {len(columns)} are wanted")
            rows.append((reader.line_num, dict(zip(columns, map(_read_number, cells), strict=False))))
    return columns, rows, problems


class _RepeatedKeys(dict[str, object]):
    """A JSON object in which some keys came twice."""


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen = dict(pairs)
    return seen if len(seen) == len(pairs) else _RepeatedKeys(seen)


def _read_jsonl(path: Path) -> tuple[list[str], _Rows, list[str]]:
    rows: _Rows = []
    problems: list[str] = []
    for line, text in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not text.strip():
            continue
        try:
            record = json.loads(text, object_pairs_hook=_pairs)
        except (ValueError, RecursionError) as error:
            problems.append(f"row {line} is not JSON: {error}")
            continue
        if not isinstance(record, dict):
            problems.append(f"row {line} is a {type(record).__name__}: an object is wanted")
            continue
        if isinstance(record, _RepeatedKeys):
            problems.append(f"row {line} has a key twice: remove one")
        rows.append((line, record))
    return list(dict.fromkeys(key for _, record in rows for key in record)), rows, problems


def _read_parquet(path: Path) -> tuple[list[str], _Rows, list[str]]:
    import pyarrow as pa  # 0.2 s to load, and only this format needs it
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()
    except pa.ArrowException as error:
        raise TableError([f"{path.name} is no Parquet file: {error}"]) from error
    values = [column.to_pylist() for column in table.columns]  # by place: Arrow's records refuse a name twice
    rows = [
        (i + 2, dict(zip(table.column_names, cells, strict=True))) for i, cells in enumerate(zip(*values, strict=True))
    ]
    return list(table.column_names), rows, []


def _assemble(rows: _Rows, source: dict[str, str], problems: list[str], file: str) -> RunTable:
    """Judge every cell of the columns in `source` (our name to the file's), after `problems` already found."""
    kept: list[dict[str, float]] = []
    dropped: list[DroppedRow] = []
    for line, record in rows:
        cells = {name: _number(record.get(column)) for name, column in source.items()}
        bad = [
            f"row {line}, column {column!r}: {_shown(record.get(column))}: a number {_limit(name)} is wanted"
            for name, column in source.items()
            if not _good(name, cells[name])
        ]
        problems += bad
        loss = cells.get("loss")
        if loss is not None and not math.isfinite(loss):
            dropped.append(DroppedRow(row=line, reason=f"loss is {loss}: not finite"))
        elif not bad:
            kept.append({name: value for name, value in cells.items() if value is not None})
    if not problems and not kept:
        problems.append(f"{file} holds no run with a finite loss ({len(dropped)} dropped)")
    if problems:
        raise TableError(problems)
    return _table({name: np.array([cells[name] for cells in kept]) for name in source}, tuple(dropped))


def _table(columns: dict[str, Floats], dropped: tuple[DroppedRow, ...]) -> RunTable:
    six_nd = 6.0 * columns["params"] * columns["tokens"]
    return RunTable(
        params=columns["params"],
        tokens=columns["tokens"],
        loss=columns["loss"],
        flops=columns.get("flops", six_nd),
        weight=columns.get("weight", np.ones(len(six_nd))),
        budget=columns.get("budget"),
        seed=columns.get("seed"),
        dropped=dropped,
        flops_given="flops" in columns,
    )


def _read_number(text: str) -> object:
    """The number a CSV cell spells, or its text. Python alone reads 1_000 as one."""
    try:
        return text.strip() if "_" in text else float(text)
    except ValueError:
        return text.strip()


def _number(cell: object) -> float | None:
    """A cell as a float; None for what is missing or no number (JSON's "1" is text)."""
    if isinstance(cell, bool) or not isinstance(cell, int | float):
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
    return math.isfinite(value) and (value >= 0 if name == "seed" else value > 0)


def _limit(name: str) -> str:
    return ">= 0" if name == "seed" else "> 0"


def _shown(cell: object) -> str:
    return "missing" if cell is None or cell == "" else repr(cell)
