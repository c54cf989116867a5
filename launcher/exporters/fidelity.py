"""What became of a decision in a trainer's files, field by field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["exact", "equivalent", "not_expressible"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityEntry:
    """One field of the decision."""

    field: str
    """Its path, such as `learning_rate.schedule.kind`."""
    verdict: Verdict
    """The same number; another form of the same run, under the note's condition; or not in the trainer's language."""
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityReport:
    """What the export of one decision to one trainer carries over."""

    trainer: str
    version: str
    entries: tuple[FidelityEntry, ...]

    @property
    def lost(self) -> tuple[FidelityEntry, ...]:
        """What of the decision the trainer cannot express."""
        return tuple(entry for entry in self.entries if entry.verdict == "not_expressible")
