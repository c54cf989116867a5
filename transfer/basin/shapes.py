"""Families of shapes of loss basins. Fits average over the shapes, because theory prescribes none.

As a function of x, log2 of the hyperparameter, the loss at one size is a basin `a + k h(x - m)`
with its minimum at m. Its shape h comes from one of five families, each with an asymmetry
parameter, the slant (s, t, u, v, or c), and most with one fixed parameter (p, w, k, or b):

    linex     exp(s x) - 1 - s x
              one side straight, one exponential (Varian 1975, Zellner 1986)
    powers    |x|^p (1 + t sign(x))
              p = 2: two half-parabolas; other p: a cusp or a flat floor
    walls     x^2 / 2 + e^u (exp(w x) - 1 - w x)
              a parabola, and some octaves above it a wall where runs diverge
    cliffs    x^2 + e^v max(x - k, 0)^2
              a parabola that steepens from a kink k octaves above the minimum
    quartics  z^2 + c z^3 + z^4, z = x / b
              symmetric far out, with a floor that may lean to either side

A shape is an index into the tables of this module, so a posterior over shapes is an array of
integers. Within a family, neighbors in the tables have similar shapes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LINEX_SLANTS = np.arange(-0.99875, 1.55, 0.0025)
"""Grid of s, per octave; 0 itself is left out because the scaled curve is 0 / 0 there."""
LINEX_MEAN, LINEX_SD = 0.15, 0.55
"""Mean and standard deviation of the prior on s. The mean is positive because the side toward
divergence tends to be steeper. Grids of small models trained on CPUs have an s of about 0 within
2.5 octaves of the minimum."""
POWERS = {1.5: 0.5, 1.75: 0.75, 2.0: 1.0, 2.25: 0.75, 2.5: 0.5, 3.0: 0.35, 3.5: 0.25, 4.0: 0.25}
"""Values of p with their prior weights."""
POWER_SLANTS = np.arange(-1.0, 1.2, 0.0025)
"""Grid of atanh(t)."""
POWER_MEAN, POWER_SD = 0.1, 0.4
"""Mean and standard deviation of the prior on atanh(t). Two octaves from the minimum, this prior
has the same asymmetry as the prior of linex."""
STEEPNESSES = (2.0, 3.0, 4.5)
"""Values of w, per octave, with equal prior weights."""
WALL_SLANTS = np.arange(-10.0, -1.0, 0.01)
"""Grid of u, which places the wall."""
KINKS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
"""Values of k, octaves above the minimum, with equal prior weights."""
CLIFF_SLANTS = np.arange(-1.0, 3.5, 0.02)
"""Grid of v, which sets the steepness of the cliff."""
BREADTHS = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8)
"""Values of b, octaves from the minimum at which the fourth power is as large as the second, with
equal prior weights."""
QUARTIC_SLANTS = np.arange(-1.84, 1.85, 0.01)
"""Grid of c; beyond +-1.886 there are two minima."""
FAMILIES = {"linex": 0.3, "powers": 0.3, "walls": 0.12, "cliffs": 0.12, "quartics": 0.16}
"""Prior weight of each family."""
MAX_EXPONENT = 50.0
"""Upper bound of an exponent, so that an extreme draw does not overflow."""


Family = Literal["linex", "powers", "walls", "cliffs", "quartics"]


def _list_kinds() -> list[tuple[tuple[Family, float], Floats, Floats]]:
    """Return (family and fixed parameter, slants, prior probabilities of the slants) for each kind
    of shape.
    """
    prior = _compute_normal_prior(LINEX_SLANTS, LINEX_MEAN, LINEX_SD)
    kinds: list[tuple[tuple[Family, float], Floats, Floats]] = [
        (("linex", 0.0), LINEX_SLANTS, prior)
    ]
    prior = _compute_normal_prior(POWER_SLANTS, POWER_MEAN, POWER_SD) / sum(POWERS.values())
    kinds += [
        (("powers", power), np.tanh(POWER_SLANTS), prior * weight)
        for power, weight in POWERS.items()
    ]
    families_of_equal_weights: tuple[tuple[Family, tuple[float, ...], Floats], ...] = (
        ("walls", STEEPNESSES, WALL_SLANTS),
        ("cliffs", KINKS, CLIFF_SLANTS),
        ("quartics", BREADTHS, QUARTIC_SLANTS),
    )
    for family, parameters, slants in families_of_equal_weights:
        prior = np.full(len(slants), 1 / len(slants) / len(parameters))
        kinds += [((family, parameter), slants, prior) for parameter in parameters]
    return [(kind, slants, FAMILIES[kind[0]] * prior) for kind, slants, prior in kinds]


def _compute_normal_prior(x: Floats, mean: float, sd: float) -> Floats:
    weight = np.exp(-0.5 * ((x - mean) / sd) ** 2)
    return weight / weight.sum()


KINDS = tuple(kind for kind, _, _ in _list_kinds())
"""Family and fixed parameter of each kind. Shapes of one kind differ by their slant only. The
order of the kinds fixes the index of every shape, and with it the random draws of a verdict."""
KIND_INDEX = np.concatenate(
    [np.full(len(slants), index) for index, (_, slants, _) in enumerate(_list_kinds())]
)
"""Index in `KINDS` of every shape."""
SLANT = np.concatenate([slants for _, slants, _ in _list_kinds()])
"""Slant of every shape: s, t, u, v, or c."""
LOG_PRIOR = np.log(np.concatenate([prior for _, _, prior in _list_kinds()]))
"""Log prior probability of every shape."""


def compute_rise(octaves: Floats, curvature: Floats, shape: Ints) -> Floats:
    """Compute the loss above that at the minimum, in nats. The arguments broadcast.

    Args:
        octaves: Octaves above the minimum; negative below it.
        curvature: Twice the mean of the rises one octave to either side, nats per octave squared;
            for a parabola this is the second derivative.
        shape: Index of the basin's shape.
    """
    octaves, shape = np.broadcast_arrays(octaves, shape)
    height = np.empty(octaves.shape)
    for kind in np.unique(KIND_INDEX[shape]):
        here = KIND_INDEX[shape] == kind
        height[here] = _compute_height(octaves[here], SLANT[shape[here]], kind)
    return 0.5 * curvature * height


def compute_unit_rises(octaves: Floats, shapes: Ints) -> Floats:
    """Compute the rise at curvature 1 for each of the shapes (S,). `octaves` may have any
    dimensions, and the result has the dimensions (S, *octaves.shape).
    """
    height = np.empty((len(shapes), *octaves.shape))
    slants = SLANT[shapes].reshape(-1, *[1] * octaves.ndim)
    for kind in np.unique(KIND_INDEX[shapes]):
        here = KIND_INDEX[shapes] == kind
        height[here] = _compute_height(octaves, slants[here], kind)
    return 0.5 * height


def _compute_height(octaves: Floats, slant: Floats, kind: int) -> Floats:
    """Compute twice the rise at curvature 1: the heights one octave below and one octave above the
    minimum have a mean of 1.
    """
    family, parameter = KINDS[kind]
    if family == "powers":
        return np.abs(octaves) ** parameter * (1 + slant * np.sign(octaves))
    if family == "walls":
        wall = np.exp(slant) * 2
        return (octaves**2 + wall * _compute_linex(parameter * octaves)) / (
            1 + wall * (np.cosh(parameter) - 1)
        )
    if family == "cliffs":
        cliff = np.exp(slant)
        height = octaves**2 + cliff * np.maximum(octaves - parameter, 0.0) ** 2
        return height / (1 + 0.5 * cliff * max(1 - parameter, 0.0) ** 2)
    if family == "quartics":
        far = octaves / parameter
        return far**2 * (1 + slant * far + far**2) / (parameter**-2 + parameter**-4)
    return _compute_linex(slant * octaves) / (np.cosh(slant) - 1)


def _compute_linex(exponent: Floats) -> Floats:
    capped = np.minimum(exponent, MAX_EXPONENT)
    return np.expm1(capped) - capped
