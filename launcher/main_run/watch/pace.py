"""The pace of a run: its speed, the time until its end, and how long it may be silent.

The machine's nominal speed is not used. A run is compared with the best speed that it sustained
itself since its number of ranks or its device last changed. The log is cut into blocks of lines.
Their medians give little weight to the first lines after a start, and to steps that wait for a
save.
"""

from __future__ import annotations

import datetime
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from forerun._launcher.main_run.event_log import parse_time
from forerun._launcher.main_run.metrics_file import ENDINGS, AttemptStart
from forerun._launcher.main_run.supervisor.hang_detector import (
    MAX_STEP_SECONDS,
    SETTLING_LINES,
    START_SECONDS,
    estimate_step_seconds,
)
from forerun._launcher.main_run.watch.liveness import UNKNOWN_LIVENESS, Liveness
from forerun._launcher.main_run.watch.logs.columns import (
    Floats,
    LogColumns,
    compute_spacing,
    list_headers,
)
from forerun._proxies.core.notation import format_duration, format_percent
from forerun._proxies.core.tables.numerals import to_number

STALL_STEPS, MIN_STALL_SECONDS = 20, 60.0
"""A run has stalled after this many median steps, and this many seconds, without a line. Before an
attempt's first step the limit is `START_SECONDS`."""
BLOCK_LINES, SUSTAINED_BLOCKS = 16, 2
"""Lines per block, and number of consecutive blocks with which a speed counts as sustained."""
MIN_GOODPUT = 0.1
"""Minimum goodput for a projection: below it, time lost so far is not a rate to project with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """Projected end of a run; each estimate is a tuple of center, low, and high.

    For the center, the remaining steps take the usual time, which `launch` prints. For the low end,
    the steps are as fast as the fastest tenth of the blocks so far. For the high end, the steps are
    as slow as the slowest tenth, and the share of the time that is lost between attempts stays as
    it was.
    """

    remaining_seconds: tuple[float, float, float]
    """Seconds until the last step is done."""
    device_hours: tuple[float, float, float]
    """Device-hours of the whole run, its past included."""


class Silence(NamedTuple):
    """The time since the last sign of a run."""

    seconds: float
    allowed_seconds: float
    is_starting: bool
    """Whether the newest attempt has not logged its first step."""

    @property
    def is_too_long(self) -> bool:
        """Whether the run has been silent for longer than it may be."""
        return self.seconds > self.allowed_seconds


@dataclass(frozen=True, kw_only=True, eq=False)
class Pace:
    """The pace of a run so far. Numbers that the log does not determine are None."""

    columns: LogColumns
    num_steps: int
    """Steps of the whole run."""
    now: float | None = None
    """Time in seconds since 1970; None if silence cannot be judged."""
    liveness: Liveness = UNKNOWN_LIVENESS

    # ---- Attempts ----

    @cached_property
    def attempts(self) -> list[AttemptStart]:
        """Headers of the attempts, the oldest first."""
        return list_headers(self.columns.events)

    @property
    def is_done(self) -> bool:
        """Whether the schedule has ended.

        Where not every step is logged, the run is done once the next line would lie beyond the end.
        """
        columns = self.columns
        return bool(len(columns)) and columns.step > self.num_steps - self._line_spacing

    @property
    def is_starting(self) -> bool:
        """Whether an attempt was launched that has not written a line yet."""
        return self.liveness.is_starting(self.columns.newest_at)

    @property
    def has_ended(self) -> bool:
        """Whether the newest attempt has recorded its end, and no other was launched since."""
        return self.columns.last_event.get("event") in ENDINGS and not self.is_starting

    @cached_property
    def _last_change(self) -> int:
        """Step after which the ranks or the device last changed; -1 if they never did."""
        change_steps = [
            new.step
            for old, new in itertools.pairwise(self.attempts)
            if (old.num_ranks, old.device) != (new.num_ranks, new.device)
        ]
        return change_steps[-1] if change_steps else -1

    @property
    def _comparable(self) -> slice:
        """Lines since the ranks or the device last changed."""
        start = np.searchsorted(self.columns.steps, self._last_change, side="right")
        return slice(int(start), None)

    # ---- Times of steps ----

    @cached_property
    def step_seconds(self) -> Floats:
        """Seconds of each step, [S]; NaN where the log has an impossible value."""
        seconds = self.columns.seconds
        return np.where((seconds >= 0) & (seconds < MAX_STEP_SECONDS), seconds, np.nan)

    @cached_property
    def _timed_seconds(self) -> Floats:
        """Seconds of the comparable steps whose time is known."""
        seconds = self.step_seconds[self._comparable]
        return seconds[np.isfinite(seconds)]

    @property
    def median_step_seconds(self) -> float | None:
        """Median seconds of a comparable step."""
        return float(np.median(self._timed_seconds)) if len(self._timed_seconds) else None

    @cached_property
    def usual_step_seconds(self) -> float | None:
        """Seconds of a coming step, estimated as `launch` does."""
        seconds, steps = self.step_seconds, self.columns.steps
        is_settling = np.zeros(len(seconds), dtype=bool)
        for step in [header.step for header in self.attempts] or [0]:
            start = int(np.searchsorted(steps, step, side="right"))
            is_settling[start : start + SETTLING_LINES] = True
        usable = np.isfinite(seconds)
        usable[: self._comparable.start] = False
        return estimate_step_seconds(
            seconds[usable & is_settling].tolist(), seconds[usable & ~is_settling].tolist()
        )

    @property
    def _line_spacing(self) -> float:
        """Usual number of steps between two of the newest lines."""
        return compute_spacing(self.columns.steps[-BLOCK_LINES:])

    @property
    def has_enough_timed_steps(self) -> bool:
        """Whether the comparable lines with a time cover at least `BLOCK_LINES` steps."""
        return len(self._timed_seconds) * self._line_spacing >= BLOCK_LINES

    # ---- Goodput and the end ----

    @property
    def _elapsed_seconds(self) -> float | None:
        """Seconds from the first start to the newest line, without pauses."""
        newest_at = self.columns.newest_at
        if not self.attempts or newest_at is None:
            return None
        began_at = parse_time(self.attempts[0].started_at).timestamp()
        return newest_at - began_at - self.liveness.paused_seconds

    @cached_property
    def goodput(self) -> float | None:
        """Share of the run's time that was spent on steps which still count.

        A step that a rollback undid counts only once, when the run trains it again.
        """
        elapsed_seconds, typical_seconds = self._elapsed_seconds, self.median_step_seconds
        if elapsed_seconds is None or elapsed_seconds <= 0 or typical_seconds is None:
            return None
        seconds = np.where(np.isfinite(self.step_seconds), self.step_seconds, typical_seconds)
        num_steps = np.diff(self.columns.steps, prepend=self.attempts[0].step)
        return min(1.0, float((seconds * num_steps).sum()) / elapsed_seconds)

    def project_end(self, num_ranks: int) -> Projection | None:
        """Estimate the time until the run ends from its step times; None if no step was timed."""
        usual = self.usual_step_seconds
        if usual is None:
            return None
        seconds = self._timed_seconds
        starts = range(0, max(1, len(seconds) - BLOCK_LINES + 1), BLOCK_LINES)
        block_means = [seconds[start : start + BLOCK_LINES].mean() for start in starts]
        low = min(usual, float(np.quantile(block_means, 0.1)))
        high = max(usual, float(np.quantile(block_means, 0.9))) / (self.goodput or 1.0)
        steps_left = max(0, self.num_steps - self.columns.step)
        elapsed_seconds = self._elapsed_seconds
        spent = usual * self.columns.step if elapsed_seconds is None else max(0.0, elapsed_seconds)
        left = (usual * steps_left, low * steps_left, high * steps_left)
        center_hours, low_hours, high_hours = ((spent + end) * num_ranks / 3600 for end in left)
        return Projection(
            remaining_seconds=left, device_hours=(center_hours, low_hours, high_hours)
        )

    def explain_no_projection(self) -> str | None:
        """Return the reason why the end of the run cannot be projected; None if it can."""
        if self.is_done:
            return None
        if self.still_since is not None:
            at = datetime.datetime.fromtimestamp(self.still_since, datetime.UTC)
            return (
                f"the run stands still after step {self.columns.step}, since "
                f"{at:%Y-%m-%d %H:%M:%S} UTC"
            )
        if not len(self._timed_seconds):
            return "no step time is logged"
        if not self.has_enough_timed_steps:
            return f"fewer than {BLOCK_LINES} steps were timed"
        if self.goodput is not None and self.goodput < MIN_GOODPUT:
            seconds_left = (self.num_steps - self.columns.step) * (self.usual_step_seconds or 0.0)
            return (
                f"only {format_percent(self.goodput)} of the time since the first start was spent "
                f"on steps, and a projection needs {format_percent(MIN_GOODPUT)}; the steps left "
                f"take {format_duration(seconds_left)}"
            )
        return None

    # ---- Silence ----

    @cached_property
    def silence(self) -> Silence | None:
        """Silence of the run now; None if the time of its newest line is unknown."""
        columns, now, launched_at = self.columns, self.now, self.liveness.launched_at
        if now is not None and self.is_starting and launched_at is not None:
            return Silence(now - launched_at, START_SECONDS, True)
        if now is None or columns.newest_at is None:
            return None
        median_seconds, last_event = self.median_step_seconds, columns.last_event
        is_starting = last_event.get("event") == "started"
        if median_seconds is None or (
            is_starting and columns.step <= _to_float(last_event.get("step"))
        ):
            return Silence(now - columns.newest_at, START_SECONDS, True)
        save_seconds = [
            _to_float(event.get("seconds"))
            for event in columns.events
            if event.get("event") == "saved"
        ]
        slowest = np.nanmax(
            [*self.step_seconds, *(save for save in save_seconds if 0 <= save < MAX_STEP_SECONDS)]
        )
        stall_seconds = STALL_STEPS * self._line_spacing * median_seconds
        last_sign_at = max(columns.newest_at, min(self.liveness.saved_at or 0.0, now))
        allowed_seconds = max(stall_seconds, 2 * float(slowest), MIN_STALL_SECONDS)
        return Silence(now - last_sign_at, allowed_seconds, False)

    @property
    def still_since(self) -> float | None:
        """Time since which the run makes no step, in seconds since 1970; None if it advances, or if
        it is done.
        """
        if self.is_done:
            return None
        if self.now is not None and self.silence and self.silence.is_too_long:
            return self.now - self.silence.seconds
        return self.columns.newest_at if self.has_ended else None

    # ---- Comparable lines ----

    def select_comparable_ranks(self) -> tuple[Floats, Floats]:
        """Return the lines since the ranks last changed that have a time of every rank.

        Returns:
            Their steps, [K], and compute seconds, [K, R].
        """
        columns = self.columns
        if columns.rank_seconds is None:
            return np.empty(0), np.empty((0, 0))
        start = np.searchsorted(columns.rank_steps, self._last_change, side="right")
        steps, seconds_KR = columns.rank_steps[start:], columns.rank_seconds[start:]
        # Ranks that existed only before the change have a column without any number.
        seconds_KR = seconds_KR[:, np.isfinite(seconds_KR).any(axis=0)]
        is_complete = (np.isfinite(seconds_KR) & (seconds_KR > 0)).all(axis=1)
        return steps[is_complete], seconds_KR[is_complete]

    def split_into_blocks(self, values: Floats) -> tuple[Floats, Floats] | None:
        """Return the first step and the median of each block of lines; None if there are too few.

        At least `SUSTAINED_BLOCKS` + 1 whole blocks are needed. The oldest lines are left out.
        """
        steps, values = self.columns.steps[self._comparable], values[self._comparable]
        steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
        num_blocks = len(steps) // BLOCK_LINES
        if num_blocks < SUSTAINED_BLOCKS + 1:
            return None
        num_lines = num_blocks * BLOCK_LINES
        blocks_of_values = values[-num_lines:].reshape(num_blocks, BLOCK_LINES)
        return steps[-num_lines::BLOCK_LINES], np.median(blocks_of_values, axis=1)


def _to_float(value: object) -> float:
    """Convert a number to float; anything else becomes NaN."""
    number = to_number(value)
    return np.nan if number is None else number
