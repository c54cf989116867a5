"""Forms of scaling laws: which coordinates of a law each form fits, and how they are searched.

Every law is a point theta in the six coordinates (log E, log A, log B, alpha, beta, k), always in
this order, and predicts the loss E + (A N^-alpha + B D^-beta)^k (`solver`). A form fits the
coordinates of the parameters that it names, and fixes the others: without E there is no irreducible
loss, and without k the outer exponent is 1.

- `chinchilla`: E + A / N^alpha + B / D^beta (arXiv 2203.15556, section 3.3).
- `coupled`: E + (A N^-alpha + B D^-beta)^k.
- `power`: A / N^alpha + B / D^beta, which is `chinchilla` without an irreducible loss.

To add a form over the same coordinates, add one entry to `FORMS`. The plan, the command line, the
fits, and the report read that table. A law with other inputs (unique tokens, a learning-rate curve)
has other coordinates and needs its own module. Plan validation reads the names without loading
numpy, so this module imports numpy only where a law is evaluated.

Shape suffixes: M laws, P coordinates (six), Q free coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from forerun._scaling_fits.laws.solver import Floats, Points

COORDINATES = ("E", "A", "B", "alpha", "beta", "k")
"""Parameters of the six coordinates. The first three coordinates are logs."""
NO_FLOOR_LOG = -700.0
"""Log E of a form without E. It is finite, so that records can store it."""
_FIXED = (NO_FLOOR_LOG, 0.0, 0.0, 0.0, 0.0, 1.0)
"""Values of the coordinates of parameters that a form does not name."""
_MAX_EXP_LOG = 700.0  # Logarithms are clipped to this, so that their exponentials are finite
# One fit of the Gemstones data set has a degenerate optimum with an exponent of 4.98. The search
# must reach it, so that the user is warned of it.
MAX_EXPONENT = 10.0
MAX_K = 5.0
_LOWER_E = 12.0  # E may fall to exp(-12) of the lowest loss, which is practically 0
_MAX_LOG = 100.0  # Bound of a and b in centered logs: with a small k they are log loss / k


@dataclass(frozen=True, kw_only=True, slots=True)
class FormSpec:
    """One form: the parameters that it fits, and the grid of its search."""

    formula: str
    """Formula for the report, in HTML."""
    names: tuple[str, ...]
    """Parameters that are fitted, in the order of `COORDINATES`."""
    min_k: float = 1.0
    """Lower bound of the search for k."""
    floor_shares: tuple[float, ...] = (0.5,)
    """Grid of E, as shares of the lowest loss."""
    k_grid: tuple[float, ...] = (1.0,)
    """Grid of k."""
    slope_grid: tuple[float, float, int]
    """Geometric grid of k * alpha and k * beta: lowest value, highest value, and number of values
    (`np.geomspace`)."""

    @property
    def has_floor(self) -> bool:
        """Whether the form has an irreducible loss E."""
        return "E" in self.names

    @property
    def num_free(self) -> int:
        """Number of free coordinates, Q."""
        return len(self.names)

    @property
    def has_unit_k(self) -> bool:
        """Whether k is always 1. The derivatives are then cheaper."""
        return "k" not in self.names

    @property
    def free_coordinates(self) -> list[int]:
        """Index of each free coordinate among the six."""
        return [COORDINATES.index(name) for name in self.names]

    def to_theta(self, free_MQ: Floats) -> Floats:
        """Return all six coordinates (M, P), given the free ones."""
        import numpy as np

        theta = np.tile(_FIXED, (len(free_MQ), 1))
        theta[:, self.free_coordinates] = free_MQ
        return theta

    def compute_bounds(self, points: Points) -> tuple[Floats, Floats]:
        """Return the lower and upper bounds (Q,) within which the free coordinates are searched.
        `points` are the runs in centered logs.
        """
        import numpy as np

        low, high = float(points.y.min()), float(points.y.max())
        lower = np.array([low - _LOWER_E, -_MAX_LOG, -_MAX_LOG, 1e-3, 1e-3, self.min_k])
        upper = np.array([high + 1.0, _MAX_LOG, _MAX_LOG, MAX_EXPONENT, MAX_EXPONENT, MAX_K])
        return lower[self.free_coordinates], upper[self.free_coordinates]

    def name_parameters(self, theta_MP: Floats) -> dict[str, Floats]:
        """Return the values (M,) of each parameter by name, from rows of coordinates."""
        import numpy as np

        values = theta_MP.T.copy()
        values[:3] = np.exp(np.clip(values[:3], -_MAX_EXP_LOG, _MAX_EXP_LOG))
        return {name: values[COORDINATES.index(name)] for name in self.names}


MIN_POINTS = 4
"""Minimum number of different pairs of size and tokens for a law with a prior."""

FORMS: dict[str, FormSpec] = {
    "chinchilla": FormSpec(
        formula="E + A·N<sup>−α</sup> + B·D<sup>−β</sup>",
        names=("E", "A", "B", "alpha", "beta"),
        floor_shares=(0.01, 0.2, 0.4, 0.6, 0.75, 0.87, 0.95),
        slope_grid=(0.03, 6.0, 14),
    ),
    "coupled": FormSpec(
        formula="E + (A·N<sup>−α</sup> + B·D<sup>−β</sup>)<sup>k</sup>",
        names=COORDINATES,
        min_k=0.2,
        floor_shares=(0.02, 0.3, 0.6, 0.8, 0.92),
        k_grid=(0.4, 0.7, 1.0, 1.6, 2.6),
        slope_grid=(0.03, 6.0, 9),
    ),
    "power": FormSpec(
        formula="A·N<sup>−α</sup> + B·D<sup>−β</sup>, no floor",
        names=("A", "B", "alpha", "beta"),
        slope_grid=(0.01, 3.0, 18),
    ),
}
"""Every form by name. `auto` counts the parameters of the first form."""

if TYPE_CHECKING:
    Form = str
    FormChoice = str
else:  # At run time, the type with which plans and files are checked: exactly the names above
    Form = Literal[tuple(FORMS)]
    FormChoice = Literal["auto", "compute", *FORMS]
"""`Form` is a key of `FORMS`. `FormChoice` also allows `auto`, and `compute`: the law of loss
against compute for runs that lie on one line in log N and log D (`forecast.path`)."""
