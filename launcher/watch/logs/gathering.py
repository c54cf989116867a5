"""The tables of a log's files as one run's columns, and what is odd about them.

Nothing here is fatal: what cannot be used is left out, counted, and told. Of what one step logged twice, as after a
trainer's own resume, the later counts. A run that was rolled back or started again has not made the steps beyond: they
go, and are no fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from launcher.watch.logs.columns import SCALARS, Columns, Floats, headers
from launcher.watch.logs.keys import LOSS, PER_DEVICE, RECIPROCALS, STEP, UNASKED_STEP, VALIDATION, Keys
from launcher.watch.logs.table import NO_NUMBER, NUMBER, Table
from proxies.core.canon import Json

_TO = {"started": STEP, "rolled_back": "to_step"}
"""Events after which the steps beyond the one in this field are made anew."""

Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Gathered:
    """One run so far, of all its files."""

    columns: Columns
    names: Mapping[str, str]
    """Column -> the name that the log has for it."""
    odd: Mapping[str, int]
    """What is odd about the log: how often."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Rows:
    """The rows of all files, one file after the other: N of them."""

    tables: Sequence[Table]
    steps: Floats
    """[N] NaN where a row has none."""
    used: Bools
    """[N] Rows that say something of a step of this run."""
    events: Sequence[Mapping[str, Json]]

    def column(self, name: str) -> tuple[NDArray[np.int8], Floats]:
        """[N] Kinds and values of one name's cells."""
        found = [table.column(name) for table in self.tables]
        kinds, values = zip(*found, strict=True) if found else ((), ())
        return np.concatenate([np.empty(0, np.int8), *kinds]), np.concatenate([np.empty(0), *values])

    def numbers(self, name: str) -> tuple[Floats, Floats]:
        """Steps, and what the last row of each that has a number says."""
        kinds, values = self.column(name)
        there = self.used & (kinds == NUMBER)
        return last_of_each(self.steps[there], values[there])


