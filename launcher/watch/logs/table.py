"""What one file of a log holds, as columns by the names that its writer gave them.

Nothing is interpreted here: which name is the step or the loss is chosen over the whole log.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher.base.metrics import ENDINGS
from launcher.watch.logs.columns import Floats
from launcher.watch.logs.keys import number
from proxies.core.canon import Json

NUM_RANK_LINES = 1024
"""Of the newest lines the times of all ranks are kept; of all lines of a large run they would fill the memory."""
NO_NUMBER, NUMBER = 1, 2
"""Kinds of cells; 0: the row does not have the name."""
_EVENTS = frozenset({*ENDINGS, "started", "saved", "replayed", "rolled_back"})


class Table:
    """The rows of one file so far: numbers by row and name, 9 bytes each, none for what the end of a column lacks."""

    def __init__(self, wanted: Set[str]) -> None:
        """`wanted`: names that may be one of ours."""
        self.num_rows = 0
        self._wanted = wanted
        self._values: dict[str, array[float]] = {}
        self._kinds: dict[str, bytearray] = {}
        self.events: dict[int, Mapping[str, Json]] = {}
        """By row."""
        self.ranks: deque[tuple[int, Floats]] = deque(maxlen=NUM_RANK_LINES)
        """(row, seconds of each rank), the newest."""

    @property
    def names(self) -> list[str]:
        """Of the columns, in the order in which they came."""
        return list(self._kinds)

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """More rows."""
        for row in rows:
            for name in self._wanted & row.keys():
                self._put(name, row[name])
            if isinstance(event := row.get("event"), str) and event in _EVENTS:
                self.events[self.num_rows] = row
            if isinstance(times := row.get("rank_seconds"), list) and times:
                self.ranks.append((self.num_rows, np.array([_float(value) for value in times])))
            self.num_rows += 1

    def _put(self, name: str, value: object) -> None:
        """Set a cell of the row that comes."""
        if name not in self._kinds:
            self._kinds[name], self._values[name] = bytearray(), array("d")
        kinds, values = self._kinds[name], self._values[name]
        if missing := self.num_rows - len(kinds):
            kinds.extend(bytes(missing))
            values.extend([math.nan] * missing)
        found = number(value)
        kinds.append(NO_NUMBER if found is None else NUMBER)
        values.append(math.nan if found is None else found)

    def column(self, name: str) -> tuple[NDArray[np.int8], Floats]:
        """[N] Kind of each cell, and its value: NaN where it is no number."""
        kinds, values = np.zeros(self.num_rows, dtype=np.int8), np.full(self.num_rows, np.nan)
        if name in self._kinds:
            num = len(self._kinds[name])
            kinds[:num] = np.frombuffer(bytes(self._kinds[name]), dtype=np.int8)
            values[:num] = self._values[name]
        return kinds, values

    def newest(self, name: str) -> float | None:
        """The number that the newest row has there."""
        values = self._values.get(name)
        here = values is not None and len(values) == self.num_rows and math.isfinite(values[-1])
        return values[-1] if here and values is not None else None


def _float(value: object) -> float:
    """The number, or NaN."""
    return math.nan if isinstance(value, str) or (found := number(value)) is None else found
