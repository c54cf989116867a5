"""From optima at the widths that were run to the optimum and the valley at the width that will be launched.

Everything here works on rows: row 0 is the point estimate, each further row one draw of the posterior.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from transfer.valley import Floats

SCATTER_OCTAVES = 0.05
"""Prior scale (half Student t, 3 degrees of freedom) of how far optima lie off a straight line by nature."""
SCATTERS = np.concatenate([[0.0], np.geomspace(0.005, 4.0, 40)])
"""Grid of that scatter, octaves."""
CURVATURE_TREND_SD = 0.2
"""Prior sd of the change of log curvature per doubling: valleys of one family look alike."""
CURVATURE_SCATTER = 0.2
"""Sd of log curvature about its trend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Optimum against log2 width, extended to the target: one entry per row."""

    slope: Floats
    """Octaves per doubling of width."""
    at_target: Floats
    """Optimum at the target, log2 of the learning rate."""
    pull: Floats
    """(W,) how far `at_target` moves when the optimum of a width moves by one octave."""
    scatter_octaves: float
    """Of optima about the line, point estimate."""


def extend_line(optimum: Floats, log2_width: Floats, log2_target: float, rng: np.random.Generator) -> Line:
    """Straight line through the optima (D, W) of two widths or more, by generalised least squares.

    Optima scatter about the line by more than their own noise; how much is unknown with few widths, so it is
    drawn from its posterior (restricted likelihood on a grid), and the target's own optimum scatters too.
    """
    rows, num_widths = optimum.shape
    variance = np.maximum(np.var(optimum[1:], axis=0), 1e-12)
    design = np.stack([np.ones(num_widths), log2_width - log2_target], axis=1)  # intercept is the target's
    total = variance + SCATTERS[:, None] ** 2  # (T, W)
    weighted = design.T[None] / total[:, None]  # (T, 2, W)
    information = weighted @ design
    estimator = np.linalg.solve(information, weighted)  # (T, 2, W)
    residual = optimum[0] - (estimator @ optimum[0]) @ design.T
    log_likelihood = -0.5 * (
        np.log(total).sum(axis=1) + np.log(np.linalg.det(information)) + (residual**2 / total).sum(axis=1)
    )
    log_prior = -2.0 * np.log1p((SCATTERS / SCATTER_OCTAVES) ** 2 / 3)
    weight = np.exp(log_likelihood - log_likelihood.max() + log_prior) * np.gradient(SCATTERS)
    weight /= weight.sum()
    median = int(np.searchsorted(np.cumsum(weight), 0.5))
    chosen = np.concatenate([[median], rng.choice(len(weight), size=rows - 1, p=weight)])
    jitter = rng.standard_normal((rows, num_widths + 1)) * SCATTERS[chosen][:, None]
    jitter[0] = 0.0
    moved = (estimator[chosen] @ (optimum + jitter[:, 1:])[..., None])[..., 0]
    return Line(
        slope=moved[:, 1],
        at_target=moved[:, 0] + jitter[:, 0],
        pull=estimator[median, 0],
        scatter_octaves=float(SCATTERS[median]),
    )


def extend_curvature(curvature: Floats, log2_width: Floats, log2_target: float, rng: np.random.Generator) -> Floats:
    """Curvature at the target, nats per octave squared, from that at the widths (rows, W).

    Log curvature follows a line whose slope has a prior about 0: the noise of few widths must not become a
    factor of ten at the target. Perturbing data and prior alike makes each row an exact posterior draw.
    """
    log_curvature = np.log(curvature)
    rows, num_widths = curvature.shape
    precision = 1.0 / (np.var(log_curvature[1:], axis=0) + CURVATURE_SCATTER**2)
    design = np.stack([np.ones(num_widths), log2_width - log2_target], axis=1)
    weighted = design.T * precision
    prior = np.diag([0.0, CURVATURE_TREND_SD**-2])
    estimator = np.linalg.solve(weighted @ design + prior, np.concatenate([weighted, prior[:, 1:]], axis=1))
    noise = rng.standard_normal((rows, num_widths + 2))
    noise[0] = 0.0
    data = np.concatenate(
        [log_curvature + CURVATURE_SCATTER * noise[:, 2:], CURVATURE_TREND_SD * noise[:, 1:2]], axis=1
    )
    return np.asarray(np.exp(data @ estimator[0] + CURVATURE_SCATTER * noise[:, 0]))
