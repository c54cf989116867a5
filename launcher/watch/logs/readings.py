"""A main run's metrics from wherever they are. What is odd in a log becomes a note, not an error; a
log that names another config is an error.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from launcher.base import metrics
from launcher.base.metrics import ENDINGS, AttemptEnd
from launcher.watch.logs.columns import SCALARS, Floats, LogColumns, headers
from launcher.watch.logs.keys import (
    LOSS,
    PER_DEVICE,
    RECIPROCALS,
    STEP,
    TIME,
    TOKENS_PER_SECOND,
    UNASKED_STEP,
    VALIDATION,
    ColumnNames,
)
from launcher.watch.logs.sources import Log, Row, RowSource
from proxies.core import canon
from proxies.core.errors import InputError
from proxies.core.tables.numerals import to_number
from proxies.external.metric_files import UNIT_KEYS, counts_from_zero, units_agree

# The rows of a log's files as one run's columns, and what is odd about them.
#
# Nothing here is fatal: what cannot be used is ignored, counted, and noted. Of what one step logged
# twice, as after a trainer's own resume, the later counts. A run that was rolled back or started
# again has not made the steps beyond: they go, and are no fault.

_EVENTS = frozenset({*ENDINGS, "started", "saved", "replayed", "rolled_back"})
_TO = {"started": STEP, "rolled_back": "to_step"}
"""Events after which the steps beyond the one in this field are made anew."""
_MAX_UNIX_SECONDS = 1e11
"""Maximum time in seconds since 1970 (the year 5138); a larger number is in another unit."""
_AGAIN, _NULL, _BAD = "again", "null", "bad"
"""Counts that are kept with a step's columns: losses after the first, null losses, and losses that
are not numbers, null included."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GatheredRun:
    """One run so far, of all its files."""

    columns: LogColumns
    names: Mapping[str, str]
    """Column -> the name that the log has for it."""
    odd: Mapping[str, int]
    """What is odd about the log: how often."""


class _Steps:
    """The steps of the run as it is now: of each the last number that a column had."""

    def __init__(self) -> None:
        self.cells: dict[int, dict[str, float]] = defaultdict(dict)
        self.ranks: dict[int, list[float]] = {}

    def add(
        self, step: int, row: Row, names: Mapping[str, str], factors: Mapping[str, float]
    ) -> int:
        """Add a row of a step, and return the number of its values that are impossible and left
        out.
        """
        num_impossible = 0
        cells = self.cells[step]
        if (loss := names.get(LOSS)) in row:
            cells[_AGAIN] = cells.get(_AGAIN, 0) + (LOSS in cells)
            cells[_NULL] = cells.get(_NULL, 0) + (row[loss] is None)
            cells[_BAD] = cells.get(_BAD, 0) + (to_number(row[loss]) is None)
        for column, name in names.items():
            value = to_number(row.get(name))
            if value is not None and column != STEP:
                if -math.inf < value < 0 or (column == "mfu" and value > 1):
                    num_impossible += 1
                elif value or column not in ("mfu", TOKENS_PER_SECOND):  # 0: it was not measured
                    cells[column] = value * factors.get(column, 1.0)
        if isinstance(times := row.get("rank_seconds"), list) and times:
            found = [None if isinstance(each, str) else to_number(each) for each in times]
            self.ranks[step] = [math.nan if each is None else each for each in found]
        return num_impossible

    def undo(self, step: int) -> None:
        """Forget the steps beyond this one."""
        for known in (self.cells, self.ranks):
            for each in [each for each in known if each > step]:
                del known[each]

    def count(self, what: str) -> int:
        """How often, over all steps."""
        return int(sum(cells.get(what, 0) for cells in self.cells.values()))

    def losses(self, validated: Mapping[int, float]) -> dict[int, float]:
        """Steps with a training loss, ascending; NaN is one that is no number.

        Null is how strict JSON writes NaN, but also how a column without a value is written: it
        counts where no number came after it, and no validation loss stands beside it.
        """
        newest = max((step for step, cells in self.cells.items() if LOSS in cells), default=0)
        found = {}
        for step, cells in sorted(self.cells.items()):
            if LOSS in cells or (cells.get(_NULL) and step > newest and step not in validated):
                loss = cells.get(LOSS, math.nan)
                found[step] = loss if math.isfinite(loss) else math.nan
        return found