def last_of_each(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Steps, ascending and each once; of several values of a step the last."""
    found, first = np.unique(steps[::-1], return_index=True)  # of equal ones it names the first
    return found, values[::-1][first]


def gather(tables: Sequence[Table], keys: Keys, num_steps: int, num_ranks: int, newest_at: float | None) -> Gathered:
    """The run so far.

    Args:
        tables: one a file, in order.
        keys: which names may be which column.
        num_steps: of the frozen config: beyond is another run, or counts something else.
        num_ranks: of the frozen config: what is of one device is as many times more.
        newest_at: when the last line was written, in seconds since 1970.
    """
    names = keys.chosen({name for table in tables for name in table.names})
    odd = Counter[str]()
    rows = _rows(tables, names, num_steps, odd)
    kinds, losses = rows.column(names.get(LOSS, ""))
    validation_steps, validation = rows.numbers(names.get(VALIDATION, ""))
    there = np.isfinite(validation)
    validation_steps, validation = validation_steps[there], validation[there]
    numbers, nulls = rows.used & (kinds == NUMBER), rows.used & (kinds == NO_NUMBER)
    newest = rows.steps[numbers].max(initial=0.0)
    # Null is how strict JSON writes NaN, but also how a column without a value is written.
    nulls &= (rows.steps > newest) & ~np.isin(rows.steps, validation_steps)
    given = numbers | nulls
    steps, train = last_of_each(rows.steps[given], np.where(np.isfinite(losses), losses, np.nan)[given])
    _count_losses(odd, rows.steps[rows.used & (kinds > 0)], kinds[rows.used & (kinds > 0)])
    line_steps = np.unique(rows.steps[rows.used])
    begun = headers(rows.events)
    rank_steps, rank_seconds = _ranks(rows)
    columns = Columns(
        steps=steps, train_loss_nats=train, line_steps=line_steps, validation_steps=validation_steps,
        validation_loss_nats=validation, rank_steps=rank_steps, rank_seconds=rank_seconds,
        events=rows.events, header=begun[-1] if begun else None, newest_at=newest_at,
        **{name: _scalar(rows, name, names, keys, num_ranks, steps) for name in SCALARS},
    )  # fmt: skip
    return Gathered(columns=columns, names=names, odd=odd)


def _rows(tables: Sequence[Table], names: Mapping[str, str], num_steps: int, odd: Counter[str]) -> _Rows:
    """The step of each row, and which rows count; what is odd is counted in `odd`."""
    at, loss = names.get(STEP, ""), names.get(LOSS, "")
    from_zero = any(_counts_from_zero(table, at, loss) for table in tables)
    steps, used, undone, events = [], [], [], []
    for table in tables:
        kinds, values = table.column(at)
        has_loss = table.column(loss)[0] > 0
        is_event = np.zeros(table.num_rows, dtype=bool)
        is_event[[row for row in table.events if not has_loss[row]]] = True
        step, bad = _steps(kinds, values, is_event)
        step = step + from_zero
        says = has_loss | np.any([table.column(name)[0] == NUMBER for column, name in names.items() if column != STEP]
                                 or [np.zeros(table.num_rows, dtype=bool)], axis=0)  # fmt: skip
        if from_zero:  # what is logged after the last step of a run that counts from 0
            step[(step == num_steps + 1) & ~has_loss] -= 1
        line = ~bad & ~is_event & (says | (at != UNASKED_STEP))
        beyond = line & ((step < 1) | (step > num_steps))
        odd["bad step"] += int(bad.sum())
        odd["no step"] += int((line & np.isnan(step) & has_loss).sum())
        odd["beyond"] += int(beyond.sum())
        steps.append(step)
        used.append(line & ~beyond & ~np.isnan(step))
        undone.append(_undone(table, is_event, num_steps))
        events += [event for row, event in table.events.items() if is_event[row]]
    all_steps = np.concatenate([np.empty(0), *steps])
    limits = np.minimum.accumulate(np.concatenate([np.empty(0), *undone])[::-1])[::-1]
    kept = np.concatenate([np.empty(0, dtype=bool), *used]) & ~(all_steps > limits)
    return _Rows(tables=tables, steps=all_steps, used=kept, events=tuple(events))


def _steps(kinds: NDArray[np.int8], values: Floats, is_event: Bools) -> tuple[Floats, Bools]:
    """[N] The step of each row, which it may have from the row before; and where one is given that is none."""
    whole = (kinds == NUMBER) & np.isfinite(values) & (values >= 0) & (values == np.floor(values))
    given = (kinds > 0) & ~is_event
    last = np.maximum.accumulate(np.where(given, np.arange(len(values)), -1))
    known = (last >= 0) & whole[np.maximum(last, 0)]
    return np.where(known, values[np.maximum(last, 0)], np.nan), given & ~whole


def _undone(table: Table, is_event: Bools, num_steps: int) -> Floats:
    """[N] By an event: the step beyond which what came before it was not made; else infinite."""
    found = np.full(table.num_rows, np.inf)
    for row, event in table.events.items():
        to = event.get(_TO.get(str(event["event"]), ""))
        if is_event[row] and isinstance(to, int) and 0 <= to <= num_steps:
            found[row] = to
    return found


def _counts_from_zero(table: Table, at: str, loss: str) -> bool:
    """Whether a training loss is of step 0, as of trainers that count so."""
    kinds, values = table.column(at)
    is_event = np.zeros(table.num_rows, dtype=bool)
    is_event[list(table.events)] = True
    step, bad = _steps(kinds, values, is_event)
    return bool(((step == 0) & ~bad & ~is_event & (table.column(loss)[0] > 0)).any())


def _count_losses(odd: Counter[str], steps: Floats, kinds: NDArray[np.int8]) -> None:
    """Count steps whose loss came again, and losses that are no numbers; of lines with a loss."""
    places = np.arange(len(steps))
    _, which = np.unique(steps, return_inverse=True)
    first_number = np.full(which.max(initial=-1) + 1, len(steps))
    np.minimum.at(first_number, which[kinds == NUMBER], places[kinds == NUMBER])
    odd["again"] += int((places > first_number[which]).sum())
    odd["no number"] += int((kinds == NO_NUMBER).sum())


def _scalar(
    rows: _Rows, column: str, names: Mapping[str, str], keys: Keys, num_ranks: int, steps: Floats
) -> Floats:  # fmt: skip
    """[S] A column in our units, NaN where a step has none."""
    found = np.full(len(steps), np.nan)
    name = names.get(column)
    if name is None:
        return found
    at, values = rows.numbers(name)
    if name in RECIPROCALS:
        values = 1 / np.where(values == 0, np.nan, values)
    values = values * keys.factor(column, name) * (num_ranks if name in PER_DEVICE else 1)
    there = np.isin(at, steps)
    found[np.searchsorted(steps, at[there])] = values[there]
    return found


def _ranks(rows: _Rows) -> tuple[Floats, Floats | None]:
    """[K] and [K, R], R the longest list; None where there is no list."""
    times: dict[float, Floats] = {}
    offset = 0
    for table in rows.tables:
        times |= {rows.steps[offset + row]: each for row, each in table.ranks if rows.used[offset + row]}
        offset += table.num_rows
    if not times:
        return np.empty(0), None
    steps = sorted(times)
    table_KR = np.full((len(steps), max(map(len, times.values()))), np.nan)
    for row, step in enumerate(steps):
        table_KR[row, : len(times[step])] = times[step]
    return np.array(steps), table_KR
