"""The judgment of a run so far: its alerts, its standing against the frozen band, and its figures.

The frozen band is the forecast's interval for the training loss over the run. The judgment is a
pure function of its inputs, one of which is the time.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.watch import loss_alerts, machine_alerts
from forerun._launcher.main_run.watch.alerts import Alert, Commands, WatchedRun, find_alerts
from forerun._launcher.main_run.watch.course import BandComparison, find_first_look
from forerun._launcher.main_run.watch.liveness import UNKNOWN_LIVENESS, Liveness
from forerun._launcher.main_run.watch.logs.columns import Floats, LogColumns
from forerun._launcher.main_run.watch.logs.keys import NOISE_SCALE
from forerun._launcher.main_run.watch.loss_rises import compute_sensitivity
from forerun._launcher.main_run.watch.pace import BLOCK_LINES, Pace
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_counted

IN_TIME_SHARE = 0.05
"""Share of the run's steps within which a rise must be found to count as found in time."""

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
    figures: dict[str, Json]
    """Numbers about the run, with units in the keys; null if unknown."""

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
        figures={
            "step": columns.step,
            "num_steps": run.schedule.num_steps,
            "train_loss_nats": _to_finite(columns.train_loss_nats[-1]) if len(columns) else None,
            "num_spikes": len(run.spikes),
            **_compute_sensitivity_figures(decision, columns),
            **_compute_course_figures(decision, run.course),
            **_compute_pace_figures(run),
            **_compute_noise_figures(decision, columns),
        },
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


def _compute_course_figures(decision: Decision, course: BandComparison | None) -> dict[str, Json]:
    predicted = decision.predicted
    final = (
        (predicted.loss_nats, predicted.low_nats, predicted.high_nats)
        if course is None
        else course.final
    )
    return {
        "foretold_nats": predicted.loss_nats,
        "foretold_interval_nats": [predicted.low_nats, predicted.high_nats],
        "final_nats": final[0],
        "final_interval_nats": [*final[1:]],
        "level": predicted.level,
        "departure_sds": None if course is None else float(course.departure[-1]),
        "bound_sds": None if course is None else course.bound,
    }


def _compute_sensitivity_figures(decision: Decision, columns: LogColumns) -> dict[str, Json]:
    """Return the noise, and the smallest rises that it allows to detect in time."""
    schedule = decision.learning_rate.schedule
    sensitivity = compute_sensitivity(
        columns.steps,
        columns.train_loss_nats,
        schedule.warmup_steps,
        schedule.num_steps,
        IN_TIME_SHARE * schedule.num_steps,
    )
    names = ("innovation_nats", "phi", "jump_nats", "climb_nats")
    noise, phi, jump, climb = (
        None if sensitivity is None else _to_finite(getattr(sensitivity, name)) for name in names
    )
    return {
        "noise_nats": noise,
        "noise_autocorrelation": phi,
        "smallest_jump_nats": jump,
        "smallest_climb_nats": climb,
        "in_time_lines": None if sensitivity is None else sensitivity.num_lines,
    }


def _to_finite(value: float) -> float | None:
    """Convert a number for JSON, which has no NaN: None if it is not finite."""
    return float(value) if np.isfinite(value) else None


def _compute_pace_figures(run: WatchedRun) -> dict[str, Json]:
    columns, pace, since = run.columns, run.pace, run.pace.still_since
    parallelism = run.decision.parallelism
    num_ranks = pace.attempts[-1].num_ranks if pace.attempts else parallelism.num_ranks
    reason = pace.explain_no_projection()
    ends = pace.project_end(num_ranks) if reason is None else None
    # Launching a finished run again trains nothing, so it does not count as an attempt.
    attempts = [
        event
        for event in columns.events
        if event.get("event") == "started" and event.get("step") != pace.num_steps
    ]
    return {
        "num_attempts": len(attempts) or None,
        "step_seconds": pace.median_step_seconds,
        "tokens_per_second": _estimate_rate(pace, columns.tokens_per_second),
        "mfu": _estimate_rate(pace, columns.mfu),
        "goodput": pace.goodput if pace.has_enough_timed_steps else None,
        "projection": None if ends is None else canon.to_json(ends),
        "projection_reason": reason,
        "still_since": None
        if since is None
        else datetime.datetime.fromtimestamp(since, datetime.UTC).isoformat(),
    }


def _compute_noise_figures(decision: Decision, columns: LogColumns) -> dict[str, Json]:
    """Return the newest gradient noise scale, and the batch to compare it with."""
    lines = np.flatnonzero(np.isfinite(columns.noise_scale_low_tokens))
    scale, low, high = (
        _to_finite(getattr(columns, name)[lines[-1]]) if len(lines) else None
        for name in NOISE_SCALE
    )
    return {
        "noise_scale_tokens": scale,
        "noise_scale_interval_tokens": None if low is None else [low, high],
        "batch_tokens": decision.batch_tokens,
    }


def _estimate_rate(pace: Pace, rates: Floats) -> float | None:
    """Return the rate at which the run advances, from a logged rate of the newest lines.

    The rate is the median work of a step, divided by the usual seconds of a step. The end of the
    run is projected with the same seconds, so that the two agree. The median of the logged rates
    would be faster than the run: it leaves out the steps that wait for a save, a validation, or
    other processes. That median is returned only if there are no step times.

    Args:
        pace: Pace of the run.
        rates: Work per second as logged (tokens per second, or MFU), [S].
    """
    recent = slice(-BLOCK_LINES, None)
    logged = rates[recent][np.isfinite(rates[recent])]
    per_step = (rates * pace.step_seconds)[recent]
    per_step = per_step[np.isfinite(per_step)]
    usual = pace.usual_step_seconds
    if not len(logged):
        return None
    if not usual or not len(per_step):
        return _to_finite(np.median(logged))
    # Logs whose rates and step times contradict each other must not give a rate that nobody logged.
    return _to_finite(np.clip(np.median(per_step) / usual, logged.min(), logged.max()))
