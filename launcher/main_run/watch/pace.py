"""The pace of a run: its speed, when it will end, how long it may be silent, and its liveness.

The machine's nominal speed is not used. A run is compared with the best speed that it sustained
itself since its number of ranks or its device last changed. The log is cut into blocks of lines.
Their medians give little weight to the first lines after a start, and to steps that wait for a
save.

Liveness, the signs that the run is alive, comes from the run's folder, not from its log. An attempt
loads a checkpoint and compiles before its first line, and a save may take longer than any number of
steps. A silence that these explain is not a stall.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.checkpoint_folders import CHECKPOINTS, ROLLBACKS_FILE
from forerun._launcher.main_run.metrics_file import ENDINGS
from forerun._launcher.main_run.supervisor.hang_detector import (
    MAX_STEP_SECONDS,
    SETTLING_LINES,
    START_SECONDS,
    estimate_step_seconds,
)
from forerun._launcher.main_run.watch.logs.columns import (
    Floats,
    LogColumns,
    compute_spacing,
    list_headers,
)
from forerun._proxies.core.notation import format_duration, format_percent
from forerun._proxies.core.tables.numerals import to_number


@dataclass(frozen=True, kw_only=True, slots=True)
class Liveness:
    """Signs of life in a run's folder; times in seconds since 1970, None where unknown."""

    launched_at: float | None = None
    """Time of the newest launch or restart by a supervisor that still works, or of the run's own
    rollback."""
    saved_at: float | None = None
    """Time of the newest write below the folder of checkpoints."""
    ended: str = ""
    """Message of the supervisor when it ended; empty if it has not."""
    paused_seconds: float = 0.0
    """Seconds that do not count as lost: from a requested stop to the next launch, and after the
    end."""

    def is_starting(self, newest_at: float | None) -> bool:
        """Return whether an attempt was launched that has not written a line yet.

        Args:
            newest_at: Time of the newest line, in seconds since 1970; None if unknown.
        """
        # Times in the event log are whole seconds.
        return self.launched_at is not None and (
            newest_at is None or self.launched_at + 1 > newest_at
        )


UNKNOWN_LIVENESS = Liveness()
"""Liveness of a run whose folder says nothing."""


def read_liveness(run_dir: Path, digest: str) -> Liveness:
    """Read the liveness of a launch config's run; files that cannot be read say nothing.

    Args:
        run_dir: The run's folder.
        digest: Digest of the launch config.
    """
    launched_at, stopped_at, finished_at, saved_at = None, None, None, None
    ended, paused_seconds = "", 0.0
    with contextlib.suppress(OSError):
        for entry in event_log.read_events(run_dir):
            if entry.digest != digest or entry.kind not in ("launched", "restarted", "ended"):
                continue
            try:
                at = parse_unix_seconds(entry.at)
            except ValueError:
                continue
            launched_at, ended = None, entry.text if entry.kind == "ended" else ""
            if entry.kind == "launched" and stopped_at is not None:
                paused_seconds += max(0.0, at - stopped_at)
            if entry.kind != "ended":
                launched_at, stopped_at = at, None
                continue
            event = entry.data.get("event")
            stopped_at = at if event in ("stopped", "interrupted") else None
            # A finished run that is launched again trains nothing and finishes again.
            if event == "finished":
                paused_seconds += max(0.0, at - (finished_at or at))
                finished_at = at
    if not ended:
        with contextlib.suppress(OSError):
            launched_at = max((run_dir / ROLLBACKS_FILE).stat().st_mtime, launched_at or 0.0)
    with contextlib.suppress(OSError):
        times = [path.stat().st_mtime for path in (run_dir / CHECKPOINTS).rglob("*")]
        saved_at = max(times, default=None)
    return Liveness(
        launched_at=launched_at, saved_at=saved_at, ended=ended, paused_seconds=paused_seconds
    )


def parse_unix_seconds(text: str) -> float:
    """Parse an ISO 8601 time into seconds since 1970; without a time zone it is UTC.

    Raises:
        ValueError: The text is not such a time.
    """
    at = datetime.datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()


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


def compute_median_step_seconds(columns: LogColumns) -> float | None:
    """Return the median seconds of a step over the comparable lines; None if unknown."""
    seconds = select_step_seconds(columns)[_select_comparable_lines(columns)]
    return float(np.nanmedian(seconds)) if np.isfinite(seconds).any() else None


def select_step_seconds(columns: LogColumns) -> Floats:
    """Return the seconds of each step, [S]; NaN where the log has an impossible value."""
    return np.where(
        (columns.seconds >= 0) & (columns.seconds < MAX_STEP_SECONDS), columns.seconds, np.nan
    )


