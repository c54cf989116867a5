"""The excess of a run over the frontier, the effective number of weighted runs, and outliers.

**Frontier.** No law is exact, and one curve cannot be right everywhere. The runs that matter lie on
the frontier, where no other shape has a lower loss for its FLOPs. A run with a loss 10 % above the
frontier, such as a tiny model trained very long or a giant one hardly trained, shows where the law
fails rather than what to expect of a good run. The noise of a run therefore grows with the excess
of its loss over the frontier (`forecast.posterior`).

**Outliers.** One run may have diverged and recovered, or may come from the wrong file. An ordinary
standard deviation would become as large as the error of that run, and would widen every interval.
Such runs are therefore excluded from the noise, and named in a warning.
"""

from __future__ import annotations

import numpy as np
from scipy.special import stdtrit

from forerun._scaling_fits.laws.solver import HUBER_DELTA, Bools, Floats
from forerun._scaling_fits.laws.table import RunTable

# Difference in log FLOPs within which runs count as having one budget: 22 % more FLOPs
_SAME_BUDGET = 0.2
OUTLIER_SDS = 5.0
"""Minimum limit of an outlier in robust standard deviations; with few runs the limit is higher
(`compute_outlier_limit`). Of 100 clean tables, 1 to 3 show an outlier."""
# Ratio of a normal distribution's standard deviation to its median absolute deviation
_NORMAL_MAD = 1.4826
# Maximum share of outliers; more are not outliers but the scatter of these runs
_MAX_OUTLIER_SHARE = 0.2


def compute_excess(table: RunTable) -> Floats:
    """Compute the log loss (R,) of each run above that of the best run that cost less or as much;
    at least 0.

    A run counts as equally expensive within `_SAME_BUDGET`, because the FLOPs of runs of one budget
    differ a little.
    """
    order = np.argsort(table.flops, kind="stable")
    log_flops = np.log(table.flops[order])
    log_loss = np.log(table.loss)
    best = np.minimum.accumulate(log_loss[order])
    reached = np.searchsorted(log_flops, np.log(table.flops) + _SAME_BUDGET, side="right") - 1
    return np.maximum(log_loss - best[reached], 0.0)


def count_effective_runs(weight: Floats) -> float:
    """Compute the equivalent number of runs of equal weight (Kish). It is the number of runs if all
    weights are equal, else less.
    """
    return float(weight.sum() ** 2 / (weight**2).sum())


def compute_outlier_limit(num_runs: int, freedom: float) -> float:
    """Return the limit of an outlier in robust standard deviations: the value that 1 clean table in
    100 reaches by Student's t distribution, but at least `OUTLIER_SDS`.

    With 12 runs and 1 % noise, a run that is 4 % off is detected every other time. With 30 runs, it
    is always detected.
    """
    # Both tails have a probability of 1 in 100 over all runs
    return max(OUTLIER_SDS, float(stdtrit(max(freedom, 1.0), 1 - 0.005 / num_runs)))


def find_outliers(residuals: Floats, num_parameters: int, freedom: float) -> Bools:
    """Find the runs that are too far off to be noise. If they would be more than
    `_MAX_OUTLIER_SHARE` of all runs, no run is an outlier.

    A robust fit passes through about as many runs as it has parameters. That many of the smallest
    residuals carry no information on the noise, and are left out of the robust standard deviation.
    The standard deviation is at least the delta of the objective, so that runs which fit a law
    exactly have no outliers.
    """
    # With so few runs, hardly any residual is left to estimate the noise
    if len(residuals) < 2 * num_parameters:
        return np.zeros(len(residuals), dtype=np.bool_)
    sorted_residuals = np.sort(np.abs(residuals))[num_parameters:]
    sd = max(_NORMAL_MAD * float(np.median(sorted_residuals)), HUBER_DELTA)
    is_outlier = np.abs(residuals / sd) > compute_outlier_limit(len(residuals), freedom)
    return is_outlier if is_outlier.mean() <= _MAX_OUTLIER_SHARE else np.zeros_like(is_outlier)
