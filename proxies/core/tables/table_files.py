"""Readers of tables of runs, from files, pipes, and memory. They return rows of cells.

Cells are not converted to numbers here (`numerals` does that). Rows of text are numbered by line,
so that the first row below the header of a `.csv` is row 2. The first record of a `.parquet` file
is row 2 as well; rows in memory count from 0.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from forerun._proxies.core.errors import InputError
from forerun._proxies.core.notation import add_article, format_counted
from forerun._proxies.core.plain_files import open_plain
from forerun._proxies.core.tables.delimited import (
    SPACES,
    DelimitedError,
    decode_text,
    find_delimiter,
    split_rows,
)

Rows = list[tuple[int, dict[str, object]]]
"""(row number, cells by column) of each row; a missing cell is not in the mapping."""

MAX_TABLE_BYTES = 2**29
"""Maximum size of a table: ten million rows of three numbers."""
_CHUNK_BYTES = 2**20
SUFFIXES = (".csv", ".jsonl", ".parquet", ".tsv", ".txt", ".ndjson", ".md")
"""Suffixes of files that are read as tables."""
_CONTENT_SUFFIXES = (".md", ".ndjson", ".txt")
"""Suffixes of files whose content determines the format, as for a pipe."""
MAX_BAD_CELLS_SHOWN = 3
"""Maximum number of bad cells in a message; `TableError.problems` has all of them."""
_PIPE_FOLDERS = ("/dev/fd", "/proc/self/fd")
"""Folders of the pipe that a shell opens for `<(command)`."""


class TableError(InputError):
    """A table that cannot be used as it is."""

    def __init__(
        self, problems: Sequence[str], bad_cells: Sequence[str] = (), *, name: str = ""
    ) -> None:
        """Describe all problems of the table, and the first few bad cells.

        Args:
            problems: Problems of the table as a whole.
            bad_cells: Problems of single cells, each with row and column.
            name: Name of the table; empty if the problems contain it.
        """
        self.problems = [*problems, *bad_cells]
        """All problems, one for each bad cell included."""
        parts = [*problems, *bad_cells[:MAX_BAD_CELLS_SHOWN]]
        if len(bad_cells) > MAX_BAD_CELLS_SHOWN:
            parts.append(
                f"{format_counted(len(bad_cells), 'bad cell')} in all: --json lists every one"
            )
        super().__init__(f"{name}: {'; '.join(parts)}" if name else "; ".join(parts))


class FormatError(TableError):
    """A file of an unknown kind, or a file without the format of its suffix."""

    def __init__(self, source: Source, why: str) -> None:
        super().__init__([f"{source.name} {why}"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """A table before any cell is read."""

    columns: list[str]
    """Names of the columns in the file's order; a name that appears twice is listed twice."""
    rows: Rows
    problems: list[str] = field(default_factory=list)
    """Problems of rows that could not be split into cells."""
    dropped: list[tuple[int, str]] = field(default_factory=list)
    """(row number, reason) of rows that are not runs: empty rows, and repeated headers."""
    splits_at_commas: bool = False
    """Whether the table is text whose cells are separated by commas."""
    name: str = "table"
    """Name of the table, for messages."""


Source = Path | Cells
"""Source of a table: a file, a pipe (`-`, `/dev/fd/63`), or cells that were already read."""


