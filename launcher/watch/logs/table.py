"""What one file of a log holds, as columns by the names that its writer gave them. Rows are only ever appended.

Nothing is interpreted here: which name is the step or the loss is chosen over the whole log, at every look.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher.base.metrics import ENDINGS
from launcher.watch.logs.columns import GPU_COLUMNS, LAYER_COLUMNS, Floats
from launcher.watch.logs.keys import number
from proxies.core.canon import Json

NUM_RANK_LINES = 1024
"""Of the newest lines the times of all ranks are kept; of all lines of a large run they would fill the memory."""
NO_NUMBER, NUMBER = 1, 2
"""Kinds of cells; 0: the row does not have the name."""
_EVENTS = frozenset({*ENDINGS, "started", "saved", "replayed", "rolled_back"})


class Cells:
    """Numbers by row and name: 9 bytes each, and none for what the end of a column lacks."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._values: dict[Hashable, array[float]] = {}
        self._kinds: dict[Hashable, bytearray] = {}

    @property
    def names(self) -> list[Hashable]:
        """Of the columns, in the order in which they came."""
        return list(self._kinds)

    def put(self, name: Hashable, value: object) -> None:
        """Set a cell of the row that is to be ended next."""
        if name not in self._kinds:
            self._kinds[name], self._values[name] = bytearray(), array("d")
        kinds, values = self._kinds[name], self._values[name]
        if missing := self.num_rows - len(kinds):
            kinds.extend(bytes(missing))
            values.extend([math.nan] * missing)
        found = number(value)
        kinds.append(NO_NUMBER if found is None else NUMBER)
        values.append(math.nan if found is None else found)

    def end_row(self) -> None:
        """What is put from now on is of the next row."""
        self.num_rows += 1

    def column(self, name: Hashable) -> tuple[NDArray[np.int8], Floats]:
        """[N] Kind of each cell, and its value: NaN where it is no number."""
        kinds, values = np.zeros(self.num_rows, dtype=np.int8), np.full(self.num_rows, np.nan)
        if name in self._kinds:
            num = len(self._kinds[name])
            kinds[:num] = np.frombuffer(bytes(self._kinds[name]), dtype=np.int8)
            values[:num] = self._values[name]
        return kinds, values


class Table(Cells):
    """The rows of one file so far."""

    def __init__(self, wanted: Set[str]) -> None:
        """`wanted`: names that may be one of ours."""
        super().__init__()
        self._wanted = wanted
        self.events: dict[int, Mapping[str, Json]] = {}
        """By row."""
        self.no_numbers: dict[str, object] = {}
        """Of each name the first value that is no number, for the message."""
        self.ranks: deque[tuple[int, Floats]] = deque(maxlen=NUM_RANK_LINES)
        """(row, seconds of each rank), the newest."""
        self.layers, self.gpus = Cells(), Cells()
        """Names: (layer, column) and (rank, column)."""
        self.layer_rows: list[int] = []
        """Rows of this table that those of `layers` are of."""
        self.gpu_rows: list[int] = []

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """More rows."""
        for row in rows:
            for name in self._wanted & row.keys():
                self.put(name, value := row[name])
                if name not in self.no_numbers and number(value) is None:
                    self.no_numbers[name] = value
            if isinstance(event := row.get("event"), str) and event in _EVENTS:
                self.events[self.num_rows] = row
            self._take_lists(row)
            self.end_row()

    def _take_lists(self, row: Mapping[str, Any]) -> None:
        """What our own trainer logs in lists and dicts."""
        times, layers, gpus = row.get("rank_seconds"), row.get("layers"), row.get("gpus")
        if isinstance(times, list) and times:
            self.ranks.append((self.num_rows, np.array([_float(value) for value in times])))
        if isinstance(layers, dict):
            _put(self.layers, layers.items(), LAYER_COLUMNS)
            self.layer_rows.append(self.num_rows)
        if isinstance(gpus, list):
            _put(self.gpus, enumerate(gpus), GPU_COLUMNS)
            self.gpu_rows.append(self.num_rows)

    def newest(self, name: str) -> float | None:
        """The number that the newest row has there."""
        values = self._values.get(name)
        here = values is not None and len(values) == self.num_rows and math.isfinite(values[-1])
        return values[-1] if here and values is not None else None


def _put(cells: Cells, given: Iterable[tuple[Hashable, Any]], columns: Iterable[str]) -> None:
    for owner, values in given:
        for column in columns:
            cells.put((owner, column), _float(values.get(column)) if isinstance(values, dict) else math.nan)
    cells.end_row()


def _float(value: object) -> float:
    """The number, or NaN."""
    return math.nan if isinstance(value, str) or (found := number(value)) is None else found
