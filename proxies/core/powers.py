"""How a run compares with its base run, and factors that are powers of that. Standard library
only.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from proxies.core.checks import Checks, SpecError


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratios:
    """How a run compares with the base run its hyperparameters were set at."""

    width: float = 1.0
    """m_N; a hidden matrix uses its own fan-in's."""
    depth: float = 1.0
    """m_L."""
    batch: float = 1.0
    """m_B, in tokens."""
    duration: float = 1.0
    """m_D, in tokens."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        for field in dataclasses.fields(self):
            checks.number(field.name, above=0)
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Powers:
    """A factor m_N^width m_L^depth m_B^batch m_D^duration."""

    width: float = 0.0
    depth: float = 0.0
    batch: float = 0.0
    duration: float = 0.0

    def at(self, ratios: Ratios) -> float:
        """The factor; exactly 1.0 at the base.

        Raises:
            SpecError: it is no number that a float holds.
        """
        try:
            factor = float(
                ratios.width**self.width
                * ratios.depth**self.depth
                * ratios.batch**self.batch
                * ratios.duration**self.duration
            )
        except OverflowError:
            factor = math.inf
        if not 0 < factor < math.inf:
            raise SpecError(
                "Ratios", [f"{self} of {ratios} is {factor}: choose ratios nearer to 1"]
            )
        return factor

    def times(self, other: Powers) -> Powers:
        """The product of two factors."""
        return Powers(
            width=self.width + other.width,
            depth=self.depth + other.depth,
            batch=self.batch + other.batch,
            duration=self.duration + other.duration,
        )

    def __str__(self) -> str:
        """As one would write it: `m_N^-1 m_L^-1/2`; `1` where nothing scales."""
        parts = (
            ("m_N", self.width),
            ("m_L", self.depth),
            ("m_B", self.batch),
            ("m_D", self.duration),
        )
        return (
            " ".join(
                name if power == 1 else f"{name}^{_fraction(power)}"
                for name, power in parts
                if power
            )
            or "1"
        )


UNSCALED = Powers()
"""The same at every size."""


def _fraction(power: float) -> str:
    if power == int(power):
        return str(int(power))
    return f"{int(power * 2)}/2" if power * 2 == int(power * 2) else f"{power:g}"
