"""The search for a form's optimum: many starts, never a lone one, and refits that learn from each
other.

One problem: a damped Newton search with exact derivatives, from many starts. Many problems on the
same runs (bootstrap refits): what one problem found is a start for the others, and how good it is
under the weights of every other is one matrix product. M problems, R runs, P coordinates, Q free
ones, K laws of a pool.

Starts come from a grid over E, k and the exponents with A and B profiled out (variable projection):
given the others, (L - E)^(1/k) is linear in A and B, which follow from least squares on relative
errors of L, held above zero. For one E and k all pairs of exponents need one matrix product over
the runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from scaling_fits.laws import solver
from scaling_fits.laws.forms import FormShape
from scaling_fits.laws.solver import HUBER_DELTA, NUM_COORDINATES, Floats, Points

MAX_EXPONENT = 10.0  # the Gemstones set with the degenerate optimum has 4.98: see it, then warn
MAX_K = 5.0
BLOCK = 512  # refits solved together: memory is flat in their number
_LOWER_E = 12.0  # E may fall to exp(-12) of the lowest loss: to nothing
_WIDEST = 100.0  # of a and b in centred logs: with a small k they are log loss / k
_EASING = (1e-2, 3e-3)  # Huber deltas before the last
# a search is over when a step would gain this share of the objective
_EXACT, _REFIT, _ROUGH = 1e-10, 1e-6, 1e-3
_FLOOR = 1e-22  # ... or this many squared nats per unit of weight
_NOTHING = 1e-40  # a curvature or a step
STEPS, _EASED_STEPS = 600, 40
_FINALISTS = 5
_MET = 1e-3  # distance in theta of searches that have met
_ALIKE = 2.0  # Huber deltas: laws whose log losses are this near are one start
# laws of a pool a problem looks at closer, and runs by which they are told apart
_LISTED, _LOOKED_AT = 64, 12
_FEW_RUNS = 60
_SETTLING = 150  # most steps of those that have not settled after a short search
_SHORT = 60  # most steps of a search that may not be the best one
_DIFFERENCE = 1e-5  # of a coordinate, for central differences
_CHUNK = 25_000  # problems * runs differentiated at once: the fields stay in the cache
_NEIGHBOURS = 0.25  # in log k * alpha and log k * beta: closer cells are one start
_SHORT_LIST = 3  # cells judged by the robust objective, per start wanted
_DEEPEST = -300.0  # logs of terms so far under their largest count for nothing


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Solutions:
    """Where the search ended, one row per problem."""

    theta: Floats
    """(M, P)."""
    objective: Floats
    """(M,)."""
    converged: NDArray[np.bool_]
    """The next Newton step would gain less than a millionth of the objective (best fits: 1e-10)."""


def bounds(shape: FormShape, points: Points) -> tuple[Floats, Floats]:
    """Lowest and highest value of each free coordinate (Q,), for runs in centred logs."""
    low, high = float(points.y.min()), float(points.y.max())
    lower = np.array([low - _LOWER_E, -_WIDEST, -_WIDEST, 1e-3, 1e-3, shape.least_k])
    upper = np.array([high + 1.0, _WIDEST, _WIDEST, MAX_EXPONENT, MAX_EXPONENT, MAX_K])
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
    """Damped Newton search from every start within the bounds, one row a problem.

    With a delta of 1e-3 the Huber objective is nearly a sum of absolute values: kinked, and flat
    for Newton. So the search starts with a wide delta, nearly least squares, and narrows it, unless
    `ease` is off.
    """
    parts = max(1, -(-len(theta_MP) * points.n.size // _CHUNK))
    found = []
    for part in np.array_split(np.arange(len(theta_MP)), parts):
        free, weight = theta_MP[part][:, shape.first], weight_MR[part]
        for delta in _EASING if ease else ():
            free, _, _ = _descend(free, points, weight, shape, delta, _EASED_STEPS, _ROUGH)
        found.append(
            _descend(
                free, points, weight, shape, HUBER_DELTA, most_steps, _EXACT if exact else _REFIT
            )
        )
    free, objective, converged = (np.concatenate(column) for column in zip(*found, strict=True))
    return Solutions(theta=shape.theta(free), objective=objective, converged=converged)


def _derivatives(
    free_MQ: Floats, points: Points, weight_MR: Floats, shape: FormShape, delta: float
) -> tuple[Floats, Floats, Floats]:
    """Objective (M,), gradient (M, Q) and Hessian (M, Q, Q) in the free coordinates."""
    f, g, h = solver.derivatives(shape.theta(free_MQ), points, weight_MR, delta, plain=shape.plain)
    return f, shape.gradient(g), shape.hessian(h)


def _descend(
    start_MQ: Floats,
    points: Points,
    weight_MR: Floats,
    shape: FormShape,
    delta: float,
    max_steps: int,
    tolerance: float,
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """The search at one delta: coordinates, objective, and whether the next step would gain under
    the tolerance.

    Each step solves in the eigenbasis of the Hessian with absolute eigenvalues (a saddle repels),
    damped by Levenberg's rule; coordinates held by a bound leave the system; finished problems
    leave the batch.
    """
    lower, upper = bounds(shape, points)
    done, done_f = np.clip(start_MQ, lower, upper), np.empty(len(start_MQ))
    converged, alive = np.zeros(len(done), dtype=bool), np.arange(len(done))
    at, weight, floor = done.copy(), weight_MR, _FLOOR * weight_MR.sum(axis=1)
    f, g, h = _derivatives(at, points, weight, shape, delta)
    damping = np.full(len(at), 1e-3)
    for _ in range(max_steps):
        step, gain = _newton_step(at, g, h, damping, lower, upper)
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
        new_f, new_g, new_h = _derivatives(trial, points, weight, shape, delta)
        better = new_f < f
        at[better], f[better], g[better], h[better] = (
            trial[better],
            new_f[better],
            new_g[better],
            new_h[better],
        )
        damping = np.where(better, np.maximum(damping / 5, 1e-14), np.maximum(damping * 6, 1e-8))
    return done, done_f, converged


def _newton_step(
    at: Floats, gradient: Floats, hessian: Floats, damping: Floats, lower: Floats, upper: Floats
) -> tuple[Floats, Floats]:
    """The damped step (M, Q), and what the undamped one promises to gain (M,)."""
    held = ((at <= lower) & (gradient > 0)) | ((at >= upper) & (gradient < 0))
    if held.any():
        gradient = np.where(held, 0.0, gradient)
        hessian = np.where(held[:, :, None] | held[:, None, :], 0.0, hessian)
    values, vectors = np.linalg.eigh(hessian)
    size = np.abs(values)
    largest = np.maximum(size.max(axis=1, keepdims=True), _NOTHING)
    size = np.maximum(size, 1e-12 * largest)
    along = (gradient[:, None, :] @ vectors)[:, 0, :]
    gain = 0.5 * (along * along / size).sum(axis=1)
    step = -(vectors @ (along / (size + damping[:, None] * largest))[:, :, None])[:, :, 0]
    longest = np.maximum(np.abs(step).max(axis=1, keepdims=True), _NOTHING)
    return step * np.minimum(1.0, 2.0 / longest), gain


def best_of(
    theta_MP: Floats, points: Points, weight_R: Floats, shape: FormShape, most_steps: int = STEPS
) -> Solutions:
    """`polish` for many starts of one problem: those that met on the way go on as one, the best few
    to the end.
    """
    weight_MR = np.broadcast_to(weight_R, (len(theta_MP), len(weight_R)))
    free = theta_MP[:, shape.first]
    for delta in _EASING:
        free, _, _ = _descend(free, points, weight_MR, shape, delta, _EASED_STEPS, _ROUGH)
    eased = shape.theta(free)
    order = np.argsort(solver.objective(eased, points, weight_MR), kind="stable")
    kept = eased[order][_apart(eased[order], _MET, _FINALISTS)]
    return polish(
        kept, points, weight_MR[: len(kept)], shape, ease=False, exact=True, most_steps=most_steps
    )


def refits(theta_P: Floats, points: Points, weight_MR: Floats, shape: FormShape) -> Solutions:
    """The optimum under each row of weights downhill from one law and, of few runs, from others'
    ends.

    Under Dirichlet weights of 11 runs and more, 90 to 100 % of the problems end within 1e-3 of
    where a search of thirty times the steps does; where the law lies at a bound, up to a tenth do
    not settle.
    """
    few = points.n.size <= _FEW_RUNS
    start_MP = np.broadcast_to(theta_P, (len(weight_MR), len(theta_P)))
    best = polish(start_MP, points, weight_MR, shape, ease=few, most_steps=_SHORT)
    if few:
        given = _from_neighbours(best.theta, points, weight_MR, shape)
        best = _lower(best, given, np.arange(len(weight_MR)))
    left = np.flatnonzero(~best.converged)
    return _lower(
        best,
        polish(best.theta[left], points, weight_MR[left], shape, ease=False, most_steps=_SETTLING),
        left,
    )


def _from_neighbours(
    theta_MP: Floats, points: Points, weight_MR: Floats, shape: FormShape
) -> Solutions:
    """Each problem polished from the law of another problem that suits it best, laws like its own
    passed over.
    """
    pool_KP = _thinned(theta_MP, points)
    scores = weight_MR @ solver.huber(solver.residuals(pool_KP, points)).T
    listed = np.argsort(scores, axis=1, kind="stable")[:, :_LISTED]
    scores = np.take_along_axis(scores, listed, axis=1)
    marks = _marks(pool_KP, points)[listed]
    scores[(np.abs(marks - _marks(theta_MP, points)[:, None]) <= _ALIKE).all(axis=2)] = np.inf
    start_MP = pool_KP[listed[np.arange(len(scores)), scores.argmin(axis=1)]]
    return polish(start_MP, points, weight_MR, shape, ease=False, most_steps=_SHORT)


def _marks(theta_MP: Floats, points: Points) -> Floats:
    """What tells laws apart: their log losses at up to a dozen of the runs, in units of Huber's
    delta.
    """
    some = slice(None, None, -(-points.n.size // _LOOKED_AT))
    few = Points(n=points.n[some], d=points.d[some], y=points.y[some])
    return solver.residuals(theta_MP, few) / HUBER_DELTA


def _thinned(theta_MP: Floats, points: Points) -> Floats:
    """The rows but those that say the same of the runs as an earlier one."""
    return theta_MP[
        np.sort(np.unique(np.round(_marks(theta_MP, points)), axis=0, return_index=True)[1])
    ]


def _lower(best: Solutions, given: Solutions, todo: NDArray[np.intp]) -> Solutions:
    """`best` with those of its rows `todo` replaced for which a lower end was given."""
    lower = given.objective <= best.objective[todo]
    theta, objective, converged = best.theta.copy(), best.objective.copy(), best.converged.copy()
    won = todo[lower]
    theta[won], objective[won], converged[won] = (
        given.theta[lower],
        given.objective[lower],
        given.converged[lower],
    )
    return Solutions(theta=theta, objective=objective, converged=converged)


def _apart(points_MA: Floats, distance: float, most: int) -> list[int]:
    """Places of the rows that are not within `distance` of an earlier one, the first so many."""
    free = np.ones(len(points_MA), dtype=bool)
    kept: list[int] = []
    for row, point in enumerate(points_MA):
        if free[row] and len(kept) < most:
            kept.append(row)
            free &= np.abs(points_MA - point).max(axis=1) > distance
    return kept


def condition(theta_P: Floats, points: Points, shape: FormShape) -> float:
    """How loose the loosest mixture of parameters is at a law: 1 for none, infinite if the runs do
    not see one.

    The largest over the smallest singular value of the Jacobian of the log losses by the free
    coordinates that no bound holds, its columns scaled to length 1.
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
    """The best cells of the profiled grid, at most one per neighbourhood, best first (num_starts,
    P).
    """
    slabs = [
        _slab(points, weight_R, shape, share, power)
        for share, power in product(shape.shares, shape.powers)
    ]
    theta, misfit = (
        np.concatenate([slab[0] for slab in slabs]),
        np.concatenate([slab[1] for slab in slabs]),
    )
    theta = theta[np.argsort(misfit, kind="stable")]
    slopes = np.log(theta[:, 3:5] * theta[:, 5:])
    theta = theta[_apart(slopes, _NEIGHBOURS, _SHORT_LIST * num_starts)]
    score = solver.objective(theta, points, weight_R[None, :])
    return theta[np.argsort(score, kind="stable")[:num_starts]]


