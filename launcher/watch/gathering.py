"""Rows of a log, in the order in which they were written, as lines of `launcher.metrics`, and what is odd about them.

Nothing here is fatal: what cannot be used is left out, counted, and told. Of what one step logged twice, as after a
trainer's own resume, the later counts. A run that was rolled back or started again has not made the steps beyond: they
go, and are no fault.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launcher.metrics import ENDINGS
from launcher.watch.keys import LOSS, STEP, UNASKED_STEP, VALIDATION, Keys, number, whole
from proxies.canon import Json

_AS_THEY_ARE = ("rank_seconds", "layers", "gpus")
_ALWAYS = (LOSS, VALIDATION)


class Gathered:
    """The lines of a run, and the oddities of its log."""

    def __init__(self, num_steps: int) -> None:
        self.by_step: dict[int, dict[str, Json]] = {}
        self.events: list[Mapping[str, Json]] = []
        self.not_finite: list[int] = []
        """Steps whose training loss is NaN or infinite."""
        self._num_steps = num_steps
        self._odd: Counter[str] = Counter()
        self._first: dict[str, object] = {}
        self._top = 0

    def take(self, rows: Iterable[Mapping[str, object]], names: Mapping[str, str], *, from_zero: bool) -> None:
        """All rows of one file; `from_zero`: it counts its first step 0."""
        step = None
        for row in rows:
            if _is_event(row) and names.get(LOSS) not in row:
                self._event(row)
                continue
            if names.get(STEP) in row:
                raw = row[names[STEP]]
                step = whole(raw)
                if step is None:
                    self._count("bad step", raw)
                    continue
                step += from_zero
            values = _values(row, names)
            if from_zero and step == self._num_steps + 1 and LOSS not in values:
                step -= 1  # what is logged after the last step of a run that counts from 0
            if step is not None and (values or names[STEP] != UNASKED_STEP):
                self._line(step, values)
            elif LOSS in values:
                self._count("no step", row[names[LOSS]])

    def _event(self, row: Mapping[str, Any]) -> None:
        self.events.append(row)
        at = row.get({"started": STEP, "rolled_back": "to_step"}.get(row["event"], ""))
        if isinstance(at, int):
            self.by_step = {step: line for step, line in self.by_step.items() if step <= at}
            self.not_finite = [step for step in self.not_finite if step <= at]
            self._top = min(self._top, at)

    def _line(self, step: int, values: dict[str, Json]) -> None:
        if step > self._num_steps or step < 1:
            self._count("beyond", step)
            return
        line = self.by_step.setdefault(step, {STEP: step})
        if LOSS in values:
            if line.get(LOSS) is not None:
                self._count("again", step)
            elif step < self._top:
                self._count("out of order", step)
            self._top = max(self._top, step)
            loss = values[LOSS]
            if not isinstance(loss, float):
                self._count("no number", step)
            elif not math.isfinite(loss):
                self.not_finite.append(step)
                values[LOSS] = math.nan
        line.update({name: value for name, value in values.items() if value is not None or name not in line})

    def _count(self, what: str, example: object) -> None:
        self._odd[what] += 1
        self._first.setdefault(what, example)

    def lines(self) -> list[Mapping[str, Json]]:
        """Events, then steps with a training loss.

        One that is null is how strict JSON writes NaN, but also how a column without a value is written: it is a loss
        that is no number where none comes after it.
        """
        newest = max((step for step, line in self.by_step.items() if line.get(LOSS) is not None), default=0)
        kept = [
            line
            for step, line in sorted(self.by_step.items())
            if line.get(LOSS) is not None or (LOSS in line and VALIDATION not in line and step > newest)
        ]
        return [*self.events, *kept]

    def validation(self) -> list[tuple[int, float]]:
        """Step and validation loss, also of steps without a training loss."""
        found = [(step, line[VALIDATION]) for step, line in sorted(self.by_step.items()) if VALIDATION in line]
        return [(step, loss) for step, loss in found if isinstance(loss, float) and math.isfinite(loss)]

    def notes(self, keys: Keys, names: Mapping[str, str], there: Sequence[str]) -> list[str]:
        """What a reader must know of the log, in sentences."""
        said = [text.format(n=self._odd[what], first=_short(self._first[what]), top=self._num_steps)
                for what, text in _SENTENCES.items() if self._odd[what]]  # fmt: skip
        if self.not_finite:
            said.append(f"the training loss is no finite number at {len(self.not_finite)} steps, the first is "
                        f"{self.not_finite[0]}")  # fmt: skip
        said += [_missing(column, keys, there) for column in (STEP, LOSS) if there and column not in names]
        num_bare = sum(not any(column in line for column in _ALWAYS) for line in self.by_step.values())
        if num_bare and LOSS in names:
            said.append(f"{num_bare} steps have no loss: they are left out")
        absent = [column for column in ("grad_norm", "tokens_per_second") if column not in names]
        if absent and LOSS in names:
            said.append(f"it has no {' and no '.join(absent)}: what needs that is not judged")
        return said


def _is_event(row: Mapping[str, object]) -> bool:
    """Of our trainer; what others call one may hold the validation loss."""
    event = row.get("event")
    return isinstance(event, str) and event in (*ENDINGS, "started", "saved", "replayed", "rolled_back")


_SENTENCES = {
    "bad step": "{n} lines have a step that is no whole number, as {first}: they are left out",
    "no step": "{n} lines have a loss and no step: they are left out",
    "beyond": "{n} lines are of steps outside 1 to {top}, as {first}, and are left out: does it count something else, "
    "or is it another run?",
    "again": "{n} steps were logged again, the first is {first}: the last value counts",
    "out of order": "{n} steps came out of order, the first is {first}: they are put in order",
    "no number": "{n} training losses are no numbers, the first at step {first}",
}


def _missing(column: str, keys: Keys, there: Sequence[str]) -> str:
    option = {STEP: "--step-key", LOSS: "--train-loss-key"}[column]
    held = ", ".join(sorted(there)[:20])
    return f"it has no {column}, looked for as {keys.told(column)}: it holds {held}; name it with {option}"


def _values(row: Mapping[str, object], names: Mapping[str, str]) -> dict[str, Json]:
    found: dict[str, Json] = {
        column: number(row[name]) for column, name in names.items() if column != STEP and name in row
    }
    found |= {key: value for key in _AS_THEY_ARE if isinstance(value := row.get(key), list | dict)}
    return {column: value for column, value in found.items() if value is not None or column == LOSS}


def counts_from_zero(rows: Iterable[Mapping[str, object]], names: Mapping[str, str]) -> bool:
    """Whether a training loss is of step 0, as of trainers that count so."""
    step: object = None
    for row in rows:
        step = row.get(names.get(STEP, ""), step)
        if names.get(LOSS) in row and step == 0 and "event" not in row:
            return True
    return False


def _short(value: object) -> str:
    return f"{value!r:.60}"
