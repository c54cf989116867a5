"""A main run's metrics from its log, with notes on what is unusual.

Odd lines and values of a log raise no error: they are ignored, counted, and described in a note. A
log that names another config is an error. If a step was logged twice, as after a trainer's own
resume, the later values count. If a run was rolled back or restarted, its steps beyond that point
are dropped without a note.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from forerun._launcher.main_run.metrics_file import ENDINGS, AttemptEnd
from forerun._launcher.main_run.watch.logs.columns import SCALARS, Floats, LogColumns
from forerun._launcher.main_run.watch.logs.keys import (
    LOSS,
    PER_DEVICE,
    RECIPROCALS,
    STEP,
    TOKENS_PER_SECOND,
    VALIDATION,
    WANDB_STEP,
    WANDB_TIME,
    ColumnNames,
)
from forerun._launcher.main_run.watch.logs.sources import Log, Row, RowSource
from forerun._proxies.core import canon
from forerun._proxies.core.errors import InputError
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.tables.numerals import to_number
from forerun._proxies.external.metric_files import UNIT_KEYS, have_same_unit, is_counted_from_zero

# ---- Gathering of rows ----

_EVENTS = frozenset({*ENDINGS, "started", "saved", "replayed", "rolled_back"})
_KEPT_STEP_FIELDS = {"started": STEP, "rolled_back": "to_step"}
"""Field with the last step to keep, by event: the run trains the steps beyond it again."""
_MAX_UNIX_SECONDS = 1e11
"""Maximum time in seconds since 1970 (the year 5138); a larger number is in another unit."""
_ODDITIES = {
    "bad step": ("line", "with a step that is not a whole number: ignored"),
    "no step": ("line", "with a loss and no step: ignored"),
    "beyond": ("line", "with a step outside 1 to {}: ignored; check that the log is this run's"),
    "again": ("step", "logged again: the last value counts"),
    "impossible": ("value", "left out as impossible (below 0, or an MFU above 1)"),
    "no number": ("training loss", "that is not a number"),
}
"""Counted noun, and rest of the note on it, by oddity of a log."""


@dataclass(kw_only=True, slots=True)
class _Step:
    """The values that the log has for one step."""

    values: dict[str, float] = field(default_factory=dict)
    """The last number of each column."""
    rank_seconds: list[float] | None = None
    num_losses: int = 0
    """Number of numeric training losses."""
    num_nulls: int = 0
    """Number of training losses that are null."""
    num_invalid: int = 0
    """Number of training losses that are not numbers, null included."""

    def add(self, row: Row, names: Mapping[str, str], factors: Mapping[str, float]) -> int:
        """Add a row, and return how many of its values are impossible and left out."""
        num_impossible = 0
        for column, name in names.items():
            if column == STEP or name not in row:
                continue
            value = to_number(row[name])
            if column == LOSS:
                self.num_nulls += row[name] is None
                self.num_invalid += value is None
            if value is None:
                continue
            if -math.inf < value < 0 or (column == "mfu" and value > 1):
                num_impossible += 1
            elif value or column not in ("mfu", TOKENS_PER_SECOND):  # 0 means not measured.
                self.values[column] = value * factors.get(column, 1.0)
                self.num_losses += column == LOSS
        if isinstance(seconds := row.get("rank_seconds"), list) and seconds:
            numbers = [None if isinstance(time, str) else to_number(time) for time in seconds]
            self.rank_seconds = [math.nan if number is None else number for number in numbers]
        return num_impossible


def gather_columns(
    files: Sequence[Sequence[Row]],
    names: Mapping[str, str],
    factors: Mapping[str, float],
    num_steps: int,
    num_ranks: int,
    newest_at: float | None,
) -> tuple[LogColumns, Counter[str]]:
    """Gather the rows of a run's files into columns.

    Args:
        files: Rows of each file, in order.
        names: Name that the log uses for each column.
        factors: Factors by column that convert its values to forerun's units; 1 for others.
        num_steps: Steps of the frozen config; steps beyond belong to another run or count something
            else.
        num_ranks: Ranks of the frozen config, by which values of one device are multiplied.
        newest_at: Time at which the last line was written, in seconds since 1970.

    Returns:
        The columns, and the number of occurrences of each oddity (`_ODDITIES`).
    """
    steps, events, oddities = _collect_steps(files, names, factors, num_steps)
    validated = {
        step: value
        for step, cells in steps.items()
        if math.isfinite(value := cells.values.get(VALIDATION, math.nan))
    }
    losses = _select_losses(steps, validated)
    rank_steps, rank_seconds = _stack_rank_seconds(steps)
    columns = LogColumns(
        steps=_to_floats(losses),
        train_loss_nats=_to_floats(losses.values()),
        line_steps=_to_floats(steps),
        validation_steps=_to_floats(validated),
        validation_loss_nats=_to_floats(validated.values()),
        rank_steps=rank_steps,
        rank_seconds=rank_seconds,
        events=events,
        newest_at=newest_at,
        **{
            column: _convert_column(
                [steps[step].values.get(column, math.nan) for step in losses],
                names.get(column, ""),
                num_ranks,
            )
            for column in SCALARS
        },
    )
    return columns, oddities


def _collect_steps(
    files: Sequence[Sequence[Row]],
    names: Mapping[str, str],
    factors: Mapping[str, float],
    num_steps: int,
) -> tuple[dict[int, _Step], list[Row], Counter[str]]:
    """Return the steps of the run as it is now, ascending; its events, in order; and the number of
    occurrences of each oddity.
    """
    oddities, steps, events = Counter[str](), defaultdict[int, _Step](_Step), list[Row]()
    step_name, loss_name = names.get(STEP, ""), names.get(LOSS, "")
    entries = [entry for rows in files for entry in _generate_steps(rows, step_name, loss_name)]
    from_zero = is_counted_from_zero(
        {step for row, step, _ in entries if step is not None and loss_name in row}, num_steps
    )
    for row, step, is_event in entries:
        if is_event:
            events.append(row)
            last_kept = row.get(_KEPT_STEP_FIELDS.get(row["event"], ""))
            if isinstance(last_kept, int) and 0 <= last_kept <= num_steps:
                for later_step in [step for step in steps if step > last_kept]:
                    del steps[later_step]
        elif step is None:
            is_relevant = step_name in row or loss_name in row
            oddities["bad step" if step_name in row else "no step"] += is_relevant
        elif step_name != WANDB_STEP or loss_name in row or _has_values(row, names):
            num_done = step + from_zero
            if from_zero and num_done == num_steps + 1 and loss_name not in row:
                num_done = num_steps  # The row was logged after the last step.
            if 1 <= num_done <= num_steps:
                oddities["impossible"] += steps[num_done].add(row, names, factors)
            elif num_done:  # Rows at step 0 were measured before the first step.
                oddities["beyond"] += 1
    oddities["again"] = sum(max(0, cells.num_losses - 1) for cells in steps.values())
    oddities["no number"] = sum(cells.num_invalid for cells in steps.values())
    return dict(sorted(steps.items())), events, oddities


def _generate_steps(
    rows: Sequence[Row], step_name: str, loss_name: str
) -> Iterator[tuple[Row, int | None, bool]]:
    """Yield each row with its step and whether it is an event.

    A row without a step gets the step of the row before. The step is None if no row before has one,
    or if it is not a whole number.
    """
    step = None
    for row in rows:
        event = row.get("event")
        is_event = isinstance(event, str) and event in _EVENTS and loss_name not in row
        if step_name in row and not is_event:
            number = to_number(row[step_name])
            is_whole = number is not None and number >= 0 and number.is_integer()
            step = int(number) if number is not None and is_whole else None
        yield row, step, is_event


def _has_values(row: Row, names: Mapping[str, str]) -> bool:
    """Return whether a row has a number for any column except the step."""
    return any(
        to_number(row.get(name)) is not None for column, name in names.items() if column != STEP
    )


def _select_losses(steps: Mapping[int, _Step], validated: Mapping[int, float]) -> dict[int, float]:
    """Return the training loss of every step that has one; NaN if it is not finite.

    Strict JSON writes NaN as null, but a column without a value is null too. A null counts if no
    number came after it, and the step has no validation loss.

    Args:
        steps: Steps of the log, ascending.
        validated: Validation losses by step.
    """
    newest = max((step for step, cells in steps.items() if LOSS in cells.values), default=0)
    losses = {}
    for step, cells in steps.items():
        is_null = cells.num_nulls and step > newest and step not in validated
        if LOSS in cells.values or is_null:
            loss = cells.values.get(LOSS, math.nan)
            losses[step] = loss if math.isfinite(loss) else math.nan
    return losses


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


def _stack_rank_seconds(steps: Mapping[int, _Step]) -> tuple[Floats, Floats | None]:
    """Stack the rank times of all steps; None if there are none.

    Returns:
        Steps, [K], and seconds, [K, R], where R is the length of the longest list.
    """
    times = {step: cells.rank_seconds for step, cells in steps.items() if cells.rank_seconds}
    if not times:
        return np.empty(0), None
    table_KR = np.full((len(times), max(map(len, times.values()))), np.nan)
    for row, seconds in zip(table_KR, times.values(), strict=True):
        row[: len(seconds)] = seconds
    return _to_floats(times), table_KR


# ---- Reading a log ----


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

    def find_final_loss(self, num_steps: int) -> float | None:
        """Return the validation loss after the last step in nats; None if it was not measured.

        Args:
            num_steps: Steps of the whole run.
        """
        if self.ending is not None and self.ending.validation_loss_nats is not None:
            return self.ending.validation_loss_nats
        return self.columns.find_final_loss(num_steps)


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
            last: Whether this is the last look, so that a last line without a newline counts as
                complete.

        Raises:
            OtherRunError: A header in the log has another digest.
            OSError: An existing file cannot be read.
            DashboardError: The source is an online run of W&B, and W&B did not answer.
        """
        log = self._source.read(last=last)
        self._require_own_digest(log)
        rows_by_file = [rows for rows in log.files.values() if rows]
        # The rows' own times are better than the file's, which may be a copy.
        times = [to_number(rows[-1].get(WANDB_TIME)) for rows in rows_by_file]
        known = [at for at in times if at is not None and 0 < at < _MAX_UNIX_SECONDS]
        names = self._keys.choose_names(
            {name for rows in rows_by_file for row in rows for name in row}
        )
        columns, oddities = gather_columns(
            rows_by_file,
            names,
            self._keys.factors,
            self._num_steps,
            self._num_ranks,
            max(known, default=log.newest_at),
        )
        names_digest = any(event["event"] == "started" for event in columns.events)
        notes = [*log.notes, *self._describe_oddities(oddities)]
        notes += [*self._describe_columns(names, log.logged_names), *_compare_units(columns)]
        if rows_by_file and not names_digest:
            notes.append("the log names no config: it is taken to be this config's")
        return LogReading(
            columns=columns,
            notes=tuple(notes),
            names_digest=names_digest,
            ending=_read_ending(columns.last_event),
            why_empty=_explain_empty(log),
        )

    def _require_own_digest(self, log: Log) -> None:
        """Raise `OtherRunError` if a header names another config."""
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

    def _describe_oddities(self, oddities: Counter[str]) -> list[str]:
        return [
            f"{format_counted(oddities[oddity], noun)} {text.format(self._num_steps)}"
            for oddity, (noun, text) in _ODDITIES.items()
            if oddities[oddity]
        ]

    def _describe_columns(self, names: Mapping[str, str], available: Collection[str]) -> list[str]:
        """Return notes on columns that the log lacks, and on columns that are converted.

        A note on a missing column lists up to 20 names that the log has.
        """
        options = {STEP: "--step-key", LOSS: "--train-loss-key"}
        notes = [
            f"the log has no {column} (tried: {self._keys.format_names(column)}); it has "
            f"{', '.join(sorted(available)[:20])}; name the column with {option}"
            for column, option in options.items()
            if available and column not in names
        ]
        absent = [column for column in ("grad_norm", TOKENS_PER_SECOND) if column not in names]
        if absent and LOSS in names:
            notes.append(f"the log has no {' and no '.join(absent)}: alerts that need it are off")
        speed = names.get(TOKENS_PER_SECOND, "")
        if speed in PER_DEVICE and self._num_ranks > 1:
            notes.append(
                f"the log's {speed!r} is per device: multiplied by {self._num_ranks}, the ranks of "
                "the frozen config"
            )
        return notes


