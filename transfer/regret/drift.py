"""Extrapolation of the optimum and of the basin's curvature from the sizes that were run to the
target.

All arrays have rows: row 0 is the point estimate, and each further row is one draw of the
posterior.

The optimum follows a line in log2 of the size whose slope may change. Two models share the
posterior by their evidence. In the first, the slope is one number. In the second, the bent line,
the slope is a stationary Gaussian process about 0 whose correlation falls to 1 / e within one
doubling (Ornstein-Uhlenbeck). It may fade, turn, or steepen within the sizes that were run. Beyond
them it fades to zero, so the distance from the last optimum grows no faster than the square root of
the doublings, like that of a random walk. Each optimum, including the target's, deviates from the
line by a scatter.

Runs cannot show changes that begin at larger sizes, however straight their line is. Beyond the
largest width, depth, or number of parameters, the slope is therefore a random walk on top of that
line. Its scale comes from public grids and not from the runs at hand, and the interval grows with
the doublings to the power 1.5.
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
"""Distance in doublings over which a bent line's slope decays to 1 / e. Chosen among 0.5, 1, 2, and
4 by benchmarks/statistics/bend.py."""


class Prior(NamedTuple):
    """Prior of the line along one axis."""

    bends: float
    """Probability that the line bends."""
    slope_octaves: float
    """Median of the standard deviation of its slope, octaves per doubling. The prior has a heavy
    tail, so runs can override it."""
    lasting_octaves: float
    """Standard deviation of a slope that is part of both models and never fades, octaves per
    doubling. Large values leave this slope to the runs."""
    walk_octaves: float = 0.0
    """Median scale of the walk beyond the largest size, octaves per doubling after one doubling."""


WALK_OCTAVES = 0.05
"""Median scale of the walk of the slope beyond the largest size: octaves per doubling, after one
doubling. The log score of held-out larger sizes in public grids is flat within 0.01 from 0.02 to
0.05 (benchmarks/statistics/walk.py). On 1,000 grids of benchmarks/statistics/transfer_mix.py the
share of false *holds* is 0.03 from 0.05 to 0.08; from 0.08 on, three seeds of four sizes and seven
rates no longer decide a target four times the largest size. Over duration and batch the scale is 0:
there the line itself may bend with even odds, and held-out durations are covered at the stated
level."""
SLOPE_OCTAVES = 0.2
"""Median of the standard deviation of slopes, octaves per doubling. From one duration to the next,
median slopes are 0.25 (StepLaw) and 0.10 (Misfitting): benchmarks/statistics/bend.py."""
LINES: dict[Axis, Prior] = {
    # muP and CompleteP: the optimum stays, so a bend is unlikely, and the runs determine the slope
    # (2203.03466, 2505.01618)
    "width": Prior(0.02, SLOPE_OCTAVES, 4.0, WALK_OCTAVES),
    "depth": Prior(0.02, SLOPE_OCTAVES, 4.0, WALK_OCTAVES),
    # A square root up to a critical batch size, and little change beyond it (1812.06162)
    "batch": Prior(0.5, SLOPE_OCTAVES, 0.0),
    # Published exponents range from -0.5 to +0.3; on public grids optima rise, fall, or turn
    # (benchmarks/statistics/bend.py)
    "duration": Prior(0.5, SLOPE_OCTAVES, 0.0),
    # A slope that persists, and bends upward at larger sizes in standard parametrization
    # (2606.29158, abstract)
    "params": Prior(0.5, SLOPE_OCTAVES, 4.0, WALK_OCTAVES),
}
"""Prior of the line along each axis."""
STRAIGHT_SHARE = 0.25
"""Prior probability that optima lie on their line exactly."""
SCATTER_OCTAVES = 0.03
"""Median of the scatter's prior otherwise, in octaves. With 0.05 the intervals of the regret
covered more than their level, and 3 % more of the grids in benchmarks/statistics/transfer_mix.py
could not be decided."""
CURVATURE_TREND_SD = 0.2
"""Prior standard deviation of the change of log curvature per doubling. Basins of one family of
models are similar."""
CURVATURE_SCATTER = 0.1
"""Median of the prior of the scatter of log curvature about its trend."""
SCATTERS = np.concatenate([[0.0], np.geomspace(0.005, 4.0, 40)])
"""Grid of both scatters (of optima in octaves, of log curvature)."""
SLOPES = np.geomspace(0.02, 4.0, 12)
"""Grid of the slope's standard deviation, octaves per doubling."""
MIN_VARIANCE = 1e-8
"""Smallest variance in octaves squared. It keeps the covariance matrices invertible."""


def compute_half_student(grid: Floats, median: float) -> Floats:
    """Return the probabilities of a half Student t distribution with 3 degrees of freedom on a grid
    of positive values.
    """
    density = (1 + (grid / median * float(stdtrit(3, 0.75))) ** 2 / 3) ** -2.0 * np.gradient(grid)
    return np.asarray(density / density.sum())


