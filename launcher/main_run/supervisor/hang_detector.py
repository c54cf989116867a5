"""Detection of hangs: a detector follows the metrics of a run, measures how long its steps take,
and reports a hang if the run is silent for longer than a limit.

A save that the training waits for writes no metrics and may take long. Therefore the files of the
save are watched too, and while they change the run is alive.

A rank that waits forever for another one (a dead link, a stuck device, a deadlock) raises no error,
and its job would occupy the machines until a person looks. Llama 3's team calls these hangs (arXiv
2407.21783, section 3.3.4).
"""

from __future__ import annotations

import collections
import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forerun._launcher.main_run.checkpoint_folders import CHECKPOINTS
from forerun._launcher.main_run.metrics_file import MetricsFollower, RecordedSteps
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_duration

FLOOR_SECONDS = 600.0
"""Minimum silence that counts as a hang, because a validation may lie between two steps."""
STEP_FACTOR = 20.0
"""Number of median steps that a silence must last to count as a hang, if that is longer."""
START_SECONDS = 3600.0
"""Maximum silence before an attempt's first step: rendezvous, loading a checkpoint, compiling."""
_NUM_TIMED = 64
"""Number of steps in the median step time."""
SETTLING_LINES = 16
"""Number of lines at the start of an attempt whose steps load, compile, and fill caches, and are
not typical.
"""
PACE_LINES = 1024
"""Number of newest lines that give the pace: enough to have saves and validations in proportion."""
MAX_STEP_SECONDS = 1e8
"""Maximum time of a step; a longer or negative time is not a measurement."""
_NUM_LOOKS = 16
"""Number of times that the files of a save are looked at within a silence of maximum length. The
limit is for slow disks.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SilenceLimits:
    """Maximum silences of a run in seconds; None for no limit."""

    floor_seconds: float | None = FLOOR_SECONDS
    start_seconds: float | None = START_SECONDS


def estimate_step_seconds(settling: Sequence[float], settled: Sequence[float]) -> float | None:
    """Estimate the seconds of a coming step. `launch` and `watch` multiply it by the number of
    steps left.

    Args:
        settling: Seconds of the first `SETTLING_LINES` logged steps of attempts.
        settled: Seconds of the later steps, oldest first.

    Returns:
        The mean of the newest settled steps, so that saves count; the median of the settling steps
        if no step has settled; None without steps.
    """
    if settled:
        return statistics.fmean(settled[-PACE_LINES:])
    return statistics.median(settling) if settling else None


@dataclass(kw_only=True, slots=True)
class RunPace:
    """Speed of the newest attempt, from its logged steps."""

    step: int | None = None
    """Last logged step; None before this attempt's first line."""
    loss_nats: float | None = None
    tokens: int = 0
    seconds: collections.deque[float] = field(
        default_factory=lambda: collections.deque(maxlen=_NUM_TIMED)
    )
    """Durations of the last steps, of all attempts."""
    settling: collections.deque[float] = field(
        default_factory=lambda: collections.deque(maxlen=SETTLING_LINES)
    )
    """Durations of the first steps of the newest attempts."""
    settled: collections.deque[float] = field(
        default_factory=lambda: collections.deque(maxlen=PACE_LINES)
    )
    """Durations of the later steps of all attempts."""
    num_lines: int = 0
    """Number of timed steps of the newest attempt."""
    since: tuple[float, int] | None = None
    """Time at which the first new step's line was seen, and the tokens at that step."""

    def compute_tokens_per_second(self, now: float) -> float | None:
        """Return the tokens per second of wall-clock time, which includes saving and validating, as
        the rest of the run will.
        """
        if self.since is None or now <= self.since[0] or self.tokens <= self.since[1]:
            return None
        return (self.tokens - self.since[1]) / (now - self.since[0])

    def estimate_seconds_left(self, num_steps: int) -> float | None:
        """Estimate the seconds until a run of `num_steps` steps ends; None if no step was timed."""
        seconds = estimate_step_seconds([*self.settling], [*self.settled])
        return None if seconds is None else max(0, num_steps - (self.step or 0)) * seconds

    def add_step_time(self, seconds: float) -> None:
        """Add the duration of a step."""
        self.seconds.append(seconds)
        self.num_lines += 1
        (self.settling if self.num_lines <= SETTLING_LINES else self.settled).append(seconds)