def _compare_units(columns: LogColumns) -> list[str]:
    """Return a warning if validation and training losses seem to have different units.

    The last validation loss is compared with the training losses near it.
    """
    if not len(columns.validation_steps) or not len(columns):
        return []
    step, validation = columns.validation_steps[-1], float(columns.validation_loss_nats[-1])
    # Training losses within a tenth of the step
    near = columns.train_loss_nats[np.abs(columns.steps - step) <= 0.1 * step + 1]
    near = near[np.isfinite(near)]
    if not len(near) or have_same_unit(float(np.median(near)), validation):
        return []
    note = (
        f"the validation loss at step {step:.0f} is {validation:.4g} and the training loss near it "
        f"{np.median(near):.4g}: check that both are in nats per token; a plan declares other "
        f"units with {UNIT_KEYS}"
    )
    return [note]


def _explain_empty(log: Log) -> str:
    """Return the reason why a log has no training loss."""
    if log.unknown:
        return log.unknown
    if any(log.files.values()):
        return "the log has no training loss yet"
    return (
        "the log has none of the names looked for" if log.logged_names else "nothing is logged yet"
    )


def _read_ending(last_event: Mapping[str, canon.Json]) -> AttemptEnd | None:
    """Return the last event if it is the end of an attempt; None otherwise."""
    # A copy of the log in W&B has further keys.
    names = {field.name for field in fields(AttemptEnd)} & last_event.keys()
    try:
        return canon.decode(AttemptEnd, {name: last_event[name] for name in names})
    except canon.CanonError:
        return None
