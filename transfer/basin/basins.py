"""Posterior of the loss basins of all sizes together.

A basin is the loss as a function of the log learning rate at one size. Values of another
hyperparameter are called rates here too. Given a shape (`forerun._transfer.basin.shapes`), the
minimum m, and the noise, a basin `a + k h(x - m)` is linear in a and k. So a and k > 0 are
integrated exactly. a has a flat prior, and so has k |h|, the depth of the basin over the rates that
were run. The other parameters lie on grids: the shape, one for all sizes; m, over the rates and
`BEYOND_OCTAVES` beyond them; and the noise, pooled over the sizes. If the runs identify the shape,
averaging over shapes does not widen the intervals. If they do not, all shapes that fit share the
posterior, and the interval of the minimum covers all of them.

Seeds are paired: a seed that trained at several rates has its own intercept `a` (same data order
and initialization), so the deviation that its runs share does not count as noise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import special

from forerun._transfer.basin.noise import (
    MIN_NOISE_NATS,
    USUAL_NOISE_SHARE,
    ReducedRuns,
    SizeRuns,
    build_noise_grid,
    choose_noise_growth,
    estimate_variance,
    reduce_runs,
    reduce_trust,
)
from forerun._transfer.basin.shapes import (
    KIND_INDEX,
    KINDS,
    LOG_PRIOR,
    SLANT,
    Floats,
    Ints,
    compute_rise,
    compute_unit_rises,
)

BEYOND_OCTAVES = 1.0
"""Octaves beyond the rates that were run in which an optimum is searched. Farther out the runs give
no information."""
MIN_CURVATURE_SHARE = 0.05
"""Lower bound of a drawn curvature, as a share of the fitted one."""
TRUSTS_NATS = (0.3, 0.1, 0.03)
"""Heights above the minimum, in nats, above which rates may be trusted less to follow the shape of
the basin (`reduce_trust`). These heights and full trust are candidates, and the candidate with the
largest evidence is used."""
COARSE_STRIDE, COARSE_OCTAVES = 40, 0.15
"""Stride over the shapes, and step between optima in octaves, of the first, coarse grid."""
FINE_OCTAVES = 0.02
"""Step between optima in octaves when a single shape is searched."""
MAX_SHAPES, FINE_STEPS = 96, 64
"""Number of shapes, and of optima per size, in the refined grid. It covers only the region where
the coarse grid found likely values."""
DOUBTFUL = 12.0
"""Difference in log evidence from the best at which a trust is dropped after the refined grid."""
NEGLIGIBLE = 10.0
"""Difference in log likelihood from the best at which a shape or an optimum is dropped."""
LOG_ODDS = 2.0
"""Prior log odds of full trust, under which basins follow their shape at all rates."""
CREDIBLE_NOISE_NATS = 5e-4
"""Standard deviation of noise, in nats, below which a better fit is considered luck. A shape is not
ruled out by a fit that is closer than this noise."""
OFF_KINKED, OFF_LOPSIDED = 0.05, 0.1
"""Standard deviations of the error of a fitted shape between two neighboring values that were run,
as shares of the shape's rise over one step (`_draw_off_shape`). The first one is for shapes with a
kink, a cusp, or a wall. The second one is for every shape, times the asymmetry of the shape one
step from the minimum. Both are calibrated on curves outside the families of shapes: on 330 random
grids of cliffs, quartics, floors, and others, the intervals cover 0.84 of the optima without these
errors and 0.93 with them."""
KINKED = ("powers", "walls", "cliffs")
"""Families of shapes with a kink, a cusp, or a wall."""
OFF_STEPS = 33
"""Number of points of the grid over one step on which the error of a shape is inverted."""
CERTAIN_DEPTH = 6.0
"""Depth of a basin, in standard deviations, above which the probability that it is inverted is
neglected."""


class BasinPosterior(NamedTuple):
    """Posterior of W basins as D = draws + 1 rows: row 0 is the point estimate, the others are
    draws.
    """

    optimum: Floats
    """(D, W) log2 of the optimal hyperparameter. Apart from `off_shape`, it lies at most
    `BEYOND_OCTAVES` outside the values that were run."""
    off_shape: Floats
    """(D,) octaves by which the optima of a row differ from the minima of its fitted basins,
    because the true curve differs from the shape; included in `optimum`."""
    curvature: Floats
    """(D, W) curvature as `compute_rise` defines it, nats per octave squared."""
    shape: Ints
    """(D,) index of the shape, as `compute_rise` expects it."""
    side: Ints
    """(D, W) position of the optimum: -1 below the lowest rate, 0 inside, 1 above the highest."""
    minimum_nats: Floats
    """(W,) fitted loss at the optimum in nats, mean over seeds."""
    noise_nats: float
    """Standard deviation of one run about its basin near the minimum, in nats."""


class _Grid(NamedTuple):
    """One size with M candidate optima, and the depth and norm of its basin for each of S shapes
    (S, M).
    """

    size: ReducedRuns
    optimum: Floats
    depth: Floats
    norm: Floats

    @property
    def step(self) -> float:
        """Step between candidate optima, in octaves."""
        return float(self.optimum[1] - self.optimum[0])

    @property
    def misfit(self) -> Floats:
        """Residual sum of squares (S, M). An inverted basin explains none of the squares."""
        return np.maximum(self.size.squares - np.maximum(self.depth, 0.0) ** 2, 0.0)


class _ShapeGrids(NamedTuple):
    """The grids of all sizes for a selection of shapes."""

    shapes: Ints
    by_size: tuple[_Grid, ...]

    @property
    def stride(self) -> int:
        """Step between selected shapes, in table entries."""
        return int(np.diff(self.shapes).min(initial=len(SLANT)))

    @property
    def pure(self) -> tuple[float, int]:
        """Sum of squares between seeds of one rate (pure error), and its degrees of freedom."""
        return sum(g.size.pure_squares for g in self.by_size), sum(
            g.size.num_pure for g in self.by_size
        )

    @property
    def num_free(self) -> int:
        """Degrees of freedom of the lack of fit."""
        return max(sum(g.size.num_free for g in self.by_size), 1)

    @property
    def usual_nats(self) -> float:
        """Prior median of the noise of one run, in nats."""
        level = min(grid.size.level for grid in self.by_size)
        return max(USUAL_NOISE_SHARE * level, MIN_NOISE_NATS)

    def bound_lost_log_likelihood(self, excess: Floats, best: float) -> Floats:
        """Return a lower bound on the loss of log likelihood when the lack of fit is larger than
        the best one.
        """
        (pure, num_pure), least = self.pure, CREDIBLE_NOISE_NATS**2
        pooled = (num_pure + self.num_free) * np.log1p(excess / (best + pure + least))
        return (
            0.5 * np.minimum(pooled, self.num_free * np.log1p(excess / (best + least)))
            if num_pure
            else 0.5 * pooled
        )


def _fit_depth(size: ReducedRuns, h: Floats) -> tuple[Floats, Floats]:
    """Compute the depth of basins h (..., R) by least squares, and their norm |h|. The depth is |h|
    times the curvature.
    """
    flat = h.reshape(-1, h.shape[-1])
    norm = np.sqrt(np.maximum(np.einsum("ij,ij->i", flat @ size.information, flat), 1e-12))
    return ((flat @ size.score) / norm).reshape(h.shape[:-1]), norm.reshape(h.shape[:-1])


def _interpolate_minimum(misfit: Floats) -> Floats:
    """Return the minimum over the last axis, interpolated by a parabola through the lowest point
    and its two neighbors, since a narrow minimum may fall between grid points.
    """
    at = np.clip(misfit.argmin(axis=-1), 1, misfit.shape[-1] - 2)[..., None]
    around = np.take_along_axis(misfit, at + np.array([-1, 0, 1]), axis=-1)
    left, middle, right = np.moveaxis(around, -1, 0)
    below = (left - right) ** 2 / (8 * np.maximum(left + right - 2 * middle, 1e-300))
    # At an end of the grid there is nothing to interpolate: use the lowest value itself
    inside = middle <= np.minimum(left, right)
    return np.where(inside, np.maximum(middle - below, 0.0), misfit.min(axis=-1))


def _search_grids(runs: list[SizeRuns]) -> _ShapeGrids:
    """Build a coarse grid over all shapes and optima, refine it twice where both are likely, and
    keep the likeliest trust.
    """
    # Reduce the runs to quadratic forms over their rates
    growth = choose_noise_growth(runs)
    reduced = [reduce_runs(columns, growth) for columns in runs]
    # Coarse grid: a few of the shapes, and optima up to `BEYOND_OCTAVES` beyond the rates
    shapes = np.arange(0, len(SLANT), COARSE_STRIDE)
    places, rises = [], []
    for size in reduced:
        low, high = size.rates[0] - BEYOND_OCTAVES, size.rates[-1] + BEYOND_OCTAVES
        places.append(np.linspace(low, high, int(np.ceil((high - low) / COARSE_OCTAVES)) + 1))
        rises.append(compute_unit_rises(size.rates - places[-1][:, None], shapes))
    # One set of grids per trust; only those with enough evidence are refined a second time
    by_trust = [
        reduced,
        *([reduce_trust(size, trust) for size in reduced] for trust in TRUSTS_NATS),
    ]
    coarse = [
        _ShapeGrids(shapes=shapes, by_size=tuple(map(_build_grid, sizes, places, rises)))
        for sizes in by_trust
    ]
    refined = [_refine_grids(grids) for grids in coarse]
    evidence = [_compute_log_evidence(grids) for grids in refined]
    likely = [
        grids
        for grids, log in zip(refined, evidence, strict=True)
        if log > max(evidence) - DOUBTFUL
    ]
    return max(map(_refine_grids, likely), key=_compute_log_evidence)


def _build_grid(size: ReducedRuns, optimum: Floats, rises: Floats) -> _Grid:
    depth, norm = _fit_depth(size, rises)
    return _Grid(size=size, optimum=optimum, depth=depth, norm=norm)


def _refine_grids(grids: _ShapeGrids) -> _ShapeGrids:
    """Refine the grids where shape and optima are likely; return them unchanged if refining would
    not make them finer.
    """
    likely, ends = _find_likely_region(grids)
    if len(grids.shapes) <= MAX_SHAPES < 2 * len(likely):
        return grids
    marks = np.bincount(likely, minlength=len(SLANT))
    shapes = np.flatnonzero(np.convolve(marks, np.ones(2 * grids.stride - 1), "same") > 0)
    shapes = shapes[:: int(np.ceil(len(shapes) / MAX_SHAPES))]
    places = [np.linspace(low, high, FINE_STEPS) for low, high in ends]
    sizes = [grid.size for grid in grids.by_size]
    rises = [
        compute_unit_rises(size.rates - m[:, None], shapes)
        for size, m in zip(sizes, places, strict=True)
    ]
    return _ShapeGrids(shapes=shapes, by_size=tuple(map(_build_grid, sizes, places, rises)))


def _find_likely_region(grids: _ShapeGrids) -> tuple[Ints, list[tuple[float, float]]]:
    """Return the shapes that are not negligible, and for each size the interval of optima that are
    likely with them.
    """
    misfits = [grid.misfit for grid in grids.by_size]
    total = np.sum([_interpolate_minimum(misfit) for misfit in misfits], axis=0)
    best = float(total.min())
    kept = (
        grids.bound_lost_log_likelihood(total - best, best)
        - LOG_PRIOR[grids.shapes]
        + LOG_PRIOR.max()
        < NEGLIGIBLE
    )
    ends = []
    for grid, misfit in zip(grids.by_size, misfits, strict=True):
        excess = misfit[kept] - misfit[kept].min(axis=1, keepdims=True)
        places = np.flatnonzero(
            (grids.bound_lost_log_likelihood(excess, best) < NEGLIGIBLE).any(axis=0)
        )
        low, high = max(places[0] - 1, 0), min(places[-1] + 1, len(grid.optimum) - 1)
        ends.append((float(grid.optimum[low]), float(grid.optimum[high])))
    return grids.shapes[kept], ends


def _compute_log_evidence(grids: _ShapeGrids) -> float:
    """Compute the log evidence of the grids of one trust up to a constant, with flat priors on the
    curvatures and the likeliest noise.
    """
    misfit = np.sum([g.misfit.min(axis=1) for g in grids.by_size], axis=0).min()
    pure, num_pure = grids.pure
    variance = estimate_variance(pure + float(misfit), num_pure + grids.num_free, grids.usual_nats)
    by_shape = LOG_PRIOR[grids.shapes] + np.log(grids.stride)
    for grid in grids.by_size:
        by_shape = (
            by_shape
            + _sum_exponentials(-0.5 * grid.misfit / variance - np.log(grid.norm))
            + np.log(grid.step)
        )
    # Height and curvature of each size are integrated out
    num_residuals = num_pure + sum(len(g.size.rates) - 2 for g in grids.by_size)
    log_trust = sum(g.size.log_trust for g in grids.by_size)
    if log_trust < 0:  # It is 0 for full trust
        log_trust -= LOG_ODDS
    return float(
        _sum_exponentials(by_shape)
        - 0.5 * num_residuals * np.log(variance)
        - 0.5 * pure / variance
        + log_trust
    )


def _sum_exponentials(log_terms: Floats) -> Floats:
    """Compute the log of a sum of exponentials over the last axis."""
    largest = log_terms.max(axis=-1)
    return largest + np.log(np.exp(log_terms - largest[..., None]).sum(axis=-1))


def _compute_log_weight(grid: _Grid, depth: Floats, variance: Floats) -> Floats:
    """Compute the log likelihood of each shape and optimum for a variance, with the basin's depth
    integrated over positive values.
    """
    size = grid.size
    log_likelihood = -0.5 * (size.squares - depth**2) / variance - 0.5 * (
        len(size.rates) - 2
    ) * np.log(variance)
    if depth.min() < CERTAIN_DEPTH * np.sqrt(variance.max()):
        log_likelihood += special.log_ndtr(depth / np.sqrt(variance))
    return log_likelihood


def fit_basins(runs: list[SizeRuns], *, draws: int, rng: np.random.Generator) -> BasinPosterior:
    """Fit all sizes together and draw from the posterior.

    At least one size needs four different rates, so that the noise can be measured. The other sizes
    need three.

    Args:
        runs: Runs of each size.
        draws: Number of posterior draws.
        rng: Random generator. The order in which it is used fixes the numbers of a verdict.
    """
    grids = _search_grids(runs)
    # Posterior weight of each pair of variance and shape (V, S)
    misfit = np.sum([g.misfit.min(axis=1) for g in grids.by_size], axis=0).min()
    noise = build_noise_grid(*grids.pure, float(misfit), grids.num_free, grids.usual_nats)
    log_weight = LOG_PRIOR[grids.shapes] + noise.log_prior[:, None]  # (V, S)
    for size_grid in grids.by_size:
        by_optimum = _compute_log_weight(size_grid, size_grid.depth, noise.variance[:, None, None])
        log_weight = log_weight + _sum_exponentials(by_optimum)
    weight = np.exp(log_weight - log_weight.max())
    # Draw variance and shape; row 0 takes the most probable pair
    chosen = np.concatenate(
        [[weight.argmax()], rng.choice(weight.size, size=draws, p=weight.ravel() / weight.sum())]
    )
    variance, row = noise.variance[chosen // len(grids.shapes)], chosen % len(grids.shapes)
    # Draw optimum and curvature of each size
    draws_by_size = [
        _draw_optima(size_grid, grids.shapes, row, variance, rng) for size_grid in grids.by_size
    ]
    by_noise = np.cumsum(weight.sum(axis=1))
    step = float(
        np.median(np.concatenate([np.diff(size_grid.size.rates) for size_grid in grids.by_size]))
    )
    off_shape = _draw_off_shape(grids.shapes[row], step, rng)
    return BasinPosterior(
        optimum=np.stack([p[0] for p in draws_by_size], axis=1) + off_shape[:, None],
        off_shape=off_shape,
        curvature=np.stack([p[1] for p in draws_by_size], axis=1),
        side=np.stack([p[2] for p in draws_by_size], axis=1),
        shape=grids.shapes[row],
        minimum_nats=np.array([p[3] for p in draws_by_size]),
        noise_nats=float(np.sqrt(np.interp(0.5, by_noise / by_noise[-1], noise.variance))),
    )


def _draw_off_shape(shape: Ints, step: float, rng: np.random.Generator) -> Floats:
    """Draw the octaves between the optima of each row and the minima of its fitted basins (D,); 0
    in row 0.

    The runs do not show the curve between two neighboring values. There the curve may differ from a
    shape by a share of the shape's rise over one step. Such a difference moves the optimum of a
    flat floor far and that of a steep basin little, and by the same amount at all sizes. The share
    is larger if the two sides of the basin differ, and if the shape has a kink, which may truly lie
    elsewhere.
    """
    # Standard deviation of the deviation, as a share of the rise over one step
    low, high = compute_rise(np.array([[-step], [step]]), np.ones(1), shape)
    kinked = np.array([family in KINKED for family, _ in KINDS])[KIND_INDEX[shape]]
    signed_share = (
        OFF_KINKED * kinked + OFF_LOPSIDED * np.abs(high - low) / (high + low)
    ) * rng.standard_normal(len(shape))
    signed_share[0] = 0.0
    # Invert the square root of the rise, which is nearly linear in the distance
    octaves = np.linspace(0.0, step, OFF_STEPS)
    root = np.sqrt(
        compute_rise(np.sign(signed_share)[:, None] * octaves, np.ones(1), shape[:, None])
    )
    target_root = np.abs(signed_share) * root[:, -1]
    cell = np.clip((root < target_root[:, None]).sum(axis=1), 1, OFF_STEPS - 1)[:, None]
    below, above = (np.take_along_axis(root, at, axis=1)[:, 0] for at in (cell - 1, cell))
    share = (target_root - below) / np.maximum(above - below, 1e-300)
    return np.sign(signed_share) * (octaves[1] * (cell[:, 0] - 1 + np.minimum(share, 1.0)))


def find_likeliest_optimum(runs: SizeRuns, shape: int) -> float:
    """Return the least-squares optimum of one size for a given shape, as log2 of the
    hyperparameter.
    """
    size = reduce_runs(runs)
    low, high = size.rates[0] - BEYOND_OCTAVES, size.rates[-1] + BEYOND_OCTAVES
    optimum = np.linspace(low, high, int(np.ceil((high - low) / FINE_OCTAVES)) + 1)
    depth, _ = _fit_depth(
        size, compute_unit_rises(size.rates - optimum[:, None], np.array([shape]))
    )
    return float(optimum[depth[0].argmax()])


def _draw_optima(
    grid: _Grid, shapes: Ints, row: Ints, variance: Floats, rng: np.random.Generator
) -> tuple[Floats, Floats, Ints, float]:
    """Draw optimum, curvature, and side (D,) of one size for each row's shape and variance, and
    compute the loss at the optimum of row 0.
    """
    size, shape, sd, num_rows = grid.size, shapes[row], np.sqrt(variance), len(row)
    # Draw the cell of the grid by inverse transform. The weights are computed once per distinct
    # pair of shape and variance, which a complex number represents
    _, first, pair = np.unique(row + 1j * variance, return_index=True, return_inverse=True)
    log_weight = _compute_log_weight(grid, grid.depth[row[first]], variance[first, None])
    cumulative = np.cumsum(np.exp(log_weight - log_weight.max(axis=1, keepdims=True)), axis=1)
    target = rng.random(num_rows) * cumulative[pair, -1]
    cell = np.minimum((cumulative[pair] < target[:, None]).sum(axis=1), FINE_STEPS - 1)
    # The optimum is uniform within its cell; row 0 is the posterior mean
    optimum = grid.optimum[cell] + grid.step * (rng.random(num_rows) - 0.5)
    optimum[0] = np.mean(optimum[1:])
    # Draw the depth from a normal distribution truncated to positive depths
    depth, norm = _fit_depth(
        size, compute_rise(size.rates - optimum[:, None], np.ones(1), shape[:, None])
    )
    below = special.ndtr(-depth / sd)
    depth[1:] += (
        sd * special.ndtri(np.clip(below + (1 - below) * rng.random(num_rows), 1e-15, 1 - 1e-15))
    )[1:]
    curvature = depth / norm
    curvature = np.maximum(
        curvature, MIN_CURVATURE_SHARE * max(float(curvature[0]), MIN_NOISE_NATS)
    )
    side = (optimum > size.rates[-1]).astype(np.int64) - (optimum < size.rates[0]).astype(np.int64)
    fitted = compute_rise(size.rates - optimum[0], curvature[0], shape[0])
    return optimum, curvature, side, float(size.level - size.balance @ fitted)
