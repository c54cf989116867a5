"""The objective of law fits with exact derivatives, for many small robust fits at once.

A law is a point in six coordinates, theta = (e, a, b, alpha, beta, k), and predicts

    log L = logsumexp(e, k * logsumexp(a - alpha * n, b - beta * d)),    n = log N, d = log D,

so E = exp(e), A = exp(a), B = exp(b). With k = 1 the law is that of Chinchilla (arXiv 2203.15556,
section 3.3), otherwise the coupled law E + (A N^-alpha + B D^-beta)^k. A form (`forms.FormSpec`)
defines which coordinates are free and which are fixed. The objective is the sum over runs of weight
* Huber(log L - log loss).

Shape suffixes: M problems (each with a law and weights), R runs, P coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

HUBER_DELTA = 1e-3  # arXiv 2203.15556, section D.1
NUM_COORDINATES = 6
# Bound of the exponents of exp, which avoids overflow and the log of 0
_FAR = 300.0


class Points(NamedTuple):
    """Runs in logs relative to their mean, so that the coordinates of a law are of order one."""

    n: Floats
    d: Floats
    y: Floats
    """Log loss."""


Origin = tuple[float, float, float]
"""Mean of log N, log D, and log loss of the runs."""


def center_points(n: Floats, d: Floats, y: Floats) -> tuple[Points, Origin]:
    """Return runs in logs relative to their mean, and the mean."""
    origin = float(n.mean()), float(d.mean()), float(y.mean())
    return Points(n=n - origin[0], d=d - origin[1], y=y - origin[2]), origin


def center(theta_MP: Floats, origin: Origin) -> Floats:
    """Convert coordinates about the origin of log N, log D, and log loss to coordinates about
    `origin`.
    """
    n, d, y = origin
    moved = theta_MP.copy()
    # A factor c on the loss is a factor c^(1/k) on the terms of N and D
    lift = y / theta_MP[:, 5]
    moved[:, 0] -= y
    moved[:, 1] -= theta_MP[:, 3] * n + lift
    moved[:, 2] -= theta_MP[:, 4] * d + lift
    return moved


def uncenter(theta_MP: Floats, origin: Origin) -> Floats:
    """Convert coordinates about `origin` back: the inverse of `center`."""
    return center(theta_MP, (-origin[0], -origin[1], -origin[2]))


def bisect(
    is_below: Callable[[Floats], Bools],
    low: Floats | float,
    high: Floats | float,
    num_halvings: int,
) -> tuple[Floats, Floats]:
    """Find by bisection where `is_below` changes from true to false, elementwise.

    Args:
        is_below: Function that is true below the searched values, and false above.
        low: Lower bounds, where `is_below` is true.
        high: Upper bounds, where `is_below` is false.
        num_halvings: Number of halvings.

    Returns:
        The bounds after the halvings.
    """
    low, high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
    for _ in range(num_halvings):
        middle = (low + high) / 2
        is_middle_below = is_below(middle)
        low, high = np.where(is_middle_below, middle, low), np.where(is_middle_below, high, middle)
    return low, high


def compute_log_loss(theta_MP: Floats, n_R: Floats, d_R: Floats) -> Floats:
    """Compute the log of the law's loss, problems by runs (M, R)."""
    e, a, b, alpha, beta, k = theta_MP.T[:, :, None]
    return np.logaddexp(e, k * np.logaddexp(a - alpha * n_R, b - beta * d_R))


def compute_residuals(theta_MP: Floats, points: Points) -> Floats:
    """Compute predicted minus measured log loss (M, R) by a fast method that is exact for
    coordinates of order one.
    """
    e, a, b, alpha, beta, k = theta_MP.T[:, :, None]
    inner = _compute_clipped_exp(a - alpha * points.n) + _compute_clipped_exp(b - beta * points.d)
    if (theta_MP[:, 5] != 1.0).any():
        inner = _compute_clipped_exp(k * np.log(inner))
    return np.log(np.exp(e) + inner) - points.y


def compute_huber(residual_MR: Floats) -> Floats:
    """Compute the Huber function: half the square within `HUBER_DELTA`, linear beyond."""
    clipped = np.clip(residual_MR, -HUBER_DELTA, HUBER_DELTA)
    return clipped * (residual_MR - 0.5 * clipped)


