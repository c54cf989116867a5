"""Outcomes and names in words, the same on the terminal and on the page.

Numbers are formatted by `proxies.core.notation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

Body = Mapping[str, Any]
"""Body of `report.json`, as `launcher.report.body.report_body` returns it."""
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
    """Return a name of the records as words: `cannot_tell` becomes "cannot tell"."""
    return str(name).replace("_", " ")


def tone(outcome: str) -> Tone:
    """Return the tone of an outcome, which sets the color of its label and of its mark."""
    name = words(outcome)
    return "good" if name in _GOOD else "bad" if name in _BAD else "open"


class Outcome(str):
    """An outcome in words, which the page draws as a label in the color of its tone."""

    __slots__ = ()

    def __new__(cls, name: str) -> Self:
        """Create the outcome from its name in the records."""
        return super().__new__(cls, words(name))


def listed(names: Sequence[str]) -> str:
    """Join names as in a sentence: `a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def arm_name(arm: str) -> str:
    """Return a parametrization's usual spelling; `depth` is the coordinate check over depths."""
    return {"mup": "muP", "sp": "SP", "depth": "over depths"}.get(arm, arm)
