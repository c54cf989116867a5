"""The search for the optimum of a form from many starting points, and for bootstrap refits that
share starting points.

A single problem is solved by a damped Newton search with exact derivatives from many starting
points. For many problems on the same runs (bootstrap refits), the solution of one problem is a
starting point for the others, and its objective under the weights of every other problem is one
matrix product. Shape suffixes: M problems, R runs, P coordinates, Q free coordinates, K laws of a
pool.

Starting points come from a grid over E, k, and the exponents, with A and B eliminated (variable
projection): for given values of the others, (L - E)^(1/k) is linear in A and B, which follow from
least squares on relative errors of L with a lower bound of zero. For one E and k, all pairs of
exponents need a single matrix product over the runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from scaling_fits.laws import solver
from scaling_fits.laws.forms import FormShape
from scaling_fits.laws.solver import HUBER_DELTA, NUM_COORDINATES, Floats, Points

# The Gemstones data set with the degenerate optimum has 4.98, which must be found to be warned of
MAX_EXPONENT = 10.0
MAX_K = 5.0
BLOCK = 512  # Refits solved together, which bounds the memory
_LOWER_E = 12.0  # E may fall to exp(-12) of the lowest loss, which is practically 0
_MAX_LOG = 100.0  # Bound of a and b in centered logs: with a small k they are log loss / k
_EASING = (1e-2, 3e-3)  # Huber deltas before the final one
# A search ends when a step would gain less than this share of the objective
_EXACT, _REFIT, _ROUGH = 1e-10, 1e-6, 1e-3
_FLOOR = 1e-22  # or less than this many squared nats per unit of weight
_MIN_STEP = 1e-40  # Smallest curvature or step, which avoids division by zero
STEPS, _EASED_STEPS = 600, 40
_FINALISTS = 5
_MERGE_DISTANCE = 1e-3  # Distance in theta below which two searches count as one
_ALIKE_DELTAS = (
    2.0  # Distance of log losses in Huber deltas below which two laws are one starting point
)
# Laws of a pool that a problem considers, and runs by which laws are compared
_NUM_LISTED, _NUM_COMPARED = 64, 12
_FEW_RUNS = 60
_MAX_LAST_STEPS = 150  # Maximum steps of problems that have not converged after a short search
_MAX_SHORT_STEPS = 60  # Maximum steps of a search that may not be the best one
_DIFFERENCE = 1e-5  # Step of a coordinate for central differences
_CHUNK = 25_000  # Problems * runs differentiated at once, so that the arrays fit in the cache
# Distance in log k * alpha and log k * beta below which two cells are one starting point
_NEIGHBORHOOD = 0.25
_SHORT_LIST = 3  # Cells evaluated by the robust objective, per starting point
# Lower bound of the log of a term relative to its largest; smaller terms are negligible
_DEEPEST = -300.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Solutions:
    """The end points of searches, one row per problem."""

    theta: Floats
    """Coordinates (M, P)."""
    objective: Floats
    """Objective (M,)."""
    converged: NDArray[np.bool_]
    """Whether the next Newton step would gain less than a millionth of the objective (best fits:
    1e-10)."""


def bounds(shape: FormShape, points: Points) -> tuple[Floats, Floats]:
    """Return the lowest and highest value of each free coordinate (Q,), for runs in centered
    logs.
    """
    low, high = float(points.y.min()), float(points.y.max())
    lower = np.array([low - _LOWER_E, -_MAX_LOG, -_MAX_LOG, 1e-3, 1e-3, shape.least_k])
    upper = np.array([high + 1.0, _MAX_LOG, _MAX_LOG, MAX_EXPONENT, MAX_EXPONENT, MAX_K])
    return lower[shape.first], upper[shape.first]


def polish(
    theta_MP: Floats,
    points: Points,
    weight_MR: Floats,
    shape: FormShape,
    *,
    ease: bool = True,
    exact: bool = False,
    most_steps: int = STEPS,
) -> Solutions:
    """Run a damped Newton search within the bounds from every starting point, one row per problem.

    With a delta of 1e-3, the Huber objective is nearly a sum of absolute values, with kinks and
    little curvature for Newton's method. The search therefore starts with a large delta, which is
    nearly least squares, and reduces it, unless `ease` is off.
    """
    parts = max(1, -(-len(theta_MP) * points.n.size // _CHUNK))
    results = []
    for part in np.array_split(np.arange(len(theta_MP)), parts):
        free, weight = theta_MP[part][:, shape.first], weight_MR[part]
        for delta in _EASING if ease else ():
            free, _, _ = _search_at_delta(free, points, weight, shape, delta, _EASED_STEPS, _ROUGH)
        results.append(
            _search_at_delta(
                free, points, weight, shape, HUBER_DELTA, most_steps, _EXACT if exact else _REFIT
            )
        )
    free, objective, converged = (np.concatenate(column) for column in zip(*results, strict=True))
    return Solutions(theta=shape.theta(free), objective=objective, converged=converged)


def _compute_derivatives(
    free_MQ: Floats, points: Points, weight_MR: Floats, shape: FormShape, delta: float
) -> tuple[Floats, Floats, Floats]:
    """Compute objective (M,), gradient (M, Q), and Hessian (M, Q, Q) in the free coordinates."""
    f, g, h = solver.derivatives(shape.theta(free_MQ), points, weight_MR, delta, plain=shape.plain)
    return f, shape.gradient(g), shape.hessian(h)


def _search_at_delta(
    start_MQ: Floats,
    points: Points,
    weight_MR: Floats,
    shape: FormShape,
    delta: float,
    max_steps: int,
    tolerance: float,
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Search at one delta. Return the coordinates, the objective, and whether the next step would
    gain less than the tolerance.

    Each step solves in the eigenbasis of the Hessian with absolute eigenvalues (a saddle repels),
    damped by Levenberg's rule; coordinates held by a bound leave the system; finished problems
    leave the batch.
    """
    lower, upper = bounds(shape, points)
    done, done_f = np.clip(start_MQ, lower, upper), np.empty(len(start_MQ))
    converged, alive = np.zeros(len(done), dtype=bool), np.arange(len(done))
    at, weight, floor = done.copy(), weight_MR, _FLOOR * weight_MR.sum(axis=1)
    f, g, h = _compute_derivatives(at, points, weight, shape, delta)
    damping = np.full(len(at), 1e-3)
    for _ in range(max_steps):
        step, gain = _compute_newton_step(at, g, h, damping, lower, upper)
        finished = gain <= tolerance * f + floor
        stop = finished | (damping > 1e8)
        done[alive], done_f[alive], converged[alive] = at, f, finished
        if stop.all():
            break
        if stop.any():
            alive, at, weight, floor, f, g, h, damping, step = (
                each[~stop] for each in (alive, at, weight, floor, f, g, h, damping, step)
            )
        trial = np.clip(at + step, lower, upper)
        new_f, new_g, new_h = _compute_derivatives(trial, points, weight, shape, delta)
        better = new_f < f
        at[better], f[better], g[better], h[better] = (
            trial[better],
            new_f[better],
            new_g[better],
            new_h[better],
        )
        damping = np.where(better, np.maximum(damping / 5, 1e-14), np.maximum(damping * 6, 1e-8))
    return done, done_f, converged


