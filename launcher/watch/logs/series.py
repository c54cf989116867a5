"""Numbers by step, grown as a log grows: what is read once is kept in 8 bytes, and never read again."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable
from math import nan

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Series:
    """Columns over steps, ascending and each once; NaN where a step has none of a column."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[Hashable, array[float]] = {}

    def __len__(self) -> int:
        """Steps."""
        return len(self._steps)

    @property
    def steps(self) -> Floats:
        """[S]"""
        return np.array(self._steps, dtype=np.float64)

    @property
    def names(self) -> list[Hashable]:
        """Of the columns, in the order in which they came."""
        return list(self._columns)

    def row(self, step: int) -> int:
        """Where a step is; where it is not, it is put in its place, with nothing in it."""
        steps = self._steps
        if not steps or step > steps[-1]:
            steps.append(step)
            for column in self._columns.values():
                column.append(nan)
            return len(steps) - 1
        at = bisect_left(steps, step)
        if steps[at] != step:
            steps.insert(at, step)
            for column in self._columns.values():
                column.insert(at, nan)
        return at

    def put(self, row: int, name: Hashable, value: float) -> None:
        """Set one number."""
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = array("d", [nan]) * len(self._steps)
        column[row] = value

    def get(self, row: int, name: Hashable) -> float:
        """One number, NaN where it is not there."""
        column = self._columns.get(name)
        return nan if column is None else column[row]

    def clear(self, row: int) -> None:
        """Take all numbers of a step away."""
        for column in self._columns.values():
            column[row] = nan

    def cut(self, step: int) -> None:
        """Forget the steps beyond."""
        kept = bisect_right(self._steps, step)
        del self._steps[kept:]
        for column in self._columns.values():
            del column[kept:]

    def column(self, name: Hashable) -> Floats:
        """[S]"""
        found = self._columns.get(name)
        return np.full(len(self._steps), nan) if found is None else np.array(found, dtype=np.float64)


def merged(parts: Iterable[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Steps and values of several sources as one; of two values of a step the later source's."""
    pairs = list(parts)
    if len(pairs) == 1:
        return pairs[0]
    steps = np.concatenate([np.empty(0), *(steps for steps, _ in pairs)])
    values = np.concatenate([np.empty(0), *(values for _, values in pairs)])
    # Of equal steps `unique` names the first: the last of all, seen from behind.
    found, first = np.unique(steps[::-1], return_index=True)
    return found, values[::-1][first]
