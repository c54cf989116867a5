"""Text tables: their encoding, their delimiter, and their rows of cells, each with its line."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, field

from proxies.core.notation import counted

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_NUM_LINES_TRIED = 1000
_ENCODINGS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class DelimitedError(ValueError):
    """A text that is no table, or one whose delimiter nothing decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTable:
    """The rows of a text table before any cell is read."""

    columns: list[str]
    rows: list[tuple[int, dict[str, object]]]
    """(line, cells by column); a cell that is not there is not in the mapping."""
    problems: list[str] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    """(line, reason) of rows that hold no run: empty ones, and the header once more."""
    splits_at_commas: bool = True


def decode_text(data: bytes) -> str:
    """Return the text of a file: UTF-8, or what its byte order mark says.

    Raises:
        DelimitedError: Another encoding.
    """
    encoding = next((name for mark, name in _ENCODINGS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DelimitedError(f"is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if "\0" in text:
        raise DelimitedError(f"is not UTF-8 text: a zero byte at character {text.index(chr(0))}")
    return text


def parse_delimited(text: str, delimiter: str = "") -> TextTable:
    """Split a text table into cells.

    Args:
        text: The table, with its header in the first line that is not empty.
        delimiter: What separates cells; empty: what the header and the first rows leave no choice about.

    Raises:
        DelimitedError: A quote that does not end, or two delimiters that both fit.
    """
    delimiter = delimiter or _find_delimiter(text)
    rows = _split(text, delimiter)
    columns = [name.strip() for name in next(rows, (0, []))[1]]
    table = TextTable(columns=columns, rows=[], splits_at_commas=delimiter == ",")
    for line, cells in rows:
        stripped = [cell.strip() for cell in cells]
        if not any(stripped):
            table.dropped.append((line, "the row is empty"))
        elif stripped == columns:
            table.dropped.append((line, "the row repeats the header"))
        else:
            if any(stripped[len(columns) :]):
                table.problems.append(f"row {line} has {counted(len(cells), 'cell')}: must have {len(columns)}")
            table.rows.append((line, dict(zip(columns, stripped, strict=False))))
    return table


def _find_delimiter(text: str) -> str:
    """Return the only delimiter that splits the header, or the only one that also splits the rows as the header."""
    widths = {delimiter: _find_widths(text, delimiter) for delimiter in DELIMITERS}
    in_header = [delimiter for delimiter, counts in widths.items() if counts and counts[0] > 1]
    if len(in_header) < 2:
        return (in_header or [","])[0]
    regular = [delimiter for delimiter in in_header if len(set(widths[delimiter])) == 1]
    if len(regular) == 1:
        return regular[0]
    names = " and ".join(DELIMITERS[delimiter] for delimiter in in_header)
    raise DelimitedError(f"has {names} in its header, and either may separate its cells: write it with commas alone")


def _find_widths(text: str, delimiter: str) -> list[int]:
    """Return the number of cells of the first rows; empty where a quote does not end."""
    head = text[: _end_of_lines(text, _NUM_LINES_TRIED)]
    try:
        return [len(cells) for _, cells in _split(head, delimiter)]
    except DelimitedError:
        return []


def _end_of_lines(text: str, num_lines: int) -> int:
    """Return where the first lines end."""
    place = 0
    for _ in range(num_lines):
        place = text.find("\n", place) + 1
        if place == 0:
            return len(text)
    return place


def _split(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield every line that is not blank, by its number, as cells."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            if cells and (len(cells) > 1 or cells[0].strip()):
                yield reader.line_num, cells
    except csv.Error as error:
        raise DelimitedError(f"cannot be read: row {reader.line_num}: {error}") from error
