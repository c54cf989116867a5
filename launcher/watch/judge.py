"""The verdict of the watch on a run so far: alerts, its standing against the frozen band, and its figures.

A pure function: what is judged is told to it, the time included. Severity and exit code: any alarm is 3, as a gate that
failed; no alarm and too little to hold against the band is 4, cannot tell; else 0, notices or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from launcher.frozen.frozen import Decision
from launcher.watch import findings_loss, findings_run, pace
from launcher.watch.alerts import Alert, Commands
from launcher.watch.course import Course, course
from launcher.watch.logs.columns import Columns
from launcher.watch.rises import sight
from launcher.watch.signs import NO_SIGNS, Signs
from proxies.core import canon
from proxies.core.canon import Json

ALARM, CANNOT_TELL = 3, 4
IN_TIME = 0.05
"""Of the run's steps: a rise is seen in time if within so many."""

Standing = Literal["on the band", "departed", "cannot tell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What the watch has to say."""

    standing: Standing
    why: str
    """Of the standing, in a sentence."""
    alerts: tuple[Alert, ...]
    """Alarms first, then by their first step."""
    figures: dict[str, Json]
    """Units in their names; null where not known."""

    @property
    def exit_code(self) -> int:
        """0, `ALARM` or `CANNOT_TELL`."""
        if any(alert.severity == "alarm" for alert in self.alerts):
            return ALARM
        return CANNOT_TELL if self.standing == "cannot tell" else 0


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def judge(
    decision: Decision,
    columns: Columns,
    *,
    now: float | None = None,
    usd_per_device_hour: float | None = None,
    commands: Commands | None = None,
    signs: Signs | None = None,
) -> Judged:
    """Hold a run against its decision and against itself.

    Args:
        decision: what was frozen.
        columns: the run so far.
        now: seconds since 1970; None: silence cannot be told.
        usd_per_device_hour: for the projected cost.
        commands: the lines to run next, of this config and run.
        signs: what else the run's folder says; None: nothing.
    """
    say, others = commands or Commands(), signs or NO_SIGNS
    num_steps, warmup = decision.learning_rate.schedule.num_steps, decision.learning_rate.schedule.warmup_steps
    seen = course(decision.predicted, num_steps, columns.steps, columns.train_loss_nats, warmup)
    missed = findings_loss.missed_end(decision, columns, say)
    spiked, spikes = findings_loss.spike_alerts(decision, columns, say)
    alerts = [
        *findings_loss.bad_values(decision, columns, say),
        *findings_loss.departures(decision, seen, say),
        *missed,
        *spiked,
        *findings_loss.risen(decision, columns, say),
        *findings_loss.stands_still(decision, columns, say),
        *findings_loss.precursors(decision, columns, say),
        *findings_run.slowed(columns, say),
        *findings_run.straggling(columns, say),
        *findings_run.silent(columns, num_steps, now, others, say),
        *findings_run.metrics_stopped(columns, say),
        *findings_run.ended_badly(columns, others, say),
        *findings_run.rolled_back(columns, say),
        *findings_run.gpu_errors(columns, say),
    ]
    alerts.sort(key=lambda alert: (alert.severity != "alarm", alert.first_step))
    standing, why = _standing(decision, columns, seen, bool(missed))
    return Judged(
        standing=standing,
        why=why,
        alerts=tuple(alerts),
        figures={
            "step": columns.step,
            "num_steps": num_steps,
            "train_loss_nats": _newest(columns),
            "num_spikes": len(spikes),
            **_sight_figures(decision, columns),
            **_course_figures(decision, seen),
            **_pace_figures(decision, columns, now, usd_per_device_hour, others),
        },
    )


def _standing(decision: Decision, columns: Columns, seen: Course | None, missed: bool) -> tuple[Standing, str]:
    num_steps = decision.learning_rate.schedule.num_steps
    if missed:
        return "departed", "the run ended beside its forecast"
    if seen is not None and seen.departed is not None:
        return "departed", f"training loss left the foretold course at step {seen.seen_at[seen.departed]:.0f}"
    if seen is not None:
        newest = float(seen.departure[-1])
        return "on the band", (
            f"{newest:+.1f} standard deviations from the foretold course at step {seen.looked_at[-1]:.0f}, "
            f"{np.abs(seen.departure).max():.1f} at most so far; {seen.bound:.1f} would be an alarm"
        )
    if len(columns.validation_steps) and columns.validation_steps[-1] >= num_steps:
        return "on the band", "the run ended as foretold"
    if not decision.predicted.curve:
        return "cannot tell", "the frozen config has no foretold course: its ladder had too few runs to say"
    first = min(point.step for point in decision.predicted.curve)
    return "cannot tell", f"{columns.step} steps are logged: the foretold course is first looked at near step {first}"


def _newest(columns: Columns) -> float | None:
    """JSON has no NaN."""
    loss = float(columns.train_loss_nats[-1]) if len(columns) else float("nan")
    return loss if np.isfinite(loss) else None


def _course_figures(decision: Decision, seen: Course | None) -> dict[str, Json]:
    predicted = decision.predicted
    final = (predicted.loss_nats, predicted.low_nats, predicted.high_nats) if seen is None else seen.final
    return {
        "foretold_nats": predicted.loss_nats,
        "foretold_interval_nats": [predicted.low_nats, predicted.high_nats],
        "final_nats": final[0],
        "final_interval_nats": [*final[1:]],
        "level": predicted.level,
        "departure_sds": None if seen is None else float(seen.departure[-1]),
        "bound_sds": None if seen is None else seen.bound,
    }


def _sight_figures(decision: Decision, columns: Columns) -> dict[str, Json]:
    """What the noise lets one see, in time: within a twentieth of the run."""
    schedule = decision.learning_rate.schedule
    found = sight(columns.steps, columns.train_loss_nats, schedule.warmup_steps, schedule.num_steps,
                  IN_TIME * schedule.num_steps)  # fmt: skip
    return {
        "noise_nats": None if found is None else _finite(found.innovation_nats),
        "noise_autocorrelation": None if found is None else _finite(found.phi),
        "smallest_jump_nats": None if found is None else _finite(found.jump_nats),
        "smallest_climb_nats": None if found is None else _finite(found.climb_nats),
        "in_time_lines": None if found is None else found.num_lines,
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _pace_figures(
    decision: Decision, columns: Columns, now: float | None, usd: float | None, found: Signs
) -> dict[str, Json]:
    header = columns.header
    num_ranks = decision.parallelism.num_ranks if header is None else header.num_ranks
    ends = pace.projection(columns, decision.learning_rate.schedule.num_steps, num_ranks, now, usd, found)
    attempts = [event for event in columns.events if event.get("event") == "started"]
    return {
        "num_launches": found.num_launches or None,
        "num_attempts": len(attempts) or None,
        "step_seconds": pace.step_seconds(columns),
        "tokens_per_second": _recent(columns, "tokens_per_second"),
        "mfu": _recent(columns, "mfu"),
        "hfu": _recent(columns, "hfu"),
        "goodput": pace.goodput(columns, found),
        "projection": None if ends is None else canon.to_json(ends),
    }


def _recent(columns: Columns, name: str) -> float | None:
    values = getattr(columns, name)[-pace.BLOCK_LINES :]
    values = values[np.isfinite(values)]
    middle = float(np.median(values)) if len(values) else float("nan")
    return middle if np.isfinite(middle) else None
