"""A run looked at again and again: what stands, what is new since the last look, and the words for
both.
"""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from launcher.base import chronicle
from launcher.base.study_names import shown_name
from launcher.base.talk import say
from launcher.frozen.frozen import Decision
from launcher.watch import (
    loss_alerts,
    machine_alerts,
    pace,
)
from launcher.watch.alerts import Alert, Commands, WatchedRun, alerts
from launcher.watch.course import Course, first_look
from launcher.watch.logs.columns import Floats, LogColumns
from launcher.watch.logs.keys import NOISE_SCALE
from launcher.watch.logs.readings import LogReader, LogReading
from launcher.watch.loss_rises import sight
from launcher.watch.pace import UNKNOWN, Liveness, liveness_of
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import (
    counted,
    format_count,
    format_duration,
    format_interval,
    format_loss,
    format_percent,
    format_significant,
    format_speed,
)

# The verdict of the watch on a run so far: alerts, its standing against the frozen band, and its
# figures.
#
# A pure function, the time included. Exit code: any alarm is 3, as a gate that failed; no alarm and
# too little to compare with the band is 4, cannot tell; else 0, notices or not.

ALARM, CANNOT_TELL = 3, 4
IN_TIME = 0.05
"""A rise is seen in time if within this share of the run's steps."""

Standing = Literal["on the band", "departed", "cannot tell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchFindings:
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
    columns: LogColumns,
    *,
    now: float | None = None,
    commands: Commands | None = None,
    liveness: Liveness = UNKNOWN,
) -> WatchFindings:
    """Compare a run with its decision and with itself.

    Args:
        decision: what was frozen.
        columns: the run so far.
        now: seconds since 1970; None: silence cannot be judged.
        commands: the lines to run next, of this config and run.
        liveness: what else the run's folder says.
    """
    run = WatchedRun(decision=decision, columns=columns, now=now, liveness=liveness)
    found = alerts(run, commands or Commands())
    standing, why = _standing(run, any(alert.name == "missed_end" for alert in found))
    return WatchFindings(
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
            **_noise_figures(decision, columns),
        },
    )


def _standing(run: WatchedRun, missed: bool) -> tuple[Standing, str]:
    decision, columns, seen, num_steps = (
        run.decision,
        run.columns,
        run.course,
        run.schedule.num_steps,
    )
    if missed:
        return "departed", "the run ended outside its forecast"
    if seen is not None and seen.departed is not None:
        return (
            "departed",
            f"training loss left the predicted curve at step {seen.seen_at[seen.departed]:.0f}",
        )
    if seen is not None:
        newest = float(seen.departure[-1])
        return "on the band", (
            f"{newest:+.1f} standard deviations from the predicted curve at step "
            f"{seen.looked_at[-1]:.0f}, "
            f"at most {np.abs(seen.departure).max():.1f} so far; the alarm is at {seen.bound:.1f}"
        )
    if len(columns.validation_steps) and columns.validation_steps[-1] >= num_steps:
        return "on the band", "the run ended as predicted"
    if not decision.predicted.curve:
        return (
            "cannot tell",
            "the frozen config has no predicted curve: its ladder had too few runs",
        )
    first = first_look(decision.predicted, num_steps)
    if columns.step >= first:
        return "cannot tell", "no training loss is logged near the steps of the predicted curve"
    return (
        "cannot tell",
        (
            f"{counted(columns.step, 'step')} done: the first comparison with the predicted curve "
            "is "
            f"at step {first}"
        ),
    )


def _course_figures(decision: Decision, seen: Course | None) -> dict[str, Json]:
    predicted = decision.predicted
    final = (
        (predicted.loss_nats, predicted.low_nats, predicted.high_nats)
        if seen is None
        else seen.final
    )
    return {
        "foretold_nats": predicted.loss_nats,
        "foretold_interval_nats": [predicted.low_nats, predicted.high_nats],
        "final_nats": final[0],
        "final_interval_nats": [*final[1:]],
        "level": predicted.level,
        "departure_sds": None if seen is None else float(seen.departure[-1]),
        "bound_sds": None if seen is None else seen.bound,
    }


def _sight_figures(decision: Decision, columns: LogColumns) -> dict[str, Json]:
    """What the noise lets one see, in time: within a twentieth of the run."""
    schedule = decision.learning_rate.schedule
    found = sight(
        columns.steps,
        columns.train_loss_nats,
        schedule.warmup_steps,
        schedule.num_steps,
        IN_TIME * schedule.num_steps,
    )
    names = ("innovation_nats", "phi", "jump_nats", "climb_nats")
    noise, alike, jump, climb = (
        None if found is None else _finite(getattr(found, name)) for name in names
    )
    return {
        "noise_nats": noise,
        "noise_autocorrelation": alike,
        "smallest_jump_nats": jump,
        "smallest_climb_nats": climb,
        "in_time_lines": None if found is None else found.num_lines,
    }


