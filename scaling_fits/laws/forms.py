"""The forms a law may take: which of the six coordinates of `solver` each frees, fixes or ties, and its own names.

- `chinchilla`: E + A / N^alpha + B / D^beta (arXiv 2203.15556, section 3.3): k = 1.
- `coupled`: E + (A N^-alpha + B D^-beta)^k: all six free.
- `power`: A / N^alpha + B / D^beta: the first without an irreducible loss, so without a floor.
- `kaplan`: [(Nc / N)^(alpha_N / alpha_D) + Dc / D]^alpha_D (arXiv 2001.08361, equation 1.5): no E, beta = 1,
  k = alpha_D.
- `overtraining`: E + (a M^eta + b M^-eta) C^-eta with M = D / N and C = 6 N D (arXiv 2403.08540, equation 4):
  k = 1 and alpha = beta = 2 eta.

A later form over the same coordinates is one more entry of `SHAPES`. A law with other inputs (unique tokens, a
learning-rate curve) has other coordinates and so a module of its own beside this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scaling_fits.laws.solver import Floats, Space

_LIMIT = 700.0  # largest logarithm whose exponential a record can hold
LOG_NOTHING = -700.0  # log E of a form without E: a finite number, so that records can hold it
_LOG_SIX = float(np.log(6.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How one form sits in the six coordinates."""

    space: Space
    names: tuple[str, ...]
    """Its own parameters."""
    slope_names: tuple[str, str]
    """What it calls k * alpha and k * beta, the slopes of log reducible loss."""
    natural: Callable[[Floats], Floats]
    """Values of `names` (M, Q) from rows of theta (M, P)."""
    least_k: float
    """Lower end of the search for k."""
    shares: tuple[float, ...]
    """Grid: E as a share of the lowest loss."""
    powers: tuple[float, ...]
    """Grid: k."""
    slopes: tuple[float, ...]
    """Grid: k * alpha, and k * beta where beta is free."""


def _slopes(low: float, high: float, count: int) -> tuple[float, ...]:
    return tuple(np.geomspace(low, high, count).tolist())


def _scales(theta_MP: Floats) -> Floats:
    """(E, A, B, alpha, beta, k)."""
    values = theta_MP.copy()
    values[:, :3] = np.exp(np.clip(values[:, :3], -_LIMIT, _LIMIT))
    return values


def _kaplan(theta_MP: Floats) -> Floats:
    """(Nc, Dc, alpha_N, alpha_D): A = Nc^alpha, alpha = alpha_N / alpha_D."""
    a, b, alpha, k = (theta_MP[:, i] for i in (1, 2, 3, 5))
    critical = np.exp(np.clip(np.stack([a / alpha, b], axis=1), -_LIMIT, _LIMIT))
    return np.column_stack([critical, alpha * k, k])


def _overtraining(theta_MP: Floats) -> Floats:
    """(E, a, b, eta): N = sqrt(C / 6M), D = sqrt(CM / 6), so a = A 6^eta and b = B 6^eta."""
    eta = theta_MP[:, 3] / 2
    logs = theta_MP[:, :3] + np.stack([np.zeros_like(eta), eta * _LOG_SIX, eta * _LOG_SIX], axis=1)
    return np.column_stack([np.exp(np.clip(logs, -_LIMIT, _LIMIT)), eta])


SHAPES: dict[str, Shape] = {
    "chinchilla": Shape(
        space=Space(free=(0, 1, 2, 3, 4, None), fixed=(0, 0, 0, 0, 0, 1.0)),
        names=("E", "A", "B", "alpha", "beta"),
        slope_names=("alpha", "beta"),
        natural=lambda theta_MP: _scales(theta_MP)[:, :5],
        least_k=1.0,
        shares=(0.01, 0.2, 0.4, 0.6, 0.75, 0.87, 0.95),
        powers=(1.0,),
        slopes=_slopes(0.03, 6.0, 14),
    ),
    "coupled": Shape(
        space=Space(free=(0, 1, 2, 3, 4, 5), fixed=(0, 0, 0, 0, 0, 0)),
        names=("E", "A", "B", "alpha", "beta", "k"),
        slope_names=("k * alpha", "k * beta"),
        natural=_scales,
        least_k=0.2,
        shares=(0.02, 0.3, 0.6, 0.8, 0.92),
        powers=(0.4, 0.7, 1.0, 1.6, 2.6),
        slopes=_slopes(0.03, 6.0, 9),
    ),
    "power": Shape(
        space=Space(free=(None, 0, 1, 2, 3, None), fixed=(LOG_NOTHING, 0, 0, 0, 0, 1.0)),
        names=("A", "B", "alpha", "beta"),
        slope_names=("alpha", "beta"),
        natural=lambda theta_MP: _scales(theta_MP)[:, 1:5],
        least_k=1.0,
        shares=(0.5,),
        powers=(1.0,),
        slopes=_slopes(0.01, 3.0, 18),
    ),
    "kaplan": Shape(
        space=Space(free=(None, 0, 1, 2, None, 3), fixed=(LOG_NOTHING, 0, 0, 0, 1.0, 0)),
        names=("Nc", "Dc", "alpha_N", "alpha_D"),
        slope_names=("alpha_N", "alpha_D"),
        natural=_kaplan,
        least_k=0.01,
        shares=(0.5,),
        powers=_slopes(0.02, 3.0, 18),
        slopes=_slopes(0.01, 3.0, 18),
    ),
    "overtraining": Shape(
        space=Space(free=(0, 1, 2, 3, 3, None), fixed=(0, 0, 0, 0, 0, 1.0)),
        names=("E", "a", "b", "eta"),
        slope_names=("2 * eta", "2 * eta"),
        natural=_overtraining,
        least_k=1.0,
        shares=(0.01, 0.2, 0.4, 0.6, 0.75, 0.87, 0.95),
        powers=(1.0,),
        slopes=_slopes(0.03, 6.0, 28),
    ),
}
