"""From optima at the sizes that were run to the optimum and the basin at the size that will be
launched.

Everything here works on rows: row 0 is the point estimate, each further row one draw of the
posterior.

The optimum follows a line in log2 of the size whose slope may change. Two models share the
posterior by their evidence. In the first the slope is one number. In the second, the bend, it is a
stationary Gaussian process about 0 whose correlation falls to 1 / e within a doubling
(Ornstein-Uhlenbeck): it may fade, turn or steepen within the sizes that were run, and beyond them
it fades to nothing, so that the distance to the last optimum grows no faster than the root of the
doublings, as of a random walk. Each optimum, the target's too, lies off that line by a scatter.

Runs cannot show what begins beyond them, however straight their line is. So beyond the largest
width, depth, or number of parameters the slope is a random walk on top of that line, with a scale
learned from public grids and not from the runs at hand: the interval grows with the doublings to
the power 1.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from transfer.basin.shapes import Floats
from transfer.question import Axis

BEND_DOUBLINGS = 1.0
"""Distance over which a bent line's slope keeps 1 / e of what it was. Of 0.5, 1, 2 and 4,
benchmarks/statistics/bend.py."""


class Prior(NamedTuple):
    """What is held of the line along an axis before its runs."""

    bends: float
    """Probability that the line bends."""
    slope_octaves: float
    """Median of the standard deviation of its slope, octaves per doubling; a heavy tail leaves more
    to the runs."""
    lasting_octaves: float
    """Standard deviation of a slope that is there in both models and never fades; so wide, it is
    the runs' alone."""
    walk_octaves: float = 0.0
    """Median scale of the walk beyond the largest size."""


WALK_OCTAVES = 0.05
"""Median scale of the walk of the slope beyond the largest size: octaves per doubling, after one
doubling. The log score of held-out larger sizes in public grids is flat within 0.01 from 0.02 to
0.05 (benchmarks/statistics/walk.py). On 1,000 grids of benchmarks/statistics/transfer_mix.py the
share of false *holds* is 0.03 from 0.05 to 0.08; from 0.08 on three seeds of four sizes and seven
rates no longer decide a target four times the largest size. Over duration and batch it is 0: there
the line itself may bend with even odds, and held-out durations are covered as they should be."""
SLOPE_OCTAVES = 0.2
"""From one duration to the next, slopes are 0.25 (StepLaw) and 0.10 (Misfitting) in the median:
benchmarks/statistics/bend.py."""
LINES: dict[Axis, Prior] = {
    # muP and CompleteP: the optimum stays, so nothing bends; slopes are the runs' to show
    # (2203.03466, 2505.01618)
    "width": Prior(0.02, SLOPE_OCTAVES, 4.0, WALK_OCTAVES),
    "depth": Prior(0.02, SLOPE_OCTAVES, 4.0, WALK_OCTAVES),
    # a square root up to a critical batch, and little after (1812.06162)
    "batch": Prior(0.5, SLOPE_OCTAVES, 0.0),
    # published exponents from -0.5 to +0.3; on public grids optima rise, fall, or turn
    # (benchmarks/statistics/bend.py)
    "duration": Prior(0.5, SLOPE_OCTAVES, 0.0),
    # a slope that lasts, and bends upward at larger sizes in standard form (2606.29158, abstract)
    "params": Prior(0.5, SLOPE_OCTAVES, 4.0, WALK_OCTAVES),
}
"""By axis."""
STRAIGHT_SHARE = 0.25
"""Prior probability that optima lie on their line exactly."""
SCATTER_OCTAVES = 0.03
"""Else the median of the prior of how far they lie off it by nature. With 0.05 the intervals of the
regret covered more than they said, and 3 % more of the grids in
benchmarks/statistics/transfer_mix.py could not be told."""
CURVATURE_TREND_SD = 0.2
"""Prior sd of the change of log curvature per doubling: basins of one family look alike."""
CURVATURE_SCATTER = 0.1
"""Median of the prior of how far log curvature lies off its trend."""
SCATTERS = np.concatenate([[0.0], np.geomspace(0.005, 4.0, 40)])
"""Grid of either scatter."""
SLOPES = np.geomspace(0.02, 4.0, 12)
"""Grid of the slope's standard deviation."""
LEAST_VARIANCE = 1e-8
"""Nothing is known better than to a ten-thousandth of an octave; else a matrix here cannot be
inverted."""


def half_student(grid: Floats, median: float) -> Floats:
    """Shares of a half Student t with 3 degrees of freedom, over a grid of what is above 0."""
    rough = (1 + (grid / median * float(stdtrit(3, 0.75))) ** 2 / 3) ** -2.0 * np.gradient(grid)
    return np.asarray(rough / rough.sum())


def scatter_prior(share_of_none: float, median: float) -> Floats:
    """Return the prior of the scatters: a lump at none, and a half Student t."""
    return np.concatenate(
        [[share_of_none], (1 - share_of_none) * half_student(SCATTERS[1:], median)]
    )


