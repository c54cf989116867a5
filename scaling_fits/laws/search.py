"""The search for the law that fits runs best: one fit from many starting points, and many bootstrap
refits that share starting points.

A single problem is solved by a damped Newton search with exact derivatives from many starting
points. In many problems on the same runs (bootstrap refits), the solution of one problem is a
starting point for the others. The objectives of all solutions under the weights of all problems are
one matrix product.

Starting points come from a grid over E, k, and the exponents. A and B are eliminated (variable
projection): if E, k, and the exponents are given, (L - E)^(1/k) is linear in A and B. A and B then
follow from least squares on relative errors of L with a lower bound of zero. For one E and k, all
pairs of exponents need a single matrix product over the runs.

Shape suffixes: M problems, R runs, P coordinates, Q free coordinates, K laws of a pool, A and B
values of the two exponents, G pairs of exponents.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun._scaling_fits.laws import solver
from forerun._scaling_fits.laws.forms import NO_FLOOR_LOG, FormSpec
from forerun._scaling_fits.laws.solver import HUBER_DELTA, NUM_COORDINATES, Bools, Floats, Points

BLOCK = 512  # Refits solved together, which bounds the memory
_EASING = (1e-2, 3e-3)  # Huber deltas before the final one
# A search ends when a step would gain less than this share of the objective (in best fits, in
# refits, and before the final delta), or less than `_FLOOR`, in squared nats per unit of weight
_EXACT, _REFIT, _ROUGH = 1e-10, 1e-6, 1e-3
_FLOOR = 1e-22
_MIN_STEP = 1e-40  # Smallest curvature or step, which avoids division by zero
STEPS, _EASED_STEPS = 600, 40  # Maximum steps at the final Huber delta, and at each larger one
_FINALISTS = 5  # Number of searches of one problem that continue to the end
_MERGE_DISTANCE = 1e-3  # Distance in theta below which two searches count as one
# Distance of log losses in Huber deltas below which two laws are one starting point
_ALIKE_DELTAS = 2.0
# Laws of a pool that a problem considers, and runs by which laws are compared
_NUM_LISTED, _NUM_COMPARED = 64, 12
_FEW_RUNS = 60  # Number of runs up to which refits also start from the solutions of others
_MAX_LAST_STEPS = 150  # Maximum steps of problems that have not converged after a short search
_MAX_SHORT_STEPS = 60  # Maximum steps of a search that may not be the best one
_DIFFERENCE = 1e-5  # Step of a coordinate for central differences
_CHUNK = 25_000  # Problems * runs differentiated at once, so that the arrays fit in the cache
# Distance in log k * alpha and log k * beta below which two cells are one starting point
_NEIGHBORHOOD = 0.25
_SHORT_LIST = 3  # Cells evaluated by the robust objective, per starting point
# Lower bound of the log of a term relative to its largest; smaller terms are negligible
_DEEPEST = -300.0


class Solutions(NamedTuple):
    """The end points of searches, one row per problem."""

    theta: Floats
    """Coordinates (M, P)."""
    objective: Floats
    """Objective (M,)."""
    converged: Bools
    """Whether the next Newton step would gain less than the tolerance of the search."""


def polish(
    theta_MP: Floats,
    points: Points,
    weight_MR: Floats,
    spec: FormSpec,
    *,
    ease: bool = True,
    exact: bool = False,
    max_steps: int = STEPS,
) -> Solutions:
    """Run a damped Newton search within the bounds from every starting point, one row per problem.

    With a delta of 1e-3, the Huber objective is nearly a sum of absolute values, with kinks and
    little curvature for Newton's method. The search therefore starts with a large delta, which is
    nearly least squares, and reduces it, unless `ease` is off.
    """
    num_parts = max(1, math.ceil(len(theta_MP) * points.n.size / _CHUNK))
    results = []
    for part in np.array_split(np.arange(len(theta_MP)), num_parts):
        free, weight = theta_MP[part][:, spec.free_coordinates], weight_MR[part]
        for delta in _EASING if ease else ():
            free, _, _ = _search_at_delta(free, points, weight, spec, delta, _EASED_STEPS, _ROUGH)
        results.append(
            _search_at_delta(
                free, points, weight, spec, HUBER_DELTA, max_steps, _EXACT if exact else _REFIT
            )
        )
    free, objective, converged = (np.concatenate(column) for column in zip(*results, strict=True))
    return Solutions(theta=spec.to_theta(free), objective=objective, converged=converged)


def _compute_derivatives(
    free_MQ: Floats, points: Points, weight_MR: Floats, spec: FormSpec, delta: float
) -> tuple[Floats, Floats, Floats]:
    """Compute objective (M,), gradient (M, Q), and Hessian (M, Q, Q) in the free coordinates."""
    theta_MP, free = spec.to_theta(free_MQ), spec.free_coordinates
    f, g, h = solver.compute_derivatives(
        theta_MP, points, weight_MR, delta, has_unit_k=spec.has_unit_k
    )
    hessian = np.ascontiguousarray(h.transpose(2, 0, 1)[:, free][:, :, free])
    return f, g[free].T, hessian


def _search_at_delta(
    start_MQ: Floats,
    points: Points,
    weight_MR: Floats,
    spec: FormSpec,
    delta: float,
    max_steps: int,
    tolerance: float,
) -> tuple[Floats, Floats, Bools]:
    """Search at one delta. Return the coordinates, the objective, and whether the next step would
    gain less than the tolerance.

    Each step solves in the eigenbasis of the Hessian with absolute eigenvalues, so that a saddle
    repels, and is damped by Levenberg's rule. Coordinates that a bound holds leave the system.
    Finished problems leave the batch.
    """
    lower, upper = spec.compute_bounds(points)
    # `done` has the results of all problems, and `alive` the indices of those still in the batch
    done, done_f = np.clip(start_MQ, lower, upper), np.empty(len(start_MQ))
    converged, alive = np.zeros(len(done), dtype=bool), np.arange(len(done))
    at, weight, floor = done.copy(), weight_MR, _FLOOR * weight_MR.sum(axis=1)
    f, g, h = _compute_derivatives(at, points, weight, spec, delta)
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
        new_f, new_g, new_h = _compute_derivatives(trial, points, weight, spec, delta)
        better = new_f < f
        at[better] = trial[better]
        f[better] = new_f[better]
        g[better] = new_g[better]
        h[better] = new_h[better]
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


def polish_best(theta_MP: Floats, points: Points, weight_R: Floats, spec: FormSpec) -> Solutions:
    """Run `polish` for many starting points of one problem. Searches that meet on the way are
    merged, and only the best few continue to the end.
    """
    weight_MR = np.broadcast_to(weight_R, (len(theta_MP), len(weight_R)))
    free = theta_MP[:, spec.free_coordinates]
    for delta in _EASING:
        free, _, _ = _search_at_delta(free, points, weight_MR, spec, delta, _EASED_STEPS, _ROUGH)
    eased = spec.to_theta(free)
    order = np.argsort(solver.compute_objective(eased, points, weight_MR), kind="stable")
    kept = eased[order][_select_distant(eased[order], _MERGE_DISTANCE, _FINALISTS)]
    return polish(kept, points, weight_MR[: len(kept)], spec, ease=False, exact=True)


def refit_rows(theta_P: Floats, points: Points, weight_MR: Floats, spec: FormSpec) -> Solutions:
    """Find the optimum under each row of weights, starting from one law and, with few runs, also
    from the solutions of other rows.

    Under Dirichlet weights of 11 runs or more, 90 to 100 % of the problems end within 1e-3 of the
    result of a search with thirty times the steps. If the law lies at a bound, up to a tenth of the
    problems do not converge.
    """
    is_few = points.n.size <= _FEW_RUNS
    start_MP = np.broadcast_to(theta_P, (len(weight_MR), len(theta_P)))
    best = polish(start_MP, points, weight_MR, spec, ease=is_few, max_steps=_MAX_SHORT_STEPS)
    if is_few:
        from_neighbors = _polish_from_neighbors(best.theta, points, weight_MR, spec)
        best = _take_lower(best, from_neighbors, np.arange(len(weight_MR)))
    unconverged = np.flatnonzero(~best.converged)
    return _take_lower(
        best,
        polish(
            best.theta[unconverged],
            points,
            weight_MR[unconverged],
            spec,
            ease=False,
            max_steps=_MAX_LAST_STEPS,
        ),
        unconverged,
    )


def _polish_from_neighbors(
    theta_MP: Floats, points: Points, weight_MR: Floats, spec: FormSpec
) -> Solutions:
    """Polish each problem from the law of another problem: the law with the lowest objective under
    the weights of this problem, except laws similar to its own.
    """
    pool_KP = _remove_duplicates(theta_MP, points)
    scores = weight_MR @ solver.compute_huber(solver.compute_residuals(pool_KP, points)).T
    listed = np.argsort(scores, axis=1, kind="stable")[:, :_NUM_LISTED]
    scores = np.take_along_axis(scores, listed, axis=1)
    distance = _compute_signatures(pool_KP, points)[listed]
    distance = np.abs(distance - _compute_signatures(theta_MP, points)[:, None])
    scores[(distance <= _ALIKE_DELTAS).all(axis=2)] = np.inf
    start_MP = pool_KP[listed[np.arange(len(scores)), scores.argmin(axis=1)]]
    return polish(start_MP, points, weight_MR, spec, ease=False, max_steps=_MAX_SHORT_STEPS)


def _compute_signatures(theta_MP: Floats, points: Points) -> Floats:
    """Compute the log losses of laws at up to `_NUM_COMPARED` of the runs, in units of Huber's
    delta. Laws are compared by these signatures.
    """
    sample = slice(None, None, math.ceil(points.n.size / _NUM_COMPARED))
    sampled_points = Points(n=points.n[sample], d=points.d[sample], y=points.y[sample])
    return solver.compute_residuals(theta_MP, sampled_points) / HUBER_DELTA


def _remove_duplicates(theta_MP: Floats, points: Points) -> Floats:
    """Remove rows whose log losses equal those of an earlier row."""
    rounded = np.round(_compute_signatures(theta_MP, points))
    _, first_rows = np.unique(rounded, axis=0, return_index=True)
    return theta_MP[np.sort(first_rows)]


def _take_lower(best: Solutions, candidates: Solutions, rows: NDArray[np.intp]) -> Solutions:
    """Return `best` with some of its `rows` replaced: those where a candidate's objective is
    lower.
    """
    is_lower = candidates.objective <= best.objective[rows]
    theta, objective, converged = best.theta.copy(), best.objective.copy(), best.converged.copy()
    replaced = rows[is_lower]
    theta[replaced] = candidates.theta[is_lower]
    objective[replaced] = candidates.objective[is_lower]
    converged[replaced] = candidates.converged[is_lower]
    return Solutions(theta=theta, objective=objective, converged=converged)


def _select_distant(points_MA: Floats, distance: float, max_rows: int) -> list[int]:
    """Return the indices of the first `max_rows` rows that differ from every earlier selected row
    by more than `distance` in some coordinate.
    """
    is_free = np.ones(len(points_MA), dtype=bool)
    kept: list[int] = []
    for row, point in enumerate(points_MA):
        if is_free[row] and len(kept) < max_rows:
            kept.append(row)
            is_free &= np.abs(points_MA - point).max(axis=1) > distance
    return kept


def compute_condition(theta_P: Floats, points: Points, spec: FormSpec) -> float:
    """Compute the condition of a law: how weakly the runs determine the least determined mixture of
    parameters. The condition is infinite if the runs do not determine that mixture at all.

    The condition is the ratio of the largest to the smallest singular value of a Jacobian: that of
    the log losses by the free coordinates that are not at a bound, with columns scaled to length 1.
    """
    free, (lower, upper) = theta_P[spec.free_coordinates], spec.compute_bounds(points)
    moving = (free > lower + 1e-9) & (free < upper - 1e-9)
    if not moving.any():
        return 1.0
    steps = _DIFFERENCE * np.eye(spec.num_free)[moving]
    up, down = (
        solver.compute_residuals(spec.to_theta(free + sign * steps), points) for sign in (1, -1)
    )
    lengths = np.linalg.norm(up - down, axis=1, keepdims=True)
    if not lengths.all():
        return float("inf")
    values = np.linalg.svd((up - down) / lengths, compute_uv=False)
    return float(values[0] / values[-1]) if values[-1] > 0 else float("inf")


def build_grid_starts(points: Points, weight_R: Floats, spec: FormSpec, num_starts: int) -> Floats:
    """Return the best cells of the profiled grid, at most one per neighborhood, best first
    (num_starts, P).
    """
    slabs = [
        _build_slab(points, weight_R, spec, share, power)
        for share, power in product(spec.floor_shares, spec.k_grid)
    ]
    theta = np.concatenate([slab[0] for slab in slabs])
    misfit = np.concatenate([slab[1] for slab in slabs])
    theta = theta[np.argsort(misfit, kind="stable")]
    slopes = np.log(theta[:, 3:5] * theta[:, 5, None])
    theta = theta[_select_distant(slopes, _NEIGHBORHOOD, _SHORT_LIST * num_starts)]
    score = solver.compute_objective(theta, points, weight_R[None, :])
    return theta[np.argsort(score, kind="stable")[:num_starts]]


def _build_slab(
    points: Points, weight_R: Floats, spec: FormSpec, share: float, power: float
) -> tuple[Floats, Floats]:
    """Compute the cells (G, P) of one E and k with A and B eliminated, and their sums of squared
    relative errors (G,).

    The terms are divided in logs, first by their target and then by the largest of the results, so
    that no unit of N or D causes overflow.
    """
    slopes = np.geomspace(*spec.slope_grid) / power
    log_e = np.log(share) + points.y.min() if spec.has_floor else NO_FLOOR_LOG
    reducible_share = -np.expm1(log_e - points.y)
    target = (points.y + np.log(reducible_share)) / power
    importance = weight_R * (power * reducible_share) ** 2
    log_x, log_y = -slopes[:, None] * points.n - target, -slopes[:, None] * points.d - target
    top_x, top_y = log_x.max(axis=1), log_y.max(axis=1)
    x = np.exp(np.maximum(log_x - top_x[:, None], _DEEPEST))
    y = np.exp(np.maximum(log_y - top_y[:, None], _DEEPEST))
    a, b, misfit = _solve_least_squares(x, y, importance)
    theta = np.zeros((len(slopes), len(slopes), NUM_COORDINATES))
    theta[:, :, 0], theta[:, :, 5] = log_e, power
    theta[:, :, 1], theta[:, :, 2] = np.log(a) - top_x[:, None], np.log(b) - top_y
    theta[:, :, 3], theta[:, :, 4] = slopes[:, None], slopes
    return theta.reshape(-1, NUM_COORDINATES), misfit.reshape(-1)


def _solve_least_squares(
    x_AR: Floats, y_BR: Floats, importance_R: Floats
) -> tuple[Floats, Floats, Floats]:
    """Compute for every pair of rows the positive coefficients a and b (A, B) for which a x + b y
    is nearest to 1, and the misfit (A, B).
    """
    weighted_x, weighted_y = x_AR * importance_R, y_BR * importance_R
    xx = (weighted_x * x_AR).sum(axis=1)[:, None]
    yy = (weighted_y * y_BR).sum(axis=1)
    xy = weighted_x @ y_BR.T
    xt, yt = weighted_x.sum(axis=1)[:, None], weighted_y.sum(axis=1)
    # Normal equations of a and b
    determinant = np.maximum(xx * yy - xy**2, 1e-12 * xx * yy)
    a, b = (yy * xt - xy * yt) / determinant, (xx * yt - xy * xt) / determinant
    a_alone, b_alone = xt / xx, yt / yy
    # If a coefficient is negative, it becomes 0 and the other one is fitted alone
    is_a_negative, is_b_negative = a < 0, b < 0
    a = np.where(is_b_negative, a_alone, np.where(is_a_negative, 0.0, a))
    b = np.where(is_a_negative, b_alone, np.where(is_b_negative, 0.0, b))
    # A term of 0 would have no gradient to follow
    a = np.maximum(a, 1e-6 * a_alone)
    b = np.maximum(b, 1e-6 * b_alone)
    misfit = importance_R.sum() - 2 * (a * xt + b * yt)
    return a, b, misfit + a**2 * xx + 2 * a * b * xy + b**2 * yy
