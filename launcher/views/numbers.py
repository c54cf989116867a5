"""Outcomes and names in words, the same on the terminal and on the page. Numbers:
`proxies.core.notation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

Body = Mapping[str, Any]
"""What `launcher.report.body.report_body` gives."""
Tone = Literal["good", "bad", "open"]

_GOOD = {"passed", "passes", "holds", "converged", "finished", "ok", "tuned", "yes", "inside"}
_BAD = {
    "failed",
    "drifts",
    "blows up",
    "vanishes",
    "diverged",
    "unidentified",
    "mis tuned",
    "no",
    "different",
}


def words(name: object) -> str:
    """A name of the records as words: `cannot_tell` is "cannot tell"."""
    return str(name).replace("_", " ")


def tone(outcome: str) -> Tone:
    """Whether an outcome is good, bad, or leaves the question open: the colour of its label and of
    its mark.
    """
    said = words(outcome)
    return "good" if said in _GOOD else "bad" if said in _BAD else "open"


class Outcome(str):
    """An outcome in words, which the page draws as a label in the colour of its tone."""

    __slots__ = ()

    def __new__(cls, name: str) -> Self:
        """From its name in the records."""
        return super().__new__(cls, words(name))


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def arm_name(arm: str) -> str:
    """A parametrization as people write it; `depth` is the coordinate check over depths."""
    return {"mup": "muP", "sp": "SP", "depth": "over depths"}.get(arm, arm)