def compute_objective(theta_MP: Floats, points: Points, weight_MR: Floats) -> Floats:
    """Compute the sum over runs of weight * Huber of the log-loss residual, for each problem
    (M,).
    """
    return (weight_MR * compute_huber(compute_residuals(theta_MP, points))).sum(axis=1)


def _compute_clipped_exp(exponent: Floats) -> Floats:
    return np.exp(np.clip(exponent, -_FAR, _FAR, out=exponent), out=exponent)


def compute_derivatives(
    theta_MP: Floats,
    points: Points,
    weight_MR: Floats,
    delta: float,
    *,
    has_unit_k: bool,
) -> tuple[Floats, Floats, Floats]:
    """Compute objective (M,), gradient (P, M), and Hessian (P, P, M), all exact. With
    `has_unit_k`, k is known to be 1 and its row stays 0.

    Every entry is a sum over runs of a scalar of the run times a monomial of its n and d. Each pair
    of terms needs one field of scalars (M, R), and one product of that field with the monomials.
    """
    return (_differentiate_unit_k if has_unit_k else _differentiate_coupled)(
        theta_MP, points, weight_MR, delta
    )


class _Sums:
    """An accumulator of sums over runs into a gradient and a Hessian.

    The log loss depends on e, k, and the two terms u = a - alpha n and v = b - beta d. Indices are
    those of the coordinates: e 0, a 1, b 2, alpha 3, beta 4, k 5. Those of a term are (a, alpha), 1
    and 3, or (b, beta), 2 and 4. A field has one scalar per problem and run (M, R).
    """

    def __init__(self, points: Points, num_problems: int) -> None:
        n, d = points.n, points.d
        constant = np.ones_like(n)
        self._by_u = np.stack([constant, -n, n * n], axis=1)
        self._by_v = np.stack([constant, -d, d * d], axis=1)
        self._by_both = np.stack([constant, -n, -d, n * d], axis=1)
        self.gradient = np.zeros((NUM_COORDINATES, num_problems))
        self.hessian = np.zeros((NUM_COORDINATES, NUM_COORDINATES, num_problems))

    def _set(self, i: int, j: int, value: Floats) -> None:
        self.hessian[i, j] = self.hessian[j, i] = value

    def add_slope(self, i: int, field_MR: Floats) -> None:
        """Add the gradient of e or k."""
        self.gradient[i] = field_MR.sum(axis=1)

    def add_slope_of_term(self, i: int, field_MR: Floats) -> None:
        """Add the gradient of (a, alpha), i = 1, or (b, beta), i = 2."""
        self.gradient[[i, i + 2]] = (field_MR @ (self._by_u if i == 1 else self._by_v)[:, :2]).T

    def add_pair(self, i: int, j: int, field_MR: Floats) -> None:
        """Add the Hessian between e and k."""
        self._set(i, j, field_MR.sum(axis=1))

    def add_with_term(self, i: int, j: int, field_MR: Floats) -> None:
        """Add the Hessian between e or k (i) and (a, alpha) or (b, beta) (j)."""
        first, second = (field_MR @ (self._by_u if j == 1 else self._by_v)[:, :2]).T
        self._set(i, j, first)
        self._set(i, j + 2, second)

    def add_within_term(self, i: int, field_MR: Floats) -> None:
        """Add the Hessian of (a, alpha) or (b, beta)."""
        first, second, third = (field_MR @ (self._by_u if i == 1 else self._by_v)).T
        self._set(i, i, first)
        self._set(i, i + 2, second)
        self._set(i + 2, i + 2, third)

    def add_between_terms(self, field_MR: Floats) -> None:
        """Add the Hessian between (a, alpha) and (b, beta)."""
        ab, alpha_b, a_beta, alpha_beta = (field_MR @ self._by_both).T
        self._set(1, 2, ab)
        self._set(3, 2, alpha_b)
        self._set(1, 4, a_beta)
        self._set(3, 4, alpha_beta)


def _differentiate_huber(
    residual: Floats, weight_MR: Floats, delta: float
) -> tuple[Floats, Floats, Floats]:
    """Compute the objective, its slope per run, and its curvature per run minus that slope."""
    clipped = np.clip(residual, -delta, delta)
    pull = weight_MR * clipped
    total = (pull * (residual - 0.5 * clipped)).sum(axis=1)
    return total, pull, weight_MR * (clipped == residual) - pull


