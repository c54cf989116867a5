"""Starts for a search: a grid over E, k and the exponents with A and B profiled out (variable projection).

Given E, k and the exponents, (L - E)^(1/k) is linear in A and B: they follow from least squares on relative errors
of L, held above zero. For one E and k all pairs of exponents need one matrix product over the runs.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from scaling_fits.laws import solver
from scaling_fits.laws.forms import Shape
from scaling_fits.laws.solver import NUM_COORDINATES, Floats, Points

_NEIGHBOURS = 0.25  # in log k * alpha and log k * beta: closer cells are one start
_SHORT_LIST = 3  # cells judged by the robust objective, per start wanted
_DEEPEST = -300.0  # logs of terms so far under their largest count for nothing


def grid_starts(points: Points, weight_R: Floats, shape: Shape, num_starts: int) -> Floats:
    """The best cells of the profiled grid, at most one per neighbourhood, best first (num_starts, P)."""
    slabs = [_slab(points, weight_R, shape, share, power) for share, power in product(shape.shares, shape.powers)]
    theta, misfit = np.concatenate([slab[0] for slab in slabs]), np.concatenate([slab[1] for slab in slabs])
    theta = theta[_distinct(theta, misfit, _SHORT_LIST * num_starts)]
    score = solver.objective(theta, points, weight_R[None, :])
    return theta[np.argsort(score, kind="stable")[:num_starts]]


def _slab(points: Points, weight_R: Floats, shape: Shape, share: float, power: float) -> tuple[Floats, Floats]:
    """The cells of one E and k with A and B filled in (G, P), and their sums of squared relative errors (G,).

    The terms are taken over their target, and that over its largest, in logs: no unit of N or D is too far out.
    """
    space, slopes = shape.space, np.array(shape.slopes) / power
    tied = space.free[3] == space.free[4]
    alpha, beta = slopes, slopes if space.free[4] is not None else np.array([space.fixed[4]])
    log_e = np.log(share) + points.y.min() if space.free[0] is not None else space.fixed[0]
    left = -np.expm1(log_e - points.y)
    target, importance = (points.y + np.log(left)) / power, weight_R * (power * left) ** 2
    log_x, log_y = -alpha[:, None] * points.n - target, -beta[:, None] * points.d - target
    top_x, top_y = log_x.max(axis=1), log_y.max(axis=1)
    x, y = (np.exp(np.maximum(log - top[:, None], _DEEPEST)) for log, top in ((log_x, top_x), (log_y, top_y)))
    first, second, misfit = _least_squares(x, y, importance)
    theta = np.zeros((len(alpha), len(beta), NUM_COORDINATES))
    theta[:, :, 0], theta[:, :, 5] = log_e, power
    theta[:, :, 1], theta[:, :, 2] = np.log(first) - top_x[:, None], np.log(second) - top_y
    theta[:, :, 3], theta[:, :, 4] = alpha[:, None], beta
    if tied:
        same = np.arange(len(alpha))
        return theta[same, same], misfit[same, same]
    return theta.reshape(-1, NUM_COORDINATES), misfit.reshape(-1)


def _least_squares(x_AR: Floats, y_BR: Floats, importance_R: Floats) -> tuple[Floats, Floats, Floats]:
    """For every pair of rows the coefficients above zero whose sum is nearest to 1 (A, B), and the misfit."""
    weighed_x, weighed_y = x_AR * importance_R, y_BR * importance_R
    xx, yy, xy = (weighed_x * x_AR).sum(axis=1)[:, None], (weighed_y * y_BR).sum(axis=1), weighed_x @ y_BR.T
    xt, yt = weighed_x.sum(axis=1)[:, None], weighed_y.sum(axis=1)
    determinant = np.maximum(xx * yy - xy**2, 1e-12 * xx * yy)
    first, second = (yy * xt - xy * yt) / determinant, (xx * yt - xy * xt) / determinant
    lone_first, lone_second = xt / xx, yt / yy
    first, second = (
        np.where(second < 0, lone_first, np.where(first < 0, 0.0, first)),
        np.where(first < 0, lone_second, np.where(second < 0, 0.0, second)),
    )
    first = np.maximum(first, 1e-6 * lone_first)  # a term of nothing has no slope to follow
    second = np.maximum(second, 1e-6 * lone_second)
    misfit = importance_R.sum() - 2 * (first * xt + second * yt)
    return first, second, misfit + first**2 * xx + 2 * first * second * xy + second**2 * yy


def _distinct(theta: Floats, score: Floats, count: int) -> list[int]:
    """The best `count` rows of which no two have the same exponents k * alpha and k * beta within a quarter."""
    chosen: list[int] = []
    slopes = np.log(theta[:, 3:5] * theta[:, 5:])
    free = np.ones(len(theta), dtype=bool)
    for index in np.argsort(score, kind="stable"):
        if free[index]:
            chosen.append(int(index))
            free &= np.abs(slopes - slopes[index]).max(axis=1) > _NEIGHBOURS
            if len(chosen) == count:
                break
    return chosen
