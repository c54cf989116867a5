"""Ratios of a run to its base run, and factors that are powers of these ratios."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from forerun._proxies.core.checks import Checks, SpecError


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratios:
    """Ratios of a run to the base run, at which its hyperparameters were set."""

    width: float = 1.0
    """m_N. For a hidden matrix, the ratio of its own fan-in."""
    depth: float = 1.0
    """m_L."""
    batch: float = 1.0
    """m_B, of the batches in tokens."""
    duration: float = 1.0
    """m_D, of the training tokens."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        for field in dataclasses.fields(self):
            checks.require_number(field.name, above=0)
        checks.raise_problems()


@dataclass(frozen=True, kw_only=True, slots=True)
class Powers:
    """The factor m_N^width m_L^depth m_B^batch m_D^duration."""

    width: float = 0.0
    depth: float = 0.0
    batch: float = 0.0
    duration: float = 0.0

    def evaluate(self, ratios: Ratios) -> float:
        """Return the factor at some ratios; exactly 1.0 at the base.

        Raises:
            SpecError: The factor is not a positive finite float.
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
            problem = f"{self} of {ratios} is {factor}: choose ratios nearer to 1"
            raise SpecError("Ratios", [problem])
        return factor

    def multiply(self, factor: Powers) -> Powers:
        """Return the product of two factors."""
        return Powers(
            width=self.width + factor.width,
            depth=self.depth + factor.depth,
            batch=self.batch + factor.batch,
            duration=self.duration + factor.duration,
        )

    def __str__(self) -> str:
        """Return the factor as people write it: `m_N^-1 m_L^-1/2`; `1` if nothing scales."""
        powers = {
            "m_N": self.width,
            "m_L": self.depth,
            "m_B": self.batch,
            "m_D": self.duration,
        }
        factors = [
            name if power == 1 else f"{name}^{_format_power(power)}"
            for name, power in powers.items()
            if power
        ]
        return " ".join(factors) or "1"


UNSCALED = Powers()
"""The factor 1 at every size."""


def _format_power(power: float) -> str:
    """Return an exponent as an integer, as halves, or as a decimal number."""
    if power == int(power):
        return str(int(power))
    return f"{int(power * 2)}/2" if power * 2 == int(power * 2) else f"{power:g}"
