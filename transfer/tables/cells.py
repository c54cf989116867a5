"""Cells of a table as sizes, octaves and losses; what is wrong with one is added to a list, with
its place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from proxies.core.hyperparameters import hyperparameter_named
from proxies.core.tables import table_files
from proxies.core.tables.columns import is_known_name
from proxies.core.tables.table_files import Cells, FormatError, Source, read_cells
from transfer.question import Hyperparameter, TransferError, to_log2

# Rows of a table as a file holds them, before anybody asks what they mean.


class TableError(table_files.TableError):
    """A table that cannot be read or judged. `problems` lists every bad cell by row and column."""

    def __init__(
        self, path: Source, problems: Sequence[str], bad_cells: Sequence[str] = ()
    ) -> None:
        super().__init__(problems, bad_cells, name=path.name)


def read_sheet(path: Source, known: Collection[str] = ()) -> Cells:
    """Read a table; of a wide `.parquet` file only the columns with a name that is known.

    Args:
        path: A file or pipe, or cells already read.
        known: Names that a user chose.

    Raises:
        TableError: An unknown kind of file, one that cannot be parsed, or no rows.
    """
    try:
        sheet = read_cells(path, lambda name: name in known or is_known_name(name))
    except FormatError as error:
        raise TableError(path, [error.why]) from error
    if problems := sheet.problems or ([] if sheet.rows else ["no rows: nothing to judge"]):
        raise TableError(path, problems)
    return sheet


LARGEST_SIZE = 10**18
SMALLEST, LARGEST = 1e-30, 1e30
"""Bounds of a hyperparameter: beyond them a cell is a slip, and arithmetic would overflow. Those of
a loss:"""
LOSSES = (1e-6, 1e6)
_NO_LOSS = (
    "; write NaN only if the loss itself diverged: leave out a run that crashed or still runs, or "
    "name its state in a "
    "column state"
)


def to_comparable(cell: object, number: float | None) -> object:
    """Return a cell as it is compared with others: its number if it is one (1e-3 and 0.001 are the
    same), else text.
    """
    if number is None or math.isnan(number):
        return "" if cell is None else str(cell).strip()
    return number


def shown(cell: object) -> str:
    """A cell for a message."""
    return f"{cell:.10g}" if isinstance(cell, float) else str(cell) or "empty"


def octaves(
    cell: object,
    value: float | None,
    hyperparameter: Hyperparameter,
    where: str,
    problems: list[str],
) -> float | None:
    """Return the log2 of a hyperparameter's value (`transfer.question.to_log2`); None where a 0
    says that it is off.
    """
    known = hyperparameter_named(hyperparameter)
    if value == 0 and known.zero_is_none:
        return None
    share = known.scale == "log2_complement"
    low, high = (0.0, 1.0) if share else (SMALLEST, LARGEST)
    try:
        if value is not None and low <= value <= high:
            return to_log2(hyperparameter, value)
    except TransferError:
        pass  # 1, of a complement
    limits = "at least 0 and below 1" if share else f"from {SMALLEST:g} to {LARGEST:g}"
    problems.append(f"{where}: {_describe(cell, value)} must be a number {limits}")
    return None


def whole(cell: object, value: float | None, where: str, least: int, problems: list[str]) -> int:
    """Return a whole number, also if it is written as 1e6."""
    if value is None or not least <= value <= LARGEST_SIZE or value != int(value):
        problems.append(
            f"{where}: {_describe(cell, value)} must be a whole number from {least} to "
            f"{LARGEST_SIZE:g}"
        )
        return least
    return int(value)


def loss(cell: object, value: float | None, where: str, problems: list[str]) -> float | None:
    """Return a loss in nats; None for a run that diverged: a number that is not finite, or the
    word.
    """
    if isinstance(cell, str) and cell.strip().lower() == "diverged":
        return None
    low, high = LOSSES
    if value is None or (math.isfinite(value) and not low <= value <= high):
        advice = "" if cell not in (None, "") else _NO_LOSS
        problems.append(
            f"{where}: {_describe(cell, value)} must be a loss in nats, from {low:g} to "
            f"{high:g}{advice}"
        )
        return None
    return value if math.isfinite(value) else None


def _describe(cell: object, value: float | None) -> str:
    return "an empty cell" if cell is None or cell == "" else repr(cell if value is None else value)
