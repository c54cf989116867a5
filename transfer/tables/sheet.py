"""Rows of a table as a file holds them, before anybody asks what they mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from proxies.core.table_files import Cells, FormatError, read_cells


class TableError(ValueError):
    """A table that cannot be read or judged. `problems` lists every bad cell by row and column."""

    def __init__(self, path: Path, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__(f"{path.name}: " + "; ".join(self.problems))


def read_sheet(path: Path, known: Collection[str]) -> Cells:
    """Read a table, of a wide one only the columns that are `known` where the file allows that.

    Raises:
        TableError: an unknown kind of file, one that cannot be parsed, or no rows.
    """
    try:
        sheet = read_cells(path, known)
    except FormatError as error:
        raise TableError(path, [error.why]) from error
    names = sheet.columns
    problems = [f"the column {name!r} is there twice" for name in sorted({n for n in names if names.count(n) > 1})]
    problems += sheet.problems or ([] if sheet.rows else ["no rows: nothing to judge"])
    if problems:
        raise TableError(path, problems)
    return sheet
