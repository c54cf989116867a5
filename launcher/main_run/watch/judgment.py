"""The judgment of a run so far: its alerts, its standing against the frozen band, and its figures.

The frozen band is the forecast's interval for the training loss over the run. The judgment is a
pure function of its inputs, one of which is the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.watch import loss_alerts, machine_alerts
from forerun._launcher.main_run.watch.alerts import Alert, Commands, WatchedRun, find_alerts
from forerun._launcher.main_run.watch.course import find_first_look
from forerun._launcher.main_run.watch.figures import RunFigures, compute_figures
from forerun._launcher.main_run.watch.liveness import UNKNOWN_LIVENESS, Liveness
from forerun._launcher.main_run.watch.logs.columns import LogColumns
from forerun._proxies.core.notation import format_counted

_ALERT_MODULES = (loss_alerts, machine_alerts)
"""Modules whose alerts are judged; importing them registers their alerts."""

Standing = Literal["on the band", "departed", "cannot tell"]
Outcome = Literal["fine", "alarm", "cannot_tell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchFindings:
    """The judgment of a run so far."""

    standing: Standing
    why: str
    """Reason of the standing, in a sentence."""
    alerts: tuple[Alert, ...]
    """Alerts: alarms first, then by first step."""
    figures: RunFigures

    @property
    def outcome(self) -> Outcome:
        """`alarm` if an alert is an alarm, else `cannot_tell` if the standing is, else `fine`.

        A run that has only notices is fine.
        """
        if any(alert.severity == "alarm" for alert in self.alerts):
            return "alarm"
        return "cannot_tell" if self.standing == "cannot tell" else "fine"


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def judge(
    decision: Decision,
    columns: LogColumns,
    *,
    now: float | None = None,
    commands: Commands | None = None,
    liveness: Liveness = UNKNOWN_LIVENESS,
) -> WatchFindings:
    """Compare a run with its decision and with itself.

    Args:
        decision: The frozen decision.
        columns: The run so far.
        now: Time in seconds since 1970; None if silence cannot be judged.
        commands: Commands to run next, for this config and run; None for those of `Commands()`.
        liveness: Signs of life in the run's folder.
    """
    run = WatchedRun(decision=decision, columns=columns, now=now, liveness=liveness)
    run_alerts = find_alerts(run, commands or Commands())
    standing, reason = _find_standing(run, any(alert.name == "missed_end" for alert in run_alerts))
    return WatchFindings(
        standing=standing,
        why=reason,
        alerts=run_alerts,
        figures=compute_figures(run),
    )


def _find_standing(run: WatchedRun, has_missed_end: bool) -> tuple[Standing, str]:
    """Return the standing of a run against the frozen band, and the reason as a sentence."""
    decision, columns, course = run.decision, run.columns, run.course
    num_steps = run.schedule.num_steps
    if has_missed_end:
        return "departed", "the run ended outside its forecast"
    if course is not None and course.departed is not None:
        return (
            "departed",
            f"training loss left the predicted curve at step {course.seen_at[course.departed]:.0f}",
        )
    if course is not None:
        newest = float(course.departure[-1])
        return "on the band", (
            f"{newest:+.1f} standard deviations from the predicted curve at step "
            f"{course.looked_at[-1]:.0f}, at most {np.abs(course.departure).max():.1f} so far; the "
            f"alarm is at {course.bound:.1f}"
        )
    if columns.find_final_loss(num_steps) is not None:
        return "on the band", "the run ended as predicted"
    if not decision.predicted.curve:
        return (
            "cannot tell",
            "the frozen config has no predicted curve: its ladder had too few runs",
        )
    first = find_first_look(decision.predicted, num_steps)
    if columns.step >= first:
        return "cannot tell", "no training loss is logged near the steps of the predicted curve"
    return (
        "cannot tell",
        (
            f"{format_counted(columns.step, 'step')} done: the first comparison with the "
            f"predicted curve is at step {first}"
        ),
    )
