"""Cells of a table as sizes, octaves, and losses. Problems with a cell are appended to a list, with
the cell's place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from proxies.core.hyperparameters import hyperparameter_named
from proxies.core.tables import table_files
from proxies.core.tables.columns import is_known_name
from proxies.core.tables.table_files import Cells, FormatError, Source, read_cells
from transfer.question import Hyperparameter, TransferError, to_log2


class TableError(table_files.TableError):
    """A table that cannot be read or judged. `problems` lists every bad cell by row and column."""

    def __init__(
        self, path: Source, problems: Sequence[str], bad_cells: Sequence[str] = ()
    ) -> None:
        super().__init__(problems, bad_cells, name=path.name)


def read_sheet(path: Source, known: Collection[str] = ()) -> Cells:
    """Read a table. From a wide `.parquet` file only the columns with a known name are read.

    Args:
        path: A file or pipe, or cells already read.
        known: Column names that the user chose.

    Raises:
        TableError: The kind of file is unknown, it cannot be parsed, or it has no rows.
    """
    try:
        sheet = read_cells(path, lambda name: name in known or is_known_name(name))
    except FormatError as error:
        raise TableError(path, [error.why]) from error
    if problems := sheet.problems or ([] if sheet.rows else ["no rows: nothing to judge"]):
        raise TableError(path, problems)
    return sheet


MAX_SIZE = 10**18
SMALLEST, LARGEST = 1e-30, 1e30
"""Bounds of a hyperparameter. A cell beyond them is a typing mistake, and arithmetic with it would
overflow."""
LOSSES = (1e-6, 1e6)
"""Bounds of a loss, in nats."""
_NO_LOSS = (
    "; write NaN only if the loss itself diverged: leave out a run that crashed or still runs, or "
    "name its state in a "
    "column state"
)


def to_comparable(cell: object, number: float | None) -> object:
    """Return a cell in the form in which it is compared with others: its number if it has one (1e-3
    and 0.001 are the same), else its text.
    """
    if number is None or math.isnan(number):
        return "" if cell is None else str(cell).strip()
    return number


def format_cell(cell: object) -> str:
    """Format a cell for a message."""
    return f"{cell:.10g}" if isinstance(cell, float) else str(cell) or "empty"


def octaves(
    cell: object,
    value: float | None,
    hyperparameter: Hyperparameter,
    where: str,
    problems: list[str],
) -> float | None:
    """Return the log2 of a hyperparameter's value (`transfer.question.to_log2`); None if the value
    is 0 and 0 means off.
    """
    known = hyperparameter_named(hyperparameter)
    if value == 0 and known.zero_is_none:
        return None
    is_complement = known.scale == "log2_complement"
    low, high = (0.0, 1.0) if is_complement else (SMALLEST, LARGEST)
    try:
        if value is not None and low <= value <= high:
            return to_log2(hyperparameter, value)
    except TransferError:
        pass  # The complement of 1 has no logarithm
    limits = "at least 0 and below 1" if is_complement else f"from {SMALLEST:g} to {LARGEST:g}"
    problems.append(f"{where}: {_describe_cell(cell, value)} must be a number {limits}")
    return None


def whole(cell: object, value: float | None, where: str, least: int, problems: list[str]) -> int:
    """Return a whole number, which may be written as 1e6."""
    if value is None or not least <= value <= MAX_SIZE or value != int(value):
        problems.append(
            f"{where}: {_describe_cell(cell, value)} must be a whole number from {least} to "
            f"{MAX_SIZE:g}"
        )
        return least
    return int(value)


def loss(cell: object, value: float | None, where: str, problems: list[str]) -> float | None:
    """Return a loss in nats; None for a run that diverged, whose cell is a number that is not
    finite or the word `diverged`.
    """
    if isinstance(cell, str) and cell.strip().lower() == "diverged":
        return None
    low, high = LOSSES
    if value is None or (math.isfinite(value) and not low <= value <= high):
        advice = "" if cell not in (None, "") else _NO_LOSS
        problems.append(
            f"{where}: {_describe_cell(cell, value)} must be a loss in nats, from {low:g} to "
            f"{high:g}{advice}"
        )
        return None
    return value if math.isfinite(value) else None


def _describe_cell(cell: object, value: float | None) -> str:
    return "an empty cell" if cell is None or cell == "" else repr(cell if value is None else value)
