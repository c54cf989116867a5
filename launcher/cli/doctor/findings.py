"""The findings of the checks, one line of the report each. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]
STATES: tuple[State, ...] = ("ok", "warn", "fail")
"""All states, from best to worst."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorFinding:
    """One line of the report. A finding with the state `warn` may cause trouble, and one with
    `fail` would stop a study or a launch.
    """

    name: str
    """The thing that was checked, such as `python`."""
    state: State
    said: str
    """The fact that was found, in words."""
    mend: str = ""
    """The command or action that fixes the problem; empty if the state is ok."""


def ok(name: str, fact: str) -> DoctorFinding:
    """Return a finding that nothing is wrong."""
    return DoctorFinding(name=name, state="ok", said=fact)


def warn(name: str, fact: str, mend: str) -> DoctorFinding:
    """Return a finding that works but may cause trouble."""
    return DoctorFinding(name=name, state="warn", said=fact, mend=mend)


def fail(name: str, fact: str, mend: str) -> DoctorFinding:
    """Return a finding that would stop a study or a launch."""
    return DoctorFinding(name=name, state="fail", said=fact, mend=mend)


def find_worst_state(findings: Sequence[DoctorFinding]) -> State:
    """Return the worst state among findings; ok if there are none."""
    return max((finding.state for finding in findings), key=STATES.index, default="ok")


def to_json(findings: Sequence[DoctorFinding]) -> dict[str, object]:
    """Return the findings as `--json` prints them."""
    states = [finding.state for finding in findings]
    return {
        "outcome": find_worst_state(findings),
        **{f"num_{state}": states.count(state) for state in STATES},
        "findings": [asdict(finding) for finding in findings],
    }


def format_finding(finding: DoctorFinding) -> str:
    """Return a finding as text for people, with the fix on its own line."""
    line = f"{finding.state:<4}  {finding.name}: {finding.said}"
    return f"{line}\n      fix: {finding.mend}" if finding.mend else line
