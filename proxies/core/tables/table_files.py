"""A table of runs, in a file, from a pipe, or in memory: rows of cells as they stand, each with its line.

Rows are numbered by file line, the header of a `.csv` being line 1: in `.jsonl`, which has none, row n is line n; the
i-th record of a `.parquet` file, counted from 0, is row i + 2; rows in memory count from 0. Cells are read elsewhere.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from proxies.core.notation import counted, with_article
from proxies.core.plain_files import open_plain
from proxies.core.tables.delimited import DelimitedError, decode_text, parse_delimited

Rows = list[tuple[int, dict[str, object]]]

MAX_TABLE_BYTES = 2**29
"""Upper limit of a table in bytes: ten million rows of three numbers."""
_CHUNK_BYTES = 2**20
SUFFIXES = (".csv", ".jsonl", ".parquet", ".tsv")
MAX_BAD_CELLS_SHOWN = 3
"""Bad cells in a message for people; `TableError.problems` has all of them."""
_PIPE_FOLDERS = ("/dev/fd", "/proc/self/fd")
"""Folders in which a shell keeps the pipe of `<(command)`."""


class TableError(ValueError):
    """A table that cannot be used as it is."""

    def __init__(self, problems: Sequence[str], bad_cells: Sequence[str] = (), *, name: str = "") -> None:
        """Describe everything that is wrong, and show the first few bad cells.

        Args:
            problems: What is wrong with the table.
            bad_cells: What is wrong with its cells, each with row and column.
            name: Name of the table, where the problems do not have it.
        """
        self.problems = [*problems, *bad_cells]
        """Everything that is wrong, each bad cell included."""
        parts = [*problems, *bad_cells[:MAX_BAD_CELLS_SHOWN]]
        if len(bad_cells) > MAX_BAD_CELLS_SHOWN:
            parts.append(f"{counted(len(bad_cells), 'bad cell')} in all: --json lists every one")
        super().__init__(f"{name}: {'; '.join(parts)}" if name else "; ".join(parts))


class FormatError(TableError):
    """A file of an unknown kind, or one that cannot be read as what its name says."""

    def __init__(self, source: Source, why: str) -> None:
        self.why = why
        """The message without the name of the file."""
        super().__init__([f"{source.name} {why}"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """A table before any cell is read."""

    columns: list[str]
    """Names in the file's order; one that is there twice is listed twice."""
    rows: Rows
    """(row, cells by column); a cell that is not there is not in the mapping."""
    problems: list[str] = field(default_factory=list)
    """Rows that are no rows."""
    dropped: list[tuple[int, str]] = field(default_factory=list)
    """(row, reason) of rows that hold no run."""
    splits_at_commas: bool = False
    """Whether the table is text with commas between its cells."""
    name: str = "table"
    """Name of the table, for messages."""


Source = Path | Cells
"""Source of a table: a file, a pipe (`-`, `/dev/fd/63`), or cells already read."""