def build_scatter_prior(share_of_none: float, median: float) -> Floats:
    """Return the prior of the scatter: a point mass at 0, and a half Student t distribution."""
    return np.concatenate(
        [[share_of_none], (1 - share_of_none) * compute_half_student(SCATTERS[1:], median)]
    )


OFF_THE_LINE = build_scatter_prior(STRAIGHT_SHARE, SCATTER_OCTAVES)
OFF_THE_TREND = build_scatter_prior(0.0, CURVATURE_SCATTER)


def draw_walk(rows: int, doublings: float, octaves: float, rng: np.random.Generator) -> Floats:
    """Draw the deviation of the optimum from its line at a distance beyond the runs, octaves
    (rows,); row 0 is 0.
    """
    return draw_walks(rows, np.array([doublings]), octaves, rng)[:, 0]


def draw_walks(rows: int, doublings: Floats, octaves: float, rng: np.random.Generator) -> Floats:
    """Draw one walk per row, at several distances beyond the runs (rows, places); row 0 is 0.

    The slope is a random walk from the largest size on, so the deviation is its integral, with the
    variance scale^2 doublings^3 / 3. The scale has a half Student t prior: most families hardly
    bend, and a few bend a lot.
    """
    if octaves == 0:
        return np.zeros((rows, len(doublings)))
    scales = SCATTERS[1:]
    scale = rng.choice(scales, size=rows, p=compute_half_student(scales, octaves))
    u = np.maximum(doublings, 0.0)
    near, far = np.minimum.outer(u, u), np.maximum.outer(u, u)
    # Covariance of an integrated Brownian motion
    covariance = near**2 * (3 * far - near) / 6
    root = np.linalg.cholesky(covariance + MIN_VARIANCE * np.eye(len(u)))
    walks = (rng.standard_normal((rows, len(u))) @ root.T) * scale[:, None]
    walks[0] = 0.0
    return np.asarray(walks)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimumLine:
    """Line of the optimum against log2 size, extended to the target: one entry per row."""

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
    """Fit the line through the optima (D, W) of two sizes or more, and extend it to the target,
    which has a scatter of its own.
    """
    bends, octaves, lasting, _ = LINES[axis]
    prior = (
        np.outer([1 - bends, bends], compute_half_student(SLOPES, octaves))[..., None]
        * OFF_THE_LINE
    )
    extended = _extend_to_places(
        optimum, log2_size, [log2_target, log2_base], SLOPES, prior, lasting, rng
    )
    first, last, at_target, at_base = extended.along[:, [0, len(log2_size) - 1, -2, -1]].T
    slope, beyond = (last - first) / (log2_size[-1] - log2_size[0]), log2_target - log2_size[-1]
    at_target = at_target + draw_walk(len(at_target), beyond, LINES[axis].walk_octaves, rng)
    bend = (at_target - last) / beyond - slope if beyond > 0 else np.zeros_like(slope)
    return OptimumLine(
        slope=slope,
        shift=at_target - at_base,
        bend=bend,
        at_target=at_target + extended.off,
        target_scatter=extended.off,
        scatter_octaves=extended.scatter,
        bends=extended.bends,
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
    prior = (
        np.outer([1 - bends, bends], compute_half_student(SLOPES, octaves))[..., None]
        * OFF_THE_LINE
    )
    extended = _extend_to_places(optimum, log2_size, list(log2_places), SLOPES, prior, lasting, rng)
    off = extended.scatter_rows[:, None] * rng.standard_normal((len(optimum), len(log2_places)))
    off[0] = 0.0
    walks = draw_walks(
        len(optimum), np.array(log2_places) - log2_size[-1], LINES[axis].walk_octaves, rng
    )
    return np.asarray(extended.along[:, len(log2_size) :] + off + walks)


def extend_curvature(
    curvature: Floats, log2_size: Floats, log2_target: float, rng: np.random.Generator
) -> Curvature:
    """Extrapolate the curvature to the target, in nats per octave squared, from that at the sizes
    (D, W).

    Log curvature follows a straight line whose slope has a prior about 0, so that the noise of a
    few sizes does not become a factor of ten at the target.
    """
    sds, prior = np.array([CURVATURE_TREND_SD]), OFF_THE_TREND[None, None]
    extended = _extend_to_places(
        np.log(curvature), log2_size, [log2_target, log2_target - 1], sds, prior, 0.0, rng
    )
    at_target, before = extended.along[:, -2:].T
    return Curvature(at_target=np.exp(at_target + extended.off), trend=at_target - before)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ExtendedLine:
    """A line extended to more places, as rows of the posterior."""

    along: Floats
    """(D, W + P) the line at the sizes, then at P more places."""
    off: Floats
    """(D,) scatter of the first of the places."""
    scatter_rows: Floats
    """(D,) standard deviation of the scatter in each row."""
    scatter: float
    bends: float


def line_covariance(doublings: Floats, bent: bool) -> Floats:
    """Compute the prior covariance (W, W) of a line whose slope has unit variance, relative to its
    value at the smallest size.
    """
    u = doublings - doublings.min()
    if not bent:
        return np.outer(u, u)
    # Double integral of the Ornstein-Uhlenbeck correlation
    correlation = np.exp(-np.abs(np.subtract.outer(u, u)) / BEND_DOUBLINGS)
    correlation_to_first = np.exp(-u / BEND_DOUBLINGS)
    decayed = 1 - correlation_to_first[:, None] - correlation_to_first + correlation
    return np.asarray(2 * BEND_DOUBLINGS * np.minimum.outer(u, u) - BEND_DOUBLINGS**2 * decayed)


def _extend_to_places(
    values_DW: Floats,
    log2_size: Floats,
    places: list[float],
    sds: Floats,
    prior: Floats,
    lasting: float,
    rng: np.random.Generator,
) -> _ExtendedLine:
    """Draw the line at the sizes and at more places, from values at W sizes.

    `prior` has one probability for each combination of straight or bent line, standard deviation of
    the slope (`sds`), and scatter. These are T models, all Gaussian, with a flat prior on the
    line's height. A draw picks one model by its evidence, and then a line of that model's
    posterior: a line drawn from the prior, corrected by the difference between the values and its
    own simulated noisy values (Matheron's rule). Row 0 is the mean over the models.
    """
    rows, num_sizes = values_DW.shape
    # Errors of different sizes are correlated, because the sizes share one shape
    covariance = np.cov(values_DW[1:], rowvar=False)
    covariance = covariance + MIN_VARIANCE * np.eye(num_sizes)
    # Prior covariance of the line under each model (T, P, P)
    at = np.concatenate([log2_size, places])
    lines = np.stack([line_covariance(at, bent=bent) for bent in (False, True)[: len(prior)]])
    straight = lasting * (at - at.min())
    bent_T, slope_T, scatter_T = (index.reshape(-1) for index in np.indices(prior.shape))
    line_TPP = lines[bent_T] * (sds[slope_T] ** 2)[:, None, None] + np.outer(straight, straight)
    line_TPW = line_TPP[:, :, :num_sizes]
    # Marginal covariance of the values, with the height integrated out
    total = (
        covariance
        + (SCATTERS[scatter_T] ** 2)[:, None, None] * np.eye(num_sizes)
        + line_TPW[:, :num_sizes]
    )
    weight, estimator_TPW = _weigh_models(values_DW[0], total, line_TPW, prior.reshape(-1))
    # Draw a model and a line of its prior, then correct the line by the values (Matheron's rule)
    chosen = rng.choice(len(weight), size=rows, p=weight)
    roots = np.linalg.cholesky(lines + MIN_VARIANCE * np.eye(len(at)))
    drawn = np.einsum("dpq,dq->dp", roots[bent_T[chosen]], rng.standard_normal((rows, len(at))))
    drawn = drawn * sds[slope_T[chosen]][:, None] + rng.standard_normal((rows, 1)) * straight
    off = rng.standard_normal((rows, num_sizes + 1)) * SCATTERS[scatter_T[chosen]][:, None]
    errors = values_DW - drawn[:, :num_sizes] - off[:, :-1]
    along = drawn + (estimator_TPW[chosen] @ errors[..., None])[..., 0]
    # Row 0: the mean over the models
    along[0] = np.tensordot(weight, estimator_TPW, axes=1) @ values_DW[0]
    off[0] = 0.0
    by_scatter = np.bincount(scatter_T, weight)
    return _ExtendedLine(
        along=along,
        off=off[:, -1],
        scatter_rows=SCATTERS[scatter_T[chosen]],
        scatter=float(SCATTERS[int(np.searchsorted(np.cumsum(by_scatter), 0.5))]),
        bends=float(weight[bent_T == 1].sum()),
    )


def _weigh_models(
    values_W: Floats, total_TWW: Floats, line_TPW: Floats, prior_T: Floats
) -> tuple[Floats, Floats]:
    """Compute the posterior probability of each model (T,), and the matrix that estimates its line
    from the values (T, P, W).
    """
    inverse = np.linalg.inv(total_TWW)
    information = inverse.sum(axis=(1, 2))
    height = inverse.sum(axis=1) / information[:, None]  # (T, W)
    residual = values_W - (height @ values_W)[:, None]
    squares = np.einsum("ti,tij,tj->t", residual, inverse, residual)
    # Posterior probability of each model
    log_evidence = -0.5 * (np.linalg.slogdet(total_TWW)[1] + np.log(information) + squares)
    weight = np.exp(log_evidence - log_evidence.max()) * prior_T
    weight /= weight.sum()
    # Kriging weights of each model (T, P, W)
    gain = inverse - inverse.sum(axis=2)[..., None] * height[:, None]
    return weight, height[:, None] + line_TPW @ gain
