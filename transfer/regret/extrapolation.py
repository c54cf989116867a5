"""Extrapolation of the optimum and of the basin's curvature from the sizes that were run to the
target.

Row 0 of an array is the point estimate, and every other row is one draw of the posterior. Letters
after a shape or at the end of a name: D rows, W sizes that were run, P places on the line (the
sizes first), T models of the line.

The drift is the slope of the optimum against size, in octaves of the hyperparameter per doubling of
the size. The optimum follows a line in log2 of the size, and the slope of the line may change. Two
models share the posterior by their evidence. In the first model, the slope is one number. In the
second model, the bent line, the slope is a stationary Gaussian process about 0 (Ornstein-Uhlenbeck)
with a correlation that falls to 1 / e within `BEND_DOUBLINGS`. The slope of a bent line may fall to
0, turn, or steepen within the sizes that were run. Beyond them the slope decays to 0, so the
distance from the last optimum grows no faster than the square root of the doublings, like that of a
random walk. Each optimum, including the target's, deviates from the line by a random distance, the
scatter.

Runs cannot show changes that begin at larger sizes, however straight their line is. Beyond the
largest width, depth, or number of parameters, a random walk is therefore added to the slope. The
scale of the walk comes from public grids and not from the runs at hand, and the interval grows with
the doublings to the power 1.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from forerun._transfer.basin.shapes import Floats, Ints
from forerun._transfer.question import Axis

BEND_DOUBLINGS = 1.0
"""Distance in doublings over which the slope of a bent line decays to 1 / e. Chosen among 0.5, 1,
2, and 4 by benchmarks/statistics/bend.py."""


class LinePrior(NamedTuple):
    """Prior of the line along one axis."""

    bend_probability: float
    """Probability that the line bends."""
    slope_octaves: float
    """Median of the standard deviation of the slope, octaves per doubling. The prior has a heavy
    tail, so runs can override it."""
    lasting_octaves: float
    """Standard deviation of a slope that is part of both models and never decays, octaves per
    doubling. If this standard deviation is large, the runs determine the slope."""
    walk_octaves: float = 0.0
    """Median scale of the random walk of the slope beyond the largest size: octaves per doubling,
    after one doubling."""


WALK_OCTAVES = 0.05
"""Median scale of the walk of the slope beyond the largest size: octaves per doubling, after one
doubling. The log score of held-out larger sizes in public grids is flat within 0.01 from 0.02 to
0.05 (benchmarks/statistics/walk.py). On 1,000 grids of benchmarks/statistics/transfer_mix.py the
share of false *holds* is 0.03 for scales from 0.05 to 0.08. From a scale of 0.08 on, three seeds of
four sizes and seven rates no longer decide a target four times the largest size. Over duration and
batch the scale is 0, because the line itself may bend there with even odds, and the intervals cover
held-out durations at their level."""
SLOPE_OCTAVES = 0.2
"""Median of the standard deviation of slopes, octaves per doubling. From one duration to the next,
median slopes are 0.25 (StepLaw) and 0.10 (Misfitting): benchmarks/statistics/bend.py."""
_STEADY_LINE = LinePrior(
    bend_probability=0.02,
    slope_octaves=SLOPE_OCTAVES,
    lasting_octaves=4.0,
    walk_octaves=WALK_OCTAVES,
)
_BENT_LINE = LinePrior(bend_probability=0.5, slope_octaves=SLOPE_OCTAVES, lasting_octaves=0.0)
LINE_PRIORS: dict[Axis, LinePrior] = {
    # muP and CompleteP: the optimum stays, so a bend is unlikely, and the runs determine the slope
    # (2203.03466, 2505.01618)
    "width": _STEADY_LINE,
    "depth": _STEADY_LINE,
    # A square root up to a critical batch size, and little change beyond it (1812.06162)
    "batch": _BENT_LINE,
    # Published exponents range from -0.5 to +0.3; on public grids optima rise, fall, or turn
    # (benchmarks/statistics/bend.py)
    "duration": _BENT_LINE,
    # A slope that persists, and bends upward at larger sizes in standard parametrization
    # (2606.29158, abstract)
    "params": _STEADY_LINE._replace(bend_probability=0.5),
}
"""Prior of the line along each axis."""
STRAIGHT_SHARE = 0.25
"""Prior probability that optima lie on their line exactly."""
SCATTER_OCTAVES = 0.03
"""Median of the scatter's prior if optima do not lie on their line exactly, in octaves. With a
median of 0.05, the intervals of the regret covered more than their level, and 3 % more of the grids
in benchmarks/statistics/transfer_mix.py could not be decided."""
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
"""Variance in octaves squared that is added to covariance matrices, to keep them invertible."""


def compute_half_student(grid: Floats, median: float) -> Floats:
    """Return the probabilities of a half Student t distribution with 3 degrees of freedom on a grid
    of positive values.

    The 75 % quantile of the symmetric distribution is the median of its positive half.
    """
    density = (1 + (grid / median * float(stdtrit(3, 0.75))) ** 2 / 3) ** -2.0 * np.gradient(grid)
    return density / density.sum()


def build_scatter_prior(share_of_none: float, median: float) -> Floats:
    """Return the prior of the scatter: a point mass at 0, and a half Student t distribution."""
    return np.concatenate(
        [[share_of_none], (1 - share_of_none) * compute_half_student(SCATTERS[1:], median)]
    )


OPTIMUM_SCATTER_PRIOR = build_scatter_prior(STRAIGHT_SHARE, SCATTER_OCTAVES)
CURVATURE_SCATTER_PRIOR = build_scatter_prior(0.0, CURVATURE_SCATTER)


def draw_walk_end(rows: int, doublings: float, octaves: float, rng: np.random.Generator) -> Floats:
    """Draw the deviation (rows,) at the end of walks that reach `doublings` beyond the runs, in
    octaves; row 0 is 0. `draw_walk_paths` explains the walk.
    """
    return draw_walk_paths(rows, np.array([doublings]), octaves, rng)[:, 0]


def draw_walk_paths(
    rows: int, doublings: Floats, octaves: float, rng: np.random.Generator
) -> Floats:
    """Draw one walk per row: the deviation of the optimum from its line, in octaves, at each of
    several distances beyond the runs (rows, len(doublings)); row 0 is 0.

    The slope is a random walk from the largest size on. The deviation is the integral of the slope
    and has the variance scale^2 doublings^3 / 3. The scale has a half Student t prior with the
    median `octaves`: most families of models hardly bend, and a few bend a lot.
    """
    if octaves == 0:
        return np.zeros((rows, len(doublings)))
    scales = SCATTERS[1:]  # without 0
    scale = rng.choice(scales, size=rows, p=compute_half_student(scales, octaves))
    # A distance within the runs is negative: no walk has begun there
    u = np.maximum(doublings, 0.0)
    near, far = np.minimum.outer(u, u), np.maximum.outer(u, u)
    # Covariance of an integrated Brownian motion
    covariance = near**2 * (3 * far - near) / 6
    root = np.linalg.cholesky(covariance + MIN_VARIANCE * np.eye(len(u)))
    walks = (rng.standard_normal((rows, len(u))) @ root.T) * scale[:, None]
    walks[0] = 0.0
    return walks


class OptimumLine(NamedTuple):
    """Line of the optimum against log2 size, extended to the target. Arrays are (D,)."""

    slope: Floats
    """Octaves per doubling of size, from the smallest to the largest size that was run."""
    shift: Floats
    """Octaves from the base to the target, along the line and its walk beyond the runs."""
    bend: Floats
    """Octaves per doubling by which the slope from the largest size to the target differs from
    `slope`; 0 where the target lies no further than the sizes that were run."""
    at_target: Floats
    """Optimum at the target, log2 of the hyperparameter."""
    target_scatter: Floats
    """Octaves by which the target's own optimum lies off the line; included in `at_target`."""
    scatter_octaves: float
    """Standard deviation of the scatter of optima about the line, posterior median."""
    bend_probability: float
    """Posterior probability that the line bends."""


