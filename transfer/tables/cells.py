"""Cells of a table as sizes, octaves and losses; what is wrong with one is added to a list, with its place."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from proxies.core.hyperparameters import hyperparameter_named
from proxies.core.table_files import Cells, FormatError, Source, read_cells
from transfer.question import Hyperparameter, TransferError, to_log2

# Rows of a table as a file holds them, before anybody asks what they mean.


class TableError(ValueError):
    """A table that cannot be read or judged. `problems` lists every bad cell by row and column."""

    def __init__(self, path: Source, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__(f"{path.name}: " + "; ".join(self.problems))


def read_sheet(path: Source, known: Collection[str]) -> Cells:
    """Read a table, of a wide one only the columns that are `known` where the file allows that.

    Raises:
        TableError: an unknown kind of file, one that cannot be parsed, or no rows.
    """
    try:
        sheet = read_cells(path, known)
    except FormatError as error:
        raise TableError(path, [error.why]) from error
    names = sheet.columns
    problems = [f"the column {name!r} appears twice" for name in sorted({n for n in names if names.count(n) > 1})]
    problems += sheet.problems or ([] if sheet.rows else ["no rows: nothing to judge"])
    if problems:
        raise TableError(path, problems)
    return sheet


LARGEST_SIZE = 10**18
SMALLEST, LARGEST = 1e-30, 1e30
"""Bounds of a hyperparameter: beyond them a cell is a slip, and arithmetic would overflow. Those of a loss:"""
LOSSES = (1e-6, 1e6)


def plain(cell: object) -> object:
    """A cell as it is compared with others: a number where it is one (1e-3 and 0.001 are the same), else text."""
    value = _number(cell)
    if value is None or math.isnan(value):
        return "" if cell is None else str(cell).strip()
    return value


def shown(cell: object) -> str:
    """A cell for a message."""
    return f"{cell:.10g}" if isinstance(cell, float) else str(cell) or "empty"


def octaves(cell: object, hyperparameter: Hyperparameter, where: str, problems: list[str]) -> float | None:
    """The log2 of a hyperparameter's value (`transfer.question.to_log2`); None where a 0 says that it is off."""
    value = _number(cell)
    one = hyperparameter_named(hyperparameter)
    if value == 0 and one.zero_is_none:
        return None
    share = one.scale == "log2_complement"
    low, high = (0.0, 1.0) if share else (SMALLEST, LARGEST)
    try:
        if value is not None and low <= value <= high:
            return to_log2(hyperparameter, value)
    except TransferError:
        pass  # 1, of a complement
    limits = "at least 0 and below 1" if share else f"from {SMALLEST:g} to {LARGEST:g}"
    problems.append(f"{where}: {cell!r} must be a number {limits}")
    return None


def whole(cell: object, where: str, least: int, problems: list[str]) -> int:
    """A whole number, also if written as 1e6."""
    value = _number(cell)
    if value is None or not least <= value <= LARGEST_SIZE or value != int(value):
        problems.append(f"{where}: {cell!r} must be a whole number from {least} to {LARGEST_SIZE:.0e}")
        return least
    return int(value)


def loss(cell: object, where: str, problems: list[str]) -> float | None:
    """A loss in nats; None for a run that diverged: a number that is not finite, or the word."""
    if isinstance(cell, str) and cell.strip().lower() == "diverged":
        return None
    value = _number(cell)
    low, high = LOSSES
    if value is None or (math.isfinite(value) and not low <= value <= high):
        problems.append(
            f"{where}: {cell!r} must be a loss in nats, from {low:g} to {high:g}; write NaN for a run that diverged"
        )
        return None
    return value if math.isfinite(value) else None


def _number(cell: object) -> float | None:
    if isinstance(cell, bool) or not isinstance(cell, int | float | str):
        return None
    try:
        return float(cell)
    except (ValueError, OverflowError):
        return None
