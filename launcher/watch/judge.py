"""The verdict of the watch on a run so far: alerts, its standing against the frozen band, and its figures.

A pure function, the time included. Exit code: any alarm is 3, as a gate that failed; no alarm and too little to compare
with the band is 4, cannot tell; else 0, notices or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from launcher.frozen.frozen import Decision
from launcher.watch import (loss_alerts, machine_alerts, pace,)
from launcher.watch import loss_alerts  # each registers its alerts
from launcher.watch.alerts import Alert, Commands, Run, alerts
from launcher.watch.course import Course
from launcher.watch.liveness import UNKNOWN, Liveness
from launcher.watch.logs.columns import Columns
from launcher.watch.rises import sight
from proxies.core import canon
from proxies.core.canon import Json

ALARM, CANNOT_TELL = 3, 4
IN_TIME = 0.05
"""A rise is seen in time if within this share of the run's steps."""

Standing = Literal["on the band", "departed", "cannot tell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What the watch has to say."""

    standing: Standing
    why: str
    """The reason of the standing, in a sentence."""
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
    commands: Commands | None = None,
    liveness: Liveness = UNKNOWN,
) -> Judged:
    """Compare a run with its decision and with itself.

    Args:
        decision: what was frozen.
        columns: the run so far.
        now: seconds since 1970; None: silence cannot be told.
        commands: the lines to run next, of this config and run.
        liveness: what else the run's folder says.
    """
    run = Run(decision=decision, columns=columns, now=now, liveness=liveness)
    found = alerts(run, commands or Commands())
    standing, why = _standing(run, any(alert.name == "missed_end" for alert in found))
    return Judged(
        standing=standing,
        why=why,
        alerts=found,
        figures={
            "step": columns.step,
            "num_steps": run.schedule.num_steps,
            "train_loss_nats": _finite(columns.train_loss_nats[-1]) if len(columns) else None,
            "num_spikes": len(run.spikes),
            **_sight_figures(decision, columns),
            **_course_figures(decision, run.course),
            **_pace_figures(run),
        },
    )


def _standing(run: Run, missed: bool) -> tuple[Standing, str]:
    decision, columns, seen, num_steps = run.decision, run.columns, run.course, run.schedule.num_steps
    if missed:
        return "departed", "the run ended beside its forecast"
    if seen is not None and seen.departed is not None:
        return "departed", f"training loss left the predicted course at step {seen.seen_at[seen.departed]:.0f}"
    if seen is not None:
        newest = float(seen.departure[-1])
        return "on the band", (
            f"{newest:+.1f} standard deviations from the predicted course at step {seen.looked_at[-1]:.0f}, "
            f"{np.abs(seen.departure).max():.1f} at most so far; {seen.bound:.1f} would be an alarm"
        )
    if len(columns.validation_steps) and columns.validation_steps[-1] >= num_steps:
        return "on the band", "the run ended as predicted"
    if not decision.predicted.curve:
        return "cannot tell", "the frozen config has no predicted course: its ladder had too few runs to say"
    first = min(point.step for point in decision.predicted.curve)
    return "cannot tell", f"{columns.step} steps are logged: the predicted course is first looked at near step {first}"


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
    names = ("innovation_nats", "phi", "jump_nats", "climb_nats")
    noise, alike, jump, climb = (None if found is None else _finite(getattr(found, name)) for name in names)
    return {
        "noise_nats": noise, "noise_autocorrelation": alike, "smallest_jump_nats": jump, "smallest_climb_nats": climb,
        "in_time_lines": None if found is None else found.num_lines,
    }  # fmt: skip


def _finite(value: float) -> float | None:
    """A number for JSON, which has no NaN."""
    return float(value) if np.isfinite(value) else None


def _pace_figures(run: Run) -> dict[str, Json]:
    columns, header = run.columns, run.columns.header
    num_ranks = run.decision.parallelism.num_ranks if header is None else header.num_ranks
    ends = pace.projection(columns, run.schedule.num_steps, num_ranks)
    attempts = [event for event in columns.events if event.get("event") == "started"]
    return {
        "num_attempts": len(attempts) or None,
        "step_seconds": pace.step_seconds(columns),
        "tokens_per_second": _recent(columns, "tokens_per_second"),
        "mfu": _recent(columns, "mfu"),
        "goodput": pace.goodput(columns),
        "projection": None if ends is None else canon.to_json(ends),
    }


def _recent(columns: Columns, name: str) -> float | None:
    values = getattr(columns, name)[-pace.BLOCK_LINES :]
    values = values[np.isfinite(values)]
    return _finite(np.median(values)) if len(values) else None


_LOADED = (loss_alerts, loss_alerts, machine_alerts)
"""Modules whose alerts are judged, in this order."""
