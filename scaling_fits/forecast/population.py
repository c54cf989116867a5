"""The population of published scaling studies: the prior of a law, and how far laws are off beyond their runs.

A study's law has six coordinates about a reference point (N0, D0), the mean of its largest runs in log N and log D:

    L = L0 * (e + (1 - e) * (w * (N / N0)^(-a / k) + (1 - w) * (D / D0)^(-b / k))^k).

L0 is the loss there, e the irreducible share of it, w the share of the model's size in the rest, a and b the slopes of
the reducible loss in log N and log D, and k the exponent that couples the two terms (k = 1: arXiv 2203.15556). Across
published studies logit e, logit w, log a, log b, and log k vary like one multivariate t distribution, whose mean and
covariance are this module's numbers. Where a study's runs do not determine a coordinate, this distribution does.

`benchmarks/forecasts.py` learns the numbers from public families and tests them on studies that it left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaling_fits.laws.law import NEXT_RUNG
from scaling_fits.laws.solver import Floats

NUM_SHARED = 5
"""Coordinates that have a population: logit e, logit w, log a, log b, log k."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Population:
    """How the laws of studies vary, and how wrong a law is beyond its runs."""

    mean: tuple[float, ...]
    """Mean of logit e, logit w, log a, log b, log k."""
    sd: tuple[float, ...]
    """Standard deviations of the same."""
    correlation_e_slope: float
    """Correlation of logit e with log a and with log b."""
    correlation_slope_k: float
    """Correlation of log a and of log b with log k."""
    correlation_e_k: float
    """Correlation of logit e with log k."""
    correlation_slopes: float
    """Correlation of log a with log b."""
    noise_sd: float
    """Typical standard deviation of one run's log loss."""
    length: float
    """Distance in log N and log D over which a departure from the law fades."""
    decay: float
    """Log prior odds of each departure ratio in `posterior.DEPARTURES` against the one before it."""
    near: float
    """Excess of log loss over the frontier at which a run counts half."""
    error_sd: float
    """Standard deviation of the law's error in log loss where `reach` is 1."""
    reach_power: float
    """Power by which that error grows with the log of the extrapolation."""
    scale: float = 1.0
    """Factor on both arms of an interval of log loss under which studies that were left out are covered."""

    @property
    def covariance(self) -> Floats:
        """Covariance of the shared coordinates (5, 5), made positive definite."""
        matrix = np.eye(NUM_SHARED)
        entries = {
            (0, 2): self.correlation_e_slope, (0, 3): self.correlation_e_slope, (2, 4): self.correlation_slope_k,
            (3, 4): self.correlation_slope_k, (0, 4): self.correlation_e_k, (2, 3): self.correlation_slopes,
        }  # fmt: skip
        for (i, j), value in entries.items():
            matrix[i, j] = matrix[j, i] = value
        values, vectors = np.linalg.eigh(matrix)
        matrix = (vectors * np.maximum(values, 0.05)) @ vectors.T
        scale = np.array(self.sd) / np.sqrt(np.diag(matrix))
        return np.asarray(matrix * np.outer(scale, scale))

    def reach(self, ratio: Floats) -> Floats:
        """Return how far an extrapolation by the factor `ratio` goes, in units of `error_sd`.

        Args:
            ratio: 6 N D of the new run over the largest fitted (R,); below 1 it counts as 1.
        """
        return np.asarray(np.log(NEXT_RUNG * np.maximum(ratio, 1.0)) ** self.reach_power)


PUBLIC = Population(
    mean=(0.2761, 0.0250, -1.1087, -1.1087, -0.4761),
    sd=(0.2530, 0.7000, 0.3437, 0.3437, 0.2853),
    correlation_e_slope=0.4977,
    correlation_slope_k=0.5235,
    correlation_e_k=0.4294,
    correlation_slopes=0.7253,
    noise_sd=0.003022,
    length=2.3887,
    decay=-0.4295,
    near=0.03286,
    error_sd=0.003582,
    reach_power=0.8831,
    scale=1.1,
)
"""The population of the published studies in docs/public-data.md."""
