"""How fast a run goes, when it will end, for how long it may be silent, and whether its folder says
that it is alive.

Nothing here knows what the machine should give. A run is compared with the best that it has itself
sustained since its number of ranks or its device last changed; the first lines after a start, and
steps that wait for a save, weigh little in medians of blocks.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher.base import chronicle
from launcher.base.metrics import ENDINGS
from launcher.base.run_files import CHECKPOINTS, ROLLBACKS_FILE
from launcher.base.watchdog import (
    MAX_STEP_SECONDS,
    SETTLING_LINES,
    START_SECONDS,
    usual_step_seconds,
)
from launcher.watch.logs.columns import Floats, LogColumns, headers, spacing
from proxies.core.notation import format_duration, format_percent

# Whether a run is alive, as its folder says and its log does not: just launched, saving, or lying
# still.
#
# Loading a large checkpoint, and compiling before the first step, come before the first line of an
# attempt; a save may take longer than any number of steps. A silence that these explain is no
# stall.


@dataclass(frozen=True, kw_only=True, slots=True)
class Liveness:
    """Times in seconds since 1970, None where the folder does not say."""

    launched_at: float | None = None
    """The newest launch or restart by a supervisor that is still at it, or the run's own going
    back."""
    saved_at: float | None = None
    """The newest write below the folder of checkpoints."""
    ended: str = ""
    """What the supervisor printed when it gave up, or ended in order."""
    paused_seconds: float = 0.0
    """Time that the run did not lose: from a stop that somebody asked for to the next launch, and
    after its end."""

    def starting(self, newest_at: float | None) -> bool:
        """Whether an attempt was launched that has not written a line yet; `newest_at`: of the
        newest line.
        """
        # The chronicle's times are whole seconds.
        return self.launched_at is not None and (
            newest_at is None or self.launched_at + 1 > newest_at
        )


UNKNOWN = Liveness()


def liveness_of(run_dir: Path, digest: str) -> Liveness:
    """What the folder of a launch config's run says; what cannot be read says nothing."""
    launched_at, saved_at, ended = None, None, ""
    stopped_at, finished_at, paused_seconds = None, None, 0.0
    with contextlib.suppress(OSError):
        for entry in chronicle.entries(run_dir):
            if entry.digest == digest and entry.kind in ("launched", "restarted", "ended"):
                over = entry.kind == "ended"
                launched_at, ended = None, entry.text if over else ""
                with contextlib.suppress(ValueError):
                    at = unix_seconds(entry.at)
                    launched_at = None if over else at
                    if entry.kind == "launched" and stopped_at is not None:
                        paused_seconds += max(0.0, at - stopped_at)
                    event = entry.data.get("event") if over else ""
                    stopped_at = at if event in ("stopped", "interrupted") else None
                    if event == "finished":  # launched again, it trains nothing and finishes again
                        paused_seconds += (
                            max(0.0, at - finished_at) if finished_at is not None else 0.0
                        )
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


def unix_seconds(text: str) -> float:
    """Return the time that a text in ISO 8601 names, in UTC where it names no zone. Raises
    ValueError.
    """
    at = datetime.datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()