def read_cells(path: Source, is_wanted: Callable[[str], bool] | None = None) -> Cells:
    """Read a table from a `.csv`, `.tsv`, `.jsonl` or `.parquet` file, or from a pipe, whose content tells its kind.

    Args:
        path: The file or pipe; cells already read are returned as they are.
        is_wanted: Whether a column of a `.parquet` file is read, by its name; None: all are.

    Raises:
        FormatError: Another kind of file, or one that cannot be read.
    """
    if isinstance(path, Cells):
        return path
    if not _is_pipe(path) and path.suffix.lower() not in SUFFIXES:
        raise FormatError(
            path,
            f"cannot be read: the suffix {path.suffix!r} is unknown: must be one of {', '.join(SUFFIXES)}",
        )
    try:
        with _open_table(path) as file:
            data = b"".join(_read_chunks(file))
    except OSError as error:
        raise FormatError(path, f"cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_TABLE_BYTES:
        raise FormatError(path, f"has more than {MAX_TABLE_BYTES} bytes, the limit for a table: split it")
    suffix = _guess_suffix(data) if _is_pipe(path) else path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(path, data, is_wanted)
    try:
        text = decode_text(data)
        if suffix == ".jsonl":
            return _read_jsonl(text, path.name)
        table = parse_delimited(text, "\t" if suffix == ".tsv" else "")
    except DelimitedError as error:
        raise FormatError(path, str(error)) from error
    return Cells(
        columns=table.columns,
        rows=table.rows,
        problems=table.problems,
        dropped=table.dropped,
        splits_at_commas=table.splits_at_commas,
        name=path.name,
    )


def _is_pipe(path: Path) -> bool:
    """Return whether a path is standard input, or a pipe that a shell opened for this process."""
    return str(path) in ("-", "/dev/stdin") or str(path.parent) in _PIPE_FOLDERS


def _open_table(path: Path) -> BinaryIO:
    """Open a plain file, or a pipe that this process already holds.

    Raises:
        OSError: The file cannot be opened, or is a named pipe, a socket or a device.
    """
    if not _is_pipe(path):
        return open_plain(path)
    file = os.fdopen(os.dup(sys.stdin.fileno()), "rb") if str(path) == "-" else path.open("rb")
    mode = os.fstat(file.fileno()).st_mode
    if (stat.S_ISCHR(mode) and not file.isatty()) or stat.S_ISBLK(mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a device: must be a file or a pipe", str(path))
    return file


def _read_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield a file's content, up to one chunk more than the limit."""
    num_bytes = 0
    while num_bytes <= MAX_TABLE_BYTES and (chunk := file.read(_CHUNK_BYTES)):
        num_bytes += len(chunk)
        yield chunk


def _guess_suffix(data: bytes) -> str:
    """Return the kind of a table that has no file name."""
    if data.startswith(b"PAR1"):
        return ".parquet"
    return ".jsonl" if data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") else ".csv"


def cells_of(table: object) -> Cells:
    """Return the cells of a table in memory.

    Args:
        table: A pandas.DataFrame, a pyarrow.Table, a mapping from names to columns, or mappings, one a row.

    Raises:
        FormatError: None of these, or columns of different lengths.
    """
    given: Any = list(table) if isinstance(table, Iterator | tuple) else table
    if hasattr(given, "column_names") and hasattr(given, "columns"):  # pyarrow
        names, columns = list(given.column_names), [column.to_pylist() for column in given.columns]
    elif hasattr(given, "iloc") and hasattr(given, "columns"):  # pandas, by place: a name may stand twice
        names, columns = [str(name) for name in given.columns], [list(given.iloc[:, i]) for i in range(given.shape[1])]
    elif isinstance(given, Mapping) and all(_is_column(column) for column in given.values()):
        names, columns = [str(name) for name in given], [list(column) for column in given.values()]
    elif isinstance(given, list) and all(isinstance(row, Mapping) for row in given):
        records = [{str(name): _to_plain(cell) for name, cell in row.items()} for row in given]
        names = list(dict.fromkeys(name for record in records for name in record))
        return Cells(columns=names, rows=list(enumerate(records)))
    else:
        raise FormatError(
            _MEMORY,
            f"is {with_article(type(table).__name__)}: must be a path, a pandas.DataFrame, a pyarrow.Table, a dict "
            "of columns, or a list of dicts",
        )
    lengths = {name: len(column) for name, column in zip(names, columns, strict=True)}
    if len(set(map(len, columns))) > 1:
        raise FormatError(_MEMORY, f"has columns of different lengths: {lengths}")
    cells = [dict(zip(names, map(_to_plain, row), strict=True)) for row in zip(*columns, strict=True)]
    return Cells(columns=names, rows=list(enumerate(cells)))


_MEMORY = Cells(columns=[], rows=[])


def _is_column(given: object) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)


def _to_plain(cell: Any) -> object:
    """Return a cell without the array library it came from: `numpy.int64(3)` is 3."""
    return cell.item() if hasattr(cell, "item") and getattr(cell, "ndim", 0) == 0 else cell


class _RepeatedKeys(dict[str, object]):
    """A JSON object in which some keys came twice."""


def _join_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen = dict(pairs)
    return seen if len(seen) == len(pairs) else _RepeatedKeys(seen)


def _parse_json_float(text: str) -> object:
    """Return a float, or the text of a finite number that no float holds: 1e400 is not infinity."""
    number = float(text)
    return text if math.isinf(number) else number


def _read_jsonl(text: str, name: str) -> Cells:
    rows: Rows = []
    problems: list[str] = []
    for line, record_text in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), start=1):
        if not record_text.strip():
            continue
        try:
            record = json.loads(record_text, object_pairs_hook=_join_pairs, parse_float=_parse_json_float)
        except (ValueError, RecursionError) as error:
            problems.append(f"row {line} is not JSON: {error}")
            continue
        if not isinstance(record, dict):
            problems.append(f"row {line} is {with_article(type(record).__name__)}: must be an object")
            continue
        if isinstance(record, _RepeatedKeys):
            problems.append(f"row {line} has a key twice: remove one")
        rows.append((line, record))
    columns = list(dict.fromkeys(key for _, record in rows for key in record))
    return Cells(columns=columns, rows=rows, problems=problems, name=name)


def _read_parquet(path: Path, data: bytes, is_wanted: Callable[[str], bool] | None) -> Cells:
    import pyarrow as pa  # 0.2 s to load, and only this format needs it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(io.BytesIO(data)) as file:  # not `read_table`, which loads pandas
            names = list(file.schema_arrow.names)
            table = file.read(columns=None if is_wanted is None else list(filter(is_wanted, names)))
    except (pa.ArrowException, OverflowError, OSError) as error:
        raise FormatError(path, f"is not a Parquet file: {error}") from error
    values = [column.to_pylist() for column in table.columns]  # by place: Arrow's records refuse a name twice
    rows = [
        (i + 2, dict(zip(table.column_names, cells, strict=True))) for i, cells in enumerate(zip(*values, strict=True))
    ]
    return Cells(columns=names, rows=rows, name=path.name)
