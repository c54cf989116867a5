"""The findings of the checks, one line of the report each. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

State = Literal["ok", "warn", "fail"]
STATES: tuple[State, ...] = get_args(State)
"""All states, from best to worst."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorFinding:
    """Result of checking one thing, and one line of the report."""

    name: str
    """The thing that was checked, such as `python`."""
    state: State
    """`ok`: the thing works. `warn`: it works, but may cause trouble. `fail`: it would stop a study
    or a launch.
    """
    fact: str
    """The fact that was found, in words."""
    fix: str = ""
    """The command or action that fixes the problem; empty if the state is ok."""


def ok(name: str, fact: str) -> DoctorFinding:
    """Return the finding for a thing that works."""
    return DoctorFinding(name=name, state="ok", fact=fact)


def warn(name: str, fact: str, fix: str) -> DoctorFinding:
    """Return the finding for a thing that works but may cause trouble."""
    return DoctorFinding(name=name, state="warn", fact=fact, fix=fix)


def fail(name: str, fact: str, fix: str) -> DoctorFinding:
    """Return the finding for a thing that would stop a study or a launch."""
    return DoctorFinding(name=name, state="fail", fact=fact, fix=fix)


def find_worst_state(findings: Sequence[DoctorFinding]) -> State:
    """Return the worst state among findings; ok if there are none."""
    return max((finding.state for finding in findings), key=STATES.index, default="ok")


def to_json(findings: Sequence[DoctorFinding]) -> dict[str, object]:
    """Return the findings as `--json` prints them, with a fact as `said` and a fix as `mend`."""
    states = [finding.state for finding in findings]
    return {
        "outcome": find_worst_state(findings),
        **{f"num_{state}": states.count(state) for state in STATES},
        "findings": [
            {
                "name": finding.name,
                "state": finding.state,
                "said": finding.fact,
                "mend": finding.fix,
            }
            for finding in findings
        ],
    }


def format_finding(finding: DoctorFinding) -> str:
    """Return a finding as text for people, with the fix on its own line."""
    line = f"{finding.state:<4}  {finding.name}: {finding.fact}"
    return f"{line}\n      fix: {finding.fix}" if finding.fix else line
