"""The objective of law fits with exact derivatives, for many small robust fits at once.

A law is a point in six coordinates, theta = (e, a, b, alpha, beta, k), and predicts

    log L = logsumexp(e, k * logsumexp(a - alpha * n, b - beta * d)),    n = log N, d = log D,

so E = exp(e), A = exp(a), B = exp(b). With k = 1 it is the form of Chinchilla (arXiv 2203.15556,
section 3.3), otherwise the coupled form E + (A N^-alpha + B D^-beta)^k. A form (`forms.FormShape`)
defines which coordinates are free and which are fixed. The objective is the sum over runs of weight
* Huber(log L - log loss).

Shape suffixes: M problems, R runs, P coordinates, Q free coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

HUBER_DELTA = 1e-3  # arXiv 2203.15556, section D.1
NUM_COORDINATES = 6
# Bound of the exponents of exp, which avoids overflow and the log of 0
_FAR = 300.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Points:
    """Runs in logs relative to their mean, so that the coordinates of a law are of order one."""

    n: Floats
    d: Floats
    y: Floats
    """Log loss."""


def bisect(
    up: Callable[[Floats], NDArray[np.bool_]],
    low: Floats | float,
    high: Floats | float,
    num_halvings: int,
) -> tuple[Floats, Floats]:
    """Find by bisection where `up` changes from true, at `low`, to false; elementwise, with a fixed
    number of halvings.
    """
    low, high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
    for _ in range(num_halvings):
        middle = (low + high) / 2
        rising = up(middle)
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    return low, high


def log_loss(theta_MP: Floats, n_R: Floats, d_R: Floats) -> Floats:
    """Compute the log of the law's loss, problems by runs (M, R)."""
    e, a, b, alpha, beta, k = (theta_MP[:, i, None] for i in range(NUM_COORDINATES))
    return np.logaddexp(e, k * np.logaddexp(a - alpha * n_R, b - beta * d_R))


def residuals(theta_MP: Floats, points: Points) -> Floats:
    """Compute predicted minus measured log loss (M, R) by a fast method that is exact for
    coordinates of order one.
    """
    e, a, b, alpha, beta, k = (theta_MP[:, i, None] for i in range(NUM_COORDINATES))
    inner = _exp_clipped(a - alpha * points.n) + _exp_clipped(b - beta * points.d)
    if (theta_MP[:, 5] != 1.0).any():
        inner = _exp_clipped(k * np.log(inner))
    return np.log(np.exp(e) + inner) - points.y


def huber(residual_MR: Floats, delta: float = HUBER_DELTA) -> Floats:
    """Compute the Huber function: half the square within delta, linear beyond."""
    clipped = np.clip(residual_MR, -delta, delta)
    return clipped * (residual_MR - 0.5 * clipped)


def objective(
    theta_MP: Floats, points: Points, weight_MR: Floats, delta: float = HUBER_DELTA
) -> Floats:
    """Compute the sum over runs of weight * Huber of the log-loss residual, for each problem
    (M,).
    """
    return np.asarray((weight_MR * huber(residuals(theta_MP, points), delta)).sum(axis=1))


def _exp_clipped(exponent: Floats) -> Floats:
    return np.exp(np.clip(exponent, -_FAR, _FAR, out=exponent), out=exponent)


def derivatives(
    theta_MP: Floats,
    points: Points,
    weight_MR: Floats,
    delta: float = HUBER_DELTA,
    *,
    plain: bool = False,
) -> tuple[Floats, Floats, Floats]:
    """Compute objective (M,), gradient (P, M), and Hessian (P, P, M), all exact. With `plain`, k is
    known to be 1 and its row is left out.

    Every entry is a sum over runs of a scalar of the run times a monomial of its n and d. It is
    computed as one field of scalars (M, R) per pair of terms and one product with the monomials (R,
    few).
    """
    return (_differentiate_plain if plain else _differentiate_coupled)(
        theta_MP, points, weight_MR, delta
    )


