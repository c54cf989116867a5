"""Constants of Muon, the rules by which its learning rate depends on a matrix's shape, and the cost
of its iterations.

Muon (Jordan 2024, kellerjordan.github.io/posts/muon) updates a hidden matrix by the semi-orthogonal
matrix nearest to its momentum, which Newton-Schulz iterations approximate. The update has a
spectral norm of about 1 at every shape. Sources differ in the factor by which the update is
multiplied: `MuonRate` names the known rules. The iteration itself is in
`forerun._proxies.model.muon`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

MuonRate = Literal["none", "original", "match_rms_adamw", "spectral", "unit_rms"]
"""Name of a rule for the factor of a matrix's learning rate; `none` if Muon updates no matrix. The
names `original` and `match_rms_adamw` are from torch.optim.Muon, `spectral` and `unit_rms` from
Megatron-LM. A matrix has r rows (its outputs) and c columns (its inputs)."""

DEFAULT_MUON_RATE: MuonRate = "original"
"""Default of torch.optim.Muon and of Jordan. Its factor does not grow with the width; those of the
other rules in wide use do."""


@dataclass(frozen=True, slots=True)
class ShapeRule:
    """A factor of the learning rate that depends on a matrix's shape."""

    factor: Callable[[float, float], float]
    """The factor as a function of rows and columns."""
    law: str
    """The factor as a formula of r rows and c columns."""
    width_power: float
    """Power of the width with which the factor grows, if rows and columns grow with the width."""


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
"""Exponent of the width that keeps the size of an update's elements constant: the elements of an
orthogonal n x n matrix have a root mean square of n^-1/2."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration: as steep at 0 as it can be if it stays near 1 (Jordan
2024)."""
NUM_ITERATIONS = 5
EPS = 1e-7
"""Minimum norm by which a matrix is divided before the iterations."""


def compute_shape_factor(rate: MuonRate, size: tuple[int, ...]) -> float:
    """Return the factor of the learning rate of a matrix of a given size."""
    return SHAPE_RULES[rate].factor(*size)


def compute_iteration_flops(size: tuple[int, ...]) -> float:
    """Return the FLOPs of one step's Newton-Schulz iterations on a matrix.

    Each iteration has three matrix products over the shorter side.
    """
    short, long = min(size), max(size)
    return NUM_ITERATIONS * (4.0 * short**2 * long + 2.0 * short**3)