def extend_line_to_target(
    optimum: Floats,
    log2_size: Floats,
    log2_target: float,
    log2_base: float,
    axis: Axis,
    rng: np.random.Generator,
) -> OptimumLine:
    """Fit the line through the optima (D, W) of two sizes or more, and extend the line to the
    target. The optimum at the target has a scatter of its own.

    `log2_size` (W,) is in ascending order.
    """
    # The target is the first of the added places: `_ExtendedLine.off` is the scatter there
    extended = _extend_axis(optimum, log2_size, [log2_target, log2_base], axis, rng)
    smallest, largest, at_target, at_base = extended.along[:, [0, len(log2_size) - 1, -2, -1]].T
    slope = (largest - smallest) / (log2_size[-1] - log2_size[0])
    beyond = log2_target - log2_size[-1]
    at_target = at_target + draw_walk_end(
        len(at_target), beyond, LINE_PRIORS[axis].walk_octaves, rng
    )
    bend = (at_target - largest) / beyond - slope if beyond > 0 else np.zeros_like(slope)
    return OptimumLine(
        slope=slope,
        shift=at_target - at_base,
        bend=bend,
        at_target=at_target + extended.off,
        target_scatter=extended.off,
        scatter_octaves=extended.scatter,
        bend_probability=extended.bend_probability,
    )