def _finite(value: float) -> float | None:
    """A number for JSON, which has no NaN."""
    return float(value) if np.isfinite(value) else None


def _pace_figures(run: WatchedRun) -> dict[str, Json]:
    columns, header = run.columns, run.columns.header
    num_ranks = run.decision.parallelism.num_ranks if header is None else header.num_ranks
    num_steps = run.schedule.num_steps
    since = pace.still_since(columns, num_steps, run.now, run.liveness)
    paused = run.liveness.paused_seconds
    reason = pace.why_no_end(columns, num_steps, since, paused)
    ends = pace.projection(columns, num_steps, num_ranks, paused) if reason is None else None
    # A launch of the finished run starts its ranks and trains nothing: no attempt.
    attempts = [
        event
        for event in columns.events
        if event.get("event") == "started" and event.get("step") != num_steps
    ]
    return {
        "num_attempts": len(attempts) or None,
        "step_seconds": pace.step_seconds(columns),
        "tokens_per_second": _at_usual_pace(columns, columns.tokens_per_second),
        "mfu": _at_usual_pace(columns, columns.mfu),
        "goodput": pace.goodput(columns, paused) if pace.measured_enough(columns) else None,
        "projection": None if ends is None else canon.to_json(ends),
        "projection_reason": reason,
        "still_since": None
        if since is None
        else datetime.datetime.fromtimestamp(since, datetime.UTC).isoformat(),
    }


def _noise_figures(decision: Decision, columns: LogColumns) -> dict[str, Json]:
    """The newest gradient noise scale, beside the batch it is to be compared with."""
    told = np.flatnonzero(np.isfinite(columns.noise_scale_low_tokens))
    scale, low, high = (
        _finite(getattr(columns, name)[told[-1]]) if len(told) else None for name in NOISE_SCALE
    )
    return {
        "noise_scale_tokens": scale,
        "noise_scale_interval_tokens": None if low is None else [low, high],
        "batch_tokens": decision.batch_tokens,
    }


def _at_usual_pace(columns: LogColumns, rates: Floats) -> float | None:
    """Return a rate of recent steps at the pace that the end is projected with; without step times,
    as logged.

    The median of the logged rates would be faster than the run: it leaves out the steps that wait
    for a save, a validation, or other processes.
    """
    recent = slice(-pace.BLOCK_LINES, None)
    logged = rates[recent][np.isfinite(rates[recent])]
    per_step = (rates * pace.measured(columns))[recent]
    per_step = per_step[np.isfinite(per_step)]
    usual = pace.usual_seconds(columns)
    if not len(logged):
        return None
    if not usual or not len(per_step):
        return _finite(np.median(logged))
    # Logs whose rates and step times contradict each other must not give a rate that nobody logged.
    return _finite(np.clip(np.median(per_step) / usual, logged.min(), logged.max()))


_LOADED = (loss_alerts, loss_alerts, machine_alerts)
"""Modules whose alerts are judged, in this order."""


