"""Alerts about the machine under a run: pace, stragglers, silence, and how attempts ended."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from forerun._launcher.main_run.frozen.run_policies import MAD_TO_SIGMA
from forerun._launcher.main_run.supervisor.hang_detector import START_SECONDS
from forerun._launcher.main_run.watch import pace
from forerun._launcher.main_run.watch.alerts import (
    AlertFinding,
    Severity,
    WatchedRun,
    register_alert,
)
from forerun._launcher.main_run.watch.logs.columns import Floats
from forerun._proxies.core.notation import (
    format_counted,
    format_duration,
    format_percent,
    format_significant,
    format_speed,
)

NOTICE_SHARE, ALARM_SHARE = 0.1, 0.25
"""Share of the throughput that is lost, or by which a rank takes longer: beyond the first there is
a notice, beyond the second an alarm."""
STRAGGLER_LINES = 64
"""Newest lines in which a rank's time is compared with the other ranks'."""
_SLOWDOWN_SDS = 5.0  # Minimum slowdown, in standard deviations of the blocks' medians.
_STRAGGLER_SHARE = 0.75  # Share of the newest lines in which a straggler is slower.


def _choose_severity(share: float) -> Severity:
    return "alarm" if share > ALARM_SHARE else "notice"


@register_alert(
    "slow",
    "notice",
    "alarm",
    next_command="machine",
    when=f"throughput of {pace.SUSTAINED_BLOCKS} consecutive blocks of "
    f"{format_counted(pace.BLOCK_LINES, 'line')} is {format_percent(NOTICE_SHARE)} (alarm: "
    f"{format_percent(ALARM_SHARE)}) below the best that this run sustained",
)
def find_slowdown(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find throughput that is below the run's own best and stays there."""
    blocks = run.pace.split_into_blocks(run.columns.tokens_per_second)
    if blocks is None:
        return
    starts, speeds = blocks
    # A speed was sustained if several blocks in a row had at least that speed.
    sustained = sliding_window_view(speeds, pace.SUSTAINED_BLOCKS).min(axis=1)
    best = float(sustained.max())
    # Standard deviation from block to block, robust to a trend
    noise = MAD_TO_SIGMA * np.median(np.abs(np.diff(speeds))) / np.sqrt(2)
    is_slow = speeds < best - max(NOTICE_SHARE * best, _SLOWDOWN_SDS * noise)
    # From the newest block back, the product is 1 until the first block that is not slow.
    num_slow = int(np.cumprod(is_slow[::-1]).sum())
    if num_slow < pace.SUSTAINED_BLOCKS:
        return
    first_step, speed = int(starts[-num_slow]), float(np.median(speeds[-num_slow:]))
    lost_share = 1 - speed / best
    yield AlertFinding(
        first_step=first_step,
        seen=f"throughput since step {first_step} is {format_speed(speed, 'tokens')}, "
        f"{format_percent(lost_share)} below the {format_speed(best, 'tokens')} that this run "
        "sustained",
        evidence={
            "tokens_per_second": speed,
            "best_tokens_per_second": best,
            "lost_share": lost_share,
        },
        severity=_choose_severity(lost_share),
    )


