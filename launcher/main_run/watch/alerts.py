"""Alerts, and the registry of their kinds, which the watch, the docs, and completion read.

A kind of alert is a function of a `WatchedRun` under the decorator `@register_alert`, which states
the alert's name, its severity, when it is raised, and the command to run next. The modules
`loss_alerts` and `machine_alerts` define the kinds; `forerun._launcher.main_run.watch.judgment`
loads both.
"""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.watch.course import BandComparison, compare_with_band
from forerun._launcher.main_run.watch.liveness import UNKNOWN_LIVENESS, Liveness
from forerun._launcher.main_run.watch.logs.columns import LogColumns
from forerun._launcher.main_run.watch.loss_rises import Spike, find_spikes
from forerun._launcher.main_run.watch.pace import Pace
from forerun._proxies.core.canon import Json
from forerun._proxies.core.schedule import Schedule

Severity = Literal["notice", "alarm"]
"""An alarm needs a person now, and its false-alarm rate is known; a notice is worth a look."""
CommandKind = Literal["look", "conclude", "verify", "resume", "machine", "note"]
"""Kind of command to run next; see `Commands.format_command`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """An alert about a run, as it is shown and recorded."""

    name: str
    severity: Severity
    first_step: int
    """Step at which it began."""
    seen: str
    """Sentence on what was seen."""
    evidence: dict[str, Json] = field(default_factory=dict)
    """Numbers behind the alert, with units in the keys; None for a number that is not finite."""
    next_command: str

    def __post_init__(self) -> None:
        for name, value in self.evidence.items():
            if isinstance(value, float) and not math.isfinite(value):
                # JSON cannot hold such a number, so the alert could not be recorded.
                self.evidence[name] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """The exact command lines to run next, for this config and this run."""

    frozen: str = "FROZEN"
    metrics: str | None = None
    """Option `--metrics`, the source of the log; None for the run folder next to the config."""
    run_dir: str | None = None
    """Folder of the run; None if it is not a run of the embedded trainer."""

    @property
    def watch(self) -> str:
        """Command of the watch itself, to look again."""
        where = f" --metrics {shlex.quote(self.metrics)}" if self.metrics else ""
        return f"forerun watch {shlex.quote(self.frozen)}{where}"

    def format_command(self, kind: CommandKind, finding: AlertFinding) -> str:
        """Return the command line to run next after a finding.

        `resume` becomes `look` for a run of another trainer, which forerun does not start.
        """
        frozen = shlex.quote(self.frozen)
        resume = (
            f"forerun launch {frozen} --out {shlex.quote(self.run_dir)}" if self.run_dir else None
        )
        return {
            "look": f"{self.watch} --once",
            "conclude": f"{self.watch} --conclude",
            "verify": f"forerun verify {frozen}",
            "resume": resume or f"{self.watch} --once",
            "machine": "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,ECC",
            "note": f"forerun note {shlex.quote(f'spike at step {finding.first_step}: ...')}",
        }[kind]


@dataclass(frozen=True, kw_only=True, eq=False)
class WatchedRun:
    """A run so far, with what was frozen: the input of every alert function."""

    decision: Decision
    columns: LogColumns
    now: float | None = None
    """Time in seconds since 1970; None if silence cannot be judged."""
    liveness: Liveness = UNKNOWN_LIVENESS

    @property
    def schedule(self) -> Schedule:
        """The schedule of the decision."""
        return self.decision.learning_rate.schedule

    @functools.cached_property
    def course(self) -> BandComparison | None:
        """Comparison with the frozen band; None before the first look."""
        columns, schedule = self.columns, self.schedule
        steps, losses = columns.steps, columns.train_loss_nats
        return compare_with_band(
            self.decision.predicted, schedule.num_steps, steps, losses, schedule.warmup_steps
        )

    @functools.cached_property
    def pace(self) -> Pace:
        """Pace of the run."""
        return Pace(
            columns=self.columns,
            num_steps=self.schedule.num_steps,
            now=self.now,
            liveness=self.liveness,
        )

    @functools.cached_property
    def spikes(self) -> list[Spike]:
        """Spikes by the frozen policy that the run's noise does not explain."""
        columns = self.columns
        all_spikes = find_spikes(columns.steps, columns.train_loss_nats, self.decision.spikes)
        return [spike for spike in all_spikes if not spike.within_noise]


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertFinding:
    """A finding of an alert function."""

    first_step: int
    seen: str
    evidence: dict[str, Json]
    severity: Severity | None = None
    """Severity; None for the usual severity of the alert's kind."""


AlertFunction = Callable[[WatchedRun], Iterable[AlertFinding]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertKind:
    """A kind of alert, with the function that finds it."""

    name: str
    severities: tuple[Severity, ...]
    """Possible severities, the usual one first."""
    when: str
    """Condition under which it is raised, for docs and `--help`."""
    next_command: CommandKind
    find: AlertFunction


KINDS: dict[str, AlertKind] = {}
"""All kinds by name, once their modules are loaded."""


def register_alert(
    name: str, *severities: Severity, when: str, next_command: CommandKind
) -> Callable[[AlertFunction], AlertFunction]:
    """Register the decorated function as a kind of alert (see `AlertKind`).

    Args:
        name: Name of the kind.
        severities: Possible severities, the usual one first.
        when: Condition under which it is raised.
        next_command: Kind of command to run next.
    """

    def register(find: AlertFunction) -> AlertFunction:
        KINDS[name] = AlertKind(
            name=name, severities=severities, when=when, next_command=next_command, find=find
        )
        return find

    return register


def find_alerts(run: WatchedRun, commands: Commands) -> tuple[Alert, ...]:
    """Return all alerts of a run: alarms first, then by first step and name."""
    alerts = [
        Alert(
            name=kind.name,
            severity=finding.severity or kind.severities[0],
            first_step=finding.first_step,
            seen=finding.seen,
            evidence=finding.evidence,
            next_command=commands.format_command(kind.next_command, finding),
        )
        for kind in KINDS.values()
        for finding in kind.find(run)
    ]
    return tuple(
        sorted(alerts, key=lambda alert: (alert.severity != "alarm", alert.first_step, alert.name))
    )
