"""A main run's metrics from its log, with notes on what is unusual.

What is odd in a log becomes a note, not an error: it is ignored, counted, and noted. A log that
names another config is an error. If a step was logged twice, as after a trainer's own resume, the
later values count. Steps beyond the one to which a run was rolled back or restarted are dropped
without a note.
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

# ---- Gathering of rows ----

_EVENTS = frozenset({*ENDINGS, "started", "saved", "replayed", "rolled_back"})
_KEPT_STEP_FIELDS = {"started": STEP, "rolled_back": "to_step"}
"""Field of each event that has the last step to keep: the steps beyond it are made anew."""
_MAX_UNIX_SECONDS = 1e11
"""Maximum time in seconds since 1970 (the year 5138); a larger number is in another unit."""
_NUM_REPEATED, _NUM_NULL, _NUM_INVALID = "again", "null", "bad"
"""Keys of counts that are kept with a step's columns: losses after the first, null losses, and
losses that are not numbers, null included."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GatheredRun:
    """The columns of a run, gathered from all its files."""

    columns: LogColumns
    names: Mapping[str, str]
    """Name that the log uses for each column."""
    odd: Mapping[str, int]
    """Number of occurrences of each oddity of the log."""


class _Steps:
    """The steps of the run as it is now, with the last number of each column."""

    def __init__(self) -> None:
        """Start without steps."""
        self.cells: dict[int, dict[str, float]] = defaultdict(dict)
        self.ranks: dict[int, list[float]] = {}

    def add(
        self, step: int, row: Row, names: Mapping[str, str], factors: Mapping[str, float]
    ) -> int:
        """Add a row of a step, and return how many of its values are impossible and left out."""
        num_impossible = 0
        cells = self.cells[step]
        if (loss := names.get(LOSS)) in row:
            cells[_NUM_REPEATED] = cells.get(_NUM_REPEATED, 0) + (LOSS in cells)
            cells[_NUM_NULL] = cells.get(_NUM_NULL, 0) + (row[loss] is None)
            cells[_NUM_INVALID] = cells.get(_NUM_INVALID, 0) + (to_number(row[loss]) is None)
        for column, name in names.items():
            value = to_number(row.get(name))
            if value is not None and column != STEP:
                if -math.inf < value < 0 or (column == "mfu" and value > 1):
                    num_impossible += 1
                elif value or column not in ("mfu", TOKENS_PER_SECOND):  # 0 means not measured.
                    cells[column] = value * factors.get(column, 1.0)
        if isinstance(rank_seconds := row.get("rank_seconds"), list) and rank_seconds:
            seconds = [None if isinstance(each, str) else to_number(each) for each in rank_seconds]
            self.ranks[step] = [math.nan if each is None else each for each in seconds]
        return num_impossible

    def undo(self, step: int) -> None:
        """Drop the steps beyond this one."""
        for table in (self.cells, self.ranks):
            for later_step in [later_step for later_step in table if later_step > step]:
                del table[later_step]

    def count(self, key: str) -> int:
        """Return the sum of a count over all steps."""
        return int(sum(cells.get(key, 0) for cells in self.cells.values()))

    def losses(self, validated: Mapping[int, float]) -> dict[int, float]:
        """Return the training loss of every step that has one, ascending; NaN if not a number.

        Strict JSON writes NaN as null, but a column without a value is null too. A null counts if
        no number came after it, and the step has no validation loss.

        Args:
            validated: Validation losses by step.
        """
        newest = max((step for step, cells in self.cells.items() if LOSS in cells), default=0)
        losses = {}
        for step, cells in sorted(self.cells.items()):
            if LOSS in cells or (cells.get(_NUM_NULL) and step > newest and step not in validated):
                loss = cells.get(LOSS, math.nan)
                losses[step] = loss if math.isfinite(loss) else math.nan
        return losses


def gather(
    files: Sequence[Sequence[Row]],
    keys: ColumnNames,
    num_steps: int,
    num_ranks: int,
    newest_at: float | None,
) -> GatheredRun:
    """Gather the rows of a run's files into columns.

    Args:
        files: Rows of each file, in order.
        keys: Names that each column may have.
        num_steps: Steps of the frozen config; steps beyond belong to another run or count something
            else.
        num_ranks: Ranks of the frozen config, by which values of one device are multiplied.
        newest_at: Time at which the last line was written, in seconds since 1970.
    """
    names = keys.chosen({name for rows in files for row in rows for name in row})
    steps, events, odd = _collect_steps(files, names, keys.factors, num_steps)
    validated = {
        step: value
        for step, cells in sorted(steps.cells.items())
        if math.isfinite(value := cells.get(VALIDATION, math.nan))
    }
    losses, attempts = steps.losses(validated), headers(events)
    rank_steps, rank_seconds = _stack_rank_seconds(steps.ranks)
    columns = LogColumns(
        steps=_to_floats(losses),
        train_loss_nats=_to_floats(losses.values()),
        line_steps=_to_floats(sorted(steps.cells)),
        validation_steps=_to_floats(validated),
        validation_loss_nats=_to_floats(validated.values()),
        rank_steps=rank_steps,
        rank_seconds=rank_seconds,
        events=events,
        header=attempts[-1] if attempts else None,
        newest_at=newest_at,
        **{
            name: _convert_column(
                [steps.cells[step].get(name, math.nan) for step in losses],
                names.get(name, ""),
                num_ranks,
            )
            for name in SCALARS
        },
    )
    return GatheredRun(columns=columns, names=names, odd=odd)


