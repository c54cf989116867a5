"""What drills and rehearsals find, as records. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.frozen.attestations import CheckOutcome
from proxies.core.canon import Json

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillResult:
    """What a drill found."""

    name: str
    outcome: Outcome
    said: str
    """In a sentence."""
    seen: dict[str, object]
    """The same in numbers."""
    limit: str
    """What would have passed."""
    advice: str = ""
    """What to do, where it did not pass."""
    needed: bool = True
    """Whether a rehearsal without it is no whole one."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Attested:
    """What the attestation of a rehearsal holds."""

    outcome: CheckOutcome
    """Cannot tell: a drill that is needed did not take place."""
    not_asked_for: tuple[str, ...]
    """Drills that were left out on request: then it is a rehearsal in part."""
    copy: dict[str, object]
    """What was trained in the drills, and which config it stands for."""
    machine: dict[str, object]
    seconds: float
    drills: tuple[DrillResult, ...]

    @property
    def exit_code(self) -> int:
        """0 passed, 3 failed, 4 cannot tell."""
        return {"passed": 0, "failed": 3, "cannot_tell": 4}[self.outcome]

    def named(self, outcome: Outcome) -> list[str]:
        """The drills that ended so."""
        return [drill.name for drill in self.drills if drill.outcome == outcome]


def judged(
    name: str, holds: bool, said: str, *, seen: dict[str, Json], limit: str, advice: str
) -> DrillResult:  # fmt: skip
    """Passed if it holds, failed with the advice if not."""
    return DrillResult(
        name=name, outcome="passed" if holds else "failed", said=said, seen={**seen}, limit=limit,
        advice="" if holds else advice,
    )  # fmt: skip
