"""Rows of a table as a file holds them, before anybody asks what they mean.

Read from .csv and .jsonl by the standard library, from .parquet by pyarrow.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxies.core import canon

Row = tuple[int, Mapping[str, object]]
"""Row number as an editor shows it (a table's header is line 1), and its cells."""
MOST_PROBLEMS = 50
"""Listed one by one; of further ones the number is said."""


class TableError(ValueError):
    """A table that cannot be read or judged. `problems` lists every bad cell by row and column."""

    def __init__(self, path: Path, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        shown = self.problems[:MOST_PROBLEMS]
        rest = len(self.problems) - len(shown)
        shown += [f"and {rest} more"] if rest else []
        super().__init__(f"{path.name}: " + "; ".join(shown))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """A table: what its columns are called, and its rows."""

    names: tuple[str, ...]
    """As the file spells them, in its order."""
    rows: tuple[Row, ...]
    """Cells of the known columns at least; one that is absent is empty."""


def read_sheet(path: Path, known: Collection[str]) -> Sheet:
    """Read a table, of a wide one only the columns that are `known` where the file allows that.

    Raises:
        TableError: an unknown kind of file, one that cannot be parsed, or no rows.
        OSError: the file cannot be opened.
    """
    suffix = path.suffix.lower()
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows}
    try:
        if suffix == ".parquet":
            names, rows = _parquet_rows(path, known)
        elif suffix in readers:
            names, rows = readers[suffix](path)
        else:
            listed = ", ".join([*readers, ".parquet"])
            raise TableError(path, [f"the suffix {path.suffix!r} is unknown: one of {listed} is wanted"])
    except UnicodeDecodeError as error:
        raise TableError(path, [f"not UTF-8 text: {error.reason} at byte {error.start}"]) from error
    if not rows:
        raise TableError(path, ["no rows: nothing to judge"])
    return Sheet(names=tuple(names), rows=tuple(rows))


def _csv_rows(path: Path) -> tuple[list[str], list[Row]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restkey="", restval="", skipinitialspace=True, strict=True)
        try:
            names = [name.strip() for name in reader.fieldnames or ()]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise TableError(path, [f"the column {name!r} is there twice" for name in twice])
            return names, [(reader.line_num, {k.strip(): v for k, v in cells.items()}) for cells in reader]
        except csv.Error as error:
            raise TableError(path, [f"row {reader.line_num}: {error}"]) from error


def _jsonl_rows(path: Path) -> tuple[list[str], list[Row]]:
    rows: list[Row] = []
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
    return list(dict.fromkeys(name for _, cells in rows for name in cells)), rows


def _quote_not_finite(line: str) -> str:
    """Python's own json writes a diverged loss as a bare NaN; strict JSON knows it as text only."""
    for token in ("NaN", "-Infinity", "Infinity"):
        line = line.replace(f": {token}", f': "{token}"').replace(f":{token}", f':"{token}"')
    return line


def _parquet_rows(path: Path, known: Collection[str]) -> tuple[list[str], list[Row]]:
    parquet = importlib.import_module("pyarrow.parquet")  # slow to load, and few tables need it
    try:
        with parquet.ParquetFile(path) as file:  # not `read_table`, which loads pandas
            names = list(file.schema_arrow.names)
            cells = file.read(columns=[name for name in names if name in known]).to_pylist()
    except (ValueError, OSError, OverflowError) as error:  # pyarrow's own errors are of these
        raise TableError(path, [f"not a parquet file: {error}"]) from error
    return names, list(enumerate(cells, start=2))
