"""Forms of scaling laws: which coordinates of a law each form fits or fixes, and the names of its
parameters.

Every law is a point theta in the six coordinates (log E, log A, log B, alpha, beta, k), always in
this order, and predicts the loss E + (A N^-alpha + B D^-beta)^k (`solver`). A form fits some of the
coordinates and fixes the others:

- `chinchilla`: E + A / N^alpha + B / D^beta (arXiv 2203.15556, section 3.3), with k = 1.
- `coupled`: E + (A N^-alpha + B D^-beta)^k, with all six coordinates free.
- `power`: A / N^alpha + B / D^beta, which is `chinchilla` without an irreducible loss.

To add a form over the same coordinates, add one entry to `FORMS`. The plan, the command line, the
fits, and the report read that table. A law with other inputs (unique tokens, a learning-rate curve)
has other coordinates and needs its own module. Plan validation reads the names without loading
numpy, so this module imports numpy only where a law is evaluated.

Shape suffixes: M laws, P coordinates (six), Q free coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from forerun._scaling_fits.laws.solver import Floats, Points

_MAX_EXP_LOG = 700.0  # Logarithms are clipped to this, so that their exponentials are finite
LOG_NOTHING = -700.0  # Log E of a form without E: finite, so that records can store it
# One fit of the Gemstones data set has a degenerate optimum with an exponent of 4.98. The search
# must reach it, so that the user is warned of it.
MAX_EXPONENT = 10.0
MAX_K = 5.0
_LOWER_E = 12.0  # E may fall to exp(-12) of the lowest loss, which is practically 0
_MAX_LOG = 100.0  # Bound of a and b in centered logs: with a small k they are log loss / k


@dataclass(frozen=True, kw_only=True, slots=True)
class FormSpec:
    """The free and fixed coordinates of one form, its parameters, and the grid of its search."""

    formula: str
    """Formula for the report, in HTML."""
    free: tuple[int | None, ...]
    """Index of each of the six coordinates among the free ones; None if the coordinate is fixed."""
    fixed: tuple[float, ...] = (0, 0, 0, 0, 0, 1.0)
    """Values of the fixed coordinates; ignored for free ones."""
    names: tuple[str, ...]
    """Names of the parameters, in the order of the free coordinates."""
    slope_names: tuple[str, str]
    """Names of k * alpha and k * beta, the slopes of the log reducible loss."""
    compute_parameters: Callable[[Floats], tuple[Floats, ...]]
    """Function that computes the values of `names`, (M,) each, from rows of theta (M, P)."""
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
        """Whether the form has an irreducible loss E, the first coordinate."""
        return self.free[0] is not None

    @property
    def num_free(self) -> int:
        """Number of free coordinates, Q."""
        return 1 + max(index for index in self.free if index is not None)

    @property
    def has_unit_k(self) -> bool:
        """Whether k, the last coordinate, is always 1. The derivatives are then cheaper."""
        return self.free[-1] is None and self.fixed[-1] == 1.0

    @property
    def free_coordinates(self) -> list[int]:
        """Index of each free coordinate among the six."""
        return [self.free.index(index) for index in range(self.num_free)]

    def to_theta(self, free_MQ: Floats) -> Floats:
        """Return all six coordinates (M, P), given the free ones."""
        import numpy as np

        columns = [
            np.full(len(free_MQ), value) if index is None else free_MQ[:, index]
            for index, value in zip(self.free, self.fixed, strict=True)
        ]
        return np.stack(columns, axis=1)

    def bounds(self, points: Points) -> tuple[Floats, Floats]:
        """Return the lower and upper bounds (Q,) within which the free coordinates are searched.
        `points` are the runs in centered logs.
        """
        import numpy as np

        low, high = float(points.y.min()), float(points.y.max())
        lower = np.array([low - _LOWER_E, -_MAX_LOG, -_MAX_LOG, 1e-3, 1e-3, self.min_k])
        upper = np.array([high + 1.0, _MAX_LOG, _MAX_LOG, MAX_EXPONENT, MAX_EXPONENT, MAX_K])
        return lower[self.free_coordinates], upper[self.free_coordinates]


def _compute_clipped_exp(logs: Floats) -> Floats:
    import numpy as np

    return np.exp(np.clip(logs, -_MAX_EXP_LOG, _MAX_EXP_LOG))


def _compute_all_parameters(theta_MP: Floats) -> tuple[Floats, ...]:
    """Compute (E, A, B, alpha, beta, k), (M,) each."""
    return (
        *(_compute_clipped_exp(theta_MP[:, i]) for i in range(3)),
        *(theta_MP[:, i] for i in range(3, 6)),
    )


MIN_POINTS = 4
"""Minimum number of different pairs of size and tokens for a law with a prior."""

FORMS: dict[str, FormSpec] = {
    "chinchilla": FormSpec(
        formula="E + A·N<sup>−α</sup> + B·D<sup>−β</sup>",
        free=(0, 1, 2, 3, 4, None),
        names=("E", "A", "B", "alpha", "beta"),
        slope_names=("alpha", "beta"),
        compute_parameters=lambda theta_MP: _compute_all_parameters(theta_MP)[:5],
        floor_shares=(0.01, 0.2, 0.4, 0.6, 0.75, 0.87, 0.95),
        slope_grid=(0.03, 6.0, 14),
    ),
    "coupled": FormSpec(
        formula="E + (A·N<sup>−α</sup> + B·D<sup>−β</sup>)<sup>k</sup>",
        free=(0, 1, 2, 3, 4, 5),
        names=("E", "A", "B", "alpha", "beta", "k"),
        slope_names=("k * alpha", "k * beta"),
        compute_parameters=_compute_all_parameters,
        min_k=0.2,
        floor_shares=(0.02, 0.3, 0.6, 0.8, 0.92),
        k_grid=(0.4, 0.7, 1.0, 1.6, 2.6),
        slope_grid=(0.03, 6.0, 9),
    ),
    "power": FormSpec(
        formula="A·N<sup>−α</sup> + B·D<sup>−β</sup>, no floor",
        free=(None, 0, 1, 2, 3, None),
        fixed=(LOG_NOTHING, 0, 0, 0, 0, 1.0),
        names=("A", "B", "alpha", "beta"),
        slope_names=("alpha", "beta"),
        compute_parameters=lambda theta_MP: _compute_all_parameters(theta_MP)[1:5],
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
