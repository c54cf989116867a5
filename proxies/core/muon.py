"""Muon in numbers: how its rate scales with a matrix's shape, and what its iteration costs.
Standard library only.

Muon (Jordan 2024, kellerjordan.github.io/posts/muon) steps a hidden matrix by its momentum's
nearest semi-orthogonal matrix, found by Newton-Schulz iterations, so that the step has about the
same spectral norm, 1, whatever the matrix's shape. What that is multiplied with is where sources
differ: `MuonRate`. `proxies.model.muon` has the iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

MuonRate = Literal["none", "original", "match_rms_adamw", "spectral", "unit_rms"]
"""What multiplies the learning rate of a matrix of so many rows (its outputs) and columns; `none`:
Muon steps nothing. The names are those of torch.optim.Muon and, for the last two, of Megatron-LM.
"""

DEFAULT_MUON_RATE: MuonRate = "original"
"""torch.optim.Muon's, and Jordan's: of those in wide use the one that is the same at every
width."""


@dataclass(frozen=True, slots=True)
class ShapeRule:
    """What a matrix's shape multiplies its learning rate with."""

    factor: Callable[[float, float], float]
    """Of its rows and columns."""
    law: str
    """The same in words, of r rows and c columns."""
    width_power: float
    """How it grows where rows and columns grow as the width does."""


SHAPE_RULES: Mapping[MuonRate, ShapeRule] = MappingProxyType(
    {
        "original": ShapeRule(lambda r, c: math.sqrt(max(1.0, r / c)), "sqrt(max(1, r/c))", 0.0),
        "match_rms_adamw": ShapeRule(
            lambda r, c: 0.2 * math.sqrt(max(r, c)), "0.2 sqrt(max(r, c))", 0.5
        ),
        "spectral": ShapeRule(lambda r, c: math.sqrt(max(r, c)), "sqrt(max(r, c))", 0.5),
        "unit_rms": ShapeRule(lambda r, c: math.sqrt(r / c), "sqrt(r/c)", 0.0),
    }
)
RMS_POWER = 0.5
"""By which a step's elements stay as large as they were: an orthogonal n x n matrix's have a root
mean square of n^-1/2."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: the steepest at zero that stays near one (Jordan 2024)."""
NUM_ITERATIONS = 5
EPS = 1e-7
"""The least norm that a matrix is divided by."""


def shape_factor(rate: MuonRate, size: tuple[int, ...]) -> float:
    """What a rule multiplies the learning rate of a matrix of that size with."""
    return SHAPE_RULES[rate].factor(*size)


def iteration_flops(size: tuple[int, ...]) -> float:
    """FLOPs of one step's Newton-Schulz on a matrix: three products an iteration, over its shorter
    side.
    """
    short, long = min(size), max(size)
    return NUM_ITERATIONS * (4.0 * short**2 * long + 2.0 * short**3)