STALL_STEPS, LEAST_STALL_SECONDS = 20, 60.0
"""No line for so many median steps, and for so long; before an attempt's first step, for
`START_SECONDS`."""
BLOCK_LINES, SUSTAINED = 16, 2
"""Lines of a block, and blocks on end that are a level."""
LEAST_GOODPUT = 0.1
"""Below it, the rest of a run cannot be projected: what was lost so far is not a rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """When the run ends; centre, low and high.

    Centre: the rest goes at the usual pace, which is what `launch` prints. Low: as the fastest
    tenth of the blocks so far. High: as the slowest tenth, and as much time is lost between
    attempts as was so far.
    """

    remaining_seconds: tuple[float, float, float]
    device_hours: tuple[float, float, float]
    """Device-hours of the whole run, its past included."""


def step_seconds(columns: LogColumns) -> float | None:
    """Median time of a step, over the comparable lines; None where it is unknown."""
    seconds = measured(columns)[_comparable(columns)]
    return float(np.nanmedian(seconds)) if np.isfinite(seconds).any() else None


def measured(columns: LogColumns) -> Floats:
    """[S] Seconds of each step, NaN where they cannot be."""
    return np.where(
        (columns.seconds >= 0) & (columns.seconds < MAX_STEP_SECONDS), columns.seconds, np.nan
    )


def goodput(columns: LogColumns, paused_seconds: float = 0.0) -> float | None:
    """Return the share of the run's time that was spent on steps that still count; None if it is
    unknown.

    Args:
        columns: The run so far.
        paused_seconds: Time since the first start in which the run was stopped on request; it does
            not count.
    """
    begun = headers(columns.events)
    typical = step_seconds(columns)
    if not begun or typical is None or columns.newest_at is None:
        return None
    wall = columns.newest_at - unix_seconds(begun[0].started_at) - paused_seconds
    times = measured(columns)
    seconds = np.where(np.isfinite(times), times, typical)
    kept = float((seconds * np.diff(columns.steps, prepend=begun[0].step)).sum())
    return min(1.0, kept / wall) if wall > 0 else None


def projection(
    columns: LogColumns, num_steps: int, num_ranks: int, paused_seconds: float = 0.0
) -> Projection | None:
    """Estimate the time until the run ends from its step times; None if no step was timed."""
    seconds, usual = measured(columns), usual_seconds(columns)
    seconds = seconds[_comparable(columns)]
    seconds = seconds[np.isfinite(seconds)]
    if usual is None:
        return None
    starts = range(0, max(1, len(seconds) - BLOCK_LINES + 1), BLOCK_LINES)
    blocks = [seconds[start : start + BLOCK_LINES].mean() for start in starts]
    left, useful = max(0, num_steps - columns.step), goodput(columns, paused_seconds) or 1.0
    low = min(usual, float(np.quantile(blocks, 0.1)))
    high = max(usual, float(np.quantile(blocks, 0.9))) / useful
    attempts = headers(columns.events)
    spent = usual * columns.step
    if attempts and columns.newest_at is not None:
        spent = max(0.0, columns.newest_at - unix_seconds(attempts[0].started_at) - paused_seconds)
    centre, low, high = usual * left, low * left, high * left
    hours = [(spent + rest) * num_ranks / 3600 for rest in (centre, low, high)]
    return Projection(
        remaining_seconds=(centre, low, high), device_hours=(hours[0], hours[1], hours[2])
    )


def usual_seconds(columns: LogColumns) -> float | None:
    """Estimate the seconds of a coming step, as `launch` does; None if no step was timed."""
    seconds = measured(columns)
    is_settling = np.zeros(len(seconds), dtype=bool)
    for step in [header.step for header in headers(columns.events)] or [0]:
        start = int(np.searchsorted(columns.steps, step, side="right"))
        is_settling[start : start + SETTLING_LINES] = True
    usable = np.isfinite(seconds)
    usable[: _comparable(columns).start] = False
    return usual_step_seconds(
        seconds[usable & is_settling].tolist(), seconds[usable & ~is_settling].tolist()
    )


def done(columns: LogColumns, num_steps: int) -> bool:
    """Whether the schedule has ended: where not every step is logged, whether the next line would
    lie beyond it.
    """
    return bool(len(columns)) and columns.step > num_steps - line_steps(columns)


def measured_enough(columns: LogColumns) -> bool:
    """Whether the lines with a step time cover at least `BLOCK_LINES` steps since the ranks or the
    device changed.
    """
    return (
        int(np.isfinite(measured(columns)[_comparable(columns)]).sum()) * line_steps(columns)
        >= BLOCK_LINES
    )


def still_since(
    columns: LogColumns, num_steps: int, now: float | None, found: Liveness
) -> float | None:
    """Since when a run makes no step, in seconds since 1970; None: it advances, is done, or nobody
    says when.
    """
    if done(columns, num_steps):
        return None
    silent, allowed, _ = silence(columns, now, found) or (0.0, 0.0, False)
    if now is not None and silent > allowed:
        return now - silent
    ended = bool(columns.events) and columns.events[-1].get("event") in ENDINGS
    return columns.newest_at if ended and not found.starting(columns.newest_at) else None


def why_no_end(
    columns: LogColumns, num_steps: int, since: float | None, paused_seconds: float = 0.0
) -> str | None:
    """Return the reason why the end of a run cannot be projected; None if it can. `since` is from
    `still_since`.
    """
    if done(columns, num_steps):
        return None
    if since is not None:
        at = datetime.datetime.fromtimestamp(since, datetime.UTC)
        return f"the run stands still after step {columns.step}, since {at:%Y-%m-%d %H:%M:%S} UTC"
    if step_seconds(columns) is None:
        return "no step time is logged"
    if not measured_enough(columns):
        return f"fewer than {BLOCK_LINES} steps were timed"
    useful = goodput(columns, paused_seconds)
    if useful is not None and useful < LEAST_GOODPUT:
        return (
            f"only {format_percent(useful)} of the time since the first start went into steps, at "
            "least "
            f"{format_percent(LEAST_GOODPUT)} must; the steps left take "
            f"{format_duration((num_steps - columns.step) * (usual_seconds(columns) or 0.0))}"
        )
    return None


def silence(
    columns: LogColumns, now: float | None, found: Liveness
) -> tuple[float, float, bool] | None:
    """For how many seconds no line came, how many are allowed, and whether an attempt begins that
    has made no step yet.

    None where nobody says when the newest line was written.
    """
    newest = columns.newest_at
    if now is not None and found.starting(newest) and found.launched_at is not None:
        return now - found.launched_at, START_SECONDS, True
    if now is None or newest is None:
        return None
    typical = step_seconds(columns)
    begun = bool(columns.events) and columns.events[-1].get("event") == "started"
    if typical is None or (begun and columns.step <= _number(columns.events[-1].get("step"))):
        return now - newest, START_SECONDS, True
    waits = [
        _number(event.get("seconds")) for event in columns.events if event.get("event") == "saved"
    ]
    slowest = np.nanmax(
        [*measured(columns), *(wait for wait in waits if 0 <= wait < MAX_STEP_SECONDS)]
    )
    usual = STALL_STEPS * line_steps(columns) * typical
    since = newest if found.saved_at is None else max(newest, min(found.saved_at, now))
    return now - since, max(usual, 2 * float(slowest), LEAST_STALL_SECONDS), False


def line_steps(columns: LogColumns) -> float:
    """Steps from one of the newest lines to the next."""
    return spacing(columns.steps[-BLOCK_LINES:])


def comparable_ranks(columns: LogColumns) -> tuple[Floats, Floats]:
    """[K] and [K, R] The lines since the ranks last changed that have a time of each of them."""
    if columns.rank_seconds is None:
        return np.empty(0), np.empty((0, 0))
    since = np.searchsorted(columns.rank_steps, _comparable_since(columns), side="right")
    steps, seconds_KR = columns.rank_steps[since:], columns.rank_seconds[since:]
    seconds_KR = seconds_KR[:, np.isfinite(seconds_KR).any(axis=0)]  # more ranks were there before
    whole = (np.isfinite(seconds_KR) & (seconds_KR > 0)).all(axis=1)
    return steps[whole], seconds_KR[whole]


def _comparable(columns: LogColumns) -> slice:
    """Lines since the ranks or the device last changed."""
    return slice(
        int(np.searchsorted(columns.steps, _comparable_since(columns), side="right")),
        len(columns.steps),
    )


def _comparable_since(columns: LogColumns) -> int:
    """The step after which the ranks or the device last changed; -1: never."""
    begun = headers(columns.events)
    changed = [
        new.step
        for old, new in itertools.pairwise(begun)
        if (old.num_ranks, old.device) != (new.num_ranks, new.device)
    ]
    return changed[-1] if changed else -1


def blocks(columns: LogColumns, values: Floats) -> tuple[Floats, Floats] | None:
    """First step and median of each whole block of lines; None below three."""
    at = _comparable(columns)
    steps, values = columns.steps[at], values[at]
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    num_blocks = len(steps) // BLOCK_LINES
    if num_blocks < SUSTAINED + 1:
        return None
    whole = num_blocks * BLOCK_LINES  # the newest lines in whole blocks, the oldest left out
    cut_steps, cut = (
        column[-whole:].reshape(num_blocks, BLOCK_LINES) for column in (steps, values)
    )
    return cut_steps[:, 0], np.median(cut, axis=1)


def _number(value: object) -> float:
    """The number, or NaN."""
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool)
        else float("nan")
    )