def read_cells(path: Source, is_wanted: Callable[[str], bool] | None = None) -> Cells:
    """Read a table from a file with one of `SUFFIXES`, or from a pipe.

    The suffix `.csv`, `.tsv`, `.jsonl`, or `.parquet` determines the format. For other suffixes and
    for pipes, the content does.

    Args:
        path: The file or pipe; cells that were already read are returned unchanged.
        is_wanted: Predicate on the names of a `.parquet` file's columns to read; None for all
            columns.

    Raises:
        FormatError: The file is of another kind, or cannot be read.
    """
    if isinstance(path, Cells):
        return path
    suffix, is_pipe = path.suffix.lower(), _is_pipe(path)
    if not is_pipe and suffix not in SUFFIXES:
        raise FormatError(
            path,
            f"cannot be read: the suffix {path.suffix!r} is unknown: must be one of "
            f"{', '.join(SUFFIXES)}",
        )
    try:
        with _open_table(path) as file:
            data = b"".join(_read_chunks(file))
    except OSError as error:
        raise FormatError(path, f"cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_TABLE_BYTES:
        raise FormatError(
            path, f"has more than {MAX_TABLE_BYTES} bytes, the limit for a table: split it"
        )
    by_content = is_pipe or suffix in _CONTENT_SUFFIXES
    if suffix == ".parquet" or (by_content and data.startswith(b"PAR1")):
        return _read_parquet(path, data, is_wanted)
    try:
        text = decode_text(data)
        if suffix == ".jsonl" or (by_content and text.lstrip().startswith(("{", "["))):
            return _read_jsonl(text, path.name)
        return _read_delimited(text, "\t" if suffix == ".tsv" else find_delimiter(text), path.name)
    except DelimitedError as error:
        raise FormatError(path, str(error)) from error


def _is_pipe(path: Path) -> bool:
    """Return whether a path is standard input or a pipe that a shell opened for this process."""
    return str(path) in ("-", "/dev/stdin") or str(path.parent) in _PIPE_FOLDERS


def _open_table(path: Path) -> BinaryIO:
    """Open a plain file, or a pipe that this process already holds.

    Raises:
        OSError: The file cannot be opened, or is a named pipe, a socket, or a device.
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
    """Yield a file's content, at most one chunk beyond the limit."""
    num_bytes = 0
    while num_bytes <= MAX_TABLE_BYTES and (chunk := file.read(_CHUNK_BYTES)):
        num_bytes += len(chunk)
        yield chunk


def read_memory_table(table: object) -> Cells:
    """Return the cells of a table in memory.

    Args:
        table: A pandas.DataFrame, a pyarrow.Table, a mapping from names to columns, or one mapping
            for each row.

    Raises:
        FormatError: The table is none of these, or its columns have different lengths.
    """
    given: Any = list(table) if isinstance(table, Iterator | tuple) else table
    if hasattr(given, "column_names") and hasattr(given, "columns"):  # pyarrow
        names, columns = list(given.column_names), [_list_cells(column) for column in given.columns]
    elif hasattr(given, "iloc") and hasattr(given, "columns"):  # pandas
        names = [str(name) for name in given.columns]
        columns = [list(given.iloc[:, i]) for i in range(len(names))]  # a name may appear twice
    elif isinstance(given, Mapping) and all(_is_column(column) for column in given.values()):
        names, columns = [str(name) for name in given], [list(column) for column in given.values()]
    elif isinstance(given, list) and all(isinstance(row, Mapping) for row in given):
        records = [{str(name): _to_plain(cell) for name, cell in row.items()} for row in given]
        names = list(dict.fromkeys(name for record in records for name in record))
        return Cells(columns=names, rows=list(enumerate(records)))
    else:
        raise FormatError(
            _MEMORY,
            f"is {add_article(type(table).__name__)}: must be a path, a pandas.DataFrame, a "
            "pyarrow.Table, a dict of columns, or a list of dicts",
        )
    lengths = {name: len(column) for name, column in zip(names, columns, strict=True)}
    if len(set(map(len, columns))) > 1:
        raise FormatError(_MEMORY, f"has columns of different lengths: {lengths}")
    cells = [
        dict(zip(names, map(_to_plain, row), strict=True)) for row in zip(*columns, strict=True)
    ]
    return Cells(columns=names, rows=list(enumerate(cells)))


_MEMORY = Cells(columns=[], rows=[])
"""Stands for a table in memory in error messages, which call it `table`."""


def _is_column(given: object) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)


def _to_plain(cell: Any) -> object:
    """Return a cell as a value of Python itself: `numpy.int64(3)` becomes 3."""
    return cell.item() if hasattr(cell, "item") and getattr(cell, "ndim", 0) == 0 else cell