def _collect_steps(
    files: Sequence[Sequence[Row]],
    names: Mapping[str, str],
    factors: Mapping[str, float],
    num_steps: int,
) -> tuple[_Steps, list[Row], Counter[str]]:
    """Return the steps of a run, its events in order, and the counts of what is odd in its rows."""
    odd, steps, events = Counter[str](), _Steps(), list[Row]()
    step_name, loss_name = names.get(STEP, ""), names.get(LOSS, "")
    from_zero = counts_from_zero(
        {
            step
            for rows in files
            for row, step, _ in _generate_steps(rows, step_name, loss_name)
            if step is not None and loss_name in row
        },
        num_steps,
    )
    for row, step, is_event in (
        entry for rows in files for entry in _generate_steps(rows, step_name, loss_name)
    ):
        if is_event:
            events.append(row)
            last_kept = row.get(_KEPT_STEP_FIELDS.get(row["event"], ""))
            if isinstance(last_kept, int) and 0 <= last_kept <= num_steps:
                steps.undo(last_kept)
        elif step is None:
            is_relevant = step_name in row or loss_name in row
            odd["bad step" if step_name in row else "no step"] += is_relevant
        elif step_name != UNASKED_STEP or loss_name in row or _has_values(row, names):
            num_done = step + from_zero
            if from_zero and num_done == num_steps + 1 and loss_name not in row:
                num_done = num_steps  # The row was logged after the last step.
            if 1 <= num_done <= num_steps:
                odd["impossible"] += steps.add(num_done, row, names, factors)
            elif num_done:  # Rows at step 0 were measured before the first step.
                odd["beyond"] += 1
    odd["again"], odd["no number"] = steps.count(_NUM_REPEATED), steps.count(_NUM_INVALID)
    return steps, events, odd


def _generate_steps(
    rows: Sequence[Row], step_name: str, loss_name: str
) -> Iterator[tuple[Row, int | None, bool]]:
    """Yield each row with its step and whether it is an event.

    A row without a step has that of the row before. The step is None if there is none, or if it is
    not a whole number.
    """
    step = None
    for row in rows:
        is_event = (
            isinstance(event := row.get("event"), str) and event in _EVENTS and loss_name not in row
        )
        if step_name in row and not is_event:
            number = to_number(row[step_name])
            step = (
                int(number) if number is not None and number >= 0 and number.is_integer() else None
            )
        yield row, step, is_event


def _has_values(row: Row, names: Mapping[str, str]) -> bool:
    """Return whether a row has a number for any column besides the step."""
    return any(
        to_number(row.get(name)) is not None for column, name in names.items() if column != STEP
    )


def _to_floats(values: Iterable[float]) -> Floats:
    return np.array([*values], dtype=np.float64)


def _convert_column(values: list[float], name: str, num_ranks: int) -> Floats:
    """Convert the values of a column to forerun's units, [S].

    Args:
        values: Values as logged.
        name: The log's name of the column.
        num_ranks: Ranks, by which values of one device are multiplied.
    """
    converted = _to_floats(values)
    if name in RECIPROCALS:
        converted = 1 / np.where(converted == 0, np.nan, converted)
    return converted * (num_ranks if name in PER_DEVICE else 1)


def _stack_rank_seconds(times: Mapping[int, list[float]]) -> tuple[Floats, Floats | None]:
    """Stack the rank times of all steps; None if there are none.

    Returns:
        Steps, [K], and seconds, [K, R], where R is the length of the longest list.
    """
    if not times:
        return np.empty(0), None
    steps = sorted(times)
    table_KR = np.full((len(steps), max(map(len, times.values()))), np.nan)
    for row, step in enumerate(steps):
        table_KR[row, : len(times[step])] = times[step]
    return _to_floats(steps), table_KR


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
        "1 line has a step outside 1 to {top} and is ignored; check that the log is this run's",
        "{n} lines have steps outside 1 to {top} and are ignored; check that the log is this run's",
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
"""Notes by oddity, for one occurrence and for several."""


