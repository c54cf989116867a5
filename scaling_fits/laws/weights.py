"""Excess of a run over the frontier, and detection of outliers.

**Frontier.** No law is exact, and one curve cannot be right everywhere. The runs that matter lie on
the frontier, where no other shape has a lower loss for its FLOPs. A run 10 % worse than that, such
as a tiny model trained very long or a giant one hardly trained, shows where the law fails rather
than what to expect of a good run. The noise of a run therefore grows with its excess over the
frontier (`forecast.posterior`).

**Outliers.** One run that diverged and recovered, or was read from the wrong file, makes an
ordinary standard deviation as large as its own error, and widens every interval. Such runs are
therefore excluded from the noise, and named.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from scaling_fits.laws.solver import HUBER_DELTA, Floats
from scaling_fits.laws.table import RunTable

_SAME_BUDGET = 0.2  # Difference in log FLOPs within which runs count as having one budget
OUTLIER_SDS = 5.0
"""Minimum limit of an outlier in robust standard deviations; with few runs the limit is higher
(`outlier_limit`). Of 100 clean tables, 1 to 3 show an outlier."""
# Ratio of a normal distribution's standard deviation to its median absolute deviation
_NORMAL_MAD = 1.4826
_MAX_OUTLIER_SHARE = (
    0.2  # Maximum share of outliers; more are not outliers but the scatter of these runs
)


def excess(table: RunTable) -> Floats:
    """Compute the log loss above the best run that cost less or, as budgets are met, up to 22 %
    more (R,); at least 0.
    """
    order = np.argsort(table.flops, kind="stable")
    log_flops = np.log(table.flops[order])
    log_loss = np.log(table.loss)
    best = np.minimum.accumulate(log_loss[order])
    reached = np.searchsorted(log_flops, np.log(table.flops) + _SAME_BUDGET, side="right") - 1
    return np.asarray(np.maximum(log_loss - best[reached], 0.0))


def effective_runs(weight: Floats) -> float:
    """Compute the equivalent number of runs of equal weight (Kish): their number if all weights are
    equal, else fewer.
    """
    return float(weight.sum() ** 2 / (weight**2).sum())


def outlier_limit(num_runs: int, freedom: float) -> float:
    """Return the limit of an outlier in robust standard deviations: the value that 1 clean table in
    100 reaches by Student's t distribution, at least 5.

    With 12 runs and 1 % noise, a run that is 4 % off is detected every other time; with 30 runs,
    always.
    """
    return max(OUTLIER_SDS, float(stdtrit(max(freedom, 1.0), 1 - 0.005 / num_runs)))


def find_outliers(residuals: Floats, num_parameters: int, freedom: float) -> NDArray[np.bool_]:
    """Find the runs that are too far off to be noise; none if they would be more than a fifth of
    all.

    A robust fit passes through about as many runs as it has parameters. That many of the smallest
    residuals carry no information on the noise, and are left out of the robust standard deviation.
    It is at least the delta of the objective, so runs that fit a law exactly have no outliers.
    """
    if len(residuals) < 2 * num_parameters:
        return np.zeros(len(residuals), dtype=np.bool_)
    sorted_residuals = np.sort(np.abs(residuals))[num_parameters:]
    sd = max(_NORMAL_MAD * float(np.median(sorted_residuals)), HUBER_DELTA)
    is_outlier = np.abs(residuals / sd) > outlier_limit(len(residuals), freedom)
    return is_outlier if is_outlier.mean() <= _MAX_OUTLIER_SHARE else np.zeros_like(is_outlier)
