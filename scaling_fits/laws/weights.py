"""How far a run is from the frontier, and whether it is off a law by more than noise.

**Frontier.** No law is the truth, and one curve cannot be right everywhere. The runs that money is
spent on lie on the frontier, where no other shape does better for its FLOPs; a run 10 % worse than
that, a tiny model fed for ever or a giant one barely fed, says more about where the law fails than
about the run to be predicted. So the noise of a run grows with its excess over the frontier
(`forecast.posterior`).

**Outliers.** One run that diverged and came back, or was read off the wrong file, makes an ordinary
standard deviation as large as itself, and every interval with it. So the noise is that of the runs
that are not such, and such runs are named.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from scaling_fits.laws.solver import HUBER_DELTA, Floats
from scaling_fits.laws.table import RunTable

_SAME_BUDGET = 0.2  # in log FLOPs: runs of one budget, as budgets are met
OUTLIER_SDS = 5.0
"""Robust sds, at least; few runs need more (`outlier_limit`). Of 100 clean tables 1 to 3 show an
outlier."""
_NORMAL_MAD = 1.4826  # sd of a normal over its median absolute deviation
_MOST = 0.2  # of the runs; more are no outliers but the way these runs scatter


def excess(table: RunTable) -> Floats:
    """Log loss above the best run that cost less or, as budgets are met, up to 22 % more (R,), at
    least 0.
    """
    order = np.argsort(table.flops, kind="stable")
    log_flops = np.log(table.flops[order])
    log_loss = np.log(table.loss)
    best = np.minimum.accumulate(log_loss[order])
    reached = np.searchsorted(log_flops, np.log(table.flops) + _SAME_BUDGET, side="right") - 1
    return np.asarray(np.maximum(log_loss - best[reached], 0.0))


def effective_runs(weight: Floats) -> float:
    """How many runs of one weight say as much (Kish): their number where all weigh alike, fewer
    where not.
    """
    return float(weight.sum() ** 2 / (weight**2).sum())


def outlier_limit(num_runs: int, freedom: float) -> float:
    """Robust sds beyond which a run is no noise: what 1 clean table in 100 reaches by Student's
    tails, at least 5.

    Of 12 runs with 1 % noise, one that is 4 % off is caught every other time; of 30, always.
    """
    return max(OUTLIER_SDS, float(stdtrit(max(freedom, 1.0), 1 - 0.005 / num_runs)))


def outliers(residuals: Floats, num_parameters: int, freedom: float) -> NDArray[np.bool_]:
    """Which runs are too far off to be noise; none where they would be more than a fifth of all.

    A fit that forgives large residuals runs through about as many runs as it has parameters, so
    that many of the smallest residuals say nothing of noise and are left out of the robust sd. That
    is no smaller than what the objective takes for noise: runs that fit a law exactly have no
    outliers.
    """
    if len(residuals) < 2 * num_parameters:
        return np.zeros(len(residuals), dtype=np.bool_)
    telling = np.sort(np.abs(residuals))[num_parameters:]
    sd = max(_NORMAL_MAD * float(np.median(telling)), HUBER_DELTA)
    found = np.abs(residuals / sd) > outlier_limit(len(residuals), freedom)
    return found if found.mean() <= _MOST else np.zeros_like(found)
