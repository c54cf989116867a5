"""The optimiser under the laws: many small robust fits at once, deterministic, never a lone local search.

A law is a point of six coordinates, theta = (e, a, b, alpha, beta, k), and says

    log L = logsumexp(e, k * logsumexp(a - alpha * n, b - beta * d)),    n = log N, d = log D,

so E = exp(e), A = exp(a), B = exp(b). With k = 1 it is the form of Chinchilla (arXiv 2203.15556, section 3.3),
otherwise the coupled form E + (A N^-alpha + B D^-beta)^k. The objective is the sum over runs of weight *
Huber(log L - log loss).

Two steps. A grid over E, k and the exponents, in which A and B are profiled out (variable projection: there the
law is linear in them), gives starts in every basin; a damped Newton search with exact derivatives, vectorised
over problems, polishes them. Letters: M problems, R runs, P coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

HUBER_DELTA = 1e-3  # arXiv 2203.15556, section D.1
NUM_COORDINATES = 6
MAX_EXPONENT = 10.0  # the Gemstones set with the degenerate optimum has 4.98: see it, then warn
_LOWER_E = 12.0  # E may fall to exp(-12) of the lowest loss: to nothing
_EASING = ((3e-2, 40), (1e-2, 20), (3e-3, 20))  # Huber deltas before the last, and steps at each
_EXACT, _REFIT, _ROUGH = 1e-9, 1e-6, 1e-4  # a search is over when a step would gain this share of the objective
_FINALISTS = 5
_CHUNK = 50_000  # problems * runs held at once: memory stays flat in the number of problems


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Points:
    """Runs in centred logs, so that the coordinates of a law are of order one."""

    n: Floats
    d: Floats
    y: Floats
    """Log loss."""

    @property
    def lower(self) -> Floats:
        """Lowest value of each coordinate."""
        floor = float(self.y.min())
        return np.array([floor - _LOWER_E, -60.0, -60.0, 1e-3, 1e-3, 0.2])

    @property
    def upper(self) -> Floats:
        """Highest value of each coordinate."""
        return np.array([float(self.y.max()) + 1.0, 60.0, 60.0, MAX_EXPONENT, MAX_EXPONENT, 5.0])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Solutions:
    """Where the search ended, one row per problem."""

    theta: Floats
    """(M, P)."""
    objective: Floats
    """(M,)."""
    converged: NDArray[np.bool_]
    """The next Newton step would gain less than a millionth of the objective (best fits: a billionth)."""


def log_loss(theta_MP: Floats, n_R: Floats, d_R: Floats) -> Floats:
    """Log of the law's loss, problems by runs (M, R)."""
    e, a, b, alpha, beta, k = (theta_MP[:, i, None] for i in range(NUM_COORDINATES))
    result: Floats = np.logaddexp(e, k * np.logaddexp(a - alpha * n_R, b - beta * d_R))
    return result


def _huber(residual_MR: Floats, delta: float) -> Floats:
    size = np.abs(residual_MR)
    result: Floats = np.where(size <= delta, 0.5 * residual_MR**2, delta * (size - 0.5 * delta))
    return result


def objective(theta_MP: Floats, points: Points, weight_MR: Floats, delta: float = HUBER_DELTA) -> Floats:
    """Sum over runs of weight * Huber of the log-loss residual, for each problem (M,)."""
    residual_MR = log_loss(theta_MP, points.n, points.d) - points.y
    total: Floats = (weight_MR * _huber(residual_MR, delta)).sum(axis=1)
    return total


def _gram(x_MRP: Floats, weight_MR: Floats) -> Floats:
    result: Floats = np.swapaxes(x_MRP * weight_MR[:, :, None], 1, 2) @ x_MRP
    return result


def derivatives(
    theta_MP: Floats, points: Points, weight_MR: Floats, delta: float = HUBER_DELTA
) -> tuple[Floats, Floats, Floats]:
    """Objective (M,), gradient (M, P) and Hessian (M, P, P), exact.

    With p the reducible share of the loss, q the share of the N-term in it and m the inner logsumexp, the
    second derivatives of log L are three rank-one terms per run (each logsumexp of two adds one) and m's
    cross terms with k.
    """
    e, a, b, alpha, beta, k = (theta_MP[:, i, None] for i in range(NUM_COORDINATES))
    u = a - alpha * points.n
    m = np.logaddexp(u, b - beta * points.d)
    z = np.logaddexp(e, k * m)
    q, p = np.exp(u - m), np.exp(k * m - z)
    zero, one = np.zeros_like(q), np.ones_like(q)
    inner = np.stack([zero, q, 1 - q, -q * points.n, -(1 - q) * points.d, zero], axis=2)
    outer = k[:, :, None] * inner
    outer[:, :, 5] = m
    jacobian = p[:, :, None] * outer
    jacobian[:, :, 0] = 1 - p
    contrast = -outer
    contrast[:, :, 0] = 1.0
    split = np.stack([zero, one, -one, -points.n * one, points.d * one, zero], axis=2)

    residual = z - points.y
    pull = weight_MR * np.clip(residual, -delta, delta)
    gradient = (pull[:, None, :] @ jacobian)[:, 0, :]
    hessian = _gram(jacobian, weight_MR * (np.abs(residual) <= delta))
    hessian += _gram(contrast, pull * p * (1 - p)) + _gram(split, pull * p * k * q * (1 - q))
    cross = ((pull * p)[:, None, :] @ inner)[:, 0, :]
    hessian[:, 5, :] += cross
    hessian[:, :, 5] += cross
    return (weight_MR * _huber(residual, delta)).sum(axis=1), gradient, hessian