def _slab(
    points: Points, weight_R: Floats, shape: FormShape, share: float, power: float
) -> tuple[Floats, Floats]:
    """The cells of one E and k with A and B filled in (G, P), and their sums of squared relative
    errors (G,).

    The terms are taken over their target, and that over its largest, in logs: no unit of N or D is
    too far out.
    """
    slopes = np.geomspace(*shape.slopes) / power
    log_e = np.log(share) + points.y.min() if shape.has_floor else shape.fixed[0]
    left = -np.expm1(log_e - points.y)
    target, importance = (points.y + np.log(left)) / power, weight_R * (power * left) ** 2
    log_x, log_y = -slopes[:, None] * points.n - target, -slopes[:, None] * points.d - target
    top_x, top_y = log_x.max(axis=1), log_y.max(axis=1)
    x, y = (
        np.exp(np.maximum(log - top[:, None], _DEEPEST))
        for log, top in ((log_x, top_x), (log_y, top_y))
    )
    first, second, misfit = _least_squares(x, y, importance)
    theta = np.zeros((len(slopes), len(slopes), NUM_COORDINATES))
    theta[:, :, 0], theta[:, :, 5] = log_e, power
    theta[:, :, 1], theta[:, :, 2] = np.log(first) - top_x[:, None], np.log(second) - top_y
    theta[:, :, 3], theta[:, :, 4] = slopes[:, None], slopes
    return theta.reshape(-1, NUM_COORDINATES), misfit.reshape(-1)


def _least_squares(
    x_AR: Floats, y_BR: Floats, importance_R: Floats
) -> tuple[Floats, Floats, Floats]:
    """For every pair of rows the coefficients above zero whose sum is nearest to 1 (A, B), and the
    misfit.
    """
    weighed_x, weighed_y = x_AR * importance_R, y_BR * importance_R
    xx, yy, xy = (
        (weighed_x * x_AR).sum(axis=1)[:, None],
        (weighed_y * y_BR).sum(axis=1),
        weighed_x @ y_BR.T,
    )
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
