"""How fast a run goes: against its own best, rank against rank, in kept work, and when it will end.

Nothing here knows what the machine should give. A run is held against the best that it has itself sustained since its
number of ranks or its device last changed; the first lines after a start, and steps that wait for a save, weigh little
in medians of blocks.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from launcher.watch.columns import Columns, Floats, headers, number
from launcher.watch.losses import line_noise

_T = TypeVar("_T")

NOTICE_SHARE, ALARM_SHARE = 0.1, 0.25
"""Of throughput lost, or of time that a rank takes longer than the others."""
STALL_STEPS, LEAST_STALL_SECONDS, START_SECONDS = 20, 60.0, 600.0
"""No line for so many median steps, and for so long; before the first line, for `START_SECONDS`."""
BLOCK_LINES, STRAGGLER_LINES = 16, 64
_SUSTAINED, _SLOWDOWN_SDS, _STRAGGLER_QUANTILE = 2, 5.0, 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """Throughput is below the run's own best, and stays there."""

    first_step: int
    best_tokens_per_second: float
    tokens_per_second: float
    lost_share: float
    mfu: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank slower than the median of the others in three of four of the newest lines."""

    first_step: int
    rank: int
    slower_share: float
    """Median over those lines."""
    seconds: float
    others_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """When and at what cost the run ends; centre, low and high of each.

    Low: the rest goes as the fastest tenth of the blocks so far, and nothing is lost any more. High: as the slowest
    tenth, and as much is lost as was so far.
    """

    remaining_seconds: tuple[float, float, float]
    ends_at: tuple[str, str, str] | None
    """UTC, ISO 8601; None where nobody says what time it is."""
    device_hours: tuple[float, float, float]
    """Of the whole run, its past included."""
    usd: tuple[float, float, float] | None


def slowdown(columns: Columns) -> Slowdown | None:
    """Whether throughput is down now; None also where nothing was told of it."""
    found = _blocks(columns, columns.tokens_per_second)
    if found is None:
        return None
    starts, levels = found
    sustained = np.minimum(levels[1:], levels[:-1])
    best = float(sustained.max())
    limit = best - max(NOTICE_SHARE * best, _SLOWDOWN_SDS * line_noise(levels))
    slow = levels < limit
    num_slow = int(np.argmin(slow[::-1])) if not slow.all() else len(slow)
    if num_slow < _SUSTAINED:
        return None
    now = float(np.median(levels[-num_slow:]))
    mfu = columns.mfu[-BLOCK_LINES:]
    return Slowdown(
        first_step=int(starts[-num_slow]), best_tokens_per_second=best, tokens_per_second=now,
        lost_share=1 - now / best, mfu=float(np.nanmedian(mfu)) if np.isfinite(mfu).any() else None,
    )  # fmt: skip


def stragglers(columns: Columns) -> list[Straggler]:
    """Ranks that the others wait for, over the newest `STRAGGLER_LINES` lines; the slowest first."""
    table = columns.rank_seconds
    if table is None or table.shape[1] < 2:
        return []
    at = _comparable(columns)
    steps, seconds_SR = columns.steps[at], table[at]
    whole = np.isfinite(seconds_SR).all(axis=1) & (seconds_SR > 0).all(axis=1)
    steps, seconds_SR = steps[whole], seconds_SR[whole]
    if len(steps) < STRAGGLER_LINES:
        return []
    found = []
    for rank in range(seconds_SR.shape[1]):
        others = np.median(np.delete(seconds_SR, rank, axis=1), axis=1)
        slower = seconds_SR[:, rank] / others - 1
        recent = slower[-STRAGGLER_LINES:]
        if np.quantile(recent, _STRAGGLER_QUANTILE) <= NOTICE_SHARE:
            continue
        start = len(slower) - STRAGGLER_LINES
        while start >= BLOCK_LINES and np.median(slower[start - BLOCK_LINES : start]) > NOTICE_SHARE:
            start -= BLOCK_LINES
        found.append(
            Straggler(
                first_step=int(steps[start]),
                rank=rank,
                slower_share=float(np.median(recent)),
                seconds=float(np.median(seconds_SR[-STRAGGLER_LINES:, rank])),
                others_seconds=float(np.median(others[-STRAGGLER_LINES:])),
            )
        )
    return sorted(found, key=lambda straggler: -straggler.slower_share)


def step_seconds(columns: Columns) -> float | None:
    """Median time of a step, over the comparable lines; None where nothing was told of it."""
    seconds = columns.seconds[_comparable(columns)]
    return float(np.nanmedian(seconds)) if np.isfinite(seconds).any() else None


def goodput(columns: Columns) -> float | None:
    """Share of the time since the run first started that went into steps that are still part of it."""
    begun = headers(columns.events)
    typical = step_seconds(columns)
    if not begun or typical is None or columns.newest_at is None:
        return None
    wall = columns.newest_at - _unix(begun[0].started_at)
    seconds = np.where(np.isfinite(columns.seconds), columns.seconds, typical)
    kept = float((seconds * np.diff(columns.steps, prepend=begun[0].step)).sum())
    return min(1.0, kept / wall) if wall > 0 else None


def projection(
    columns: Columns, num_steps: int, num_ranks: int, now: float | None, usd_per_device_hour: float | None
) -> Projection | None:
    """From the recorded step times; None where there are none."""
    seconds = columns.seconds[_comparable(columns)]
    seconds = seconds[np.isfinite(seconds)]
    if not len(seconds):
        return None
    starts = range(0, max(1, len(seconds) - BLOCK_LINES + 1), BLOCK_LINES)
    blocks = [seconds[start : start + BLOCK_LINES].mean() for start in starts]
    useful, left = goodput(columns) or 1.0, max(0, num_steps - columns.step)
    paces = np.array([seconds.mean() / useful, np.quantile(blocks, 0.1), np.quantile(blocks, 0.9) / useful])
    paces[1:] = min(paces[:2]), max(paces[0], paces[2])
    centre, low, high = (float(left * pace) for pace in paces)
    begun = headers(columns.events)
    since = columns.newest_at if columns.newest_at is not None else now
    spent = since - _unix(begun[0].started_at) if begun and since is not None else float(seconds.mean()) * columns.step
    rest = (centre, low, high)
    hours = _each(rest, lambda seconds: (spent + seconds) * num_ranks / 3600)
    price = usd_per_device_hour
    return Projection(
        remaining_seconds=rest,
        ends_at=None if since is None else _each(rest, lambda seconds: _iso(since + seconds)),
        device_hours=hours,
        usd=None if price is None else _each(hours, lambda hour: hour * price),
    )


def silent_seconds(columns: Columns, now: float | None) -> tuple[float, float] | None:
    """For how long no line came, and what is allowed; None where nobody says when the newest one was written."""
    if now is None or columns.newest_at is None:
        return None
    typical = step_seconds(columns)
    if typical is None:
        return now - columns.newest_at, START_SECONDS
    between = float(np.median(np.diff(columns.steps[-BLOCK_LINES:]))) if len(columns) > 1 else 1.0
    waits = [number(event.get("seconds")) for event in columns.events if event.get("event") == "saved"]
    longest = 2 * max([float(np.nanmax(columns.seconds)), *(wait for wait in waits if np.isfinite(wait))])
    return now - columns.newest_at, max(STALL_STEPS * between * typical, longest, LEAST_STALL_SECONDS)


def _comparable(columns: Columns) -> slice:
    """Lines since the ranks or the device last changed."""
    begun = headers(columns.events)
    changed = [
        new.step for old, new in itertools.pairwise(begun)
        if (old.num_ranks, old.device) != (new.num_ranks, new.device)
    ]  # fmt: skip
    first = int(np.searchsorted(columns.steps, changed[-1], side="right")) if changed else 0
    return slice(first, len(columns.steps))


def _blocks(columns: Columns, values: Floats) -> tuple[Floats, Floats] | None:
    """First step and median of each whole block of lines; None below three."""
    at = _comparable(columns)
    steps, values = columns.steps[at], values[at]
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    num_blocks = len(steps) // BLOCK_LINES
    if num_blocks < _SUSTAINED + 1:
        return None
    whole = num_blocks * BLOCK_LINES  # the newest lines in whole blocks, the oldest left out
    cut_steps, cut = (column[-whole:].reshape(num_blocks, BLOCK_LINES) for column in (steps, values))
    return cut_steps[:, 0], np.median(cut, axis=1)


def _each(values: tuple[float, float, float], change: Callable[[float], _T]) -> tuple[_T, _T, _T]:
    centre, low, high = values
    return change(centre), change(low), change(high)


def _unix(text: str) -> float:
    at = datetime.datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()


def _iso(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="seconds")
