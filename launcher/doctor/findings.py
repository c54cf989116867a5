"""What a check found: one line of the report. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]
STATES: tuple[State, ...] = ("ok", "warn", "fail")
"""From the best to the worst."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line: `warn` is what may cost time or surprise, `fail` is what a study or a launch would stop at."""

    name: str
    state: State
    said: str
    mend: str = ""
    """What to type, or to do; there for all that is not ok."""


def ok(name: str, said: str) -> Finding:
    """All is well."""
    return Finding(name=name, state="ok", said=said)


def warn(name: str, said: str, mend: str) -> Finding:
    """It works, but."""
    return Finding(name=name, state="warn", said=said, mend=mend)


def fail(name: str, said: str, mend: str) -> Finding:
    """It does not work."""
    return Finding(name=name, state="fail", said=said, mend=mend)


def worst(found: Sequence[Finding]) -> State:
    """The worst state among them; ok where there are none."""
    return max((each.state for each in found), key=STATES.index, default="ok")


def body_of(found: Sequence[Finding]) -> dict[str, object]:
    """As `--json` prints them."""
    counts = {f"num_{state}": sum(each.state == state for each in found) for state in STATES}
    return {"outcome": worst(found), **counts, "findings": [asdict(each) for each in found]}


def line_of(finding: Finding) -> str:
    """As people read it: the mend on a line of its own."""
    line = f"{finding.state:<4}  {finding.name}: {finding.said}"
    return f"{line}\n      mend: {finding.mend}" if finding.mend else line
