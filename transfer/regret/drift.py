"""From optima at the sizes that were run to the optimum and the basin at the size that will be launched.

Everything here works on rows: row 0 is the point estimate, each further row one draw of the posterior.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from transfer.basin.shapes import Floats

STRAIGHT_SHARE = 0.25
"""Prior probability that optima lie on a straight line exactly."""
SCATTER_OCTAVES = 0.05
"""Else the median of the prior of how far they lie off it by nature."""
CURVATURE_TREND_SD = 0.2
"""Prior sd of the change of log curvature per doubling: basins of one family look alike."""
CURVATURE_SCATTER = 0.1
"""Median of the prior of how far log curvature lies off its trend."""
SCATTERS = np.concatenate([[0.0], np.geomspace(0.005, 4.0, 40)])
"""Grid of either scatter."""


def scatter_prior(share_of_none: float, median: float) -> Floats:
    """Return the prior of the scatters: a lump at none, and a half Student t with 3 degrees of freedom."""
    scale = median / float(stdtrit(3, 0.75))
    rough = (1 + (SCATTERS / scale) ** 2 / 3) ** -2.0 * np.gradient(SCATTERS) * (SCATTERS > 0)
    return np.where(SCATTERS > 0, (1 - share_of_none) * rough / rough.sum(), share_of_none)


OFF_THE_LINE = scatter_prior(STRAIGHT_SHARE, SCATTER_OCTAVES)
OFF_THE_TREND = scatter_prior(0.0, CURVATURE_SCATTER)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimumLine:
    """Optimum against log2 size, extended to the target: one entry per row."""

    slope: Floats
    """Octaves per doubling of size."""
    at_target: Floats
    """Optimum at the target, log2 of the learning rate."""
    target_scatter: Floats
    """Octaves by which the target's own optimum lies off the line; part of `at_target`."""
    scatter_octaves: float
    """The scatter of optima about the line, point estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curvature:
    """Curvature of the basin, extended to the target: one entry per row."""

    at_target: Floats
    """Nats per octave squared."""
    trend: Floats
    """Change of its natural log per doubling of size."""


def extend_line(optimum: Floats, log2_size: Floats, log2_target: float, rng: np.random.Generator) -> OptimumLine:
    """Straight line through the optima (D, W) of two sizes or more, and on to the target, whose own scatters too."""
    return _extend(optimum, log2_size - log2_target, OFF_THE_LINE, 0.0, rng)


def extend_curvature(curvature: Floats, log2_size: Floats, log2_target: float, rng: np.random.Generator) -> Curvature:
    """Curvature at the target, nats per octave squared, from that at the sizes (D, W).

    Its log follows a line whose slope has a prior about 0: the noise of few sizes must not become a factor of ten at
    the target.
    """
    line = _extend(np.log(curvature), log2_size - log2_target, OFF_THE_TREND, CURVATURE_TREND_SD**-2, rng)
    return Curvature(at_target=np.exp(line.at_target), trend=line.slope)


def _extend(
    values: Floats, doublings: Floats, scatter_prior: Floats, slope_precision: float, rng: np.random.Generator
) -> OptimumLine:
    """Generalised least squares, with the slope's normal prior about 0, from W sizes to 0 doublings.

    Values scatter about the line by more than their own noise; how much is unknown with few sizes, so it is drawn from
    its posterior (restricted likelihood on a grid). Perturbing data and prior alike makes each row a posterior draw.
    """
    rows, num_sizes = values.shape
    covariance = np.cov(values[1:], rowvar=False) + 1e-12 * np.eye(num_sizes)  # sizes share the error of their shape
    design = np.stack([np.ones(num_sizes), doublings], axis=1)  # intercept is the target's
    total = covariance + SCATTERS[:, None, None] ** 2 * np.eye(num_sizes)  # (T, W, W)
    weighted = np.swapaxes(np.linalg.solve(total, design[None]), 1, 2)  # (T, 2, W)
    information = weighted @ design + np.diag([0.0, slope_precision])
    estimator = np.linalg.solve(information, weighted)  # (T, 2, W)
    line = estimator @ values[0]  # (T, 2)
    residual = values[0] - line @ design.T
    squares = (residual * np.linalg.solve(total, residual[..., None])[..., 0]).sum(axis=1)
    log_likelihood = -0.5 * (
        np.linalg.slogdet(total)[1] + np.linalg.slogdet(information)[1] + squares + slope_precision * line[:, 1] ** 2
    )
    weight = np.exp(log_likelihood - log_likelihood.max()) * scatter_prior
    weight /= weight.sum()
    median = int(np.searchsorted(np.cumsum(weight), 0.5))
    chosen = np.concatenate([[median], rng.choice(len(weight), size=rows - 1, p=weight)])
    jitter = rng.standard_normal((rows, num_sizes + 2))
    jitter[0] = 0.0
    off = jitter[:, :-1] * SCATTERS[chosen][:, None]
    moved = (estimator[chosen] @ (values + off[:, 1:])[..., None])[..., 0]
    moved += np.linalg.inv(information)[chosen, :, 1] * (np.sqrt(slope_precision) * jitter[:, -1:])
    return OptimumLine(
        slope=moved[:, 1],
        at_target=moved[:, 0] + off[:, 0],
        target_scatter=off[:, 0],
        scatter_octaves=float(SCATTERS[median]),
    )