def _compute_newton_step(
    at: Floats, gradient: Floats, hessian: Floats, damping: Floats, lower: Floats, upper: Floats
) -> tuple[Floats, Floats]:
    """Compute the damped step (M, Q), and the predicted gain of the undamped one (M,)."""
    is_held = ((at <= lower) & (gradient > 0)) | ((at >= upper) & (gradient < 0))
    # Coordinates at a bound with a gradient pointing outward do not move
    if is_held.any():
        gradient = np.where(is_held, 0.0, gradient)
        hessian = np.where(is_held[:, :, None] | is_held[:, None, :], 0.0, hessian)
    # Solve in the eigenbasis, with absolute eigenvalues
    values, vectors = np.linalg.eigh(hessian)
    size = np.abs(values)
    largest = np.maximum(size.max(axis=1, keepdims=True), _MIN_STEP)
    size = np.maximum(size, 1e-12 * largest)
    projections = (gradient[:, None, :] @ vectors)[:, 0, :]
    gain = 0.5 * (projections * projections / size).sum(axis=1)
    step = -(vectors @ (projections / (size + damping[:, None] * largest))[:, :, None])[:, :, 0]
    # Limit the largest component of a step to 2
    longest = np.maximum(np.abs(step).max(axis=1, keepdims=True), _MIN_STEP)
    return step * np.minimum(1.0, 2.0 / longest), gain


def best_of(
    theta_MP: Floats, points: Points, weight_R: Floats, shape: FormShape, most_steps: int = STEPS
) -> Solutions:
    """Run `polish` for many starting points of one problem. Searches that meet on the way are
    merged, and only the best few continue to the end.
    """
    weight_MR = np.broadcast_to(weight_R, (len(theta_MP), len(weight_R)))
    free = theta_MP[:, shape.first]
    for delta in _EASING:
        free, _, _ = _search_at_delta(free, points, weight_MR, shape, delta, _EASED_STEPS, _ROUGH)
    eased = shape.theta(free)
    order = np.argsort(solver.objective(eased, points, weight_MR), kind="stable")
    kept = eased[order][_select_distant(eased[order], _MERGE_DISTANCE, _FINALISTS)]
    return polish(
        kept, points, weight_MR[: len(kept)], shape, ease=False, exact=True, most_steps=most_steps
    )


