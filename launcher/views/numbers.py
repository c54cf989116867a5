"""Numbers and outcomes in words, the same on the terminal and on the page, which sets powers and signs in type."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from launcher.base import talk

Body = Mapping[str, Any]
"""What `launcher.report.body.report_body` gives."""
Tone = Literal["good", "bad", "open"]

NONE = "-"
"""Where there is no number."""
_GOOD = {"passed", "passes", "holds", "converged", "finished", "ok", "tuned", "yes", "inside"}
_BAD = {"failed", "drifts", "blows up", "vanishes", "diverged", "unidentified", "mis tuned", "no", "different"}
_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def words(name: object) -> str:
    """A name of the records as words: `cannot_tell` is "cannot tell"."""
    return str(name).replace("_", " ")


def tone(outcome: str) -> Tone:
    """Whether an outcome is good, bad, or leaves the question open: the colour of its label and of its mark."""
    said = words(outcome)
    return "good" if said in _GOOD else "bad" if said in _BAD else "open"


class Outcome(str):
    """An outcome in words, which the page draws as a label in the colour of its tone."""

    __slots__ = ()

    def __new__(cls, name: str) -> Self:
        """From its name in the records."""
        return super().__new__(cls, words(name))


def number(value: float | None, spec: str = ".4g") -> str:
    """A number by its format spec; one too large for fixed digits has four."""
    if value is None:
        return NONE
    spec = ".4g" if abs(value) >= 1e6 and spec.endswith("f") else spec
    return format(value, f"+z{spec[1:]}" if spec[0] == "+" else f"z{spec}")  # z: what rounds to nothing has no sign


def loss(value: float | None) -> str:
    """Nats, to a thousandth."""
    return number(value, ".3f")


def interval(ends: Sequence[float] | None, spec: str = ".3f") -> str:
    """Both ends in brackets, or that there are none."""
    return "no interval" if ends is None else f"[{number(ends[0], spec)}, {number(ends[1], spec)}]"


def flops(value: float | None) -> str:
    """Three digits and a power of ten."""
    return number(value, ".2e")


def count(value: float | None) -> str:
    """Things counted: whole below a million, then in millions (M), billions (B), trillions (T)."""
    if value is None:
        return NONE
    for size, suffix in _SUFFIXES:
        if value >= size:
            return f"{value / size:.3g}\u00a0{suffix}" if value < 1000 * size else f"{value / size:,.0f}\u00a0{suffix}"
    return f"{value:,.0f}"


def significant(value: float | None, digits: int = 3) -> str:
    """Return a number rounded to significant digits and written without an exponent: 370, 4,800, 0.012, 3.7 M."""
    if value is None or value == 0 or not math.isfinite(value):
        return NONE if value is None else f"{value:g}"
    rounded = float(f"{value:.{digits}g}")
    if not 1e-4 <= abs(rounded) < 1e6:
        return count(rounded) if rounded >= 1e6 else f"{rounded:g}"
    return f"{rounded:,}".removesuffix(".0")


def percent(value: float | None, spec: str = "") -> str:
    """A share in percent; a weight or an error by its own format spec."""
    if value is None:
        return NONE
    return f"{format(100 * value, spec)}\u00a0%" if spec else talk.percent(value)


def seconds(value: float | None) -> str:
    """A duration in seconds, minutes or hours."""
    if value is None:
        return NONE
    if value < 600:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 36_000 else f"{value / 3600:.1f} h"


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def arm_name(arm: str) -> str:
    """A parametrization as people write it; `depth` is the coordinate check over depths."""
    return {"mup": "muP", "sp": "SP", "depth": "over depths"}.get(arm, arm)
