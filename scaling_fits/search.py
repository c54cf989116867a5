"""The search for a form's optimum: many starts, never a lone one, and refits that learn from each other.

One problem: a damped Newton search with exact derivatives, from many starts. Many problems on the same runs
(bootstrap refits): what one problem found is a start for the others, and how good it is under the weights of every
other is one matrix product. M problems, R runs, P coordinates, Q free ones, K laws of a pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaling_fits import solver
from scaling_fits.forms import Shape
from scaling_fits.solver import HUBER_DELTA, Floats, Points, Space

MAX_EXPONENT = 10.0  # the Gemstones set with the degenerate optimum has 4.98: see it, then warn
MAX_K = 5.0
BLOCK = 512  # refits solved together: memory is flat in their number
_LOWER_E = 12.0  # E may fall to exp(-12) of the lowest loss: to nothing
_WIDEST = 100.0  # of a and b in centred logs: with a small k they are log loss / k
_EASING = (1e-2, 3e-3)  # Huber deltas before the last
_EXACT, _REFIT, _ROUGH = 1e-10, 1e-6, 1e-3  # a search is over when a step would gain this share of the objective
_FLOOR = 1e-22  # ... or this many squared nats per unit of weight
_NOTHING = 1e-40  # a curvature or a step
_STEPS, _EASED_STEPS = 600, 40
_FINALISTS = 5
_MET = 1e-3  # distance in theta of searches that have met
_ELSEWHERE = 0.3  # distance in theta of a start worth a try beside the best so far
_TURNS, _GIFTS = 8, 8  # most rounds of starts from neighbours, and starts in each
_FEW_RUNS = 60
_DIFFERENCE = 1e-5  # of a coordinate, for central differences
_AGREE, _FLAT = 1e-4, 1e-12  # ends this close, relatively or per unit of weight, are one
_CHUNK = 25_000  # problems * runs differentiated at once: the fields stay in the cache


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Solutions:
    """Where the search ended, one row per problem."""

    theta: Floats
    """(M, P)."""
    objective: Floats
    """(M,)."""
    converged: NDArray[np.bool_]
    """The next Newton step would gain less than a millionth of the objective (best fits: 1e-10)."""

    def rows(self, keep: NDArray[np.intp]) -> Solutions:
        """Some of them."""
        return Solutions(theta=self.theta[keep], objective=self.objective[keep], converged=self.converged[keep])


def bounds(shape: Shape, points: Points) -> tuple[Floats, Floats]:
    """Lowest and highest value of each free coordinate (Q,), for runs in centred logs."""
    low, high = float(points.y.min()), float(points.y.max())
    lower = np.array([low - _LOWER_E, -_WIDEST, -_WIDEST, 1e-3, 1e-3, shape.least_k])
    upper = np.array([high + 1.0, _WIDEST, _WIDEST, MAX_EXPONENT, MAX_EXPONENT, MAX_K])
    return lower[shape.space.first], upper[shape.space.first]


def polish(
    theta_MP: Floats, points: Points, weight_MR: Floats, shape: Shape, *, ease: bool = True, exact: bool = False
) -> Solutions:
    """Damped Newton search from every start within the bounds, one row a problem.

    With a delta of 1e-3 the Huber objective is nearly a sum of absolute values: kinked, and flat for Newton.
    So the search starts with a wide delta, nearly least squares, and narrows it, unless `ease` is off.
    """
    parts = max(1, -(-len(theta_MP) * points.n.size // _CHUNK))
    found = []
    for part in np.array_split(np.arange(len(theta_MP)), parts):
        free, weight = theta_MP[part][:, shape.space.first], weight_MR[part]
        for delta in _EASING if ease else ():
            free, _, _ = _descend(free, points, weight, shape, delta, _EASED_STEPS, _ROUGH)
        found.append(_descend(free, points, weight, shape, HUBER_DELTA, _STEPS, _EXACT if exact else _REFIT))
    free, objective, converged = (np.concatenate(column) for column in zip(*found, strict=True))
    return Solutions(theta=shape.space.theta(free), objective=objective, converged=converged)


def _derivatives(
    free_MQ: Floats, points: Points, weight_MR: Floats, space: Space, delta: float
) -> tuple[Floats, Floats, Floats]:
    """Objective (M,), gradient (M, Q) and Hessian (M, Q, Q) in the free coordinates."""
    f, g, h = solver.derivatives(space.theta(free_MQ), points, weight_MR, delta, plain=space.plain)
    return f, space.gradient(g), space.hessian(h)


def _descend(
    start_MQ: Floats, points: Points, weight_MR: Floats, shape: Shape, delta: float, max_steps: int, tolerance: float
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """The search at one delta: coordinates, objective, and whether the next step would gain under the tolerance.

    Each step solves in the eigenbasis of the Hessian with absolute eigenvalues (a saddle repels), damped by
    Levenberg's rule; coordinates held by a bound leave the system; finished problems leave the batch.
    """
    lower, upper = bounds(shape, points)
    done, done_f = np.clip(start_MQ, lower, upper), np.empty(len(start_MQ))
    converged, alive = np.zeros(len(done), dtype=bool), np.arange(len(done))
    at, weight, floor = done.copy(), weight_MR, _FLOOR * weight_MR.sum(axis=1)
    f, g, h = _derivatives(at, points, weight, shape.space, delta)
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
        new_f, new_g, new_h = _derivatives(trial, points, weight, shape.space, delta)
        better = new_f < f
        at[better], f[better], g[better], h[better] = trial[better], new_f[better], new_g[better], new_h[better]
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


def best_of(theta_MP: Floats, points: Points, weight_R: Floats, shape: Shape) -> Solutions:
    """`polish` for many starts of one problem: those that met on the way go on as one, the best few to the end."""
    weight_MR = np.broadcast_to(weight_R, (len(theta_MP), len(weight_R)))
    free = theta_MP[:, shape.space.first]
    for delta in _EASING:
        free, _, _ = _descend(free, points, weight_MR, shape, delta, _EASED_STEPS, _ROUGH)
    eased = shape.space.theta(free)
    order = np.argsort(solver.objective(eased, points, weight_MR), kind="stable")
    kept = _apart(eased[order], _MET)[:_FINALISTS]
    return polish(kept, points, weight_MR[: len(kept)], shape, ease=False, exact=True)


def refits(pool_MP: Floats, points: Points, weight_MR: Floats, shape: Shape, num_starts: int) -> Solutions:
    """The optimum under each row of weights: from the best of `pool_MP` for it, then from what its neighbours found.

    At most `BLOCK` rows. Every problem tries its best starts and the neighbours' optima that are lowest for it; one
    whose tries did not all end at one objective has several basins, and tries more for as long as that helps.
    Few runs make many basins, and cost little: there every problem has twice the tries.
    """
    few = points.n.size <= _FEW_RUNS
    first_gifts = _GIFTS if few else _GIFTS // 3
    elsewhere = _ELSEWHERE if few else _ELSEWHERE / 3
    best, worst = _tried(pool_MP, points, weight_MR, shape, num_starts if few else -(-num_starts // 2))
    todo = np.arange(len(weight_MR))
    for turn in range(_TURNS):
        donors = _apart(np.concatenate([best.theta, pool_MP]), elsewhere)
        count = _GIFTS if turn else first_gifts
        given, highest = _tried(donors, points, weight_MR[todo], shape, count, best.theta[todo], elsewhere)
        worst[todo] = np.maximum(worst[todo], highest)
        slack = _FLAT * weight_MR[todo].sum(axis=1)
        gained = given.objective < best.objective[todo] * (1 - _AGREE) - slack
        best = _lower(best, given, todo)
        if turn == 0:
            gained = worst > best.objective * (1 + _AGREE) + slack
        todo = todo[gained]
        if not todo.size:
            break
    return best


def _tried(
    pool_KP: Floats,
    points: Points,
    weight_MR: Floats,
    shape: Shape,
    count: int,
    own_MP: Floats | None = None,
    elsewhere: float = 0.0,
) -> tuple[Solutions, Floats]:
    """Each problem polished from the `count` laws of the pool that suit it best: the lowest, and the highest end.

    With `own_MP`, laws not `elsewhere` than a problem's own are passed over, and the search starts at the last delta.
    """
    delta = HUBER_DELTA if own_MP is not None else _EASING[0]
    scores = weight_MR @ solver.huber(solver.residuals(pool_KP, points), delta).T
    if own_MP is not None:
        scores[np.abs(pool_KP[None] - own_MP[:, None]).max(axis=2) < elsewhere] = np.inf
    chosen = np.argsort(scores, axis=1, kind="stable")[:, :count]
    count = chosen.shape[1]
    every = np.repeat(np.arange(len(weight_MR)), count)
    found = polish(pool_KP[chosen.reshape(-1)], points, weight_MR[every], shape, ease=own_MP is None)
    ends = found.objective.reshape(-1, count)
    return found.rows(np.arange(len(ends)) * count + ends.argmin(axis=1)), ends.max(axis=1)


def _lower(best: Solutions, given: Solutions, todo: NDArray[np.intp]) -> Solutions:
    """`best` with those of its rows `todo` replaced for which a lower end was given."""
    lower = given.objective < best.objective[todo]
    theta, objective, converged = best.theta.copy(), best.objective.copy(), best.converged.copy()
    won = todo[lower]
    theta[won], objective[won], converged[won] = given.theta[lower], given.objective[lower], given.converged[lower]
    return Solutions(theta=theta, objective=objective, converged=converged)


def _apart(theta_MP: Floats, distance: float) -> Floats:
    """The rows that are not within `distance` of an earlier one."""
    free = np.ones(len(theta_MP), dtype=bool)
    kept = []
    for row in range(len(theta_MP)):
        if free[row]:
            kept.append(row)
            free &= np.abs(theta_MP - theta_MP[row]).max(axis=1) > distance
    return theta_MP[kept]


def gain_left(theta_MP: Floats, points: Points, weight_MR: Floats, shape: Shape) -> Floats:
    """Share of each objective that one more Newton step within the bounds promises to gain (M,)."""
    free = theta_MP[:, shape.space.first]
    f, g, h = _derivatives(free, points, weight_MR, shape.space, HUBER_DELTA)
    gain = _newton_step(free, g, h, np.zeros(len(free)), *bounds(shape, points))[1]
    result: Floats = gain / np.maximum(f, _FLOOR * weight_MR.sum(axis=1))
    return result


def condition(theta_P: Floats, points: Points, shape: Shape) -> float:
    """How loose the loosest mixture of parameters is at a law: 1 for none, infinite if the runs do not see one.

    The largest over the smallest singular value of the Jacobian of the log losses by the free coordinates that no
    bound holds, its columns scaled to length 1.
    """
    free, (lower, upper) = theta_P[shape.space.first], bounds(shape, points)
    moving = (free > lower + 1e-9) & (free < upper - 1e-9)
    if not moving.any():
        return 1.0
    steps = _DIFFERENCE * np.eye(shape.space.dim)[moving]
    up, down = (solver.residuals(shape.space.theta(free + sign * steps), points) for sign in (1, -1))
    lengths = np.linalg.norm(up - down, axis=1, keepdims=True)
    if not lengths.all():
        return float("inf")
    values = np.linalg.svd((up - down) / lengths, compute_uv=False)
    return float(values[0] / values[-1]) if values[-1] > 0 else float("inf")
