"""The watch over a run: it looks again and again, and reports what is new since the last look."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.base import chronicle
from launcher.base.study_names import shown_name
from launcher.base.talk import say
from launcher.frozen.frozen import Decision
from launcher.watch import pace
from launcher.watch.alerts import Alert, Commands
from launcher.watch.judgment import ALARM, CANNOT_TELL, WatchFindings, judge
from launcher.watch.logs.readings import LogReader, LogReading
from launcher.watch.pace import liveness_of
from launcher.watch.status_text import alert_text, figure_lines, headline
from proxies.core import canon
from proxies.core.canon import Json

Word = Literal["fine", "alarm", "cannot_tell"]
_WORDS_BY_CODE: dict[int, Word] = {0: "fine", ALARM: "alarm", CANNOT_TELL: "cannot_tell"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchStatus:
    """The result of one look at a run."""

    standing: Word
    line: str
    """Headline: the standing, and where the run is."""
    text: str
    """The whole text, the headline first."""
    news: tuple[str, ...]
    """Text of alerts that were not there at the look before."""
    notes: tuple[str, ...]
    """Notes on what is unusual about the log."""
    over: bool
    """Whether nothing more will come, because the run finished or stopped itself."""
    body: dict[str, Json]


class Follower:
    """A watch over one run. Every alert is recorded in the run's event log once."""

    def __init__(
        self,
        decision: Decision,
        readings: LogReader,
        *,
        frozen: Path,
        run_dir: Path,
        metrics: str | None = None,
    ) -> None:
        """Store what to watch.

        Args:
            decision: The frozen decision.
            readings: Reader of the run's log.
            frozen: Folder of the config, named in the commands.
            run_dir: Folder of the run, which has its event log.
            metrics: Option `--metrics`, named in the commands; None if it was not given.
        """
        self._decision, self._readings, self._run_dir = decision, readings, run_dir
        self._frozen, self._metrics = shown_name(frozen), metrics
        self._active: set[str] = set()

    def look(self, *, last: bool) -> WatchStatus:
        """Read the new part of the log, judge the run, and record the new alerts.

        Args:
            last: Whether nobody will look again, so that a last line without its end counts.

        Raises:
            OtherRunError, OSError, DashboardError: See `LogReader.read`.
        """
        reading = self._readings.read(last=last)
        over = reading.ending is not None or self._is_through(reading)
        log_run_dir = str(self._run_dir) if reading.names_digest else None
        commands = Commands(frozen=self._frozen, metrics=self._metrics, run_dir=log_run_dir)
        folder = liveness_of(self._run_dir, self._decision.digest)
        over = over and not folder.starting(reading.columns.newest_at)
        findings = judge(
            self._decision,
            reading.columns,
            now=None if over else time.time(),
            commands=commands,
            liveness=folder,
        )
        new_alerts = [alert for alert in findings.alerts if alert.name not in self._active]
        self._active = {alert.name for alert in findings.alerts}
        self._record_alerts(new_alerts, reading.columns.step)
        return self._build_status(reading, findings, new_alerts, commands, over=over)

    def _is_through(self, reading: LogReading) -> bool:
        """Return whether a run whose log has no events has reached its end.

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
            and time.time() - columns.newest_at > pace.MIN_STALL_SECONDS
        )
        return silent and pace.is_done(columns, num_steps)

    def _build_status(
        self,
        reading: LogReading,
        findings: WatchFindings,
        new_alerts: list[Alert],
        commands: Commands,
        *,
        over: bool,
    ) -> WatchStatus:
        is_empty = not len(reading.columns) and not findings.alerts
        standing = "cannot_tell" if is_empty else _WORDS_BY_CODE[findings.exit_code]
        reason = reading.why_empty if is_empty else findings.why
        line = headline(
            "cannot tell" if is_empty else findings.standing, reason, findings, self._decision
        )
        is_through = over and (reading.ending is None or reading.ending.event == "finished")
        ended = over and (
            is_through or (reading.ending is not None and reading.ending.event == "aborted")
        )
        tail = [f"the run finished; next: {commands.watch} --conclude"] if is_through else []
        final_loss = (
            _find_final_loss(reading, self._decision.learning_rate.schedule.num_steps)
            if is_through
            else None
        )
        # This text is the answer of `watch --once`, so it does not advise to run that command.
        alerts = [
            alert_text(alert, known_command=f"{commands.watch} --once") for alert in findings.alerts
        ]
        lines = [
            line,
            *alerts,
            *figure_lines(findings.figures, final_loss),
            *tail,
            *(f"log: {note}" for note in reading.notes),
        ]
        return WatchStatus(
            standing=standing,
            line=line,
            text="\n".join(lines),
            news=tuple(map(alert_text, new_alerts)),
            notes=tuple(f"log: {note}" for note in reading.notes),
            over=ended,
            body={
                "standing": standing,
                "why": reason,
                "digest": self._decision.digest,
                "alerts": canon.to_json(findings.alerts),
                "figures": findings.figures,
                "notes": [*reading.notes],
                "names_digest": reading.names_digest,
                "ending": None if reading.ending is None else canon.to_json(reading.ending),
            },
        )

    def _record_alerts(self, new_alerts: list[Alert], step: int) -> None:
        """Record new alerts in the run's event log.

        An alert is skipped if one of that name was recorded after this one began.
        """
        if not new_alerts:
            return
        try:
            recorded_steps = {
                entry.data.get("name"): entry.data.get("at_step")
                for entry in chronicle.entries(self._run_dir)
                if entry.kind == "alert"
            }
            for alert in new_alerts:
                if (
                    isinstance(seen_at := recorded_steps.get(alert.name), int)
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


def _find_final_loss(reading: LogReading, num_steps: int) -> float | None:
    """Return the validation loss of a finished run in nats; None if it was not measured."""
    if reading.ending is not None and reading.ending.validation_loss_nats is not None:
        return reading.ending.validation_loss_nats
    columns = reading.columns
    is_measured = len(columns.validation_steps) and columns.validation_steps[-1] >= num_steps
    return float(columns.validation_loss_nats[-1]) if is_measured else None