def gather(
    files: Sequence[Sequence[Row]],
    keys: ColumnNames,
    num_steps: int,
    num_ranks: int,
    newest_at: float | None,
) -> GatheredRun:
    """The run so far.

    Args:
        files: the rows of each, in order.
        keys: which names may be which column.
        num_steps: of the frozen config: beyond is another run, or counts something else.
        num_ranks: of the frozen config: what is of one device is as many times more.
        newest_at: when the last line was written, in seconds since 1970.
    """
    names = keys.chosen({name for rows in files for row in rows for name in row})
    odd, made, events = Counter[str](), _Steps(), list[Row]()
    at, loss = names.get(STEP, ""), names.get(LOSS, "")
    from_zero = counts_from_zero(
        {
            step
            for rows in files
            for row, step, _ in _stepped(rows, at, loss)
            if step is not None and loss in row
        },
        num_steps,
    )
    for row, step, is_event in (each for rows in files for each in _stepped(rows, at, loss)):
        if is_event:
            events.append(row)
            to = row.get(_TO.get(row["event"], ""))
            if isinstance(to, int) and 0 <= to <= num_steps:
                made.undo(to)
        elif step is None:
            odd["bad step" if at in row else "no step"] += at in row or loss in row
        elif at != UNASKED_STEP or loss in row or _says(row, names):
            done = step + from_zero
            if from_zero and done == num_steps + 1 and loss not in row:
                done = num_steps  # what is logged after the last step
            if 1 <= done <= num_steps:
                odd["impossible"] += made.add(done, row, names, keys.factors)
            elif done:  # what is logged at step 0 was measured before the first
                odd["beyond"] += 1
    odd["again"], odd["no number"] = made.count(_AGAIN), made.count(_BAD)
    validated = {
        step: value
        for step, cells in sorted(made.cells.items())
        if math.isfinite(value := cells.get(VALIDATION, math.nan))
    }
    losses, begun = made.losses(validated), headers(events)
    rank_steps, rank_seconds = _ranks(made.ranks)
    columns = LogColumns(
        steps=_floats(losses),
        train_loss_nats=_floats(losses.values()),
        line_steps=_floats(sorted(made.cells)),
        validation_steps=_floats(validated),
        validation_loss_nats=_floats(validated.values()),
        rank_steps=rank_steps,
        rank_seconds=rank_seconds,
        events=events,
        header=begun[-1] if begun else None,
        newest_at=newest_at,
        **{
            name: _scalar(
                [made.cells[step].get(name, math.nan) for step in losses],
                names.get(name, ""),
                num_ranks,
            )
            for name in SCALARS
        },
    )
    return GatheredRun(columns=columns, names=names, odd=odd)


def _stepped(rows: Sequence[Row], at: str, loss: str) -> Iterator[tuple[Row, int | None, bool]]:
    """Each row with its step, which it may have from the row before, and whether it is an event.

    The step is None where there is none, or one that is no whole number.
    """
    step = None
    for row in rows:
        is_event = (
            isinstance(event := row.get("event"), str) and event in _EVENTS and loss not in row
        )
        if at in row and not is_event:
            found = to_number(row[at])
            step = int(found) if found is not None and found >= 0 and found.is_integer() else None
        yield row, step, is_event


def _says(row: Row, names: Mapping[str, str]) -> bool:
    """Whether a row says anything of its step."""
    return any(
        to_number(row.get(name)) is not None for column, name in names.items() if column != STEP
    )


def _floats(values: Iterable[float]) -> Floats:
    return np.array([*values], dtype=np.float64)


def _scalar(values: list[float], name: str, num_ranks: int) -> Floats:
    """[S] The values of a column that has this name, in our units."""
    found = _floats(values)
    if name in RECIPROCALS:
        found = 1 / np.where(found == 0, np.nan, found)
    return found * (num_ranks if name in PER_DEVICE else 1)


def _ranks(times: Mapping[int, list[float]]) -> tuple[Floats, Floats | None]:
    """[K] and [K, R], R the longest list; None where there is no list."""
    if not times:
        return np.empty(0), None
    steps = sorted(times)
    table_KR = np.full((len(steps), max(map(len, times.values()))), np.nan)
    for row, step in enumerate(steps):
        table_KR[row, : len(times[step])] = times[step]
    return _floats(steps), table_KR


_SENTENCES = {
    "bad step": (
        "1 line has a step that is not a whole number: it is ignored",
        "{n} lines have a step that is not a whole number: they are ignored",
    ),
    "no step": (
        "1 line has a loss and no step: it is ignored",
        "{n} lines have a loss and no step: they are ignored",
    ),
    "beyond": (
        "1 line has a step outside 1 to {top} and is ignored: another count, or another run's?",
        "{n} lines have steps outside 1 to {top} and are ignored: another count, or another run's?",
    ),
    "again": (
        "1 step was logged again: the last value counts",
        "{n} steps were logged again: the last value counts",
    ),
    "impossible": (
        "1 value is impossible (below 0, or an MFU above 1) and is left out",
        "{n} values are impossible (below 0, or an MFU above 1) and are left out",
    ),
    "no number": ("1 training loss is not a number", "{n} training losses are not numbers"),
}
"""Notes by oddity, for one and for several."""