class OtherRunError(InputError):
    """A log names another config, so that nothing in it is about this run."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LogReading:
    """A run so far, as read from its log."""

    columns: LogColumns
    notes: tuple[str, ...]
    """Sentences on what is odd about the log."""
    names_digest: bool
    """Whether the log names the config that it belongs to."""
    ending: AttemptEnd | None
    """End of the newest attempt; None if it did not record one."""
    why_empty: str = "nothing is logged yet"
    """Reason why the log has no training loss, if it has none."""


class LogReader:
    """A reader that follows the log of one run."""

    def __init__(
        self, source: RowSource, keys: ColumnNames, digest: str, num_steps: int, num_ranks: int = 1
    ) -> None:
        """Store the source, and what the frozen config says about the run.

        Args:
            source: Source of the rows.
            keys: Names of the columns.
            digest: Digest of the frozen config.
            num_steps: Steps of the frozen config.
            num_ranks: Ranks of the frozen config.
        """
        self._source, self._keys, self._digest = source, keys, digest
        self._num_steps, self._num_ranks = num_steps, num_ranks

    def read(self, *, last: bool = False) -> LogReading:
        """Read the run as it is now.

        Args:
            last: Whether nobody will read again, so that a last line without its end counts.

        Raises:
            OtherRunError: A header in the log has another digest.
            OSError: An existing file cannot be read.
            DashboardError: W&B was asked online, and did not answer.
        """
        log = self._source.read(last=last)
        self._check(log)
        # The rows' own times are better than the file's, which may be a copy.
        times = [to_number(rows[-1].get(TIME)) for rows in log.files.values() if rows]
        known = [at for at in times if at is not None and 0 < at < _MAX_UNIX_SECONDS]
        newest_at = max(known, default=log.newest_at)
        run = gather([*log.files.values()], self._keys, self._num_steps, self._num_ranks, newest_at)
        names_digest = any(event["event"] == "started" for event in run.columns.events)
        notes = [*log.notes, *self._describe_oddities(run, log.there)]
        if any(log.files.values()) and not names_digest:
            notes.append("the log names no config: it is taken to be this config's")
        return LogReading(
            columns=run.columns,
            notes=tuple(notes),
            names_digest=names_digest,
            ending=_read_ending(run.columns.events),
            why_empty=_explain_empty(log),
        )

    def _check(self, log: Log) -> None:
        for name, rows in log.files.items():
            digests = [str(row.get("digest")) for row in rows if row.get("event") == "started"]
            other_digests = dict.fromkeys(digest for digest in digests if digest != self._digest)
            if other_digests:
                raise OtherRunError(
                    f"{name} belongs to the config "
                    f"{', '.join(f'{digest[:16]}...' for digest in other_digests)}, and this one "
                    f"is {self._digest[:16]}...: it is not judged; name this run's log with "
                    "--metrics"
                )

    def _describe_oddities(self, run: GatheredRun, available: Collection[str]) -> list[str]:
        """Return notes on what a reader must know of the log."""
        names, odd = run.names, run.odd
        notes = [
            texts[odd[oddity] > 1].format(n=odd[oddity], top=self._num_steps)
            for oddity, texts in _SENTENCES.items()
            if odd[oddity]
        ]
        notes += [
            _describe_missing(column, self._keys, available)
            for column in (STEP, LOSS)
            if available and column not in names
        ]
        notes += _compare_units(run.columns)
        absent = [column for column in ("grad_norm", TOKENS_PER_SECOND) if column not in names]
        if absent and LOSS in names:
            notes.append(f"the log has no {' and no '.join(absent)}: alerts that need it are off")
        speed, num_ranks = names.get(TOKENS_PER_SECOND, ""), self._num_ranks
        if speed in PER_DEVICE and num_ranks > 1:
            notes.append(
                f"the log's {speed!r} is per device: multiplied by {num_ranks}, the ranks of the "
                "frozen config"
            )
        return notes


def _compare_units(columns: LogColumns) -> list[str]:
    """Return a warning if validation and training losses seem to have different units.

    The last validation loss is compared with the training losses near it.
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
        f"{float(np.median(near)):.4g}: "
        "check that both are in nats per token; a plan declares other units with "
        f"{UNIT_KEYS}"
    )
    return [warning]


def _explain_empty(log: Log) -> str:
    """Return the reason why a log has no training loss."""
    if log.unknown:
        return log.unknown
    if any(log.files.values()):
        return "the log has no training loss yet"
    return "the log has none of the names looked for" if log.there else "nothing is logged yet"


def _describe_missing(column: str, keys: ColumnNames, available: Collection[str]) -> str:
    option = {STEP: "--step-key", LOSS: "--train-loss-key"}[column]
    examples = ", ".join(sorted(available)[:20])
    return (
        f"the log has no {column} (tried: {keys.told(column)}); it has {examples}; name the column "
        f"with {option}"
    )


def _read_ending(events: Sequence[Mapping[str, Any]]) -> AttemptEnd | None:
    """Return the last event if it is the end of an attempt; None otherwise."""
    if not events or events[-1]["event"] not in metrics.ENDINGS:
        return None
    names = {field.name for field in fields(AttemptEnd)}
    try:
        return canon.decode(
            AttemptEnd, {key: value for key, value in events[-1].items() if key in names}
        )
    except canon.CanonError:
        return None
