"""The population of scaling studies: the prior of a law, and the error of a law beyond its runs.

A study fits one law to its runs, each with N parameters and D tokens. The law has six coordinates
about a reference point (N0, D0), the mean of the study's largest runs in log N and log D:

    L = L0 * (e + (1 - e) * (w * (N / N0)^(-a / k) + (1 - w) * (D / D0)^(-b / k))^k).

L0 is the loss at that point, e its irreducible share, and w the share of the term of N in the two
terms of the reducible loss. a and b are the rates at which the reducible loss would fall in log N
and log D if it consisted of one term only, and k is the exponent that couples the terms (k = 1:
arXiv 2203.15556). Across studies logit e, logit w, log a, log b, and log k follow one multivariate
t distribution. This distribution determines a coordinate that a study's runs do not determine.

The numbers of `PUBLIC` are round, broad, and set by hand. They were also fitted to 13 public
studies, but the fitted numbers forecast the other four studies worse than the ones set by hand
(docs/log.md). `benchmarks/statistics/forecasts.py` tests the numbers on all studies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forerun._scaling_fits.laws.law import NEXT_RUNG
from forerun._scaling_fits.laws.solver import Floats

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
    """Growth of the mean of logit e with the log of the reference point's FLOPs. It is positive,
    because with more compute the reducible loss falls and the irreducible loss stays."""
    noise_sd: float
    """Typical standard deviation of one run's log loss."""
    length: float
    """Length scale, in log N and log D, of departures from the law. Losses deviate from any law by
    a smooth function of N and D; at two runs this far apart, the correlation of the deviations is
    exp(-1/2)."""
    near: float
    """Excess of a run's log loss over the lowest one for its FLOPs at which the run has half the
    weight of the best runs."""
    error_sd: float
    """Standard deviation of the law's error in log loss at a reach of 1 (`compute_error_at`)."""
    error_power: float
    """Power by which that error grows with the reach."""
    error_growth: float
    """Power by which that error grows as the FLOPs of the reference point fall below
    `REFERENCE_FLOPS`."""

    @property
    def covariance(self) -> Floats:
        """Covariance of the shared coordinates (5, 5)."""
        matrix = np.full((NUM_SHARED, NUM_SHARED), self.correlation)
        matrix[1, :] = matrix[:, 1] = 0.0
        np.fill_diagonal(matrix, 1.0)
        return matrix * np.outer(self.sd, self.sd)

    def compute_mean_at(self, reference: tuple[float, float]) -> Floats:
        """Return the mean (5,) of laws about a reference point, given by its log N and log D."""
        return np.asarray(
            [self.mean[0] + self.e_growth * _compute_log_scale(reference), *self.mean[1:]]
        )

    def compute_error_at(self, reference: tuple[float, float], ratio: Floats) -> Floats:
        """Return the standard deviation of a law's error in log loss beyond its runs.

        The reach of a new run is the log of `NEXT_RUNG * ratio`: a run at the fitted ones counts as
        one rung away.

        Args:
            reference: log N and log D of the law's reference point.
            ratio: 6 N D of the new run over the largest fitted (R,); below 1 it counts as 1.
        """
        reach = np.log(NEXT_RUNG * np.maximum(ratio, 1.0))
        growth = math.exp(self.error_growth * max(0.0, -_compute_log_scale(reference)))
        return self.error_sd * growth * reach**self.error_power


def _compute_log_scale(reference: tuple[float, float]) -> float:
    """Return the log of 6 N0 D0 over `REFERENCE_FLOPS`; `reference` is (log N0, log D0)."""
    return math.log(6.0 / REFERENCE_FLOPS) + reference[0] + reference[1]


PUBLIC = Population(
    # logit e, logit w, log a, log b, log k
    mean=(0.2, 0.0, math.log(0.33), math.log(0.33), -0.3),
    sd=(0.5, 0.7, 0.35, 0.35, 0.4),
    correlation=0.3,
    # About 0.33 / 2: if compute is split evenly between N and D, log N and log D each grow half as
    # fast as log FLOPs, and the reducible loss falls with a slope of 0.33 in each of them
    e_growth=0.15,
    noise_sd=0.003,
    length=2.0,
    near=0.03,
    error_sd=0.002,
    error_power=1.5,
    error_growth=0.1,
)
"""The population of public scaling studies of language models, the default prior."""