class OtherRunError(InputError):
    """A log that names another config: nothing in it is about this run."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LogReading:
    """A run so far."""

    columns: LogColumns
    notes: tuple[str, ...]
    """What is odd about the log, in sentences."""
    names_digest: bool
    """Whether the log says of which config it is."""
    ending: AttemptEnd | None
    """How the newest attempt ended, if it could write that down."""
    why_empty: str = "nothing is logged yet"
    """Reason why the log has no training loss, if it has none."""


class LogReader:
    """Follows one run."""

    def __init__(
        self, source: RowSource, keys: ColumnNames, digest: str, num_steps: int, num_ranks: int = 1
    ) -> None:
        """`num_steps` and `num_ranks` are those of the frozen config."""
        self._source, self._keys, self._digest = source, keys, digest
        self._num_steps, self._num_ranks = num_steps, num_ranks

    def read(self, *, last: bool = False) -> LogReading:
        """The run as it is now; `last`: nobody will read again.

        Raises:
            OtherRunError: a header in the log has another digest.
            OSError: what is there cannot be read.
            DashboardError: W&B was asked online, and did not answer.
        """
        log = self._source.read(last=last)
        self._check(log)
        # By the rows' own time where they have one: a file may be a copy.
        times = [to_number(rows[-1].get(TIME)) for rows in log.files.values() if rows]
        known = [at for at in times if at is not None and 0 < at < _MAX_UNIX_SECONDS]
        newest_at = max(known, default=log.newest_at)
        found = gather(
            [*log.files.values()], self._keys, self._num_steps, self._num_ranks, newest_at
        )
        names_digest = any(event["event"] == "started" for event in found.columns.events)
        notes = [*log.notes, *self._notes(found, log.there)]
        if any(log.files.values()) and not names_digest:
            notes.append("the log names no config: it is taken to be this config's")
        return LogReading(
            columns=found.columns,
            notes=tuple(notes),
            names_digest=names_digest,
            ending=_ending(found.columns.events),
            why_empty=_why_empty(log),
        )

    def _check(self, log: Log) -> None:
        for name, rows in log.files.items():
            started = [str(row.get("digest")) for row in rows if row.get("event") == "started"]
            others = dict.fromkeys(digest for digest in started if digest != self._digest)
            if others:
                raise OtherRunError(
                    f"{name} belongs to the config "
                    f"{', '.join(f'{digest[:16]}...' for digest in others)}, and this one "
                    f"is {self._digest[:16]}...: it is not judged; name this run's log with "
                    "--metrics"
                )

    def _notes(self, found: GatheredRun, there: Collection[str]) -> list[str]:
        """What a reader must know of the log, in sentences."""
        names, odd = found.names, found.odd
        said = [
            texts[odd[what] > 1].format(n=odd[what], top=self._num_steps)
            for what, texts in _SENTENCES.items()
            if odd[what]
        ]
        said += [
            _missing(column, self._keys, there)
            for column in (STEP, LOSS)
            if there and column not in names
        ]
        said += _compare_units(found.columns)
        absent = [column for column in ("grad_norm", TOKENS_PER_SECOND) if column not in names]
        if absent and LOSS in names:
            said.append(f"the log has no {' and no '.join(absent)}: alerts that need it are off")
        speed, num_ranks = names.get(TOKENS_PER_SECOND, ""), self._num_ranks
        if speed in PER_DEVICE and num_ranks > 1:
            said.append(
                f"the log's {speed!r} is per device: multiplied by {num_ranks}, the ranks of the "
                "frozen config"
            )
        return said


def _compare_units(columns: LogColumns) -> list[str]:
    """Return a warning if the last validation loss and the training loss near it seem to have
    different units.
    """
    if not len(columns.validation_steps) or not len(columns):
        return []
    step, validation = columns.validation_steps[-1], float(columns.validation_loss_nats[-1])
    near = columns.train_loss_nats[np.abs(columns.steps - step) <= 0.1 * step + 1]
    near = near[np.isfinite(near)]
    if not len(near) or units_agree(float(np.median(near)), validation):
        return []
    warning = (
        f"the validation loss at step {step:.0f} is {validation:.4g} and the training loss near it "
        f"{float(np.median(near)):.4g}: are both in nats per token? A plan declares other units: "
        f"{UNIT_KEYS}"
    )
    return [warning]


def _why_empty(log: Log) -> str:
    """Return the reason why a log has no training loss."""
    if log.unknown:
        return log.unknown
    if any(log.files.values()):
        return "the log has no training loss yet"
    return "the log has none of the names looked for" if log.there else "nothing is logged yet"


def _missing(column: str, keys: ColumnNames, there: Collection[str]) -> str:
    option = {STEP: "--step-key", LOSS: "--train-loss-key"}[column]
    held = ", ".join(sorted(there)[:20])
    return (
        f"the log has no {column} (tried: {keys.told(column)}); it has {held}; name the column "
        f"with {option}"
    )


def _ending(events: Sequence[Mapping[str, Any]]) -> AttemptEnd | None:
    """The last event, if it is how an attempt ended."""
    if not events or events[-1]["event"] not in metrics.ENDINGS:
        return None
    names = {field.name for field in fields(AttemptEnd)}
    try:
        return canon.decode(
            AttemptEnd, {key: value for key, value in events[-1].items() if key in names}
        )
    except canon.CanonError:
        return None