class HangDetector:
    """A detector that reads a run's metrics whenever `check` is called. All times are from one
    monotonic clock, in seconds.
    """

    def __init__(self, run_dir: Path, limits: SilenceLimits, now: float) -> None:
        """Read the metrics that earlier attempts left in `run_dir`; silence counts from `now`."""
        self.pace, self.recorded = RunPace(), RecordedSteps()
        self._run_dir, self._follower, self._limits = run_dir, MetricsFollower(run_dir), limits
        # Times of the last sign of life, and of the last look at the files of a save
        self._moved_at = self._looked_at = now
        self._unfinished = _list_unfinished_files(run_dir)
        self._has_stepped = False
        for lines, begins in self._follower.read_to_end():  # what earlier attempts left
            self._add_lines(lines, begins=begins)

    def check(self, now: float) -> str:
        """Read new lines; return why the run counts as hung, or an empty text while it moves."""
        # A read error of a network disk ends no run; a disk that stays away counts as silence.
        with contextlib.suppress(OSError):
            self._read_on(now)
        return self._explain_hang(now)

    def _read_on(self, now: float) -> None:
        for lines, begins in self._follower.read_to_end():
            if lines:  # an empty file sets `begins` at every look
                self._moved_at = now
            self._add_lines(lines, begins=begins)
            for line in lines:
                self._update_pace(line, now, old=begins)

    def _add_lines(self, lines: list[dict[str, Json]], *, begins: bool) -> None:
        """Add lines of this or an earlier attempt to the recorded steps and their times."""
        self.recorded.add_lines(lines, begins=begins)
        for line in lines:
            if line.get("event") == "started":
                self.pace.num_lines = 0
            seconds = line.get("seconds")
            if (
                "train_loss_nats" in line
                and isinstance(seconds, float)
                and 0 <= seconds < MAX_STEP_SECONDS
            ):
                self.pace.add_step_time(seconds)

    def _update_pace(self, line: dict[str, Json], now: float, *, old: bool) -> None:
        """Update the pace from one line.

        Args:
            line: The line.
            now: Time of the look.
            old: Whether the run has not just written the line, but kept it when it rewound the
                file.
        """
        step, loss, tokens = line.get("step"), line.get("train_loss_nats"), line.get("tokens")
        if not isinstance(step, int):
            return
        self.pace.step = step
        if isinstance(loss, float) and isinstance(tokens, int):
            self.pace.loss_nats, self.pace.tokens = loss, tokens
            if not old:
                self._has_stepped = True
                self.pace.since = self.pace.since or (now, tokens)

    def _explain_hang(self, now: float) -> str:
        """Return why the run counts as hung, after a look at the files of a save if that is due."""
        limit, where = self._limits.start_seconds, "before its first step"
        if self._has_stepped:
            limit, where = self._limits.floor_seconds, f"after step {self.pace.step}"
            if limit is not None and self.pace.seconds:
                limit = max(limit, STEP_FACTOR * statistics.median(self.pace.seconds))
        if limit is None:
            return ""
        if now - max(self._moved_at, self._looked_at) >= limit / _NUM_LOOKS:
            self._looked_at, unfinished_before = now, self._unfinished
            self._unfinished = _list_unfinished_files(self._run_dir)
            if self._unfinished != unfinished_before:
                self._moved_at = now
        if (silent_seconds := now - self._moved_at) <= limit:
            return ""
        save = ", nor any change of the save in progress" if self._unfinished else ""
        return (
            f"no line of metrics{save} for {format_duration(silent_seconds)} {where}; the limit is "
            f"{format_duration(limit)}"
        )


def _list_unfinished_files(run_dir: Path) -> frozenset[tuple[str, int]]:
    """Return name and size in bytes of each file of a checkpoint that is not complete."""
    files = set()
    with contextlib.suppress(OSError):
        for file in (run_dir / CHECKPOINTS).glob("*.part/*"):
            with contextlib.suppress(OSError):  # the file may have been removed meanwhile
                files.add((f"{file.parent.name}/{file.name}", file.stat().st_size))
    return frozenset(files)