def draw_optima_at_sizes(
    optimum: Floats,
    log2_size: Floats,
    log2_places: Sequence[float],
    axis: Axis,
    rng: np.random.Generator,
) -> Floats:
    """Draw the optima of several sizes that were not run, jointly, from the optima (D, W) of two
    sizes or more. Return one column for each of `log2_places`.

    In one row, all optima lie on one line with one walk beyond the runs. Each optimum has a scatter
    of its own.
    """
    extended = _extend_axis(optimum, log2_size, log2_places, axis, rng)
    off = extended.scatter_rows[:, None] * rng.standard_normal((len(optimum), len(log2_places)))
    off[0] = 0.0
    walks = draw_walk_paths(
        len(optimum), np.array(log2_places) - log2_size[-1], LINE_PRIORS[axis].walk_octaves, rng
    )
    return extended.along[:, len(log2_size) :] + off + walks


def extend_curvature(
    curvature: Floats, log2_size: Floats, log2_target: float, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Extrapolate the curvature (D, W) of the sizes to the target.

    Log curvature follows a straight line. The slope of this line has a prior about 0, so that the
    noise of a few sizes does not become a factor of ten at the target.

    Returns:
        The curvature at the target, nats per octave squared (D,), and the change of the natural log
        of the curvature per doubling of size (D,).
    """
    models = _build_models(
        # A straight line only, and one standard deviation of its slope: shape (1, 1, scatters)
        CURVATURE_SCATTER_PRIOR[None, None],
        np.array([CURVATURE_TREND_SD]),
        lasting=0.0,
    )
    places = [log2_target, log2_target - 1]
    extended = _extend_to_places(np.log(curvature), log2_size, places, models, rng)
    at_target, one_doubling_below = extended.along[:, -2:].T
    return np.exp(at_target + extended.off), at_target - one_doubling_below


class _ExtendedLine(NamedTuple):
    """A line extended to added places, as rows of the posterior."""

    along: Floats
    """(D, P) the line at the sizes, then at the added places."""
    off: Floats
    """(D,) scatter of the first of the added places."""
    scatter_rows: Floats
    """(D,) standard deviation of the scatter in each row."""
    scatter: float
    """Posterior median of that standard deviation."""
    bend_probability: float
    """Posterior probability that the line bends."""


class _Models(NamedTuple):
    """The T Gaussian models of a line: each combination of straight or bent line, standard
    deviation of the slope, and scatter.
    """

    prior: Floats
    """(T,) prior probability of each model."""
    bent: Ints
    """(T,) 1 if the line is bent, 0 if it is straight."""
    slope_sd: Floats
    """(T,) standard deviation of the slope."""
    scatter: Ints
    """(T,) index of the scatter in `SCATTERS`."""
    lasting: float
    """Standard deviation of the slope that never decays, the same in all models."""


def _build_models(prior: Floats, slope_sds: Floats, lasting: float) -> _Models:
    """Build the models of a line from their prior probabilities. The axes of `prior` are straight
    (and bent, unless the line cannot bend), `slope_sds`, and `SCATTERS`.
    """
    bent, slope, scatter = (index.reshape(-1) for index in np.indices(prior.shape))
    return _Models(
        prior=prior.reshape(-1),
        bent=bent,
        slope_sd=slope_sds[slope],
        scatter=scatter,
        lasting=lasting,
    )


def _extend_axis(
    optimum: Floats,
    log2_size: Floats,
    places: Sequence[float],
    axis: Axis,
    rng: np.random.Generator,
) -> _ExtendedLine:
    """Draw the line of the optima along an axis, by the axis's prior."""
    axis_prior = LINE_PRIORS[axis]
    bent = axis_prior.bend_probability
    slopes = np.outer([1 - bent, bent], compute_half_student(SLOPES, axis_prior.slope_octaves))
    prior = slopes[..., None] * OPTIMUM_SCATTER_PRIOR
    models = _build_models(prior, SLOPES, axis_prior.lasting_octaves)
    return _extend_to_places(optimum, log2_size, places, models, rng)


def compute_line_covariance(doublings: Floats, bent: bool) -> Floats:
    """Compute the prior covariance (P, P) of the places of a line, relative to its value at the
    smallest place. The slope of the line has unit variance.
    """
    u = doublings - doublings.min()
    if not bent:
        return np.outer(u, u)
    # Double integral of the Ornstein-Uhlenbeck correlation
    correlation = np.exp(-np.abs(np.subtract.outer(u, u)) / BEND_DOUBLINGS)
    correlation_to_first = np.exp(-u / BEND_DOUBLINGS)
    decayed = 1 - correlation_to_first[:, None] - correlation_to_first + correlation
    return 2 * BEND_DOUBLINGS * np.minimum.outer(u, u) - BEND_DOUBLINGS**2 * decayed


def _extend_to_places(
    values_DW: Floats,
    log2_size: Floats,
    places: Sequence[float],
    models: _Models,
    rng: np.random.Generator,
) -> _ExtendedLine:
    """Draw the line at the sizes and at added places, from values at W sizes.

    All models have a flat prior on the line's height. A draw picks one model by its evidence, and
    then a line of the posterior of that model. Row 0 is the mean over the models.
    """
    rows, num_sizes = values_DW.shape
    # Errors of different sizes are correlated, because the sizes share one shape
    covariance = np.cov(values_DW[1:], rowvar=False)
    covariance = covariance + MIN_VARIANCE * np.eye(num_sizes)
    # Prior covariance of the line under each model
    at = np.concatenate([log2_size, places])
    unit_covariances = np.stack(
        [compute_line_covariance(at, bent=bool(bent)) for bent in np.unique(models.bent)]
    )
    lasting_line = models.lasting * (at - at.min())
    line_TPP = unit_covariances[models.bent] * (models.slope_sd**2)[:, None, None] + np.outer(
        lasting_line, lasting_line
    )
    line_TPW = line_TPP[:, :, :num_sizes]
    # Marginal covariance of the values, with the height integrated out
    total_TWW = (
        covariance
        + (SCATTERS[models.scatter] ** 2)[:, None, None] * np.eye(num_sizes)
        + line_TPW[:, :num_sizes]
    )
    weight_T, estimator_TPW = _weigh_models(values_DW[0], total_TWW, line_TPW, models.prior)
    # The order of the random draws matters: another order changes every recorded verdict
    chosen = rng.choice(len(weight_T), size=(rows,), p=weight_T)
    # Matheron's rule: a line drawn from the prior, corrected by the difference between the values
    # and the noisy values of that same drawn line, is a draw from the posterior
    drawn = _draw_prior_lines(models, chosen, unit_covariances, lasting_line, rng)
    off = rng.standard_normal((rows, num_sizes + 1)) * SCATTERS[models.scatter[chosen]][:, None]
    errors = values_DW - drawn[:, :num_sizes] - off[:, :-1]
    along = drawn + (estimator_TPW[chosen] @ errors[..., None])[..., 0]
    # Row 0: the mean over the models
    along[0] = np.tensordot(weight_T, estimator_TPW, axes=1) @ values_DW[0]
    off[0] = 0.0
    scatter_weights = np.bincount(models.scatter, weight_T)
    return _ExtendedLine(
        along=along,
        off=off[:, -1],
        scatter_rows=SCATTERS[models.scatter[chosen]],
        scatter=float(SCATTERS[int(np.searchsorted(np.cumsum(scatter_weights), 0.5))]),
        bend_probability=float(weight_T[models.bent == 1].sum()),
    )


def _draw_prior_lines(
    models: _Models,
    chosen: Ints,
    unit_covariances: Floats,
    lasting_line: Floats,
    rng: np.random.Generator,
) -> Floats:
    """Draw a line (D, P) from the prior of each chosen model, with a height of 0.

    Args:
        models: The models.
        chosen: Index of the model of each row (D,).
        unit_covariances: `compute_line_covariance` of the straight line, and of the bent line.
        lasting_line: Standard deviation of the part of the line that never decays (P,).
        rng: Random generator.
    """
    rows, num_places = len(chosen), len(lasting_line)
    roots = np.linalg.cholesky(unit_covariances + MIN_VARIANCE * np.eye(num_places))
    normal = rng.standard_normal((rows, num_places))
    lines = np.einsum("dpq,dq->dp", roots[models.bent[chosen]], normal)
    lines = lines * models.slope_sd[chosen][:, None]
    return lines + rng.standard_normal((rows, 1)) * lasting_line


def _weigh_models(
    values_W: Floats, total_TWW: Floats, line_TPW: Floats, prior_T: Floats
) -> tuple[Floats, Floats]:
    """Compute the posterior probability of each model (T,), and the matrix (T, P, W) by which the
    model estimates its line from the values.

    Args:
        values_W: Values at the sizes.
        total_TWW: Covariance of the values under each model.
        line_TPW: Prior covariance of the line between all places and the sizes.
        prior_T: Prior probability of each model.
    """
    inverse = np.linalg.inv(total_TWW)
    information = inverse.sum(axis=(1, 2))
    # Weights by which generalized least squares estimates the height
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
