"""Rows of a log, in the order in which they were written, as growing columns, and what is odd about them.

Nothing here is fatal: what cannot be used is left out, counted, and told. Of what one step logged twice, as after a
trainer's own resume, the later counts. A run that was rolled back or started again has not made the steps beyond: they
go, and are no fault. Each row is taken once, in order: rows taken in portions give what all at once would.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher.base.metrics import ENDINGS
from launcher.watch.logs.columns import GPU_COLUMNS, LAYER_COLUMNS, SCALARS
from launcher.watch.logs.keys import (
    LOSS,
    MFU,
    PER_DEVICE,
    RECIPROCALS,
    STEP,
    UNASKED_STEP,
    VALIDATION,
    Keys,
    number,
    whole,
)
from launcher.watch.logs.series import Series
from proxies.core.canon import Json

NUM_RANK_LINES = 1024
"""Of the newest lines the times of all ranks are kept; of all lines of a large run they would fill the memory."""
_NONE = "\0"  # a name that no row has
_KIND, _NULL, _NUMBER = "kind of loss", 1.0, 2.0
_EVENTS = frozenset({*ENDINGS, "started", "saved", "replayed", "rolled_back"})
_TO = {"started": STEP, "rolled_back": "to_step"}
"""Events after which the steps beyond the one in this field are made anew."""


class Gathered:
    """What one file of a log holds, and its oddities."""

    def __init__(self, keys: Keys, num_steps: int, num_ranks: int = 1) -> None:
        self.lines, self.layers, self.gpus = Series(), Series(), Series()
        self.ranks: dict[int, array[float]] = {}
        self.events: list[Mapping[str, Json]] = []
        self.odd: Counter[str] = Counter()
        self.first: dict[str, object] = {}
        """Of each oddity."""
        self._keys, self._num_steps, self._num_ranks = keys, num_steps, num_ranks
        self._step: int | None = None
        self._top = 0

    def take(self, rows: Iterable[Mapping[str, object]], names: Mapping[str, str], *, from_zero: bool) -> None:
        """More rows; `from_zero`: the first step is counted 0."""
        at, loss = names.get(STEP, _NONE), names.get(LOSS, _NONE)
        read = [
            (column, name, name in RECIPROCALS,
             self._keys.factor(column, names) * (self._num_ranks if name in PER_DEVICE else 1))
            for column, name in names.items() if column != STEP
        ]  # fmt: skip
        for row in rows:
            if "event" in row and is_event(row) and loss not in row:
                self._event(row)
                continue
            if at in row:
                raw = row[at]
                step = whole(raw)
                self._step = None if step is None else step + from_zero
                if step is None:
                    self._count("bad step", raw)
                    continue
            values = _values(row, read)
            step = self._step
            if from_zero and step == self._num_steps + 1 and LOSS not in values:
                step -= 1  # what is logged after the last step of a run that counts from 0
            if step is not None and (values or at != UNASKED_STEP):
                self._line(step, values, row)
            elif LOSS in values:
                self._count("no step", row[names[LOSS]])

    def _event(self, row: Mapping[str, Any]) -> None:
        self.events.append(row)
        at = row.get(_TO.get(row["event"], ""))
        if isinstance(at, int) and 0 <= at <= self._num_steps:
            for series in (self.lines, self.layers, self.gpus):
                series.cut(at)
            self.ranks = {step: times for step, times in self.ranks.items() if step <= at}
            self._top = min(self._top, at)

    def _line(self, step: int, values: dict[str, float | None], row: Mapping[str, object]) -> None:
        if step > self._num_steps or step < 1:
            self._count("beyond", step)
            return
        lines = self.lines
        at = lines.row(step)
        if LOSS in values:
            if lines.get(at, _KIND) == _NUMBER:
                self._count("again", step)
            elif step < self._top:
                self._count("out of order", step)
            self._top = max(self._top, step)
            loss = values.pop(LOSS)
            if loss is not None:
                lines.put(at, _KIND, _NUMBER)
                lines.put(at, LOSS, loss if math.isfinite(loss) else math.nan)
            else:
                self._count("no number", step)
                if lines.get(at, _KIND) != _NUMBER:
                    lines.put(at, _KIND, _NULL)
        for column, value in values.items():
            if value is not None:
                lines.put(at, column, value)
        if "rank_seconds" in row or "layers" in row or "gpus" in row:
            self._tables(step, row)

    def _tables(self, step: int, row: Mapping[str, object]) -> None:
        """What our own trainer logs in lists and dicts."""
        times, layers, gpus = row.get("rank_seconds"), row.get("layers"), row.get("gpus")
        if isinstance(times, list) and times:
            self.ranks.pop(step, None)
            self.ranks[step] = _floats(times)
            if len(self.ranks) > NUM_RANK_LINES:
                del self.ranks[next(iter(self.ranks))]
        if isinstance(layers, dict):
            _put(self.layers, step, layers.items(), LAYER_COLUMNS)
        if isinstance(gpus, list):
            _put(self.gpus, step, enumerate(gpus), GPU_COLUMNS)

    def _count(self, what: str, example: object) -> None:
        self.odd[what] += 1
        self.first.setdefault(what, example)

    @property
    def numbers(self) -> NDArray[np.bool_]:
        """[S] Whether a step has a training loss, be it NaN."""
        found: NDArray[np.bool_] = self.lines.column(_KIND) == _NUMBER
        return found

    def logged(self, newest: float) -> NDArray[np.bool_]:
        """[S] The same, and nulls that no number comes after; `newest`: the last step of all files that has a number.

        Null is how strict JSON writes NaN, but also how a column without a value is written.
        """
        null = (self.lines.column(_KIND) == _NULL) & np.isnan(self.lines.column(VALIDATION))
        found: NDArray[np.bool_] = self.numbers | (null & (self.lines.steps > newest))
        return found

    @property
    def num_bare(self) -> int:
        """Steps with neither loss."""
        return int((np.isnan(self.lines.column(_KIND)) & np.isnan(self.lines.column(VALIDATION))).sum())


def is_event(row: Mapping[str, object]) -> bool:
    """Of our trainer; what others call one may hold the validation loss."""
    event = row.get("event")
    return isinstance(event, str) and event in _EVENTS


def _values(row: Mapping[str, object], read: Sequence[tuple[str, str, bool, float]]) -> dict[str, float | None]:
    """Numbers by column; None only of a loss that is none."""
    found: dict[str, float | None] = {}
    for column, name, inverse, factor in read:
        if name not in row:
            continue
        value = number(row[name])
        if value is not None and column in SCALARS:
            if inverse:
                value = 1 / value if value else math.nan
            value *= factor
            if column == MFU and value < 0:  # nanoGPT's before it knows
                value = math.nan
        if value is not None or column == LOSS:
            found[column] = value
    return found


def _put(series: Series, step: int, given: Iterable[tuple[object, object]], columns: Sequence[str]) -> None:
    """Of each layer or device its columns; of a step logged twice the later alone."""
    at = series.row(step)
    series.clear(at)
    for owner, values in given:
        for column in columns:
            series.put(at, (owner, column), _float(values.get(column)) if isinstance(values, dict) else math.nan)


def _floats(values: list[Any]) -> array[float]:
    try:
        return array("d", values)
    except (TypeError, OverflowError):
        return array("d", map(_float, values))


def _float(value: object) -> float:
    """The number, or NaN."""
    return math.nan if isinstance(value, str) or (found := number(value)) is None else found


def counts_from_zero(
    rows: Iterable[Mapping[str, object]], names: Mapping[str, str], step: object
) -> tuple[bool, object]:
    """Whether a training loss is of step 0, as of trainers that count so; and the step last named.

    Args:
        rows: in order.
        names: of the columns.
        step: the one last named before.
    """
    at, loss = names.get(STEP, ""), names.get(LOSS)
    found = False
    for row in rows:
        step = row.get(at, step)
        found = found or (step == 0 and loss in row and "event" not in row)
    return found, step