@register_alert(
    "straggler",
    "notice",
    "alarm",
    next_command="machine",
    when=f"a rank computed {format_percent(NOTICE_SHARE)} longer than the other ranks' median in "
    f"{format_percent(_STRAGGLER_SHARE)} of the newest {STRAGGLER_LINES} lines (alarm: "
    f"{format_percent(ALARM_SHARE)} longer at the median of those lines)",
)
def find_stragglers(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find ranks that the others wait for, the slowest first.

    An alert begins at the oldest block of lines from which on the rank was slow in every block.
    """
    steps, seconds_KR = run.pace.select_comparable_ranks()
    if len(steps) < STRAGGLER_LINES or seconds_KR.shape[1] < 2:
        return
    others_KR = compute_medians_of_others(seconds_KR)
    slower_KR = seconds_KR / others_KR - 1
    recent = slice(-STRAGGLER_LINES, None)
    shares_R = np.median(slower_KR[recent], axis=0)
    # In `_STRAGGLER_SHARE` of the lines, a rank is slower by at least this share.
    low_R = np.quantile(slower_KR[recent], 1 - _STRAGGLER_SHARE, axis=0)
    slow_ranks = np.flatnonzero(low_R > NOTICE_SHARE)
    for rank in slow_ranks[np.argsort(-shares_R[slow_ranks], kind="stable")].tolist():
        slower, start = slower_KR[:, rank], len(slower_KR) - STRAGGLER_LINES
        while (
            start >= pace.BLOCK_LINES
            and np.median(slower[start - pace.BLOCK_LINES : start]) > NOTICE_SHARE
        ):
            start -= pace.BLOCK_LINES
        share, first_step = float(shares_R[rank]), int(steps[start])
        seconds, others_seconds = (
            float(np.median(times_KR[recent, rank])) for times_KR in (seconds_KR, others_KR)
        )
        yield AlertFinding(
            first_step=first_step,
            seen=f"rank {rank} computes {format_significant(seconds)} s a step, "
            f"{format_percent(share)} longer than the other ranks' median of "
            f"{format_significant(others_seconds)} s, since step {first_step} or earlier: all "
            "other ranks wait for it",
            evidence={
                "rank": rank,
                "slower_share": share,
                "seconds": seconds,
                "others_seconds": others_seconds,
            },
            severity=_choose_severity(share),
        )


def compute_medians_of_others(values_KR: Floats) -> Floats:
    """Return the median of the other ranks' values, for each of K lines and R ranks, [K, R]."""
    num_ranks = values_KR.shape[1]
    sorted_KR = np.sort(values_KR, axis=1)
    # Place of each rank's value in its sorted line
    places_KR = np.argsort(np.argsort(values_KR, axis=1), axis=1)
    # Middle indices of a sorted line without this rank's value, which are equal if R is even
    low, high = (num_ranks - 2) // 2, (num_ranks - 1) // 2
    # The rank's own value is left out: from its place on, the other values lie one index higher.
    halves = [
        np.where(index < places_KR, sorted_KR[:, [index]], sorted_KR[:, [index + 1]]) / 2
        for index in (low, high)
    ]
    medians: Floats = halves[0] + halves[1]
    return medians


@register_alert(
    "stalled",
    "alarm",
    next_command="resume",
    when="no line and no write below `checkpoints/` for the longest of "
    f"{format_counted(pace.STALL_STEPS, 'median step')}, {format_duration(pace.MIN_STALL_SECONDS)} "
    "and twice the longest step or save; from a launch, a restart or a rollback to the attempt's "
    f"first step, {format_duration(START_SECONDS)} is allowed for loading and compiling",
)
def find_stall(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find a run that logs nothing although it is not over.

    After its last step, or the end of an attempt, a run writes no line until it is launched again.
    """
    silence, ended, step = run.pace.silence, run.liveness.ended, run.columns.step
    if run.pace.has_ended or (run.pace.is_done and not run.pace.is_starting):
        return
    if silence and silence.is_too_long:
        seconds, allowed, is_starting = silence
        period = "since it was started" if is_starting else f"after step {step}"
        supervisor_note = f"; its supervisor has ended: {ended}" if ended else ""
        yield AlertFinding(
            first_step=step,
            seen=f"no line for {format_duration(seconds)} {period}; at most "
            f"{format_duration(allowed)} are normal{supervisor_note}",
            evidence={"silent_seconds": seconds, "allowed_seconds": allowed},
        )


def _find_ending(run: WatchedRun, event: str) -> Iterator[AlertFinding]:
    """Yield a finding if the newest attempt ended with this event, and none was launched since."""
    last_event, step = run.columns.last_event, run.columns.step
    if run.pace.has_ended and last_event["event"] == event:
        reason = f": {last_event['reason']}" if last_event.get("reason") else ""
        yield AlertFinding(
            first_step=step,
            seen=f"the run was {event} after step {step}{reason}",
            evidence={"exit_code": last_event.get("exit_code")},
        )


@register_alert("aborted", "alarm", next_command="resume", when="the newest attempt stopped itself")
def find_abort(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find a run that stopped itself."""
    return _find_ending(run, "aborted")


@register_alert(
    "interrupted", "notice", next_command="resume", when="a signal ended the newest attempt early"
)
def find_interruption(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find a run that a signal ended early."""
    return _find_ending(run, "interrupted")