def _list_cells(column: Any) -> list[object]:
    """Return the cells of a pyarrow column. If Python cannot represent one of them, such as a date
    after the year 9999, each cell is a text that says so.
    """
    try:
        return list(column.to_pylist())
    except (ValueError, ArithmeticError, NotImplementedError):
        return [f"unreadable {column.type}"] * len(column)


def _read_delimited(text: str, delimiter: str, name: str) -> Cells:
    lines = split_rows(text, delimiter)
    _, columns = next(lines, (0, list[str]()))
    table = Cells(columns=columns, rows=[], splits_at_commas=delimiter == ",", name=name)
    for line, cells in lines:
        if not any(cells):
            table.dropped.append((line, "the row is empty"))
        elif cells == columns:
            table.dropped.append((line, "the row repeats the header"))
        else:
            if any(cells[len(columns) :]) or (delimiter == SPACES and len(cells) != len(columns)):
                table.problems.append(
                    f"row {line} has {format_counted(len(cells), 'cell')}: must have {len(columns)}"
                )
            table.rows.append((line, dict(zip(columns, cells, strict=False))))
    return table


def _join_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object. A key that appears several times gets the list of all its values, so
    that none of them is taken for the number of the column.
    """
    record = dict(pairs)
    if len(record) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = [name for name in counts if counts[name] > 1]
        record |= {name: [value for key, value in pairs if key == name] for name in repeated}
    return record


def _parse_json_float(text: str) -> object:
    """Return a float; the text of a number that is too large for a float, such as 1e400."""
    number = float(text)
    return text if math.isinf(number) else number


def _parse_json_int(text: str) -> object:
    """Return a whole number; its text if it has more digits than Python reads."""
    try:
        return int(text)
    except ValueError:
        return text


def _parse_record(text: str) -> object:
    return json.loads(
        text,
        object_pairs_hook=_join_pairs,
        parse_float=_parse_json_float,
        parse_int=_parse_json_int,
    )


def _read_jsonl(text: str, name: str) -> Cells:
    """Read one object per line. Values in columns that nobody asks for may be of any kind.

    Raises:
        DelimitedError: The text is a JSON array.
    """
    if text.lstrip().startswith("["):
        raise DelimitedError(
            "begins a JSON array: write one object a line, such as by `jq -c '.[]' FILE > "
            "FILE.jsonl`"
        )
    rows: Rows = []
    problems: list[str] = []
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for line, record_text in enumerate(lines, start=1):
        if not record_text.strip():
            continue
        try:
            record = _parse_record(record_text)
        except (ValueError, RecursionError) as error:
            problems.append(f"row {line} is not JSON: {error}")
            continue
        if not isinstance(record, dict):
            kind = add_article(type(record).__name__)
            problems.append(f"row {line} is {kind}: must be an object")
            continue
        rows.append((line, record))
    columns = list(dict.fromkeys(key for _, record in rows for key in record))
    return Cells(columns=columns, rows=rows, problems=problems, name=name)


def _read_parquet(path: Path, data: bytes, is_wanted: Callable[[str], bool] | None) -> Cells:
    import pyarrow as pa  # 0.2 s to load, and only this format needs it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(io.BytesIO(data)) as file:  # `read_table` would load pandas
            names = list(file.schema_arrow.names)
            table = file.read(columns=None if is_wanted is None else list(filter(is_wanted, names)))
    except (pa.ArrowException, OverflowError, OSError) as error:
        raise FormatError(path, f"is not a Parquet file: {error}") from error
    # By column, because `table.to_pylist` refuses a repeated name
    columns = [_list_cells(column) for column in table.columns]
    rows = [
        (number, dict(zip(table.column_names, cells, strict=True)))
        for number, cells in enumerate(zip(*columns, strict=True), start=2)
    ]
    return Cells(columns=names, rows=rows, name=path.name)
