"""What the watch has to say: one alert a finding, with the numbers it rests on and the command to run next."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field
from typing import Literal

from proxies.core.canon import Json

Severity = Literal["notice", "alarm"]
"""An alarm asks for somebody now, and has a false-alarm rate; a notice is worth a look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One finding."""

    name: str
    severity: Severity
    first_step: int
    """Where what is told began."""
    seen: str
    """In a sentence."""
    evidence: dict[str, Json] = field(default_factory=dict)
    """The numbers behind it, units in their names; None for one that is not finite."""
    next_command: str

    def __post_init__(self) -> None:
        for name, value in self.evidence.items():
            if isinstance(value, float) and not math.isfinite(value):
                self.evidence[name] = None  # a record could not hold it, and the alert would be lost


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """The lines to run next, exact: of this config and this run."""

    frozen: str = "FROZEN"
    metrics: str | None = None
    """Where the watch reads; None: the run folder beside the config."""
    run_dir: str | None = None
    """None: not a run of the embedded trainer."""

    @property
    def watch(self) -> str:
        """The watch itself, to look again."""
        where = f" --metrics {shlex.quote(self.metrics)}" if self.metrics else ""
        return f"forerun watch {shlex.quote(self.frozen)}{where}"

    @property
    def verify(self) -> str:
        """Is it the frozen config that runs, and does its trainer still equal it?"""
        return f"forerun verify {shlex.quote(self.frozen)}"

    @property
    def resume(self) -> str:
        """The run again, from its newest good checkpoint; another trainer's is not ours to start."""
        if self.run_dir is None:
            return f"{self.watch} --once"
        return f"forerun launch {shlex.quote(self.frozen)} --out {shlex.quote(self.run_dir)}"

    @property
    def machine(self) -> str:
        """What the devices say of their clocks, heat and errors; on the host of the rank that is named."""
        return "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,ECC"

    @staticmethod
    def note(text: str) -> str:
        """Keep in the logbook what was seen, and what was decided about it."""
        return f"forerun note {shlex.quote(text)}"