def refits(theta_P: Floats, points: Points, weight_MR: Floats, shape: FormShape) -> Solutions:
    """Find the optimum under each row of weights, starting from one law and, with few runs, also
    from the solutions of other rows.

    Under Dirichlet weights of 11 runs or more, 90 to 100 % of the problems end within 1e-3 of the
    result of a search with thirty times the steps. If the law lies at a bound, up to a tenth do not
    converge.
    """
    few = points.n.size <= _FEW_RUNS
    start_MP = np.broadcast_to(theta_P, (len(weight_MR), len(theta_P)))
    best = polish(start_MP, points, weight_MR, shape, ease=few, most_steps=_MAX_SHORT_STEPS)
    if few:
        given = _polish_from_neighbors(best.theta, points, weight_MR, shape)
        best = _take_lower(best, given, np.arange(len(weight_MR)))
    unconverged = np.flatnonzero(~best.converged)
    return _take_lower(
        best,
        polish(
            best.theta[unconverged],
            points,
            weight_MR[unconverged],
            shape,
            ease=False,
            most_steps=_MAX_LAST_STEPS,
        ),
        unconverged,
    )


def _polish_from_neighbors(
    theta_MP: Floats, points: Points, weight_MR: Floats, shape: FormShape
) -> Solutions:
    """Polish each problem from the law of another problem that has the lowest objective under its
    weights, excluding laws similar to its own.
    """
    pool_KP = _remove_duplicates(theta_MP, points)
    scores = weight_MR @ solver.huber(solver.residuals(pool_KP, points)).T
    listed = np.argsort(scores, axis=1, kind="stable")[:, :_NUM_LISTED]
    scores = np.take_along_axis(scores, listed, axis=1)
    marks = _compute_signatures(pool_KP, points)[listed]
    scores[
        (np.abs(marks - _compute_signatures(theta_MP, points)[:, None]) <= _ALIKE_DELTAS).all(
            axis=2
        )
    ] = np.inf
    start_MP = pool_KP[listed[np.arange(len(scores)), scores.argmin(axis=1)]]
    return polish(start_MP, points, weight_MR, shape, ease=False, most_steps=_MAX_SHORT_STEPS)


