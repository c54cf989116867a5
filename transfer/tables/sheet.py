"""Rows of a table as a file holds them, before anybody asks what they mean."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxies.core.table_files import FormatError, read_cells

Row = tuple[int, Mapping[str, object]]
"""Row number as an editor shows it (a table's header is line 1), and its cells."""


class TableError(ValueError):
    """A table that cannot be read or judged. `problems` lists every bad cell by row and column."""

    def __init__(self, path: Path, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__(f"{path.name}: " + "; ".join(self.problems))


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
    """
    try:
        cells = read_cells(path, known)
    except FormatError as error:
        raise TableError(path, [error.why]) from error
    names = cells.columns
    problems = [f"the column {name!r} is there twice" for name in sorted({n for n in names if names.count(n) > 1})]
    problems += cells.problems or ([] if cells.rows else ["no rows: nothing to judge"])
    if problems:
        raise TableError(path, problems)
    return Sheet(names=tuple(names), rows=tuple(cells.rows))
