"""Shapes of valleys: no theory gives one, so several families are averaged.

In log2 of the hyperparameter a valley is `a + k h(x - m)` with its minimum at m, and h from one of three families, each
with a lopsidedness of its own:

    linex    exp(s x) - 1 - s x                   (Varian 1975, Zellner 1986: one side straight, one exponential)
    powers   |x|^p (1 + t sign(x))                (p = 2: two half-parabolas; for other p a cusp or a flat floor)
    walls    x^2 / 2 + e^u (exp(w x) - 1 - w x)   (a parabola, and a wall some octaves above it, where runs diverge)

A shape is an index into tables here, so that a posterior over shapes is an array of whole numbers. Within a family
neighbours in the tables are neighbours in shape.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LINEX_SLANTS = np.arange(-0.99875, 1.55, 0.0025)
"""Grid of s, per octave; 0 itself is left out, where the curve is 0 / 0."""
LINEX_MEAN, LINEX_SD = 0.15, 0.55
"""Prior on s: divergence is the steeper side, mildly; within 2.5 octaves our CPU grids give about 0."""
POWERS = {1.5: 0.5, 1.75: 0.75, 2.0: 1.0, 2.25: 0.75, 2.5: 0.5, 3.0: 0.25}
"""Each p and its prior weight."""
POWER_SLANTS = np.arange(-1.0, 1.2, 0.0025)
"""Grid of atanh(t)."""
POWER_MEAN, POWER_SD = 0.1, 0.4
"""Prior on atanh(t): two octaves out, the same lopsidedness as the linex prior's."""
STEEPNESSES = (2.0, 3.0, 4.5)
"""Each w, per octave; all alike."""
WALL_SLANTS = np.arange(-10.0, -1.0, 0.01)
"""Grid of u: how far up the wall stands."""
FAMILIES = (0.4, 0.4, 0.2)
"""Prior weights."""
LARGEST_EXPONENT = 50.0
"""A wild draw may cost much, not overflow."""


def _tables() -> tuple[Floats, Floats, Floats, Floats]:
    kinds = [(LINEX_SLANTS, 0.0, 0.0, FAMILIES[0] * _normal(LINEX_SLANTS, LINEX_MEAN, LINEX_SD))]
    of_powers = FAMILIES[1] * _normal(POWER_SLANTS, POWER_MEAN, POWER_SD)
    total = sum(POWERS.values())
    kinds += [(np.tanh(POWER_SLANTS), power, 0.0, of_powers * weight / total) for power, weight in POWERS.items()]
    of_walls = np.full(len(WALL_SLANTS), FAMILIES[2] / len(WALL_SLANTS) / len(STEEPNESSES))
    kinds += [(WALL_SLANTS, 0.0, steepness, of_walls) for steepness in STEEPNESSES]
    slant, prior = (np.concatenate([kind[column] for kind in kinds]) for column in (0, 3))
    power, steepness = (np.concatenate([np.full(len(kind[0]), kind[column]) for kind in kinds]) for column in (1, 2))
    return slant, power, steepness, np.log(prior)


def _normal(x: Floats, mean: float, sd: float) -> Floats:
    weight = np.exp(-0.5 * ((x - mean) / sd) ** 2)
    return np.asarray(weight / weight.sum())


SLANT, POWER, STEEPNESS, LOG_PRIOR = _tables()
"""Of every shape: s, t or u; p or 0; w or 0; the log of its prior probability."""


def rise(octaves: Floats, curvature: Floats, shape: Ints) -> Floats:
    """Loss above the minimum, in nats, `octaves` above (or, negative, below) it; the arguments broadcast.

    Args:
        octaves: From the minimum.
        curvature: Twice the mean of the rises one octave to either side: of a parabola its second derivative, nats
            per octave squared.
        shape: Index of the valley's shape.
    """
    octaves, shape = np.broadcast_arrays(octaves, shape)
    height = np.empty(octaves.shape)
    for kind in np.unique(_KIND[shape]):
        here = _KIND[shape] == kind
        height[here] = _height(octaves[here], SLANT[shape[here]], kind)
    return np.asarray(0.5 * curvature * height)


def unit_rises(octaves: Floats, shapes: Ints) -> Floats:
    """`rise` of every shape (S,) at curvature 1, for octaves of any form: (S, *octaves.shape)."""
    height = np.empty((len(shapes), *octaves.shape))
    slants = SLANT[shapes].reshape(-1, *[1] * octaves.ndim)
    for kind in np.unique(_KIND[shapes]):
        here = _KIND[shapes] == kind
        height[here] = _height(octaves, slants[here], kind)
    return 0.5 * height


_KIND = np.cumsum(np.concatenate([[0], (np.diff(POWER) != 0) | (np.diff(STEEPNESS) != 0)]))
"""Family and its fixed number: shapes of one kind differ by their slant only."""
_FIRST = np.flatnonzero(np.diff(_KIND, prepend=-1))


def _height(octaves: Floats, slant: Floats, kind: int) -> Floats:
    """Twice the rise, scaled to a mean of 1 an octave to either side."""
    power, steepness = float(POWER[_FIRST[kind]]), float(STEEPNESS[_FIRST[kind]])
    if power:
        return np.asarray(np.abs(octaves) ** power * (1 + slant * np.sign(octaves)))
    if steepness:
        wall = np.exp(slant) * 2
        return np.asarray((octaves**2 + wall * _linex(steepness * octaves)) / (1 + wall * (np.cosh(steepness) - 1)))
    return np.asarray(_linex(slant * octaves) / (np.cosh(slant) - 1))


def _linex(exponent: Floats) -> Floats:
    capped = np.minimum(exponent, LARGEST_EXPONENT)
    return np.asarray(np.expm1(capped) - capped)