def _compute_signatures(theta_MP: Floats, points: Points) -> Floats:
    """Compute the log losses of laws at up to a dozen of the runs, in units of Huber's delta, by
    which laws are compared.
    """
    step_slice = slice(None, None, -(-points.n.size // _NUM_COMPARED))
    sampled_points = Points(n=points.n[step_slice], d=points.d[step_slice], y=points.y[step_slice])
    return solver.residuals(theta_MP, sampled_points) / HUBER_DELTA


def _remove_duplicates(theta_MP: Floats, points: Points) -> Floats:
    """Remove rows whose log losses equal those of an earlier row."""
    return theta_MP[
        np.sort(
            np.unique(np.round(_compute_signatures(theta_MP, points)), axis=0, return_index=True)[1]
        )
    ]


def _take_lower(best: Solutions, given: Solutions, todo: NDArray[np.intp]) -> Solutions:
    """Return `best` with the rows `todo` replaced where `given` has a lower objective."""
    is_lower = given.objective <= best.objective[todo]
    theta, objective, converged = best.theta.copy(), best.objective.copy(), best.converged.copy()
    replaced = todo[is_lower]
    theta[replaced], objective[replaced], converged[replaced] = (
        given.theta[is_lower],
        given.objective[is_lower],
        given.converged[is_lower],
    )
    return Solutions(theta=theta, objective=objective, converged=converged)


def _select_distant(points_MA: Floats, distance: float, most: int) -> list[int]:
    """Return the indices of the first `most` rows that are not within `distance` of an earlier
    one.
    """
    free = np.ones(len(points_MA), dtype=bool)
    kept: list[int] = []
    for row, point in enumerate(points_MA):
        if free[row] and len(kept) < most:
            kept.append(row)
            free &= np.abs(points_MA - point).max(axis=1) > distance
    return kept


def condition(theta_P: Floats, points: Points, shape: FormShape) -> float:
    """Compute the condition of a law: how weakly the runs determine the least determined mixture of
    parameters. It is infinite if they do not at all.

    It is the ratio of the largest to the smallest singular value of the Jacobian of the log losses
    by the free coordinates that are not at a bound, with columns scaled to length 1.
    """
    free, (lower, upper) = theta_P[shape.first], bounds(shape, points)
    moving = (free > lower + 1e-9) & (free < upper - 1e-9)
    if not moving.any():
        return 1.0
    steps = _DIFFERENCE * np.eye(shape.dim)[moving]
    up, down = (solver.residuals(shape.theta(free + sign * steps), points) for sign in (1, -1))
    lengths = np.linalg.norm(up - down, axis=1, keepdims=True)
    if not lengths.all():
        return float("inf")
    values = np.linalg.svd((up - down) / lengths, compute_uv=False)
    return float(values[0] / values[-1]) if values[-1] > 0 else float("inf")


def grid_starts(points: Points, weight_R: Floats, shape: FormShape, num_starts: int) -> Floats:
    """Return the best cells of the profiled grid, at most one per neighborhood, best first
    (num_starts, P).
    """
    slabs = [
        _build_slab(points, weight_R, shape, share, power)
        for share, power in product(shape.shares, shape.powers)
    ]
    theta, misfit = (
        np.concatenate([slab[0] for slab in slabs]),
        np.concatenate([slab[1] for slab in slabs]),
    )
    theta = theta[np.argsort(misfit, kind="stable")]
    slopes = np.log(theta[:, 3:5] * theta[:, 5:])
    theta = theta[_select_distant(slopes, _NEIGHBORHOOD, _SHORT_LIST * num_starts)]
    score = solver.objective(theta, points, weight_R[None, :])
    return theta[np.argsort(score, kind="stable")[:num_starts]]


def _build_slab(
    points: Points, weight_R: Floats, shape: FormShape, share: float, power: float
) -> tuple[Floats, Floats]:
    """Compute the cells of one E and k with A and B eliminated (G, P), and their sums of squared
    relative errors (G,).

    The terms are divided by their target, and by the largest of the results, in logs, so no unit of
    N or D causes overflow.
    """
    slopes = np.geomspace(*shape.slopes) / power
    log_e = np.log(share) + points.y.min() if shape.has_floor else shape.fixed[0]
    reducible_share = -np.expm1(log_e - points.y)
    target, importance = (
        (points.y + np.log(reducible_share)) / power,
        weight_R * (power * reducible_share) ** 2,
    )
    log_x, log_y = -slopes[:, None] * points.n - target, -slopes[:, None] * points.d - target
    top_x, top_y = log_x.max(axis=1), log_y.max(axis=1)
    x, y = (
        np.exp(np.maximum(log - top[:, None], _DEEPEST))
        for log, top in ((log_x, top_x), (log_y, top_y))
    )
    first, second, misfit = _solve_least_squares(x, y, importance)
    theta = np.zeros((len(slopes), len(slopes), NUM_COORDINATES))
    theta[:, :, 0], theta[:, :, 5] = log_e, power
    theta[:, :, 1], theta[:, :, 2] = np.log(first) - top_x[:, None], np.log(second) - top_y
    theta[:, :, 3], theta[:, :, 4] = slopes[:, None], slopes
    return theta.reshape(-1, NUM_COORDINATES), misfit.reshape(-1)


def _solve_least_squares(
    x_AR: Floats, y_BR: Floats, importance_R: Floats
) -> tuple[Floats, Floats, Floats]:
    """Compute for every pair of rows the positive coefficients whose weighted sum is nearest to 1
    (A, B), and the misfit.
    """
    weighted_x, weighted_y = x_AR * importance_R, y_BR * importance_R
    xx, yy, xy = (
        (weighted_x * x_AR).sum(axis=1)[:, None],
        (weighted_y * y_BR).sum(axis=1),
        weighted_x @ y_BR.T,
    )
    xt, yt = weighted_x.sum(axis=1)[:, None], weighted_y.sum(axis=1)
    determinant = np.maximum(xx * yy - xy**2, 1e-12 * xx * yy)
    first, second = (yy * xt - xy * yt) / determinant, (xx * yt - xy * xt) / determinant
    first_alone, second_alone = xt / xx, yt / yy
    first, second = (
        np.where(second < 0, first_alone, np.where(first < 0, 0.0, first)),
        np.where(first < 0, second_alone, np.where(second < 0, 0.0, second)),
    )
    first = np.maximum(first, 1e-6 * first_alone)  # A term of 0 would have no gradient to follow
    second = np.maximum(second, 1e-6 * second_alone)
    misfit = importance_R.sum() - 2 * (first * xt + second * yt)
    return first, second, misfit + first**2 * xx + 2 * first * second * xy + second**2 * yy