def compute_goodput(columns: LogColumns, paused_seconds: float = 0.0) -> float | None:
    """Return the goodput: the share of the run's time that was spent on steps which still count.

    The result is None if it is unknown. A step that a rollback undid counts only once, when the run
    trains it again.

    Args:
        columns: The run so far.
        paused_seconds: Time since the first start in which the run was stopped on request; it does
            not count.
    """
    attempts, typical = list_headers(columns.events), compute_median_step_seconds(columns)
    elapsed_seconds = _measure_elapsed(columns, paused_seconds)
    if elapsed_seconds is None or elapsed_seconds <= 0 or typical is None:
        return None
    times = select_step_seconds(columns)
    seconds = np.where(np.isfinite(times), times, typical)
    useful_seconds = float((seconds * np.diff(columns.steps, prepend=attempts[0].step)).sum())
    return min(1.0, useful_seconds / elapsed_seconds)


def _measure_elapsed(columns: LogColumns, paused_seconds: float) -> float | None:
    """Return the seconds from the first start to the newest line, without pauses.

    The result is None if it is unknown.
    """
    attempts = list_headers(columns.events)
    if not attempts or columns.newest_at is None:
        return None
    return columns.newest_at - parse_unix_seconds(attempts[0].started_at) - paused_seconds


def project_end(
    columns: LogColumns, num_steps: int, num_ranks: int, paused_seconds: float = 0.0
) -> Projection | None:
    """Estimate the time until the run ends from its step times; None if no step was timed."""
    usual = estimate_usual_step_seconds(columns)
    if usual is None:
        return None
    seconds = select_step_seconds(columns)[_select_comparable_lines(columns)]
    seconds = seconds[np.isfinite(seconds)]
    starts = range(0, max(1, len(seconds) - BLOCK_LINES + 1), BLOCK_LINES)
    block_means = [seconds[start : start + BLOCK_LINES].mean() for start in starts]
    low = min(usual, float(np.quantile(block_means, 0.1)))
    high = max(usual, float(np.quantile(block_means, 0.9)))
    high /= compute_goodput(columns, paused_seconds) or 1.0
    steps_left = max(0, num_steps - columns.step)
    elapsed_seconds = _measure_elapsed(columns, paused_seconds)
    spent = usual * columns.step if elapsed_seconds is None else max(0.0, elapsed_seconds)
    left = (usual * steps_left, low * steps_left, high * steps_left)
    center_hours, low_hours, high_hours = ((spent + end) * num_ranks / 3600 for end in left)
    return Projection(remaining_seconds=left, device_hours=(center_hours, low_hours, high_hours))


def estimate_usual_step_seconds(columns: LogColumns) -> float | None:
    """Estimate the seconds of a coming step, as `launch` does; None if no step was timed."""
    seconds = select_step_seconds(columns)
    is_settling = np.zeros(len(seconds), dtype=bool)
    for step in [header.step for header in list_headers(columns.events)] or [0]:
        start = int(np.searchsorted(columns.steps, step, side="right"))
        is_settling[start : start + SETTLING_LINES] = True
    usable = np.isfinite(seconds)
    usable[: _select_comparable_lines(columns).start] = False
    return estimate_step_seconds(
        seconds[usable & is_settling].tolist(), seconds[usable & ~is_settling].tolist()
    )


def is_done(columns: LogColumns, num_steps: int) -> bool:
    """Return whether the schedule has ended.

    Where not every step is logged, the run is done once the next line would lie beyond the end.
    """
    return bool(len(columns)) and columns.step > num_steps - compute_line_spacing(columns)


def has_enough_timed_steps(columns: LogColumns) -> bool:
    """Return whether timed lines cover at least `BLOCK_LINES` steps since the ranks or the device
    last changed.
    """
    return (
        int(np.isfinite(select_step_seconds(columns)[_select_comparable_lines(columns)]).sum())
        * compute_line_spacing(columns)
        >= BLOCK_LINES
    )


def find_standstill(
    columns: LogColumns, num_steps: int, now: float | None, liveness: Liveness
) -> float | None:
    """Return the time since which a run makes no step, in seconds since 1970.

    The result is None if the run advances or is done, or if the time is unknown.

    Args:
        columns: The run so far.
        num_steps: Steps of the whole run.
        now: Time in seconds since 1970; None if silence cannot be judged.
        liveness: Liveness of the run's folder.
    """
    if is_done(columns, num_steps):
        return None
    silence = measure_silence(columns, now, liveness)
    if now is not None and silence and silence.seconds > silence.allowed_seconds:
        return now - silence.seconds
    ended = bool(columns.events) and columns.events[-1].get("event") in ENDINGS
    return columns.newest_at if ended and not liveness.is_starting(columns.newest_at) else None