OFF_THE_LINE = scatter_prior(STRAIGHT_SHARE, SCATTER_OCTAVES)
OFF_THE_TREND = scatter_prior(0.0, CURVATURE_SCATTER)


def draw_walk(rows: int, doublings: float, octaves: float, rng: np.random.Generator) -> Floats:
    """Draw how far the optimum leaves its line so many doublings beyond the runs, octaves (rows,);
    row 0 is 0.
    """
    return draw_walks(rows, np.array([doublings]), octaves, rng)[:, 0]


def draw_walks(rows: int, doublings: Floats, octaves: float, rng: np.random.Generator) -> Floats:
    """Draw one walk per row, at several distances beyond the runs (rows, places); row 0 is 0.

    The slope is a random walk from the largest size on, so the distance is its integral, with the
    variance scale^2 doublings^3 / 3. The scale has a half Student prior: most families hardly bend,
    a few do much.
    """
    if octaves == 0:
        return np.zeros((rows, len(doublings)))
    scales = SCATTERS[1:]
    scale = rng.choice(scales, size=rows, p=half_student(scales, octaves))
    u = np.maximum(doublings, 0.0)
    near, far = np.minimum.outer(u, u), np.maximum.outer(u, u)
    covariance = near**2 * (3 * far - near) / 6
    root = np.linalg.cholesky(covariance + LEAST_VARIANCE * np.eye(len(u)))
    walks = (rng.standard_normal((rows, len(u))) @ root.T) * scale[:, None]
    walks[0] = 0.0
    return np.asarray(walks)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimumLine:
    """Optimum against log2 size, extended to the target: one entry per row."""

    slope: Floats
    """Octaves per doubling of size, from the smallest to the largest size that was run."""
    shift: Floats
    """Octaves from the base to the target, along the line and its walk beyond the runs."""
    bend: Floats
    """Octaves per doubling by which the slope from the largest size to the target differs from
    `slope`; 0 where the target lies no further than the sizes that were run."""
    at_target: Floats
    """Optimum at the target, log2 of the learning rate."""
    target_scatter: Floats
    """Octaves by which the target's own optimum lies off the line; part of `at_target`."""
    scatter_octaves: float
    """The scatter of optima about the line, posterior median."""
    bends: float
    """Posterior probability that the line bends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curvature:
    """Curvature of the basin, extended to the target: one entry per row."""

    at_target: Floats
    """Nats per octave squared."""
    trend: Floats
    """Change of its natural log per doubling of size."""


def extend_line(
    optimum: Floats,
    log2_size: Floats,
    log2_target: float,
    log2_base: float,
    axis: Axis,
    rng: np.random.Generator,
) -> OptimumLine:
    """The line through the optima (D, W) of two sizes or more, and on to the target, whose own
    scatters too.
    """
    bends, octaves, lasting, _ = LINES[axis]
    prior = np.outer([1 - bends, bends], half_student(SLOPES, octaves))[..., None] * OFF_THE_LINE
    found = _extend(optimum, log2_size, [log2_target, log2_base], SLOPES, prior, lasting, rng)
    first, last, at_target, at_base = found.along[:, [0, len(log2_size) - 1, -2, -1]].T
    slope, beyond = (last - first) / (log2_size[-1] - log2_size[0]), log2_target - log2_size[-1]
    at_target = at_target + draw_walk(len(at_target), beyond, LINES[axis].walk_octaves, rng)
    bend = (at_target - last) / beyond - slope if beyond > 0 else np.zeros_like(slope)
    return OptimumLine(
        slope=slope,
        shift=at_target - at_base,
        bend=bend,
        at_target=at_target + found.off,
        target_scatter=found.off,
        scatter_octaves=found.scatter,
        bends=found.bends,
    )


def extend_line_to(
    optimum: Floats,
    log2_size: Floats,
    log2_places: Sequence[float],
    axis: Axis,
    rng: np.random.Generator,
) -> Floats:
    """Draw the optima of several sizes that were not run, jointly (D, places), from those of two
    sizes or more (D, W).

    Each place has its own scatter, and all lie on one line with one walk beyond the runs.
    """
    bends, octaves, lasting, _ = LINES[axis]
    prior = np.outer([1 - bends, bends], half_student(SLOPES, octaves))[..., None] * OFF_THE_LINE
    found = _extend(optimum, log2_size, list(log2_places), SLOPES, prior, lasting, rng)
    off = found.scatter_rows[:, None] * rng.standard_normal((len(optimum), len(log2_places)))
    off[0] = 0.0
    walks = draw_walks(
        len(optimum), np.array(log2_places) - log2_size[-1], LINES[axis].walk_octaves, rng
    )
    return np.asarray(found.along[:, len(log2_size) :] + off + walks)


def extend_curvature(
    curvature: Floats, log2_size: Floats, log2_target: float, rng: np.random.Generator
) -> Curvature:
    """Curvature at the target, nats per octave squared, from that at the sizes (D, W).

    Its log follows a straight line whose slope has a prior about 0: the noise of few sizes must not
    become a factor of ten at the target.
    """
    sds, prior = np.array([CURVATURE_TREND_SD]), OFF_THE_TREND[None, None]
    found = _extend(
        np.log(curvature), log2_size, [log2_target, log2_target - 1], sds, prior, 0.0, rng
    )
    at_target, before = found.along[:, -2:].T
    return Curvature(at_target=np.exp(at_target + found.off), trend=at_target - before)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Extended:
    along: Floats
    """(D, W + P) the line at the sizes, then at P more places."""
    off: Floats
    """(D,) scatter of the first of the places."""
    scatter_rows: Floats
    """(D,) standard deviation of the scatter in each row."""
    scatter: float
    bends: float


def line_covariance(doublings: Floats, bent: bool) -> Floats:
    """Prior covariance (W, W) of a line whose slope has unit variance, from its value at the
    smallest size.
    """
    u = doublings - doublings.min()
    if not bent:
        return np.outer(u, u)
    far, far_u = (
        np.exp(-np.abs(np.subtract.outer(u, u)) / BEND_DOUBLINGS),
        np.exp(-u / BEND_DOUBLINGS),
    )
    rest = 1 - far_u[:, None] - far_u + far
    return np.asarray(2 * BEND_DOUBLINGS * np.minimum.outer(u, u) - BEND_DOUBLINGS**2 * rest)


def _extend(
    values_DW: Floats,
    log2_size: Floats,
    places: list[float],
    sds: Floats,
    prior: Floats,
    lasting: float,
    rng: np.random.Generator,
) -> _Extended:
    """The line at the sizes and at more places, from values at W sizes.

    `prior` has a share for each of straight and bent, each `sds` of the slope, each scatter: T
    models, all Gaussian, with a flat prior on the line's height. A draw is one model, by its
    evidence, and a line of its posterior: a line of its prior, corrected by what its own noisy
    values say (Matheron). Row 0 is the mean over the models.
    """
    rows, num_sizes = values_DW.shape
    covariance = np.cov(values_DW[1:], rowvar=False)  # sizes share the error of their shape
    covariance = covariance + LEAST_VARIANCE * np.eye(num_sizes)
    at = np.concatenate([log2_size, places])
    lines = np.stack([line_covariance(at, bent=bent) for bent in (False, True)[: len(prior)]])
    straight = lasting * (at - at.min())
    bent_T, slope_T, scatter_T = (index.reshape(-1) for index in np.indices(prior.shape))
    line_TPP = lines[bent_T] * (sds[slope_T] ** 2)[:, None, None] + np.outer(straight, straight)
    line_TPW = line_TPP[:, :, :num_sizes]
    total = (
        covariance
        + (SCATTERS[scatter_T] ** 2)[:, None, None] * np.eye(num_sizes)
        + line_TPW[:, :num_sizes]
    )
    inverse = np.linalg.inv(total)
    information = inverse.sum(axis=(1, 2))
    height = inverse.sum(axis=1) / information[:, None]  # (T, W)
    residual = values_DW[0] - (height @ values_DW[0])[:, None]
    squares = np.einsum("ti,tij,tj->t", residual, inverse, residual)
    log_evidence = -0.5 * (np.linalg.slogdet(total)[1] + np.log(information) + squares)
    weight = np.exp(log_evidence - log_evidence.max()) * prior.reshape(-1)
    weight /= weight.sum()
    gain = inverse - inverse.sum(axis=2)[..., None] * height[:, None]
    estimator_TPW = height[:, None] + line_TPW @ gain
    chosen = rng.choice(len(weight), size=rows, p=weight)
    roots = np.linalg.cholesky(lines + LEAST_VARIANCE * np.eye(len(at)))
    drawn = np.einsum("dpq,dq->dp", roots[bent_T[chosen]], rng.standard_normal((rows, len(at))))
    drawn = drawn * sds[slope_T[chosen]][:, None] + rng.standard_normal((rows, 1)) * straight
    off = rng.standard_normal((rows, num_sizes + 1)) * SCATTERS[scatter_T[chosen]][:, None]
    errors = values_DW - drawn[:, :num_sizes] - off[:, :-1]
    along = drawn + (estimator_TPW[chosen] @ errors[..., None])[..., 0]
    along[0], off[0] = np.tensordot(weight, estimator_TPW, axes=1) @ values_DW[0], 0.0
    by_scatter = np.bincount(scatter_T, weight)
    return _Extended(
        along=along,
        off=off[:, -1],
        scatter_rows=SCATTERS[scatter_T[chosen]],
        scatter=float(SCATTERS[int(np.searchsorted(np.cumsum(by_scatter), 0.5))]),
        bends=float(weight[bent_T == 1].sum()),
    )