Word = Literal["fine", "alarm", "cannot_tell"]
_STANDINGS: dict[int, Word] = {0: "fine", ALARM: "alarm", CANNOT_TELL: "cannot_tell"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchStatus:
    """The result of a look."""

    standing: Word
    line: str
    """The standing, and where the run is."""
    text: str
    """All of it, the standing first."""
    news: tuple[str, ...]
    """Alerts that were not there at the look before."""
    notes: tuple[str, ...]
    """What is odd about the log."""
    over: bool
    """Nothing more will come: the run finished or stopped itself."""
    body: dict[str, Json]


class Follower:
    """Looks at one run; its chronicle gets every alert once."""

    def __init__(
        self,
        decision: Decision,
        readings: LogReader,
        *,
        frozen: Path,
        run_dir: Path,
        metrics: str | None = None,
    ) -> None:
        """`frozen` and `metrics` are named in the commands; `run_dir` is where the chronicle
        lies.
        """
        self._decision, self._readings, self._run_dir = decision, readings, run_dir
        self._frozen, self._metrics = shown_name(frozen), metrics
        self._active: set[str] = set()

    def look(self, *, last: bool) -> WatchStatus:
        """Read on, judge, and record what is new.

        Args:
            last: nobody will look again: the last line counts without its end.

        Raises:
            OtherRunError, OSError, DashboardError: see `LogReader.read`.
        """
        reading = self._readings.read(last=last)
        over = reading.ending is not None or self._is_through(reading)
        ours = str(self._run_dir) if reading.names_digest else None
        commands = Commands(frozen=self._frozen, metrics=self._metrics, run_dir=ours)
        folder = liveness_of(self._run_dir, self._decision.digest)
        over = over and not folder.starting(reading.columns.newest_at)
        found = judge(
            self._decision,
            reading.columns,
            now=None if over else time.time(),
            commands=commands,
            liveness=folder,
        )
        new = [alert for alert in found.alerts if alert.name not in self._active]
        self._active = {alert.name for alert in found.alerts}
        self._record(new, reading.columns.step)
        return self._standing(reading, found, new, commands, over=over)

    def _is_through(self, reading: LogReading) -> bool:
        """Return whether a run whose log has no events has reached its end, which no event will
        tell.

        A final validation may come after the last step, so without one the log must also have been
        silent.
        """
        columns, num_steps = reading.columns, self._decision.learning_rate.schedule.num_steps
        if reading.names_digest:
            return False
        if len(columns.validation_steps) and columns.validation_steps[-1] >= num_steps:
            return True
        silent = (
            columns.newest_at is not None
            and time.time() - columns.newest_at > pace.LEAST_STALL_SECONDS
        )
        return silent and pace.done(columns, num_steps)

    def _standing(
        self,
        reading: LogReading,
        found: WatchFindings,
        new: list[Alert],
        commands: Commands,
        *,
        over: bool,
    ) -> WatchStatus:
        nothing = not len(reading.columns) and not found.alerts
        standing = "cannot_tell" if nothing else _STANDINGS[found.exit_code]
        why = reading.why_empty if nothing else found.why
        head = headline("cannot tell" if nothing else found.standing, why, found, self._decision)
        is_through = over and (reading.ending is None or reading.ending.event == "finished")
        ended = over and (
            is_through or (reading.ending is not None and reading.ending.event == "aborted")
        )
        tail = [f"the run finished; next: {commands.watch} --conclude"] if is_through else []
        final_loss = (
            _final_loss(reading, self._decision.learning_rate.schedule.num_steps)
            if is_through
            else None
        )
        # This text answers `watch --once`: to look again is no advice here, as it is beside a line
        # of news.
        alerts = [
            alert_text(alert, known_command=f"{commands.watch} --once") for alert in found.alerts
        ]
        lines = [
            head,
            *alerts,
            *figure_lines(found.figures, final_loss),
            *tail,
            *(f"log: {note}" for note in reading.notes),
        ]
        return WatchStatus(
            standing=standing,
            line=head,
            text="\n".join(lines),
            news=tuple(map(alert_text, new)),
            notes=tuple(f"log: {note}" for note in reading.notes),
            over=ended,
            body={
                "standing": standing,
                "why": why,
                "digest": self._decision.digest,
                "alerts": canon.to_json(found.alerts),
                "figures": found.figures,
                "notes": [*reading.notes],
                "names_digest": reading.names_digest,
                "ending": None if reading.ending is None else canon.to_json(reading.ending),
            },
        )

    def _record(self, new: list[Alert], step: int) -> None:
        """Into the chronicle, but for what it has: an alert of that name that was seen after this
        one began.
        """
        if not new:
            return
        try:
            known = {
                entry.data.get("name"): entry.data.get("at_step")
                for entry in chronicle.entries(self._run_dir)
                if entry.kind == "alert"
            }
            for alert in new:
                if (
                    isinstance(seen_at := known.get(alert.name), int)
                    and seen_at >= alert.first_step
                ):
                    continue
                data: dict[str, Json] = {
                    "name": alert.name,
                    "severity": alert.severity,
                    "at_step": step,
                    "first_step": alert.first_step,
                    "evidence": alert.evidence,
                }
                text = f"{alert.severity}: {alert.seen}"
                chronicle.record(
                    self._run_dir,
                    "alert",
                    text,
                    step=alert.first_step,
                    digest=self._decision.digest,
                    data=data,
                )
        except OSError as error:
            say(
                f"the chronicle in {self._run_dir} cannot be written ({error.strerror}): alerts "
                "are not recorded"
            )


def _final_loss(reading: LogReading, num_steps: int) -> float | None:
    """Return the validation loss that a finished run ended with, in nats; None where nobody
    measured it.
    """
    if reading.ending is not None and reading.ending.validation_loss_nats is not None:
        return reading.ending.validation_loss_nats
    columns = reading.columns
    is_measured = len(columns.validation_steps) and columns.validation_steps[-1] >= num_steps
    return float(columns.validation_loss_nats[-1]) if is_measured else None


def headline(standing: str, why: str, found: WatchFindings, decision: Decision) -> str:
    """The standing, where the run is, and what its noise hides."""
    counts = [
        counted(number, name)
        for name in ("alarm", "notice")
        if (number := sum(alert.severity == name for alert in found.alerts))
    ]
    at = f"step {found.figures['step']} of {decision.learning_rate.schedule.num_steps}"
    said = f"{standing.upper()} at {at}: {why}"
    said = f"{said} ({', '.join(counts)})" if counts else said
    return said + _unseen(found.figures)


def _unseen(figures: dict[str, Any]) -> str:
    """What would not be seen in time, to two digits so that the line stays while nothing
    changes.
    """
    jump, climb, lines = (
        figures[name] for name in ("smallest_jump_nats", "smallest_climb_nats", "in_time_lines")
    )
    if jump is None:
        return ""
    within = f"within {lines} logged steps"
    slow = (
        f" or a slow one under {format_significant(climb, 2)} nats"
        if climb is not None and climb > 1.1 * jump
        else ""
    )
    return f"; not detectable {within}: a rise under {format_significant(jump, 2)} nats{slow}"


def alert_text(alert: Alert, known_command: str = "") -> str:
    """Format what was seen, the numbers, and what to run, unless that is `known_command`."""
    numbers = ", ".join(
        f"{name} {_value(value)}" for name, value in alert.evidence.items() if value is not None
    )
    lines = [f"{alert.severity.upper()} {alert.name}, from step {alert.first_step}: {alert.seen}"]
    lines += [f"  evidence: {numbers}"] if numbers else []
    lines += [f"  next: {alert.next_command}"] if alert.next_command != known_command else []
    return "\n".join(lines)


def _value(value: Json) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def figure_lines(figures: dict[str, Any], final_loss: float | None = None) -> list[str]:
    """Format loss, pace, end and cost, as far as they are known; `final_loss` in nats of a run that
    has finished.
    """
    low, high = figures["final_interval_nats"]
    lines = []
    if figures["train_loss_nats"] is not None:
        lines.append(
            f"training loss {format_loss(figures['train_loss_nats'])} nats; spikes so far: "
            f"{figures['num_spikes']}"
        )
    frozen = (
        f"{format_loss(figures['foretold_nats'])} "
        f"{format_interval(figures['foretold_interval_nats'])}"
    )
    frozen += f", at level {figures['level']:g}"
    if final_loss is not None:
        lines.append(
            f"final validation loss: {format_loss(final_loss)} nats; predicted when frozen: "
            f"{frozen}"
        )
    else:
        final, final_low, final_high = map(format_loss, (figures["final_nats"], low, high))
        lines.append(
            f"predicted final validation loss: {final} nats [{final_low}, {final_high}] from here; "
            f"frozen {frozen}"
        )
    pace = [
        format_speed(figures["tokens_per_second"], "tokens")
        if figures["tokens_per_second"] is not None
        else "",
        f"MFU {format_percent(figures['mfu'])}" if figures["mfu"] is not None else "",
        f"goodput {format_percent(figures['goodput'])}" if figures["goodput"] is not None else "",
        f"{counted(figures['num_attempts'], 'attempt')}"
        if (figures["num_attempts"] or 1) > 1
        else "",
    ]
    if any(pace):
        until = f"until step {figures['step']}: " if figures["still_since"] is not None else ""
        lines.append(until + ", ".join(filter(None, pace)))
    if figures["noise_scale_interval_tokens"] is not None:
        lines.append(_noise_line(figures))
    if (ends := figures["projection"]) is not None:
        lines.append(_end_line(ends))
    elif figures["projection_reason"] is not None:
        lines.append(f"cannot tell when it ends: {figures['projection_reason']}")
    return lines


def _noise_line(figures: dict[str, Any]) -> str:
    (low, high), batch = figures["noise_scale_interval_tokens"], figures["batch_tokens"]
    scale = figures["noise_scale_tokens"]
    said = "not told" if scale is None else format_count(scale)
    ends = (
        f"{format_count(low)} or more"
        if high is None
        else f"{format_count(low)} to {format_count(high)}"
    )
    side = "under" if batch < low else "over" if high is not None and batch > high else "about"
    return (
        f"gradient noise scale: {said} tokens ({ends}); the batch of {format_count(batch)} "
        f"tokens is {side} it"
    )


def _end_line(ends: dict[str, Any]) -> str:
    left, hours = (
        [format_duration(seconds) for seconds in ends["remaining_seconds"]],
        ends["device_hours"],
    )
    if not ends["remaining_seconds"][0]:
        return f"{format_significant(hours[0])} device-hours in all"
    said = f"ends in {left[0]} ({left[1]} to {left[2]})"
    total, least, most = map(format_significant, hours)
    return f"{said}; {total} device-hours in all ({least} to {most})"
