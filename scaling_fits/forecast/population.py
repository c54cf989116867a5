"""The population of scaling studies: the prior of a law, and the error of a law beyond its runs.

A study's law has six coordinates about a reference point (N0, D0), the mean of its largest runs in
log N and log D:

    L = L0 * (e + (1 - e) * (w * (N / N0)^(-a / k) + (1 - w) * (D / D0)^(-b / k))^k).

L0 is the loss at that point, e the irreducible share of it, w the share of the model's size in the
rest, a and b the slopes of the reducible loss in log N and log D, and k the exponent that couples
the two terms (k = 1: arXiv 2203.15556). Across studies logit e, logit w, log a, log b, and log k
follow one multivariate t distribution. This distribution determines a coordinate that a study's
runs do not determine.

The numbers are round, broad, and set by hand: a search that learned them from 13 public studies
forecast the other four worse than the numbers set by hand (docs/log.md).
`benchmarks/statistics/forecasts.py` tests them on all studies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scaling_fits.laws.law import NEXT_RUNG
from scaling_fits.laws.solver import Floats

NUM_SHARED = 5
"""Coordinates that have a population: logit e, logit w, log a, log b, log k."""
REFERENCE_FLOPS = 1e19
"""FLOPs, 6 N0 D0, of the reference point at which the population is stated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Population:
    """The distribution of laws over studies, and the error of a law beyond its runs."""

    mean: tuple[float, ...]
    """Mean of logit e, logit w, log a, log b, log k at `REFERENCE_FLOPS`."""
    sd: tuple[float, ...]
    """Standard deviations of the same coordinates."""
    correlation: float
    """Correlation of any two of logit e, log a, log b, and log k; logit w varies alone."""
    e_growth: float
    """Growth of the mean of logit e with the log of the reference point's FLOPs: the reducible loss
    falls, the irreducible loss stays."""
    noise_sd: float
    """Typical standard deviation of one run's log loss."""
    length: float
    """Distance in log N and log D over which a departure from the law fades."""
    near: float
    """Excess of log loss over the frontier at which a run counts half."""
    error_sd: float
    """Standard deviation of the law's error in log loss where the log of the extrapolation is 1."""
    error_power: float
    """Power by which that error grows with the log of the extrapolation."""
    error_growth: float
    """Power by which that error grows as the reference point's FLOPs fall below
    `REFERENCE_FLOPS`."""

    @property
    def covariance(self) -> Floats:
        """Covariance of the shared coordinates (5, 5)."""
        matrix = np.full((NUM_SHARED, NUM_SHARED), self.correlation)
        matrix[1, :] = matrix[:, 1] = 0.0
        np.fill_diagonal(matrix, 1.0)
        return np.asarray(matrix * np.outer(self.sd, self.sd))

    def mean_at(self, reference: tuple[float, float]) -> Floats:
        """Return the mean (5,) of laws about a reference point, given by its log N and log D."""
        return np.asarray(
            [self.mean[0] + self.e_growth * _compute_log_scale(reference), *self.mean[1:]]
        )

    def error_at(self, reference: tuple[float, float], ratio: Floats) -> Floats:
        """Return the standard deviation of a law's error in log loss beyond its runs.

        Args:
            reference: log N and log D of the law's reference point.
            ratio: 6 N D of the new run over the largest fitted (R,); below 1 it counts as 1.
        """
        reach = np.log(NEXT_RUNG * np.maximum(ratio, 1.0)) ** self.error_power
        growth = math.exp(self.error_growth * max(0.0, -_compute_log_scale(reference)))
        return np.asarray(self.error_sd * growth * reach)


def _compute_log_scale(reference: tuple[float, float]) -> float:
    """Return the log of a reference point's FLOPs over `REFERENCE_FLOPS`."""
    return math.log(6.0 / REFERENCE_FLOPS) + reference[0] + reference[1]


PUBLIC = Population(
    mean=(0.2, 0.0, math.log(0.33), math.log(0.33), -0.3),
    sd=(0.5, 0.7, 0.35, 0.35, 0.4),
    correlation=0.3,
    e_growth=0.15,  # half of a slope of 0.33: compute is split evenly between N and D
    noise_sd=0.003,
    length=2.0,
    near=0.03,
    error_sd=0.002,
    error_power=1.5,
    error_growth=0.1,
)
"""The population of studies of language models."""
