"""A table of runs, in a file of three kinds or in memory: rows of cells as they stand, each with its line.

Rows are numbered by file line, the header of a `.csv` being line 1: in `.jsonl`, which has none, row n is line n; the
i-th record of a `.parquet` file, counted from 0, is row i + 2; rows in memory count from 0. Cells are judged elsewhere.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = list[tuple[int, dict[str, object]]]


class FormatError(ValueError):
    """A file of none of the three kinds, or one that cannot be read as what its name says; `why`: without the name."""

    def __init__(self, source: Source, why: str) -> None:
        self.why = why
        super().__init__(f"{source.name} {why}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """What a file holds, before any cell is judged."""

    columns: list[str]
    """Names in the file's order; one that is there twice is listed twice."""
    rows: Rows
    """(row, cells by column); a cell that is not there is not in the mapping."""
    problems: list[str]
    """Rows that are no rows."""
    name: str = "table"
    """Of the table, for messages."""


Source = Path | Cells
"""Where a table comes from: a file, or cells already read."""


def read_cells(path: Source, columns: Collection[str] | None = None) -> Cells:
    """The cells of a `.csv`, `.jsonl` or `.parquet` file; cells already read are given back.

    Args:
        path: the file, or its cells.
        columns: of a `.parquet` file, those whose cells are read; None: all.

    Raises:
        FormatError: another kind of file, or one that cannot be read.
    """
    if isinstance(path, Cells):
        return path
    readers: dict[str, Callable[[Path], Cells]] = {
        ".csv": _read_csv, ".jsonl": _read_jsonl, ".parquet": lambda path: _read_parquet(path, columns)
    }  # fmt: skip
    suffix = path.suffix.lower()
    if suffix not in readers:
        raise FormatError(
            path,
            f"cannot be read: the suffix {path.suffix!r} is unknown: must be one of {', '.join(readers)}",
        )
    try:
        return readers[suffix](path)
    except UnicodeDecodeError as error:
        raise FormatError(path, f"cannot be read: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise FormatError(path, f"cannot be read: {error.strerror or error}") from error


def cells_of(table: object) -> Cells:
    """The cells of a table in memory.

    Args:
        table: a pandas.DataFrame, a pyarrow.Table, a mapping from names to columns, or mappings, one a row.

    Raises:
        FormatError: none of these, or columns of different lengths.
    """
    given: Any = list(table) if isinstance(table, Iterator | tuple) else table
    if hasattr(given, "column_names") and hasattr(given, "columns"):  # pyarrow
        names, columns = list(given.column_names), [column.to_pylist() for column in given.columns]
    elif hasattr(given, "iloc") and hasattr(given, "columns"):  # pandas, by place: a name may stand twice
        names, columns = [str(name) for name in given.columns], [list(given.iloc[:, i]) for i in range(given.shape[1])]
    elif isinstance(given, Mapping) and all(_is_column(column) for column in given.values()):
        names, columns = [str(name) for name in given], [list(column) for column in given.values()]
    elif isinstance(given, list) and all(isinstance(row, Mapping) for row in given):
        records = [{str(name): _plain(cell) for name, cell in row.items()} for row in given]
        names = list(dict.fromkeys(name for record in records for name in record))
        return Cells(columns=names, rows=list(enumerate(records)), problems=[])
    else:
        raise FormatError(_MEMORY, f"is a {type(table).__name__}: must be a path, a pandas.DataFrame, a pyarrow.Table, "
                          "a dict of columns, or a list of dicts")  # fmt: skip
    lengths = {name: len(column) for name, column in zip(names, columns, strict=True)}
    if len(set(map(len, columns))) > 1:
        raise FormatError(_MEMORY, f"has columns of different lengths: {lengths}")
    cells = [dict(zip(names, map(_plain, row), strict=True)) for row in zip(*columns, strict=True)]
    return Cells(columns=names, rows=list(enumerate(cells)), problems=[])


_MEMORY = Cells(columns=[], rows=[], problems=[])


def _is_column(given: object) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)


def _plain(cell: Any) -> object:
    """A cell without the array library it came from: `numpy.int64(3)` is 3."""
    return cell.item() if hasattr(cell, "item") else cell


def _read_csv(path: Path) -> Cells:
    rows: Rows = []
    problems: list[str] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            columns = [name.strip() for name in next(reader, [])]
            for cells in reader:
                if not cells:
                    continue
                if len(cells) > len(columns):
                    problems.append(f"row {reader.line_num} has {len(cells)} cells: must have {len(columns)}")
                rows.append((reader.line_num, dict(zip(columns, map(_read_number, cells), strict=False))))
        except csv.Error as error:
            raise FormatError(path, f"cannot be read: row {reader.line_num}: {error}") from error
    return Cells(columns=columns, rows=rows, problems=problems)


def _read_number(text: str) -> object:
    """The number a CSV cell spells, or its text. Python alone reads 1_000 as one."""
    try:
        return text.strip() if "_" in text else float(text)
    except ValueError:
        return text.strip()


class _RepeatedKeys(dict[str, object]):
    """A JSON object in which some keys came twice."""


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen = dict(pairs)
    return seen if len(seen) == len(pairs) else _RepeatedKeys(seen)


def _read_jsonl(path: Path) -> Cells:
    rows: Rows = []
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
            problems.append(f"row {line} is a {type(record).__name__}: must be an object")
            continue
        if isinstance(record, _RepeatedKeys):
            problems.append(f"row {line} has a key twice: remove one")
        rows.append((line, record))
    return Cells(columns=list(dict.fromkeys(key for _, record in rows for key in record)), rows=rows, problems=problems)


def _read_parquet(path: Path, columns: Collection[str] | None) -> Cells:
    import pyarrow as pa  # 0.2 s to load, and only this format needs it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:  # not `read_table`, which loads pandas
            names = list(file.schema_arrow.names)
            table = file.read(columns=None if columns is None else [name for name in names if name in columns])
    except (pa.ArrowException, OverflowError) as error:
        raise FormatError(path, f"is not a Parquet file: {error}") from error
    values = [column.to_pylist() for column in table.columns]  # by place: Arrow's records refuse a name twice
    rows = [
        (i + 2, dict(zip(table.column_names, cells, strict=True))) for i, cells in enumerate(zip(*values, strict=True))
    ]
    return Cells(columns=names, rows=rows, problems=[])
