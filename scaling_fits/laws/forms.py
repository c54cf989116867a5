"""Forms of scaling laws: which of the six coordinates of `solver` each one fits or fixes, and the
names of its parameters.

- `chinchilla`: E + A / N^alpha + B / D^beta (arXiv 2203.15556, section 3.3), with k = 1.
- `coupled`: E + (A N^-alpha + B D^-beta)^k, with all six coordinates free.
- `power`: A / N^alpha + B / D^beta, which is `chinchilla` without an irreducible loss.

To add a form over the same coordinates, add one entry to `SHAPES`; the plan, the command line, the
fits, and the report read it from there. A law with other inputs (unique tokens, a learning-rate
curve) has other coordinates and needs its own module. Plan validation reads the names without
loading numpy, so this module imports numpy only where a law is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from scaling_fits.laws.solver import Floats

_LIMIT = 700.0  # Largest logarithm whose exponential fits in a record
LOG_NOTHING = -700.0  # Log E of a form without E: finite, so that records can store it


class Geometric(NamedTuple):
    """A geometric sequence of numbers."""

    low: float
    high: float
    num: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FormShape:
    """The mapping of one form to the six coordinates."""

    formula: str
    """Formula for the report, in HTML."""
    free: tuple[int | None, ...]
    """Index of the free coordinate at each of the six coordinates; None where it is fixed."""
    fixed: tuple[float, ...] = (0, 0, 0, 0, 0, 1.0)
    """Values of the fixed coordinates; ignored elsewhere."""
    names: tuple[str, ...]
    """Names of its parameters."""
    slope_names: tuple[str, str]
    """Names of k * alpha and k * beta, the slopes of the log reducible loss."""
    natural: Callable[[Floats], tuple[Floats, ...]]
    """Function that computes the values of `names`, (M,) each, from rows of theta (M, P)."""
    least_k: float = 1.0
    """Lower end of the search for k."""
    shares: tuple[float, ...] = (0.5,)
    """Grid of E, as shares of the lowest loss."""
    powers: tuple[float, ...] = (1.0,)
    """Grid of k."""
    slopes: Geometric
    """Grid of k * alpha and k * beta."""

    @property
    def has_floor(self) -> bool:
        """Whether it has an irreducible loss."""
        return self.free[0] is not None

    @property
    def dim(self) -> int:
        """Number of free coordinates, Q."""
        return 1 + max(index for index in self.free if index is not None)

    @property
    def plain(self) -> bool:
        """Whether k is always 1. The derivatives are then cheaper."""
        return self.free[5] is None and self.fixed[5] == 1.0

    @property
    def first(self) -> list[int]:
        """Index among the six coordinates of each free coordinate."""
        return [self.free.index(index) for index in range(self.dim)]

    def theta(self, free_MQ: Floats) -> Floats:
        """Return all six coordinates (M, P), given the free ones."""
        import numpy as np

        columns = [
            np.full(len(free_MQ), value) if index is None else free_MQ[:, index]
            for index, value in zip(self.free, self.fixed, strict=True)
        ]
        return np.stack(columns, axis=1)

    def gradient(self, gradient_PM: Floats) -> Floats:
        """Return a gradient in the free coordinates (M, Q)."""
        return gradient_PM[self.first].T

    def hessian(self, hessian_PPM: Floats) -> Floats:
        """Return a Hessian in the free coordinates (M, Q, Q)."""
        import numpy as np

        return np.ascontiguousarray(hessian_PPM.transpose(2, 0, 1)[:, self.first][:, :, self.first])


def _exp_clipped(logs: Floats) -> Floats:
    import numpy as np

    return np.exp(np.clip(logs, -_LIMIT, _LIMIT))


def _to_natural(theta_MP: Floats) -> tuple[Floats, ...]:
    """Compute (E, A, B, alpha, beta, k)."""
    return (
        *(_exp_clipped(theta_MP[:, i]) for i in range(3)),
        *(theta_MP[:, i] for i in range(3, 6)),
    )


MIN_POINTS = 4
"""Minimum number of different pairs of size and tokens for a law with a prior."""

_FLOORS = (0.01, 0.2, 0.4, 0.6, 0.75, 0.87, 0.95)
SHAPES: dict[str, FormShape] = {
    "chinchilla": FormShape(
        formula="E + A·N<sup>−α</sup> + B·D<sup>−β</sup>",
        free=(0, 1, 2, 3, 4, None),
        names=("E", "A", "B", "alpha", "beta"),
        slope_names=("alpha", "beta"),
        natural=lambda theta_MP: _to_natural(theta_MP)[:5],
        shares=_FLOORS,
        slopes=Geometric(0.03, 6.0, 14),
    ),
    "coupled": FormShape(
        formula="E + (A·N<sup>−α</sup> + B·D<sup>−β</sup>)<sup>k</sup>",
        free=(0, 1, 2, 3, 4, 5),
        names=("E", "A", "B", "alpha", "beta", "k"),
        slope_names=("k * alpha", "k * beta"),
        natural=_to_natural,
        least_k=0.2,
        shares=(0.02, 0.3, 0.6, 0.8, 0.92),
        powers=(0.4, 0.7, 1.0, 1.6, 2.6),
        slopes=Geometric(0.03, 6.0, 9),
    ),
    "power": FormShape(
        formula="A·N<sup>−α</sup> + B·D<sup>−β</sup>, no floor",
        free=(None, 0, 1, 2, 3, None),
        fixed=(LOG_NOTHING, 0, 0, 0, 0, 1.0),
        names=("A", "B", "alpha", "beta"),
        slope_names=("alpha", "beta"),
        natural=lambda theta_MP: _to_natural(theta_MP)[1:5],
        slopes=Geometric(0.01, 3.0, 18),
    ),
}

if TYPE_CHECKING:
    Form = str
    FormChoice = str
else:  # where plans and files are read: exactly the names above
    Form = Literal[tuple(SHAPES)]
    FormChoice = Literal["auto", "compute", *SHAPES]
"""A key of `SHAPES`; `FormChoice` also allows `auto`, and `compute`, the law of runs along one
line."""
