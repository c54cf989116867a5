"""Tables of runs people already have: `width, lr, loss[, seed]`, or `width, lr_optimum`.

Read from .csv and .jsonl by the standard library, from .parquet by pyarrow. Other columns are left alone.
"""

from __future__ import annotations

import csv
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxies import canon
from transfer.optimum import Point

_Row = tuple[int, Mapping[str, object]]
"""Row number as an editor shows it (a table's header is line 1), and its cells."""
MOST_PROBLEMS = 50
"""Listed one by one; of further ones the number is said."""


class TableError(ValueError):
    """A table that cannot be read. `problems` lists every bad cell by row and column."""

    def __init__(self, path: Path, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        shown = self.problems[:MOST_PROBLEMS]
        rest = len(self.problems) - len(shown)
        shown += [f"and {rest} more"] if rest else []
        super().__init__(f"{path.name}: " + "; ".join(shown))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTable:
    """What a table holds: runs, or optima that somebody else has read off theirs. The other one is empty."""

    points: tuple[Point, ...]
    optima: tuple[tuple[int, float], ...]
    """(width, log2 of the optimal learning rate)."""


def read_runs(path: Path) -> RunTable:
    """Read a table of runs.

    A loss that is not finite (NaN, inf) is a run that diverged; an empty one may be a run that never was, so it
    is refused. Without a `seed` column all runs count as one seed, and runs of one width and rate as replicates.

    Raises:
        TableError: an unknown kind of file, a missing column, or bad cells, all of them with row and column.
        OSError: the file cannot be opened.
    """
    rows = _rows(path)
    if not rows:
        raise TableError(path, ["no rows: nothing to judge"])
    names = set().union(*(cells.keys() for _, cells in rows))
    wanted = ("width", "lr", "loss") if {"lr", "loss"} & names else ("width", "lr_optimum")
    missing = [name for name in wanted if name not in names]
    if missing:
        found = ", ".join(sorted(names)) or "none"
        layouts = "`width, lr, loss[, seed]` or `width, lr_optimum` is wanted"
        raise TableError(path, [f"no column {', '.join(missing)} (found: {found}): {layouts}"])
    problems: list[str] = []
    points, optima = [], []
    for number, cells in rows:
        width = _whole(cells.get("width"), f"row {number}, column width", 1, problems)
        lr = _positive(cells.get(wanted[1]), f"row {number}, column {wanted[1]}", problems)
        if wanted[-1] == "lr_optimum":
            optima.append((width, math.log2(lr)))
            continue
        loss = _loss(cells.get("loss"), f"row {number}, column loss", problems)
        seed = _whole(cells["seed"], f"row {number}, column seed", 0, problems) if "seed" in cells else 0
        points.append(Point(width=width, log2_lr=math.log2(lr), loss_nats=loss, seed=seed))
    if problems:
        raise TableError(path, problems)
    return RunTable(points=tuple(points), optima=tuple(optima))


def _rows(path: Path) -> list[_Row]:
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise TableError(path, [f"the suffix {path.suffix!r} is unknown: one of {', '.join(readers)} is wanted"])
    try:
        return reader(path)
    except UnicodeDecodeError as error:
        raise TableError(path, [f"not UTF-8 text: {error.reason} at byte {error.start}"]) from error


_COLUMNS = ("width", "lr", "loss", "seed", "lr_optimum")


def _csv_rows(path: Path) -> list[_Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restkey="", restval="", skipinitialspace=True, strict=True)
        try:
            names = [name.strip() for name in reader.fieldnames or ()]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise TableError(path, [f"the column {name!r} is there twice" for name in twice])
            return [(reader.line_num, {k.strip(): v for k, v in cells.items()}) for cells in reader]
        except csv.Error as error:
            raise TableError(path, [f"row {reader.line_num}: {error}"]) from error


def _jsonl_rows(path: Path) -> list[_Row]:
    rows: list[_Row] = []
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            cells = canon.parse(_quote_not_finite(line))
        except canon.CanonError as error:
            problems.append(f"row {number}: {error}")
            continue
        if isinstance(cells, dict):
            rows.append((number, cells))
        else:
            problems.append(f"row {number}: a {type(cells).__name__}, an object is wanted")
    if problems:
        raise TableError(path, problems)
    return rows


def _quote_not_finite(line: str) -> str:
    """Python's own json writes a diverged loss as a bare NaN; strict JSON knows it as text only."""
    for token in ("NaN", "-Infinity", "Infinity"):
        line = line.replace(f": {token}", f': "{token}"').replace(f":{token}", f':"{token}"')
    return line


def _parquet_rows(path: Path) -> list[_Row]:
    parquet = importlib.import_module("pyarrow.parquet")  # slow to load, and few tables need it
    try:
        there = parquet.read_schema(path).names
        cells = parquet.read_table(path, columns=[name for name in _COLUMNS if name in there]).to_pylist()
    except (ValueError, OSError, OverflowError) as error:  # pyarrow's own errors are of these
        raise TableError(path, [f"not a parquet file: {error}"]) from error
    return list(enumerate(cells, start=2))


def _number(cell: object) -> float | None:
    if isinstance(cell, bool) or not isinstance(cell, int | float | str):
        return None
    try:
        return float(cell)
    except (ValueError, OverflowError):
        return None


def _positive(cell: object, where: str, problems: list[str]) -> float:
    value = _number(cell)
    if value is None or not math.isfinite(value) or value <= 0:
        problems.append(f"{where}: {cell!r} is not a number > 0")
        return 1.0
    return value


def _whole(cell: object, where: str, least: int, problems: list[str]) -> int:
    value = _number(cell)
    if value is None or not math.isfinite(value) or value != int(value) or value < least:
        problems.append(f"{where}: {cell!r} is not a whole number >= {least}")
        return least
    return int(value)


def _loss(cell: object, where: str, problems: list[str]) -> float | None:
    value = _number(cell)
    if value is None or (value <= 0 and math.isfinite(value)):
        problems.append(f"{where}: {cell!r} is not a loss > 0 in nats (write NaN for a run that diverged)")
        return None
    return value if math.isfinite(value) else None
