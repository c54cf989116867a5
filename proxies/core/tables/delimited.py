"""Text tables: their encoding, their delimiter, and the cells of each line."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import re
from collections.abc import Iterator

from forerun._proxies.core.errors import InputError

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
"""Words for the delimiters that a table may have, apart from spaces."""
SPACES = " "
"""Delimiter of a table whose cells are separated by one or more spaces or tabs."""
_RULE_CELL = re.compile(r":?-[-+]*:?")
"""Cell of the line below the header of a Markdown table."""
_RULE_LINE = re.compile(r"^[ \t]*\|?[ \t]*:?-+:?[ \t]*\|", re.MULTILINE)
_NUM_LINES_TRIED = 1000
"""Lines at the head of a table whose cells are counted to find the delimiter."""
_ENCODINGS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class DelimitedError(InputError):
    """A text that is not a table, or whose delimiter cannot be determined."""


def decode_text(data: bytes) -> str:
    """Decode a file as UTF-8, or by its byte order mark.

    Raises:
        DelimitedError: The file has another encoding.
    """
    encoding = next((name for mark, name in _ENCODINGS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DelimitedError(f"is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if "\0" in text:
        raise DelimitedError(f"is not UTF-8 text: a zero byte at character {text.index(chr(0))}")
    return text


def find_delimiter(text: str) -> str:
    """Find the delimiter that splits the header.

    If several delimiters do, it is the delimiter that splits each row into the same number of
    cells. If none does, spaces separate the cells.

    Raises:
        DelimitedError: The header contains several delimiters, and not exactly one of them fits;
            or rows have different numbers of words; or there is text before a Markdown table.
    """
    head = "".join(itertools.islice(io.StringIO(text, newline=""), _NUM_LINES_TRIED))
    counts_by_delimiter = {delimiter: _count_cells(head, delimiter) for delimiter in DELIMITERS}
    in_header = [
        delimiter for delimiter, counts in counts_by_delimiter.items() if counts and counts[0] > 1
    ]
    if not in_header and _RULE_LINE.search(text):
        raise DelimitedError(
            "has other lines before its Markdown table: keep the lines of the table alone"
        )
    if not in_header:
        return _check_words(head)
    if len(in_header) == 1:
        return in_header[0]
    regular = [
        delimiter for delimiter in in_header if len(set(counts_by_delimiter[delimiter])) == 1
    ]
    if len(regular) == 1:
        return regular[0]
    names = " and ".join(DELIMITERS[delimiter] for delimiter in in_header)
    raise DelimitedError(
        f"has {names} in its header, and either may separate its cells: write it with commas alone"
    )


def _check_words(head: str) -> str:
    """Return the delimiter of a table whose header has only spaces; a comma if it has one word.

    Raises:
        DelimitedError: Some row has another number of words than the header: an empty cell would
            not be seen.
    """
    rows = list(split_rows(head, SPACES))
    num_columns = len(rows[0][1]) if rows else 0
    if num_columns < 2:
        return ","
    for line, cells in rows:
        if len(cells) != num_columns:
            raise DelimitedError(
                f"has spaces between its cells; its header has {num_columns} and row {line} has "
                f"{len(cells)}: separate the cells by commas, empty ones too"
            )
    return SPACES


def _count_cells(head: str, delimiter: str) -> list[int]:
    """Return the number of cells of each of the first rows; empty if a quote does not end."""
    try:
        return [len(cells) for _, cells in split_rows(head, delimiter)]
    except DelimitedError:
        return []


def split_rows(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, stripped cells) of each row.

    Blank rows and the rule of a Markdown table are skipped. A header that begins with `#`, as NumPy
    writes it before the names, is read without it.

    Raises:
        DelimitedError: A quote does not end.
    """
    if delimiter == SPACES:
        for line, text_line in enumerate(text.splitlines(), start=1):
            if words := text_line.split():
                yield line, words[1:] if words[0] == "#" else words
        return
    # Allow cells of any length; the size of the whole table is limited
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            texts = [cell for cell in cells if cell]
            is_blank = not texts and len(cells) < 2
            is_rule = delimiter == "|" and texts and all(map(_RULE_CELL.fullmatch, texts))
            if not is_blank and not is_rule:
                yield reader.line_num, cells
    except csv.Error as error:
        raise DelimitedError(f"cannot be read: row {reader.line_num}: {error}") from error