class _Sums:
    """An accumulator of sums over runs into a gradient and a Hessian. Terms: e, u = a - alpha n, v
    = b - beta d, k.
    """

    def __init__(self, points: Points, num_problems: int) -> None:
        n, d = points.n, points.d
        ones = np.ones_like(n)
        self._by_u, self._by_v = (
            np.stack([ones, -n, n * n], axis=1),
            np.stack([ones, -d, d * d], axis=1),
        )
        self._by_both = np.stack([ones, -n, -d, n * d], axis=1)
        self.gradient = np.zeros((NUM_COORDINATES, num_problems))
        self.hessian = np.zeros((NUM_COORDINATES, NUM_COORDINATES, num_problems))

    def _set(self, i: int, j: int, value: Floats) -> None:
        self.hessian[i, j] = self.hessian[j, i] = value

    def slope(self, i: int, field_MR: Floats) -> None:
        """Add the gradient of e or k."""
        self.gradient[i] = field_MR.sum(axis=1)

    def slope_of_term(self, i: int, field_MR: Floats) -> None:
        """Add the gradient of (a, alpha), i = 1, or (b, beta), i = 2."""
        self.gradient[[i, i + 2]] = (field_MR @ (self._by_u if i == 1 else self._by_v)[:, :2]).T

    def pair(self, i: int, j: int, field_MR: Floats) -> None:
        """Add the Hessian between e and k."""
        self._set(i, j, field_MR.sum(axis=1))

    def with_term(self, i: int, j: int, field_MR: Floats) -> None:
        """Add the Hessian between e or k (i) and (a, alpha) or (b, beta) (j)."""
        first, second = (field_MR @ (self._by_u if j == 1 else self._by_v)[:, :2]).T
        self._set(i, j, first)
        self._set(i, j + 2, second)

    def within_term(self, i: int, field_MR: Floats) -> None:
        """Add the Hessian of (a, alpha) or (b, beta)."""
        first, second, third = (field_MR @ (self._by_u if i == 1 else self._by_v)).T
        self._set(i, i, first)
        self._set(i, i + 2, second)
        self._set(i + 2, i + 2, third)

    def between_terms(self, field_MR: Floats) -> None:
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


def _differentiate_plain(
    theta_MP: Floats, points: Points, weight_MR: Floats, delta: float
) -> tuple[Floats, Floats, Floats]:
    """Compute the derivatives for k = 1. With the shares p of each term in the loss, the Hessian of
    log L is p on the diagonal blocks minus the product of gradients.
    """
    e, a, b, alpha, beta = (theta_MP[:, i, None] for i in range(5))
    constant, u, v = (
        np.exp(e),
        _exp_clipped(a - alpha * points.n),
        _exp_clipped(b - beta * points.d),
    )
    loss = constant + u + v
    f, pull, curve = _differentiate_huber(np.log(loss) - points.y, weight_MR, delta)
    share_e, share_u, share_v = constant / loss, u / loss, v / loss
    sums = _Sums(points, len(theta_MP))
    pull_e, pull_u, pull_v = pull * share_e, pull * share_u, pull * share_v
    curve_e, curve_u, curve_v = curve * share_e, curve * share_u, curve * share_v
    sums.slope(0, pull_e)
    sums.slope_of_term(1, pull_u)
    sums.slope_of_term(2, pull_v)
    sums.pair(0, 0, curve_e * share_e + pull_e)
    sums.with_term(0, 1, curve_e * share_u)
    sums.with_term(0, 2, curve_e * share_v)
    sums.within_term(1, curve_u * share_u + pull_u)
    sums.within_term(2, curve_v * share_v + pull_v)
    sums.between_terms(curve_u * share_v)
    return f, sums.gradient, sums.hessian


def _differentiate_coupled(
    theta_MP: Floats, points: Points, weight_MR: Floats, delta: float
) -> tuple[Floats, Floats, Floats]:
    """Compute the derivatives for any k. Let p be the reducible share of the loss, q the share of
    the N-term in it, and m the log of the inner sum.

    The Hessian of log L is (1 - p) on e and p on k m, minus the product of gradients; that of k m
    follows.
    """
    e, a, b, alpha, beta, k = (theta_MP[:, i, None] for i in range(NUM_COORDINATES))
    u, v = _exp_clipped(a - alpha * points.n), _exp_clipped(b - beta * points.d)
    inner = u + v
    q, q_tokens, m = u / inner, v / inner, np.log(inner)
    reducible = _exp_clipped(k * m)
    loss = np.exp(e) + reducible
    p = reducible / loss
    f, pull, curve = _differentiate_huber(np.log(loss) - points.y, weight_MR, delta)
    by_e, by_u, by_v, by_k = 1 - p, k * p * q, k * p * q_tokens, p * m
    sums = _Sums(points, len(theta_MP))
    pull_e, pull_p = pull * by_e, pull * p
    bend, cross = (k * k - k) * pull_p, pull_p * (1 + k * m)
    curve_u, curve_v, curve_k = curve * by_u, curve * by_v, curve * by_k
    sums.slope(0, pull_e)
    sums.slope_of_term(1, pull * by_u)
    sums.slope_of_term(2, pull * by_v)
    sums.slope(5, pull * by_k)
    sums.pair(0, 0, curve * by_e * by_e + pull_e)
    sums.pair(0, 5, curve_k * by_e)
    sums.pair(5, 5, curve_k * by_k + pull_p * m * m)
    sums.with_term(0, 1, curve_u * by_e)
    sums.with_term(0, 2, curve_v * by_e)
    sums.with_term(5, 1, curve_u * by_k + cross * q)
    sums.with_term(5, 2, curve_v * by_k + cross * q_tokens)
    sums.within_term(1, curve_u * by_u + (bend * q + k * pull_p) * q)
    sums.within_term(2, curve_v * by_v + (bend * q_tokens + k * pull_p) * q_tokens)
    sums.between_terms(curve_u * by_v + bend * q * q_tokens)
    return f, sums.gradient, sums.hessian
