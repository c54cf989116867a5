"""The machine under a run as alerts: pace, stragglers, silence, GPU errors, how attempts ended."""

from __future__ import annotations

import numpy as np

from launcher.base.metrics import ENDINGS
from launcher.watch import pace
from launcher.watch.alerts import Alert, Commands, Severity
from launcher.watch.logs.columns import Columns
from launcher.watch.signs import Signs
from launcher.watch.standstill import stopped

_ERRORS = {"num_ecc_errors": "ECC", "num_link_errors": "link"}


def over(columns: Columns, num_steps: int) -> bool:
    """Whether the newest attempt has ended in order, or the schedule has: nothing more is to come by itself.

    Where not every step is logged the schedule has ended when the next line would lie beyond it.
    """
    done = len(columns) and columns.step > num_steps - pace.line_steps(columns)
    return bool(done) or bool(columns.events and columns.events[-1].get("event") in ENDINGS)


def slowed(columns: Columns, commands: Commands) -> list[Alert]:
    """Throughput below the run's own best."""
    found = pace.slowdown(columns)
    if found is None:
        return []
    mfu = "" if found.mfu is None else f", MFU {found.mfu:.1%}"
    return [
        Alert(
            name="slow", severity=_severity(found.lost_share), first_step=found.first_step,
            seen=f"since step {found.first_step} {found.tokens_per_second:,.0f} tokens/s{mfu}: "
            f"{found.lost_share:.0%} below the {found.best_tokens_per_second:,.0f} that this run has sustained",
            evidence={
                "tokens_per_second": found.tokens_per_second, "best_tokens_per_second": found.best_tokens_per_second,
                "lost_share": found.lost_share, "mfu": found.mfu,
            },
            next_command=commands.machine,
        )
    ]  # fmt: skip


def straggling(columns: Columns, commands: Commands) -> list[Alert]:
    """Ranks that the others wait for."""
    return [
        Alert(
            name="straggler", severity=_severity(found.slower_share), first_step=found.first_step,
            seen=f"rank {found.rank} computes {found.seconds:.3g} s a step, {found.slower_share:.0%} longer than the "
            f"other ranks' median of {found.others_seconds:.3g} s, since step {found.first_step} or before: all wait "
            "for it",
            evidence={
                "rank": found.rank, "slower_share": found.slower_share, "seconds": found.seconds,
                "others_seconds": found.others_seconds,
            },
            next_command=commands.machine,
        )
        for found in pace.stragglers(columns)
    ]  # fmt: skip


def silent(columns: Columns, num_steps: int, now: float | None, signs: Signs, commands: Commands) -> list[Alert]:
    """A run that is not over and says nothing."""
    ended = over(columns, num_steps) and not signs.starting(columns.newest_at)
    found = None if ended else pace.silence(columns, now, signs)
    if found is None or found.seconds <= found.allowed_seconds:
        return []
    after = "since it was started" if found.starting else f"after step {columns.step}"
    said = f"; its supervisor has ended: {signs.ended}" if signs.ended else ""
    return [
        Alert(
            name="stalled", severity="alarm", first_step=columns.step,
            seen=f"no line for {found.seconds:,.0f} s {after}, where at most {found.allowed_seconds:,.0f} s are "
            f"usual{said}",
            evidence={"silent_seconds": found.seconds, "allowed_seconds": found.allowed_seconds},
            next_command=commands.resume,
        )
    ]  # fmt: skip


def metrics_stopped(columns: Columns, commands: Commands) -> list[Alert]:
    """Metrics that come no more while steps go on; an alarm where a loss is among them."""
    found = stopped(columns)
    if not found:
        return []
    names = [each.name for each in found]
    told = ", ".join(f"{each.name} (last at step {each.last_step})" for each in found)
    return [
        Alert(
            name="metrics_stop", severity="alarm" if any("loss" in name for name in names) else "notice",
            first_step=min(each.last_step for each in found),
            seen=f"steps go on, {found[0].num_lines} lines of them, without {told}",
            evidence={"metrics": [*names], "last_steps": [each.last_step for each in found],
                      "num_lines": found[0].num_lines},
            next_command=f"{commands.watch} --once",
        )
    ]  # fmt: skip


def ended_badly(columns: Columns, signs: Signs, commands: Commands) -> list[Alert]:
    """The newest attempt stopped itself, or was asked to before its end, and no other was launched since."""
    last = columns.events[-1] if columns.events else {}
    event, reason = last.get("event"), str(last.get("reason") or "")
    if event not in ("aborted", "interrupted") or signs.starting(columns.newest_at):
        return []
    return [
        Alert(
            name=str(event), severity="alarm" if event == "aborted" else "notice", first_step=columns.step,
            seen=f"the run was {event} after step {columns.step}" + (f": {reason}" if reason else ""),
            evidence={"exit_code": last.get("exit_code")}, next_command=commands.resume,
        )
    ]  # fmt: skip


def rolled_back(columns: Columns, commands: Commands) -> list[Alert]:
    """What the trainer itself did about spikes."""
    found = [event for event in columns.events if event.get("event") == "rolled_back"]
    if not found:
        return []
    step = found[-1].get("to_step")
    to_step = step if isinstance(step, int) else columns.step
    return [
        Alert(
            name="rolled_back", severity="notice", first_step=to_step,
            seen=f"{len(found)} rollbacks, the last to step {to_step}: {found[-1].get('reason', '')}",
            evidence={"num_rollbacks": len(found)}, next_command=f"{commands.watch} --once",
        )
    ]  # fmt: skip


def gpu_errors(columns: Columns, commands: Commands) -> list[Alert]:
    """Counters of the GPUs that grew while this run was watched; what they stood at before is not its doing."""
    alerts = []
    for column, name in _ERRORS.items():
        counts_GR = columns.gpus.get(column)
        if counts_GR is None:
            continue
        for rank, counts in enumerate(counts_GR.T):
            there = np.isfinite(counts)
            grown = np.flatnonzero(np.diff(counts[there]) > 0)  # a restart elsewhere may begin lower
            if not len(grown):
                continue
            first = int(columns.gpu_steps[there][grown[0] + 1])
            num_more = int(np.maximum(np.diff(counts[there]), 0).sum())
            alerts.append(
                Alert(
                    name=f"{name.lower()}_errors", severity="notice", first_step=first,
                    seen=f"the GPU of rank {rank} counts {num_more} more {name} errors, the first by step {first}",
                    evidence={"rank": rank, "num_errors": num_more}, next_command=commands.machine,
                )
            )  # fmt: skip
    return alerts


def _severity(share: float) -> Severity:
    return "alarm" if share > pace.ALARM_SHARE else "notice"