def explain_no_projection(
    columns: LogColumns, num_steps: int, since: float | None, paused_seconds: float = 0.0
) -> str | None:
    """Return the reason why the end of a run cannot be projected; None if it can.

    Args:
        columns: The run so far.
        num_steps: Steps of the whole run.
        since: Result of `find_standstill`.
        paused_seconds: As in `compute_goodput`.
    """
    if is_done(columns, num_steps):
        return None
    if since is not None:
        at = datetime.datetime.fromtimestamp(since, datetime.UTC)
        return f"the run stands still after step {columns.step}, since {at:%Y-%m-%d %H:%M:%S} UTC"
    if compute_median_step_seconds(columns) is None:
        return "no step time is logged"
    if not has_enough_timed_steps(columns):
        return f"fewer than {BLOCK_LINES} steps were timed"
    useful_share = compute_goodput(columns, paused_seconds)
    if useful_share is not None and useful_share < MIN_GOODPUT:
        step_seconds = estimate_usual_step_seconds(columns) or 0.0
        seconds_left = (num_steps - columns.step) * step_seconds
        return (
            f"only {format_percent(useful_share)} of the time since the first start was spent on "
            f"steps, and a projection needs {format_percent(MIN_GOODPUT)}; the steps left take "
            f"{format_duration(seconds_left)}"
        )
    return None


class Silence(NamedTuple):
    """The time since the last sign of a run."""

    seconds: float
    allowed_seconds: float
    is_starting: bool
    """Whether the newest attempt has not logged its first step."""


def measure_silence(columns: LogColumns, now: float | None, liveness: Liveness) -> Silence | None:
    """Return the silence of a run now; None if the time of the newest line is unknown.

    Args:
        columns: The run so far.
        now: Time in seconds since 1970; None if unknown.
        liveness: Liveness of the run's folder.
    """
    newest = columns.newest_at
    if now is not None and liveness.is_starting(newest) and liveness.launched_at is not None:
        return Silence(now - liveness.launched_at, START_SECONDS, True)
    if now is None or newest is None:
        return None
    median_seconds = compute_median_step_seconds(columns)
    is_starting = bool(columns.events) and columns.events[-1].get("event") == "started"
    if median_seconds is None or (
        is_starting and columns.step <= _to_float(columns.events[-1].get("step"))
    ):
        return Silence(now - newest, START_SECONDS, True)
    save_seconds = [
        _to_float(event.get("seconds")) for event in columns.events if event.get("event") == "saved"
    ]
    slowest = np.nanmax(
        [
            *select_step_seconds(columns),
            *(save for save in save_seconds if 0 <= save < MAX_STEP_SECONDS),
        ]
    )
    stall_seconds = STALL_STEPS * compute_line_spacing(columns) * median_seconds
    last_sign_at = newest if liveness.saved_at is None else max(newest, min(liveness.saved_at, now))
    allowed_seconds = max(stall_seconds, 2 * float(slowest), MIN_STALL_SECONDS)
    return Silence(now - last_sign_at, allowed_seconds, False)


def compute_line_spacing(columns: LogColumns) -> float:
    """Return the usual number of steps between two of the newest lines."""
    return compute_spacing(columns.steps[-BLOCK_LINES:])


def select_comparable_ranks(columns: LogColumns) -> tuple[Floats, Floats]:
    """Return the lines since the ranks last changed that have a time of every rank.

    Returns:
        Their steps, [K], and compute seconds, [K, R].
    """
    if columns.rank_seconds is None:
        return np.empty(0), np.empty((0, 0))
    start = np.searchsorted(columns.rank_steps, _find_last_change(columns), side="right")
    steps, seconds_KR = columns.rank_steps[start:], columns.rank_seconds[start:]
    # Ranks that existed only before the change have a column without any number.
    seconds_KR = seconds_KR[:, np.isfinite(seconds_KR).any(axis=0)]
    is_complete = (np.isfinite(seconds_KR) & (seconds_KR > 0)).all(axis=1)
    return steps[is_complete], seconds_KR[is_complete]


def _select_comparable_lines(columns: LogColumns) -> slice:
    """Return the slice of lines since the ranks or the device last changed."""
    start = int(np.searchsorted(columns.steps, _find_last_change(columns), side="right"))
    return slice(start, None)


def _find_last_change(columns: LogColumns) -> int:
    """Return the step after which the ranks or the device last changed; -1 if they never did."""
    attempts = list_headers(columns.events)
    change_steps = [
        new.step
        for old, new in itertools.pairwise(attempts)
        if (old.num_ranks, old.device) != (new.num_ranks, new.device)
    ]
    return change_steps[-1] if change_steps else -1


def split_into_blocks(columns: LogColumns, values: Floats) -> tuple[Floats, Floats] | None:
    """Return the first step and the median of each block of lines; None if there are too few.

    At least `SUSTAINED_BLOCKS` + 1 whole blocks are needed. The oldest lines are left out.
    """
    lines = _select_comparable_lines(columns)
    steps, values = columns.steps[lines], values[lines]
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    num_blocks = len(steps) // BLOCK_LINES
    if num_blocks < SUSTAINED_BLOCKS + 1:
        return None
    num_lines = num_blocks * BLOCK_LINES
    blocks_of_steps, blocks_of_values = (
        column[-num_lines:].reshape(num_blocks, BLOCK_LINES) for column in (steps, values)
    )
    return blocks_of_steps[:, 0], np.median(blocks_of_values, axis=1)


def _to_float(value: object) -> float:
    """Convert a number to float; anything else becomes NaN."""
    number = to_number(value)
    return np.nan if number is None else number
