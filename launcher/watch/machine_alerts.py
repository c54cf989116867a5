"""Alerts about the machine under a run: pace, stragglers, silence, and how attempts ended."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from launcher.base.metrics import ENDINGS
from launcher.watch import pace
from launcher.watch.alerts import AlertFinding, Severity, WatchedRun, alert
from launcher.watch.logs.columns import Floats, LogColumns
from launcher.watch.loss_rises import estimate_line_noise
from proxies.core.notation import (
    counted,
    format_duration,
    format_percent,
    format_significant,
    format_speed,
)

NOTICE_SHARE, ALARM_SHARE = 0.1, 0.25
"""Shares of throughput lost, or of extra time that a rank takes, that raise a notice and an alarm.
"""
STRAGGLER_LINES = 64
"""Newest lines in which a rank's time is compared with the other ranks'."""
_SLOWDOWN_SDS, _STRAGGLER_QUANTILE = 5.0, 0.25


def _choose_severity(share: float) -> Severity:
    return "alarm" if share > ALARM_SHARE else "notice"


@alert(
    "slow",
    "notice",
    "alarm",
    next_command="machine",
    when=f"throughput of two consecutive blocks of {counted(pace.BLOCK_LINES, 'line')} is "
    f"{format_percent(NOTICE_SHARE)} (alarm: {format_percent(ALARM_SHARE)}) below the best that "
    "this run sustained",
)
def find_slowdown(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find throughput that is below the run's own best and stays there."""
    columns = run.columns
    blocks = pace.split_into_blocks(columns, columns.tokens_per_second)
    if blocks is None:
        return
    starts, levels = blocks
    best = float(np.minimum(levels[1:], levels[:-1]).max())
    is_slow = levels < best - max(NOTICE_SHARE * best, _SLOWDOWN_SDS * estimate_line_noise(levels))
    num_slow = int(np.argmin(is_slow[::-1])) if not is_slow.all() else len(is_slow)
    if num_slow < pace.SUSTAINED:
        return
    first, now = int(starts[-num_slow]), float(np.median(levels[-num_slow:]))
    yield AlertFinding(
        first_step=first,
        seen=f"throughput since step {first} is {format_speed(now, 'tokens')}, "
        f"{format_percent(1 - now / best)} "
        f"below the {format_speed(best, 'tokens')} that this run sustained",
        evidence={
            "tokens_per_second": now,
            "best_tokens_per_second": best,
            "lost_share": 1 - now / best,
        },
        severity=_choose_severity(1 - now / best),
    )


