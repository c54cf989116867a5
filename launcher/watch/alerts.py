"""Alerts, and the registry of their kinds, which the watch, the docs, and completion read.

A kind is a function of a `WatchedRun` under the decorator `@alert`, which states its name,
severity, when it is raised, and what to run next. The modules `loss_alerts` and `machine_alerts`
define the kinds; `launcher.watch.judgment` loads both.
"""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from launcher.frozen.frozen import Decision
from launcher.watch.course import Course, course
from launcher.watch.logs.columns import LogColumns
from launcher.watch.loss_rises import Spike, spikes
from launcher.watch.pace import UNKNOWN, Liveness
from proxies.core.canon import Json
from proxies.core.schedule import Schedule

Severity = Literal["notice", "alarm"]
"""An alarm needs somebody now and has a known false-alarm rate; a notice is worth a look."""
Next = Literal["look", "conclude", "verify", "resume", "machine", "note"]
"""Kind of command to run next; see `Commands.line`."""


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
                # A record cannot hold such a number, and the alert would be lost.
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

    def line(self, wanted: Next, finding: AlertFinding) -> str:
        """Return the command that follows a finding.

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
        }[wanted]


@dataclass(frozen=True, kw_only=True, eq=False)
class WatchedRun:
    """A run so far, with what was frozen: the input of every alert function."""

    decision: Decision
    columns: LogColumns
    now: float | None = None
    """Time in seconds since 1970; None if silence cannot be judged."""
    liveness: Liveness = UNKNOWN

    @property
    def schedule(self) -> Schedule:
        """The schedule of the decision."""
        return self.decision.learning_rate.schedule

    @functools.cached_property
    def course(self) -> Course | None:
        """Comparison with the frozen band; None before the first look."""
        columns, schedule = self.columns, self.schedule
        steps, losses = columns.steps, columns.train_loss_nats
        return course(
            self.decision.predicted, schedule.num_steps, steps, losses, schedule.warmup_steps
        )

    @functools.cached_property
    def spikes(self) -> list[Spike]:
        """Spikes by the frozen policy that the run's noise does not explain."""
        columns = self.columns
        all_spikes = spikes(columns.steps, columns.train_loss_nats, self.decision.spikes)
        return [spike for spike in all_spikes if not spike.within_noise]


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertFinding:
    """A finding of an alert function."""

    first_step: int
    seen: str
    evidence: dict[str, Json]
    severity: Severity | None = None
    """Severity; None for the first of its kind's severities."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertKind:
    """A kind of alert, with the function that finds it."""

    name: str
    severities: tuple[Severity, ...]
    """Possible severities, the usual one first."""
    when: str
    """Condition under which it is raised, for docs and `--help`."""
    next_command: Next
    find: Callable[[WatchedRun], Iterable[AlertFinding]]


KINDS: dict[str, AlertKind] = {}
"""All kinds by name, once their modules are loaded."""


def alert(
    name: str, *severities: Severity, when: str, next_command: Next
) -> Callable[
    [Callable[[WatchedRun], Iterable[AlertFinding]]], Callable[[WatchedRun], Iterable[AlertFinding]]
]:
    """Register a function of a run as a kind of alert."""

    def register(
        find: Callable[[WatchedRun], Iterable[AlertFinding]],
    ) -> Callable[[WatchedRun], Iterable[AlertFinding]]:
        KINDS[name] = AlertKind(
            name=name, severities=severities, when=when, next_command=next_command, find=find
        )
        return find

    return register


def alerts(run: WatchedRun, commands: Commands) -> tuple[Alert, ...]:
    """Return all alerts of a run: alarms first, then by first step and name."""
    alerts_found = [
        Alert(
            name=kind.name,
            severity=finding.severity or kind.severities[0],
            first_step=finding.first_step,
            seen=finding.seen,
            evidence=finding.evidence,
            next_command=commands.line(kind.next_command, finding),
        )
        for kind in KINDS.values()
        for finding in kind.find(run)
    ]
    return tuple(
        sorted(
            alerts_found, key=lambda each: (each.severity != "alarm", each.first_step, each.name)
        )
    )
