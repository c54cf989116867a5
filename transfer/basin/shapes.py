"""Shapes of basins: no theory gives one, so several families are averaged.

In log2 of the hyperparameter a basin is `a + k h(x - m)` with its minimum at m, and h from one of
five families, each with a lopsidedness of its own:

    linex    exp(s x) - 1 - s x                   (Varian 1975, Zellner 1986: one side straight, one
    exponential) powers   |x|^p (1 + t sign(x))                (p = 2: two half-parabolas; for other
    p a cusp or a flat floor) walls    x^2 / 2 + e^u (exp(w x) - 1 - w x)   (a parabola, and a wall
    some octaves above it, where runs diverge) cliffs   x^2 + e^v max(x - k, 0)^2            (a
    parabola, and a kink k octaves above it, steeper from there on) quartics z^2 + c z^3 + z^4, z =
    x / b         (far out even, while its floor may lean to either side)

A shape is an index into tables here, so that a posterior over shapes is an array of whole numbers.
Within a family neighbours in the tables are neighbours in shape.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LINEX_SLANTS = np.arange(-0.99875, 1.55, 0.0025)
"""Grid of s, per octave; 0 itself is left out, where the curve is 0 / 0."""
LINEX_MEAN, LINEX_SD = 0.15, 0.55
"""Prior on s: divergence is the steeper side, mildly; within 2.5 octaves our CPU grids give about
0."""
POWERS = {1.5: 0.5, 1.75: 0.75, 2.0: 1.0, 2.25: 0.75, 2.5: 0.5, 3.0: 0.35, 3.5: 0.25, 4.0: 0.25}
"""Each p and its prior weight."""
POWER_SLANTS = np.arange(-1.0, 1.2, 0.0025)
"""Grid of atanh(t)."""
POWER_MEAN, POWER_SD = 0.1, 0.4
"""Prior on atanh(t): two octaves out, the same lopsidedness as the linex prior's."""
STEEPNESSES = (2.0, 3.0, 4.5)
"""Each w, per octave; all alike."""
WALL_SLANTS = np.arange(-10.0, -1.0, 0.01)
"""Grid of u: how far up the wall stands."""
KINKS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
"""Each k, octaves above the minimum; all alike."""
CLIFF_SLANTS = np.arange(-1.0, 3.5, 0.02)
"""Grid of v: how steep the cliff is."""
BREADTHS = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8)
"""Each b, octaves from the minimum at which the fourth power is as large as the second; all
alike."""
QUARTIC_SLANTS = np.arange(-1.84, 1.85, 0.01)
"""Grid of c: beyond +-1.886 there are two minima."""
FAMILIES = {"linex": 0.3, "powers": 0.3, "walls": 0.12, "cliffs": 0.12, "quartics": 0.16}
"""Prior weights."""
LARGEST_EXPONENT = 50.0
"""A wild draw may cost much, not overflow."""


Family = Literal["linex", "powers", "walls", "cliffs", "quartics"]


def _kinds() -> list[tuple[tuple[Family, float], Floats, Floats]]:
    """Each kind of shape: its family and fixed number, its slants, and their prior
    probabilities.
    """
    prior = _normal(LINEX_SLANTS, LINEX_MEAN, LINEX_SD)
    kinds: list[tuple[tuple[Family, float], Floats, Floats]] = [
        (("linex", 0.0), LINEX_SLANTS, prior)
    ]
    prior = _normal(POWER_SLANTS, POWER_MEAN, POWER_SD) / sum(POWERS.values())
    kinds += [
        (("powers", power), np.tanh(POWER_SLANTS), prior * weight)
        for power, weight in POWERS.items()
    ]
    evenly: tuple[tuple[Family, tuple[float, ...], Floats], ...] = (
        ("walls", STEEPNESSES, WALL_SLANTS),
        ("cliffs", KINKS, CLIFF_SLANTS),
        ("quartics", BREADTHS, QUARTIC_SLANTS),
    )
    for family, numbers, slants in evenly:
        prior = np.full(len(slants), 1 / len(slants) / len(numbers))
        kinds += [((family, number), slants, prior) for number in numbers]
    return [(kind, slants, FAMILIES[kind[0]] * prior) for kind, slants, prior in kinds]


def _normal(x: Floats, mean: float, sd: float) -> Floats:
    weight = np.exp(-0.5 * ((x - mean) / sd) ** 2)
    return np.asarray(weight / weight.sum())


KINDS = tuple(kind for kind, _, _ in _kinds())
"""Family and fixed number: shapes of one kind differ by their slant only."""
KIND = np.concatenate(
    [np.full(len(slants), number) for number, (_, slants, _) in enumerate(_kinds())]
)
"""The index in `KINDS` of every shape."""
SLANT = np.concatenate([slants for _, slants, _ in _kinds()])
"""The slant of every shape: s, t, u, v or c."""
LOG_PRIOR = np.log(np.concatenate([prior for _, _, prior in _kinds()]))
"""The log of the prior probability of every shape."""


def rise(octaves: Floats, curvature: Floats, shape: Ints) -> Floats:
    """Loss above the minimum, in nats, `octaves` above (or, negative, below) it; the arguments
    broadcast.

    Args:
        octaves: From the minimum.
        curvature: Twice the mean of the rises one octave to either side: of a parabola its second
            derivative, nats per octave squared.
        shape: Index of the basin's shape.
    """
    octaves, shape = np.broadcast_arrays(octaves, shape)
    height = np.empty(octaves.shape)
    for kind in np.unique(KIND[shape]):
        here = KIND[shape] == kind
        height[here] = _height(octaves[here], SLANT[shape[here]], kind)
    return np.asarray(0.5 * curvature * height)


def unit_rises(octaves: Floats, shapes: Ints) -> Floats:
    """`rise` of every shape (S,) at curvature 1, for octaves of any form: (S, *octaves.shape)."""
    height = np.empty((len(shapes), *octaves.shape))
    slants = SLANT[shapes].reshape(-1, *[1] * octaves.ndim)
    for kind in np.unique(KIND[shapes]):
        here = KIND[shapes] == kind
        height[here] = _height(octaves, slants[here], kind)
    return 0.5 * height


def _height(octaves: Floats, slant: Floats, kind: int) -> Floats:
    """Twice the rise, scaled to a mean of 1 an octave to either side."""
    family, number = KINDS[kind]
    if family == "powers":
        return np.asarray(np.abs(octaves) ** number * (1 + slant * np.sign(octaves)))
    if family == "walls":
        wall = np.exp(slant) * 2
        return np.asarray(
            (octaves**2 + wall * _linex(number * octaves)) / (1 + wall * (np.cosh(number) - 1))
        )
    if family == "cliffs":
        cliff = np.exp(slant)
        height = octaves**2 + cliff * np.maximum(octaves - number, 0.0) ** 2
        return np.asarray(height / (1 + 0.5 * cliff * max(1 - number, 0.0) ** 2))
    if family == "quartics":
        far = octaves / number
        return np.asarray(far**2 * (1 + slant * far + far**2) / (number**-2 + number**-4))
    return np.asarray(_linex(slant * octaves) / (np.cosh(slant) - 1))


def _linex(exponent: Floats) -> Floats:
    capped = np.minimum(exponent, LARGEST_EXPONENT)
    return np.asarray(np.expm1(capped) - capped)
