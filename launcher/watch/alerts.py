"""Alerts: what they are, and the registry of their kinds, which the judgement, the docs and
completion read.

A kind is a function of a `WatchedRun` under `@alert`: its name, severity, when it is raised and
what to run next stand there, and nowhere else. The modules `loss_alerts` and `machine_alerts` hold
them; `launcher.watch.follower` loads all three.
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
"""An alarm asks for somebody now, and has a false-alarm rate; a notice is worth a look."""
Next = Literal["look", "conclude", "verify", "resume", "machine", "note"]
"""What to run next: see `Commands.line`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One finding."""

    name: str
    severity: Severity
    first_step: int
    """Where it began."""
    seen: str
    """In a sentence."""
    evidence: dict[str, Json] = field(default_factory=dict)
    """The numbers behind it, units in their names; None for one that is not finite."""
    next_command: str

    def __post_init__(self) -> None:
        for name, value in self.evidence.items():
            if isinstance(value, float) and not math.isfinite(value):
                # a record could not hold it, and the alert would be lost
                self.evidence[name] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """The lines to run next, exact: of this config and this run."""

    frozen: str = "FROZEN"
    metrics: str | None = None
    """Where the watch reads; None: the run folder next to the config."""
    run_dir: str | None = None
    """None: not a run of the embedded trainer."""

    @property
    def watch(self) -> str:
        """The watch itself, to look again."""
        where = f" --metrics {shlex.quote(self.metrics)}" if self.metrics else ""
        return f"forerun watch {shlex.quote(self.frozen)}{where}"

    def line(self, wanted: Next, finding: AlertFinding) -> str:
        """The command that follows a finding; `resume`: another trainer's run is not ours to
        start.
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
    """A run so far, with what was frozen: what the functions of alerts read."""

    decision: Decision
    columns: LogColumns
    now: float | None = None
    """Seconds since 1970; None: silence cannot be judged."""
    liveness: Liveness = UNKNOWN

    @property
    def schedule(self) -> Schedule:
        """The schedule of the decision."""
        return self.decision.learning_rate.schedule

    @functools.cached_property
    def course(self) -> Course | None:
        """Against the frozen band."""
        columns, schedule = self.columns, self.schedule
        steps, losses = columns.steps, columns.train_loss_nats
        return course(
            self.decision.predicted, schedule.num_steps, steps, losses, schedule.warmup_steps
        )

    @functools.cached_property
    def spikes(self) -> list[Spike]:
        """Those of the frozen policy that noise alone does not make."""
        columns = self.columns
        found = spikes(columns.steps, columns.train_loss_nats, self.decision.spikes)
        return [spike for spike in found if not spike.within_noise]


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertFinding:
    """What a function of an alert found."""

    first_step: int
    seen: str
    evidence: dict[str, Json]
    severity: Severity | None = None
    """None: the first of its kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertKind:
    """A kind of alert."""

    name: str
    severities: tuple[Severity, ...]
    """The usual one first."""
    when: str
    """It is raised, for docs and `--help`."""
    next_command: Next
    find: Callable[[WatchedRun], Iterable[AlertFinding]]


KINDS: dict[str, AlertKind] = {}
"""All kinds by name, once their modules are loaded."""


def alert(
    name: str, *severities: Severity, when: str, next_command: Next
) -> Callable[
    [Callable[[WatchedRun], Iterable[AlertFinding]]], Callable[[WatchedRun], Iterable[AlertFinding]]
]:
    """Make a function of a run a kind of alert."""

    def register(
        find: Callable[[WatchedRun], Iterable[AlertFinding]],
    ) -> Callable[[WatchedRun], Iterable[AlertFinding]]:
        KINDS[name] = AlertKind(
            name=name, severities=severities, when=when, next_command=next_command, find=find
        )
        return find

    return register


def alerts(run: WatchedRun, commands: Commands) -> tuple[Alert, ...]:
    """All alerts of a run: alarms first, then by their first step and name."""
    found = [
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
        sorted(found, key=lambda each: (each.severity != "alarm", each.first_step, each.name))
    )