def _differentiate_unit_k(
    theta_MP: Floats, points: Points, weight_MR: Floats, delta: float
) -> tuple[Floats, Floats, Floats]:
    """Compute the derivatives for k = 1. With the shares p of each term in the loss, the Hessian of
    log L is p on the diagonal blocks minus the product of gradients.
    """
    e, a, b, alpha, beta = theta_MP.T[:5, :, None]
    constant = np.exp(e)
    u = _compute_clipped_exp(a - alpha * points.n)
    v = _compute_clipped_exp(b - beta * points.d)
    loss = constant + u + v
    f, pull, curve = _differentiate_huber(np.log(loss) - points.y, weight_MR, delta)
    share_e, share_u, share_v = constant / loss, u / loss, v / loss
    sums = _Sums(points, len(theta_MP))
    pull_e, pull_u, pull_v = pull * share_e, pull * share_u, pull * share_v
    curve_e, curve_u, curve_v = curve * share_e, curve * share_u, curve * share_v
    sums.add_slope(0, pull_e)
    sums.add_slope_of_term(1, pull_u)
    sums.add_slope_of_term(2, pull_v)
    sums.add_pair(0, 0, curve_e * share_e + pull_e)
    sums.add_with_term(0, 1, curve_e * share_u)
    sums.add_with_term(0, 2, curve_e * share_v)
    sums.add_within_term(1, curve_u * share_u + pull_u)
    sums.add_within_term(2, curve_v * share_v + pull_v)
    sums.add_between_terms(curve_u * share_v)
    return f, sums.gradient, sums.hessian


def _differentiate_coupled(
    theta_MP: Floats, points: Points, weight_MR: Floats, delta: float
) -> tuple[Floats, Floats, Floats]:
    """Compute the derivatives for any k. Let p be the reducible share of the loss, q the share of
    the N-term in it, and m the log of the inner sum.

    With respect to (e, k m), the Hessian of log L is the diagonal matrix of (1 - p, p) minus the
    outer product of that vector. The chain rule gives the derivatives by the coordinates in k m.
    """
    e, a, b, alpha, beta, k = theta_MP.T[:, :, None]
    u, v = _compute_clipped_exp(a - alpha * points.n), _compute_clipped_exp(b - beta * points.d)
    inner = u + v
    q, q_tokens, m = u / inner, v / inner, np.log(inner)
    reducible = _compute_clipped_exp(k * m)
    loss = np.exp(e) + reducible
    p = reducible / loss
    f, pull, curve = _differentiate_huber(np.log(loss) - points.y, weight_MR, delta)
    by_e, by_u, by_v, by_k = 1 - p, k * p * q, k * p * q_tokens, p * m
    sums = _Sums(points, len(theta_MP))
    pull_e, pull_p = pull * by_e, pull * p
    bend, cross = (k * k - k) * pull_p, pull_p * (1 + k * m)
    curve_u, curve_v, curve_k = curve * by_u, curve * by_v, curve * by_k
    sums.add_slope(0, pull_e)
    sums.add_slope_of_term(1, pull * by_u)
    sums.add_slope_of_term(2, pull * by_v)
    sums.add_slope(5, pull * by_k)
    sums.add_pair(0, 0, curve * by_e * by_e + pull_e)
    sums.add_pair(0, 5, curve_k * by_e)
    sums.add_pair(5, 5, curve_k * by_k + pull_p * m * m)
    sums.add_with_term(0, 1, curve_u * by_e)
    sums.add_with_term(0, 2, curve_v * by_e)
    sums.add_with_term(5, 1, curve_u * by_k + cross * q)
    sums.add_with_term(5, 2, curve_v * by_k + cross * q_tokens)
    sums.add_within_term(1, curve_u * by_u + (bend * q + k * pull_p) * q)
    sums.add_within_term(2, curve_v * by_v + (bend * q_tokens + k * pull_p) * q_tokens)
    sums.add_between_terms(curve_u * by_v + bend * q * q_tokens)
    return f, sums.gradient, sums.hessian
