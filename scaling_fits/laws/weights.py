"""How much a run counts: by how near it is to the best of its budget, and whether it is off the law by more than noise.

**Nearness.** No law is the truth, and one curve cannot be right everywhere. The runs that money is spent on lie on the
frontier, where no other shape does better for its FLOPs; a run 10 % worse than that, a tiny model fed for ever or a
giant one barely fed, says more about where the law fails than about the run to be predicted. So a run's weight falls
with its distance from the frontier, as if the laws' own error grew with it:

    weight = 1 / (1 + (excess / 0.015)^2),   excess = log(loss) - log(the best loss for its FLOPs or less).

On public families this alone takes about half off the error of an extrapolation (`benchmarks/backtests.py`).

A law needs runs all the same. Where these weights leave fewer than 15 effective runs (Kish 1965: the square of the
weights' sum over the sum of their squares), three for each parameter of a law with five, they are evened out, by a
power below 1, until they leave as many; a ladder of 15 runs or fewer weighs all alike.

**Outliers.** One run that diverged and came back, or was read off the wrong file, makes an ordinary standard
deviation as large as itself, and every interval with it. So the noise is that of the runs that are not such, and such
runs are named.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from scaling_fits.laws.solver import HUBER_DELTA, Floats, bisected
from scaling_fits.laws.table import RunTable

FRONTIER_WIDTH = 0.015  # a run 1.5 % worse than the best of its budget weighs half
LEAST_EFFECTIVE_RUNS = 15.0
_BISECTIONS = 40
_SAME_BUDGET = 0.2  # in log FLOPs: runs of one budget, as budgets are met
OUTLIER_SDS = 5.0
"""Robust sds, at least; few runs need more (`outlier_limit`). Of 100 clean tables 1 to 3 show an outlier."""
_NORMAL_MAD = 1.4826  # sd of a normal over its median absolute deviation
_MOST = 0.2  # of the runs; more are no outliers but the way these runs scatter


def excess(table: RunTable) -> Floats:
    """Log loss above the best run that cost less or, as budgets are met, up to 22 % more (R,), at least 0."""
    order = np.argsort(table.flops, kind="stable")
    log_flops = np.log(table.flops[order])
    log_loss = np.log(table.loss)
    best = np.minimum.accumulate(log_loss[order])
    reached = np.searchsorted(log_flops, np.log(table.flops) + _SAME_BUDGET, side="right") - 1
    return np.asarray(np.maximum(log_loss - best[reached], 0.0))


def effective_runs(weight: Floats) -> float:
    """How many runs of one weight say as much (Kish): their number where all weigh alike, fewer where not."""
    return float(weight.sum() ** 2 / (weight**2).sum())


def near_frontier(table: RunTable) -> RunTable:
    """The table with every weight times the run's nearness to the frontier; the weights' sum stays."""
    log_shares = -np.log1p((excess(table) / FRONTIER_WIDTH) ** 2)
    weight = table.weight * np.exp(_power(table.weight, log_shares) * log_shares)
    return dataclasses.replace(table, weight=weight * (table.weight.sum() / weight.sum()))


def _power(weight: Floats, log_shares: Floats) -> float:
    """The largest power of the shares, at most 1, that leaves `LEAST_EFFECTIVE_RUNS`, or 0."""
    if effective_runs(weight * np.exp(log_shares)) >= LEAST_EFFECTIVE_RUNS:
        return 1.0
    if effective_runs(weight) <= LEAST_EFFECTIVE_RUNS:
        return 0.0

    def enough(power: Floats) -> NDArray[np.bool_]:
        return np.asarray(effective_runs(weight * np.exp(power * log_shares)) >= LEAST_EFFECTIVE_RUNS)

    return float(bisected(enough, 0.0, 1.0, _BISECTIONS)[0])


def outlier_limit(num_runs: int, freedom: float) -> float:
    """Robust sds beyond which a run is no noise: what 1 clean table in 100 reaches by Student's tails, at least 5.

    Of 12 runs with 1 % noise, one that is 4 % off is caught every other time; of 30, always.
    """
    return max(OUTLIER_SDS, float(stdtrit(max(freedom, 1.0), 1 - 0.005 / num_runs)))


def outliers(residuals: Floats, num_parameters: int, freedom: float) -> NDArray[np.bool_]:
    """Which runs are too far off to be noise; none where they would be more than a fifth of all.

    A fit that forgives large residuals runs through about as many runs as it has parameters, so that many of the
    smallest residuals say nothing of noise and are left out of the robust sd. That is no smaller than what the
    objective takes for noise: runs that fit a law exactly have no outliers.
    """
    telling = np.sort(np.abs(residuals))[num_parameters:]
    sd = max(_NORMAL_MAD * float(np.median(telling)), HUBER_DELTA)
    found = np.abs(residuals / sd) > outlier_limit(len(residuals), freedom)
    return found if found.mean() <= _MOST else np.zeros_like(found)
