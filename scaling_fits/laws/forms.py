"""The forms a law may take: which of the six coordinates of `solver` each frees, fixes or ties, and its own names.

- `chinchilla`: E + A / N^alpha + B / D^beta (arXiv 2203.15556, section 3.3): k = 1.
- `coupled`: E + (A N^-alpha + B D^-beta)^k: all six free.
- `power`: A / N^alpha + B / D^beta: the first without an irreducible loss, so without a floor.
- `kaplan`: [(Nc / N)^(alpha_N / alpha_D) + Dc / D]^alpha_D (arXiv 2001.08361, equation 1.5): no E, beta = 1,
  k = alpha_D.
- `overtraining`: E + (a M^eta + b M^-eta) C^-eta with M = D / N and C = 6 N D (arXiv 2403.08540, equation 4):
  k = 1 and alpha = beta = 2 eta.

A further form over the same coordinates is one more entry of `SHAPES`, and nothing else: the plan, the command line,
the fits and the report read it from there. A law with other inputs (unique tokens, a learning-rate curve) has other
coordinates and so a module of its own beside this one. The names are read where numpy is not loaded, by a plan's
validation, so this module imports it only where a law is evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from scaling_fits.laws.solver import Floats, Space

_LIMIT = 700.0  # largest logarithm whose exponential a record can hold
LOG_NOTHING = -700.0  # log E of a form without E: a finite number, so that records can hold it


class Geometric(NamedTuple):
    """Numbers evenly spaced in their logs."""

    low: float
    high: float
    num: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How one form sits in the six coordinates."""

    formula: str
    """As the report writes it, in HTML."""
    free: tuple[int | None, ...]
    """Of each of the six coordinates, the free one it is, maybe shared; None where it is fixed."""
    fixed: tuple[float, ...] = (0, 0, 0, 0, 0, 1.0)
    """Values of the fixed coordinates; ignored elsewhere."""
    names: tuple[str, ...]
    """Its own parameters."""
    slope_names: tuple[str, str]
    """What it calls k * alpha and k * beta, the slopes of log reducible loss."""
    natural: Callable[[Floats], tuple[Floats, ...]]
    """Values of `names`, (M,) each, from rows of theta (M, P)."""
    prior_mass: float | None = None
    """In the pool of `auto`, before any held-out budget (`forecast.pooling`); None: `auto` leaves the form out."""
    least_k: float = 1.0
    """Lower end of the search for k."""
    shares: tuple[float, ...] = (0.5,)
    """Grid: E as a share of the lowest loss."""
    powers: tuple[float, ...] | Geometric = (1.0,)
    """Grid: k."""
    slopes: Geometric
    """Grid: k * alpha, and k * beta where beta is free."""

    @property
    def dim(self) -> int:
        """Number of free coordinates, Q."""
        return 1 + max(index for index in self.free if index is not None)

    @property
    def has_floor(self) -> bool:
        """Whether it has an irreducible loss."""
        return self.free[0] is not None

    @property
    def space(self) -> Space:
        """The map from the free coordinates to all six."""
        from scaling_fits.laws.solver import Space

        return Space(free=self.free, fixed=self.fixed)


def _exp(logs: Floats) -> Floats:
    import numpy as np

    result: Floats = np.exp(np.clip(logs, -_LIMIT, _LIMIT))
    return result


def _scales(theta_MP: Floats) -> tuple[Floats, ...]:
    """(E, A, B, alpha, beta, k)."""
    return (*(_exp(theta_MP[:, i]) for i in range(3)), *(theta_MP[:, i] for i in range(3, 6)))


def _kaplan(theta_MP: Floats) -> tuple[Floats, ...]:
    """(Nc, Dc, alpha_N, alpha_D): A = Nc^alpha, alpha = alpha_N / alpha_D."""
    a, b, alpha, k = (theta_MP[:, i] for i in (1, 2, 3, 5))
    return _exp(a / alpha), _exp(b), alpha * k, k


def _overtraining(theta_MP: Floats) -> tuple[Floats, ...]:
    """(E, a, b, eta): N = sqrt(C / 6M), D = sqrt(CM / 6), so a = A 6^eta and b = B 6^eta."""
    eta = theta_MP[:, 3] / 2
    return _exp(theta_MP[:, 0]), *(_exp(theta_MP[:, i] + eta * math.log(6)) for i in (1, 2)), eta


_FLOORS = (0.01, 0.2, 0.4, 0.6, 0.75, 0.87, 0.95)
SHAPES: dict[str, Shape] = {
    "chinchilla": Shape(
        formula="E + A·N<sup>−α</sup> + B·D<sup>−β</sup>",
        free=(0, 1, 2, 3, 4, None),
        names=("E", "A", "B", "alpha", "beta"),
        slope_names=("alpha", "beta"),
        natural=lambda theta_MP: _scales(theta_MP)[:5],
        prior_mass=4.0,
        shares=_FLOORS,
        slopes=Geometric(0.03, 6.0, 14),
    ),
    "coupled": Shape(
        formula="E + (A·N<sup>−α</sup> + B·D<sup>−β</sup>)<sup>k</sup>",
        free=(0, 1, 2, 3, 4, 5),
        names=("E", "A", "B", "alpha", "beta", "k"),
        slope_names=("k * alpha", "k * beta"),
        natural=_scales,
        prior_mass=5.0,
        least_k=0.2,
        shares=(0.02, 0.3, 0.6, 0.8, 0.92),
        powers=(0.4, 0.7, 1.0, 1.6, 2.6),
        slopes=Geometric(0.03, 6.0, 9),
    ),
    "power": Shape(
        formula="A·N<sup>−α</sup> + B·D<sup>−β</sup>, no floor",
        free=(None, 0, 1, 2, 3, None),
        fixed=(LOG_NOTHING, 0, 0, 0, 0, 1.0),
        names=("A", "B", "alpha", "beta"),
        slope_names=("alpha", "beta"),
        natural=lambda theta_MP: _scales(theta_MP)[1:5],
        prior_mass=2.5,
        slopes=Geometric(0.01, 3.0, 18),
    ),
    "kaplan": Shape(
        formula="[(Nc/N)<sup>α<sub>N</sub>/α<sub>D</sub></sup> + Dc/D]<sup>α<sub>D</sub></sup>, no floor",
        free=(None, 0, 1, 2, None, 3),
        fixed=(LOG_NOTHING, 0, 0, 0, 1.0, 0),
        names=("Nc", "Dc", "alpha_N", "alpha_D"),
        slope_names=("alpha_N", "alpha_D"),
        natural=_kaplan,
        least_k=0.01,
        powers=Geometric(0.02, 3.0, 18),
        slopes=Geometric(0.01, 3.0, 18),
    ),
    "overtraining": Shape(
        formula="E + (a·M<sup>η</sup> + b·M<sup>−η</sup>)·C<sup>−η</sup>, M = D/N",
        free=(0, 1, 2, 3, 3, None),
        names=("E", "a", "b", "eta"),
        slope_names=("2 * eta", "2 * eta"),
        natural=_overtraining,
        shares=_FLOORS,
        slopes=Geometric(0.03, 6.0, 28),
    ),
}

POOLED = tuple(form for form, shape in SHAPES.items() if shape.prior_mass is not None)
"""What `auto` pools, the plainest first."""

if TYPE_CHECKING:
    Form = str
    FormChoice = str
else:  # where plans and files are read: exactly the names above
    Form = Literal[tuple(SHAPES)]
    FormChoice = Literal["auto", *SHAPES]
"""A key of `SHAPES`; and a form, or those that the runs support, pooled."""