def polish(theta_MP: Floats, points: Points, weight_MR: Floats, *, dim: int, max_steps: int = 300) -> Solutions:
    """Damped Newton search from every start within the bounds; coordinates from `dim` on stay fixed.

    With a delta of 1e-3 the Huber objective is nearly a sum of absolute values: kinked, and flat for Newton.
    So the search starts with a wide delta, nearly least squares, and narrows it.
    """
    parts = max(1, -(-len(theta_MP) * points.n.size // _CHUNK))
    theta, f = np.clip(theta_MP, points.lower, points.upper), np.empty(len(theta_MP))
    converged = np.zeros(len(theta_MP), dtype=bool)
    for part in np.array_split(np.arange(len(theta_MP)), parts):
        eased = _eased(theta[part], points, weight_MR[part], dim)
        theta[part], f[part], converged[part] = _descend(
            eased, points, weight_MR[part], dim, max_steps, HUBER_DELTA, _REFIT
        )
    return Solutions(theta=theta, objective=f, converged=converged)


def polish_best(theta_MP: Floats, points: Points, weight_R: Floats, *, dim: int, max_steps: int = 300) -> Solutions:
    """`polish` for many starts of one problem: those that met on the way go on as one, the best few to the end."""
    weight_MR = np.broadcast_to(weight_R, (len(theta_MP), len(weight_R)))
    theta = _eased(np.clip(theta_MP, points.lower, points.upper), points, weight_MR, dim)
    order = np.argsort(objective(theta, points, weight_MR), kind="stable")
    met: list[int] = []
    for index in order:
        if all(np.abs(theta[index] - theta[other]).max() > 1e-3 for other in met):
            met.append(int(index))
    met = met[:_FINALISTS]
    ends, f, converged = _descend(theta[met], points, weight_MR[met], dim, max_steps, HUBER_DELTA, _EXACT)
    return Solutions(theta=ends, objective=f, converged=converged)


def _eased(theta: Floats, points: Points, weight_MR: Floats, dim: int) -> Floats:
    for delta, steps in _EASING:
        theta, _, _ = _descend(theta, points, weight_MR, dim, steps, delta, _ROUGH)
    return theta


def _descend(
    start: Floats, points: Points, weight_MR: Floats, dim: int, max_steps: int, delta: float, tolerance: float
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """The search at one delta: theta, objective, and whether the next step would gain under the tolerance.

    Each step solves in the eigenbasis of the Hessian with absolute eigenvalues (a saddle repels), damped by
    Levenberg's rule; coordinates held by a bound leave the system; finished problems leave the batch.
    """
    lower, upper = points.lower, points.upper
    done, done_f, converged = start.copy(), np.empty(len(start)), np.zeros(len(start), dtype=bool)
    alive = np.arange(len(start))
    theta, weight = done.copy(), weight_MR
    f, g, h = derivatives(theta, points, weight, delta)
    damping = np.full(len(start), 1e-3)
    for _ in range(max_steps):
        step, gain = _newton_step(theta, g[:, :dim], h[:, :dim, :dim], damping, lower, upper)
        finished = gain <= tolerance * f + 1e-24
        stop = finished | (damping > 1e8)
        done[alive], done_f[alive] = theta, f
        converged[alive] = finished
        if stop.all():
            break
        keep = ~stop
        alive, theta, weight = alive[keep], theta[keep], weight[keep]
        f, g, h, damping, step = f[keep], g[keep], h[keep], damping[keep], step[keep]
        trial = theta.copy()
        trial[:, :dim] = np.clip(trial[:, :dim] + step, lower[:dim], upper[:dim])
        new_f, new_g, new_h = derivatives(trial, points, weight, delta)
        better = new_f < f
        theta[better], f[better], g[better], h[better] = trial[better], new_f[better], new_g[better], new_h[better]
        damping = np.where(better, np.maximum(damping / 5, 1e-14), np.maximum(damping * 6, 1e-8))
    return done, done_f, converged


def _newton_step(
    theta: Floats, gradient: Floats, hessian: Floats, damping: Floats, lower: Floats, upper: Floats
) -> tuple[Floats, Floats]:
    """The damped step (M, dim), and what the undamped one promises to gain (M,)."""
    dim = gradient.shape[1]
    at = theta[:, :dim]
    held = ((at <= lower[:dim]) & (gradient > 0)) | ((at >= upper[:dim]) & (gradient < 0))
    g = np.where(held, 0.0, gradient)
    h = np.where(held[:, :, None] | held[:, None, :], 0.0, hessian)
    values, vectors = np.linalg.eigh(h)
    size = np.abs(values)
    largest = np.maximum(size.max(axis=1, keepdims=True), 1e-300)
    along = (g[:, None, :] @ vectors)[:, 0, :]
    gain = 0.5 * (along**2 / np.maximum(size, 1e-12 * largest)).sum(axis=1)
    scaled = along / (np.maximum(size, 1e-12 * largest) + damping[:, None] * largest)
    step = -(vectors @ scaled[:, :, None])[:, :, 0]
    longest = np.abs(step).max(axis=1, keepdims=True)
    return step * np.minimum(1.0, 2.0 / np.maximum(longest, 1e-300)), gain


def grid_starts(points: Points, weight_R: Floats, *, coupled: bool, num_starts: int) -> Floats:
    """The best cells of the profiled grid, at most one per neighbourhood, best first (num_starts, P).

    Given E, k and the exponents, (L - E)^(1/k) is linear in A and B; they follow from least squares on relative
    errors of L, held at zero or above.
    """
    shares = np.array([0.02, 0.3, 0.6, 0.8, 0.92]) if coupled else np.array([0.01, 0.2, 0.4, 0.6, 0.75, 0.87, 0.95])
    powers = np.array([0.4, 0.7, 1.0, 1.6, 2.6]) if coupled else np.array([1.0])
    exponents = np.geomspace(0.03, 6.0, 9 if coupled else 14)
    cells = np.meshgrid(shares, powers, exponents, exponents, indexing="ij")
    share, power, first, second = (cell.reshape(-1) for cell in cells)
    theta = np.empty((len(share), NUM_COORDINATES))
    theta[:, 0] = np.log(share) + points.y.min()
    theta[:, 3], theta[:, 4], theta[:, 5] = first / power, second / power, power
    parts = max(1, -(-len(theta) * points.n.size // _CHUNK))
    scores = []
    for part in np.array_split(np.arange(len(theta)), parts):
        theta[part] = _profile(theta[part], points, weight_R)
        scores.append(objective(theta[part], points, weight_R[None, :]))
    return _distinct(theta, np.concatenate(scores), num_starts)


def _profile(theta: Floats, points: Points, weight_R: Floats) -> Floats:
    """Fill in a and b: non-negative least squares in two unknowns, in closed form."""
    e, alpha, beta, k = (theta[:, i, None] for i in (0, 3, 4, 5))
    reducible = np.exp(points.y) - np.exp(e)
    target = reducible ** (1 / k)
    importance = weight_R * (k * reducible / np.exp(points.y)) ** 2 / target**2
    x, y = np.exp(-alpha * points.n), np.exp(-beta * points.d)
    xx, xy, yy = ((importance * r * s).sum(axis=1) for r, s in ((x, x), (x, y), (y, y)))
    xt, yt = (importance * x * target).sum(axis=1), (importance * y * target).sum(axis=1)
    determinant = np.maximum(xx * yy - xy**2, 1e-12 * xx * yy)
    first, second = (yy * xt - xy * yt) / determinant, (xx * yt - xy * xt) / determinant
    lone_first, lone_second = xt / xx, yt / yy
    first, second = (
        np.where(second < 0, lone_first, np.where(first < 0, 0.0, first)),
        np.where(first < 0, lone_second, np.where(second < 0, 0.0, second)),
    )
    least = 1e-6 * np.maximum(lone_first, lone_second)  # a term of nothing has no slope to follow
    filled = theta.copy()
    filled[:, 1], filled[:, 2] = np.log(np.maximum(first, least)), np.log(np.maximum(second, least))
    return filled


def _distinct(theta: Floats, score: Floats, count: int) -> Floats:
    """The best `count` rows of which no two have the same exponents k * alpha and k * beta within a quarter."""
    chosen: list[int] = []
    slopes = np.log(theta[:, 3:5] * theta[:, 5:])
    for index in np.argsort(score, kind="stable"):
        gaps = np.abs(slopes[chosen] - slopes[index]).max(axis=1) if chosen else np.array([np.inf])
        if gaps.min() > 0.25:
            chosen.append(int(index))
        if len(chosen) == count:
            break
    return theta[chosen]
