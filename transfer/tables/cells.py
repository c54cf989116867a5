"""Cells of a table of runs: how they are read from a file, and converted to sizes, log2 values, and
losses.

The functions that convert a cell append every problem with it to the list `problems`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from forerun._proxies.core.hyperparameters import get_hyperparameter
from forerun._proxies.core.tables.columns import is_known_name
from forerun._proxies.core.tables.table_files import Cells, Source, TableError, read_cells
from forerun._transfer.question import Hyperparameter, TransferError, to_log2

MAX_SIZE = 10**18
"""Upper bound of a size or seed. A cell beyond it is a typing mistake."""
MIN_VALUE, MAX_VALUE = 1e-30, 1e30
"""Bounds of a hyperparameter. A cell beyond them is a typing mistake, and arithmetic with it would
overflow."""
LOSS_BOUNDS_NATS = (1e-6, 1e6)
"""Bounds of a loss, in nats."""
_EMPTY_LOSS_ADVICE = (
    "; write NaN only if the loss itself diverged: leave out a run that crashed or still runs, or "
    "name its state in a column state"
)


def read_sheet(path: Source, known_names: Collection[str]) -> Cells:
    """Read a table. From a wide `.parquet` file only the columns with a known name are read.

    Args:
        path: A file or pipe, or cells already read.
        known_names: Column names that the user chose, in addition to those that forerun knows.

    Raises:
        TableError: The kind of file is unknown, it cannot be parsed, or it has no rows.
    """
    sheet = read_cells(path, lambda name: name in known_names or is_known_name(name))
    problems = sheet.problems or ([] if sheet.rows else ["no rows: nothing to judge"])
    if problems:
        raise TableError(problems, name=path.name)
    return sheet


class TableCell(NamedTuple):
    """One cell of a table."""

    content: object
    number: float | None
    """The number in the cell; None if there is none."""
    where: str
    """Row and column, for messages."""

    @property
    def comparable(self) -> object:
        """The form in which cells are compared: the number, if there is one (1e-3 and 0.001 are the
        same), else the text.
        """
        if self.number is not None and not math.isnan(self.number):
            return self.number
        return "" if self.content is None else str(self.content).strip()

    def describe_problem(self, problem: str) -> str:
        """Return a sentence that names the cell, its content, and the problem with it."""
        content = repr(self.content if self.number is None else self.number)
        if self.content is None or self.content == "":
            content = "an empty cell"
        return f"{self.where}: {content} {problem}"


def format_cell(cell: object) -> str:
    """Format a cell for a message."""
    return f"{cell:.10g}" if isinstance(cell, float) else str(cell) or "empty"


def parse_log2_value(
    cell: TableCell, hyperparameter: Hyperparameter, problems: list[str]
) -> float | None:
    """Return the log2 of a hyperparameter's value (`forerun._transfer.question.to_log2`). Return
    None if the value is 0 and a 0 turns this hyperparameter off, or if the cell has a problem.
    """
    value, properties = cell.number, get_hyperparameter(hyperparameter)
    if value == 0 and properties.zero_is_none:
        return None
    is_complement = properties.scale == "log2_complement"
    low, high = (0.0, 1.0) if is_complement else (MIN_VALUE, MAX_VALUE)
    try:
        if value is not None and low <= value <= high:
            return to_log2(hyperparameter, value)
    except TransferError:
        pass  # The complement of 1 has no logarithm
    limits = "at least 0 and below 1" if is_complement else f"from {MIN_VALUE:g} to {MAX_VALUE:g}"
    problems.append(cell.describe_problem(f"must be a number {limits}"))
    return None


def parse_whole(cell: TableCell, least: int, problems: list[str]) -> int:
    """Return the whole number in a cell, which may be written as 1e6. Return `least`, the smallest
    number that is allowed, if the cell has a problem.
    """
    value = cell.number
    if value is None or not least <= value <= MAX_SIZE or value != int(value):
        problems.append(
            cell.describe_problem(f"must be a whole number from {least} to {MAX_SIZE:g}")
        )
        return least
    return int(value)


def parse_loss(cell: TableCell, problems: list[str]) -> float | None:
    """Return a loss in nats. Return None for a run that diverged: the cell is the word `diverged`
    or a number that is not finite. Also return None if the cell has a problem.
    """
    if isinstance(cell.content, str) and cell.content.strip().lower() == "diverged":
        return None
    value, (low, high) = cell.number, LOSS_BOUNDS_NATS
    if value is None or (math.isfinite(value) and not low <= value <= high):
        # An empty cell may be a run that was never trained
        advice = "" if cell.content not in (None, "") else _EMPTY_LOSS_ADVICE
        problems.append(
            cell.describe_problem(f"must be a loss in nats, from {low:g} to {high:g}{advice}")
        )
        return None
    return value if math.isfinite(value) else None
