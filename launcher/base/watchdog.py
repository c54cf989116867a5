"""Whether a run still moves: its metrics are followed, its steps timed, and silence past a limit is
a hang.

A save that the training waits for writes no metrics, and may take long: its files are looked at,
and while they change the run moves.

A rank that waits for ever for another one (a dead link, a stuck device, a deadlock) raises nothing,
and its job would hold the machines until somebody looks: what Llama 3's team called hangs, arXiv
2407.21783, section 3.3.4.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.base.metrics import Following, RecordedSteps
from launcher.base.run_files import CHECKPOINTS
from proxies.core.canon import Json
from proxies.core.notation import format_duration

FLOOR_SECONDS = 600.0
"""The shortest silence called a hang: a validation lies between two steps."""
STEP_FACTOR = 20.0
"""Or so many median steps, if that is longer."""
START_SECONDS = 3600.0
"""For everything before an attempt's first step: meeting, loading a checkpoint, compiling."""
_NUM_TIMED = 64
"""Steps that the median is of."""
SETTLING_LINES = 16
"""Lines at the start of an attempt, whose steps load, compile and fill caches, and are not
typical."""
PACE_LINES = 1024
"""Number of newest lines that give the pace: enough to have saves and validations in proportion."""
MAX_STEP_SECONDS = 1e8
"""Maximum time of a step; a longer or negative time is not a measurement."""
_NUM_LOOKS = 16
"""At the files of a save, within a silence as long as the limit; their folder may lie on a slow
disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long a run may be silent; None: for ever."""

    floor_seconds: float | None = FLOOR_SECONDS
    start_seconds: float | None = START_SECONDS


def usual_step_seconds(settling: Sequence[float], settled: Sequence[float]) -> float | None:
    """Estimate the seconds of a coming step; `launch` and `watch` multiply the number of steps left
    by it.

    Args:
        settling: Seconds of the first `SETTLING_LINES` logged steps of attempts.
        settled: Seconds of the later steps, oldest first.

    Returns:
        The mean of the newest settled steps, so that saves count; the median of the settling steps
        if there are none; None without steps.
    """
    if settled:
        return statistics.fmean(settled[-PACE_LINES:])
    return statistics.median(settling) if settling else None


@dataclass(kw_only=True, slots=True)
class Pace:
    """What the steps of this attempt say about its speed."""

    step: int | None = None
    """The last one logged; None before this attempt's first line."""
    loss_nats: float | None = None
    tokens: int = 0
    seconds: collections.deque[float] = field(
        default_factory=lambda: collections.deque(maxlen=_NUM_TIMED)
    )
    """Durations of the last steps."""
    settling: collections.deque[float] = field(
        default_factory=lambda: collections.deque(maxlen=SETTLING_LINES)
    )
    """Durations of the first steps of the newest attempt."""
    settled: collections.deque[float] = field(
        default_factory=lambda: collections.deque(maxlen=PACE_LINES)
    )
    """Durations of the later steps of all attempts."""
    num_lines: int = 0
    """Number of timed steps of the newest attempt."""
    since: tuple[float, int] | None = None
    """The moment of the first line of a step that was seen, and its tokens."""

    def tokens_per_second(self, now: float) -> float | None:
        """By the clock: saving and validating count, as they will for the rest of the run."""
        if self.since is None or now <= self.since[0] or self.tokens <= self.since[1]:
            return None
        return (self.tokens - self.since[1]) / (now - self.since[0])

    def seconds_left(self, num_steps: int) -> float | None:
        """Estimate the seconds until a run of `num_steps` steps ends; None if no step was timed."""
        seconds = usual_step_seconds([*self.settling], [*self.settled])
        return None if seconds is None else max(0, num_steps - (self.step or 0)) * seconds

    def time(self, seconds: float) -> None:
        """Add the duration of a step."""
        self.seconds.append(seconds)
        self.num_lines += 1
        (self.settling if self.num_lines <= SETTLING_LINES else self.settled).append(seconds)


class Watchdog:
    """Looks at a run's metrics whenever asked to; `now` is always of one monotonic clock, in
    seconds.
    """

    def __init__(self, run_dir: Path, limits: Limits, now: float) -> None:
        self.pace, self.recorded = Pace(), RecordedSteps()
        self._following, self._limits, self._moved, self._stepping = (
            Following(run_dir),
            limits,
            now,
            False,
        )
        self._run_dir, self._looked, self._written = run_dir, now, _written(run_dir)
        while True:  # what earlier attempts left
            lines, begins = self._following.read()
            self.recorded.take(lines, begins=begins)
            self._time(lines)
            if self._following.at_end:
                break

    def look(self, now: float) -> str:
        """Read on; returns why the run is to be called hung, empty while it moves."""
        # a network disk that stutters ends no run; one that is gone is silence
        with contextlib.suppress(OSError):
            self._read_on(now)
        return self._hung(now)

    def _read_on(self, now: float) -> None:
        while True:
            lines, begins = self._following.read()
            if lines:  # an empty file begins at every look
                self._moved = now
            self.recorded.take(lines, begins=begins)
            self._time(lines)
            for line in lines:
                self._take(line, now, old=begins)
            if self._following.at_end:
                return

    def _time(self, lines: list[dict[str, Json]]) -> None:
        for line in lines:
            if line.get("event") == "started":
                self.pace.num_lines = 0
            seconds = line.get("seconds")
            if (
                "train_loss_nats" in line
                and isinstance(seconds, float)
                and 0 <= seconds < MAX_STEP_SECONDS
            ):
                self.pace.time(seconds)

    def _take(self, line: dict[str, Json], now: float, *, old: bool) -> None:
        """`old`: what a rewind kept of earlier attempts, or has just been followed by."""
        step, loss, tokens = line.get("step"), line.get("train_loss_nats"), line.get("tokens")
        if not isinstance(step, int):
            return
        self.pace.step = step
        if isinstance(loss, float) and isinstance(tokens, int):
            self.pace.loss_nats, self.pace.tokens = loss, tokens
            if not old:
                self._stepping = True
                self.pace.since = self.pace.since or (now, tokens)

    def _hung(self, now: float) -> str:
        limit, what = self._limits.start_seconds, "before its first step"
        if self._stepping:
            limit, what = self._limits.floor_seconds, f"after step {self.pace.step}"
            if limit is not None and self.pace.seconds:
                limit = max(limit, STEP_FACTOR * statistics.median(self.pace.seconds))
        if limit is None:
            return ""
        if now - max(self._moved, self._looked) >= limit / _NUM_LOOKS:
            self._looked, before, self._written = now, self._written, _written(self._run_dir)
            if self._written != before:
                self._moved = now
        if (silent := now - self._moved) <= limit:
            return ""
        save = ", nor any change of the save in progress" if self._written else ""
        return (
            f"no line of metrics{save} for {format_duration(silent)} {what}; the limit is "
            f"{format_duration(limit)}"
        )


def _written(run_dir: Path) -> frozenset[tuple[str, int]]:
    """The files of checkpoints that are not complete, and how large they are by now."""
    found = set()
    with contextlib.suppress(OSError):
        for file in (run_dir / CHECKPOINTS).glob("*.part/*"):
            with contextlib.suppress(OSError):  # it may just be gone
                found.add((f"{file.parent.name}/{file.name}", file.stat().st_size))
    return frozenset(found)
