"""The watch over a run: it reads the log again and again, and reports the alerts that are new."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.frozen.config_names import shorten_config_name
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.main_run.watch.alerts import Alert, Commands
from forerun._launcher.main_run.watch.judgment import Outcome, WatchFindings, judge
from forerun._launcher.main_run.watch.liveness import read_liveness
from forerun._launcher.main_run.watch.logs.readings import LogReader, LogReading
from forerun._launcher.main_run.watch.pace import MIN_STALL_SECONDS, Pace
from forerun._launcher.main_run.watch.status_text import (
    format_alert,
    format_figures,
    format_headline,
)
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchStatus:
    """The result of one look at a run."""

    standing: Outcome
    line: str
    """Headline: the standing, and where the run is."""
    text: str
    """The whole text, the headline first."""
    news: tuple[str, ...]
    """Text of the alerts that the look before did not raise."""
    notes: tuple[str, ...]
    """Notes on what is unusual about the log."""
    over: bool
    """Whether nothing more will come, because the run finished or stopped itself."""
    body: dict[str, Json]
    """The status for `--json`."""


class Follower:
    """A watch over one run. It records every alert in the run's event log once."""

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
        self._frozen, self._metrics = shorten_config_name(frozen), metrics
        # Names of the alerts that the last look raised
        self._active: set[str] = set()

    @property
    def _num_steps(self) -> int:
        return self._decision.learning_rate.schedule.num_steps

    def look(self, *, last: bool) -> WatchStatus:
        """Read the new part of the log, judge the run, and record the new alerts.

        Args:
            last: Whether this is the last look, so that a last line without a newline counts as
                complete.

        Raises:
            OtherRunError, OSError, DashboardError: See `LogReader.read`.
        """
        reading = self._readings.read(last=last)
        commands = Commands(
            frozen=self._frozen,
            metrics=self._metrics,
            run_dir=str(self._run_dir) if reading.names_digest else None,
        )
        liveness = read_liveness(self._run_dir, self._decision.digest)
        over = reading.ending is not None or self._is_through(reading)
        over = over and not liveness.is_starting(reading.columns.newest_at)
        findings = judge(
            self._decision,
            reading.columns,
            now=None if over else time.time(),
            commands=commands,
            liveness=liveness,
        )
        if not len(reading.columns) and not findings.alerts:
            findings = dataclasses.replace(findings, standing="cannot tell", why=reading.why_empty)
        new_alerts = [alert for alert in findings.alerts if alert.name not in self._active]
        self._active = {alert.name for alert in findings.alerts}
        self._record_alerts(new_alerts, reading.columns.step)
        return self._build_status(reading, findings, new_alerts, commands, over=over)

    def _is_through(self, reading: LogReading) -> bool:
        """Return whether a run whose log has no events has reached its end.

        A final validation may come after the last step. If the log has none, it must also have been
        silent for `MIN_STALL_SECONDS`.
        """
        columns = reading.columns
        if reading.names_digest:
            return False
        if columns.find_final_loss(self._num_steps) is not None:
            return True
        is_silent = (
            columns.newest_at is not None and time.time() - columns.newest_at > MIN_STALL_SECONDS
        )
        return is_silent and Pace(columns=columns, num_steps=self._num_steps).is_done

    def _build_status(
        self,
        reading: LogReading,
        findings: WatchFindings,
        new_alerts: list[Alert],
        commands: Commands,
        *,
        over: bool,
    ) -> WatchStatus:
        line = format_headline(findings)
        event = "finished" if reading.ending is None else reading.ending.event
        is_through = over and event == "finished"
        tail = [f"the run finished; next: {commands.watch} --conclude"] if is_through else []
        final_loss = reading.find_final_loss(self._num_steps) if is_through else None
        # This text is the answer of `watch --once`, so it does not advise to run that command.
        alerts = [
            format_alert(alert, known_command=f"{commands.watch} --once")
            for alert in findings.alerts
        ]
        notes = tuple(f"log: {note}" for note in reading.notes)
        lines = [line, *alerts, *format_figures(findings.figures, final_loss), *tail, *notes]
        return WatchStatus(
            standing=findings.outcome,
            line=line,
            text="\n".join(lines),
            news=tuple(map(format_alert, new_alerts)),
            notes=notes,
            over=over and event in ("finished", "aborted"),
            body={
                "standing": findings.outcome,
                "why": findings.why,
                "digest": self._decision.digest,
                "alerts": canon.to_json(findings.alerts),
                "figures": canon.to_json(findings.figures),
                "notes": [*reading.notes],
                "names_digest": reading.names_digest,
                "ending": None if reading.ending is None else canon.to_json(reading.ending),
            },
        )

    def _record_alerts(self, new_alerts: list[Alert], step: int) -> None:
        """Record new alerts in the run's event log.

        A watch that is started again finds the old alerts once more. Therefore an alert is skipped
        if one of that name was recorded at or after its first step.
        """
        if not new_alerts:
            return
        try:
            recorded_steps = {
                entry.data.get("name"): entry.data.get("at_step")
                for entry in event_log.read_events(self._run_dir)
                if entry.kind == "alert"
            }
            for alert in new_alerts:
                recorded_at = recorded_steps.get(alert.name)
                if isinstance(recorded_at, int) and recorded_at >= alert.first_step:
                    continue
                event_log.append_event(
                    self._run_dir,
                    "alert",
                    f"{alert.severity}: {alert.seen}",
                    step=alert.first_step,
                    digest=self._decision.digest,
                    data={
                        "name": alert.name,
                        "severity": alert.severity,
                        "at_step": step,
                        "first_step": alert.first_step,
                        "evidence": alert.evidence,
                    },
                )
        except OSError as error:
            print_progress(
                f"the event log in {self._run_dir} cannot be written ({error.strerror}): alerts "
                "are not recorded"
            )