@alert(
    "straggler",
    "notice",
    "alarm",
    next_command="machine",
    when=f"a rank computed {format_percent(NOTICE_SHARE)} longer than the other ranks' median in "
    "three quarters of "
    f"the newest {STRAGGLER_LINES} lines (alarm: {format_percent(ALARM_SHARE)} longer at the "
    "median of those lines)",
)
def find_stragglers(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find ranks that the others wait for, the slowest first."""
    steps, seconds_KR = pace.select_comparable_ranks(run.columns)
    if len(steps) < STRAGGLER_LINES or seconds_KR.shape[1] < 2:
        return
    others_KR = medians_of_others(seconds_KR)
    slower_KR = seconds_KR / others_KR - 1
    recent = slice(-STRAGGLER_LINES, None)
    shares_R = np.median(slower_KR[recent], axis=0)
    low_R = np.quantile(slower_KR[recent], _STRAGGLER_QUANTILE, axis=0)
    slow_ranks = np.flatnonzero(low_R > NOTICE_SHARE)
    for rank in slow_ranks[np.argsort(-shares_R[slow_ranks], kind="stable")].tolist():
        slower, start = slower_KR[:, rank], len(slower_KR) - STRAGGLER_LINES
        while (
            start >= pace.BLOCK_LINES
            and np.median(slower[start - pace.BLOCK_LINES : start]) > NOTICE_SHARE
        ):
            start -= pace.BLOCK_LINES
        share, first = float(shares_R[rank]), int(steps[start])
        seconds, others_seconds = (
            float(np.median(table[recent, rank])) for table in (seconds_KR, others_KR)
        )
        yield AlertFinding(
            first_step=first,
            seen=f"rank {rank} computes {format_significant(seconds)} s a step, "
            f"{format_percent(share)} longer than "
            f"the other ranks' median of {format_significant(others_seconds)} s, since step "
            f"{first} or earlier: all other ranks wait for it",
            evidence={
                "rank": rank,
                "slower_share": share,
                "seconds": seconds,
                "others_seconds": others_seconds,
            },
            severity=_choose_severity(share),
        )


def medians_of_others(values_KR: Floats) -> Floats:
    """Return the median of the other ranks, for each line and rank, [K, R]."""
    num_ranks = values_KR.shape[1]
    sorted_KR, ranks_KR = (
        np.sort(values_KR, axis=1),
        np.argsort(np.argsort(values_KR, axis=1), axis=1),
    )
    # Middle indices of the other ranks once this rank is taken out of the sorted ones.
    low, high = (num_ranks - 2) // 2, (num_ranks - 1) // 2
    halves = [
        np.where(index < ranks_KR, sorted_KR[:, [index]], sorted_KR[:, [index + 1]]) / 2
        for index in (low, high)
    ]
    medians: Floats = halves[0] + halves[1]
    return medians


def is_over(columns: LogColumns, num_steps: int) -> bool:
    """Return whether the newest attempt ended in order, or the schedule has ended.

    Nothing more is to come by itself then.
    """
    return pace.is_done(columns, num_steps) or bool(
        columns.events and columns.events[-1].get("event") in ENDINGS
    )


@alert(
    "stalled",
    "alarm",
    next_command="resume",
    when="no line and no write below `checkpoints/` for the longest of "
    f"{counted(pace.STALL_STEPS, 'median step')}, "
    f"{format_duration(pace.MIN_STALL_SECONDS)} and twice the longest step or save; from a "
    "launch, a restart or a "
    "rollback to the attempt's first step, one hour is allowed for loading and compiling",
)
def find_stall(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find a run that is not over and logs nothing."""
    columns, liveness = run.columns, run.liveness
    if is_over(columns, run.schedule.num_steps) and not liveness.starting(columns.newest_at):
        return
    seconds, allowed, starting = pace.silence(columns, run.now, liveness) or (0.0, 0.0, False)
    if seconds > allowed:
        period = "since it was started" if starting else f"after step {columns.step}"
        supervisor_note = f"; its supervisor has ended: {liveness.ended}" if liveness.ended else ""
        yield AlertFinding(
            first_step=columns.step,
            seen=f"no line for {format_duration(seconds)} {period}; at most "
            f"{format_duration(allowed)} are normal{supervisor_note}",
            evidence={"silent_seconds": seconds, "allowed_seconds": allowed},
        )


def _find_ending(run: WatchedRun, event: str) -> Iterator[AlertFinding]:
    """Find a newest attempt that ended with this event, with no other launched since."""
    columns = run.columns
    last = columns.events[-1] if columns.events else {}
    if last.get("event") == event and not run.liveness.starting(columns.newest_at):
        reason = str(last.get("reason") or "")
        yield AlertFinding(
            first_step=columns.step,
            seen=f"the run was {event} after step {columns.step}"
            + (f": {reason}" if reason else ""),
            evidence={"exit_code": last.get("exit_code")},
        )


@alert("aborted", "alarm", next_command="resume", when="the newest attempt stopped itself")
def find_abort(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find a run that stopped itself."""
    return _find_ending(run, "aborted")


@alert(
    "interrupted", "notice", next_command="resume", when="a signal ended the newest attempt early"
)
def find_interruption(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find a run that a signal ended early."""
    return _find_ending(run, "interrupted")
