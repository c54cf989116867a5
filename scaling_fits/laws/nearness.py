"""Weights for runs by how near they are to the best of their budget.

No law is the truth, and one curve cannot be right everywhere. The runs that money is spent on lie on the frontier,
where no other shape does better for its FLOPs; a run 10 % worse than that, a tiny model fed for ever or a giant
one barely fed, says more about where the law fails than about the run to be predicted. So a run's weight falls
with its distance from the frontier, as if the laws' own error grew with it:

    weight = 1 / (1 + (excess / 0.015)^2),   excess = log(loss) - log(the best loss for its FLOPs or less).

On public families this alone takes about half off the error of an extrapolation (`benchmarks/backtests.py`).

A law needs runs all the same. Where these weights leave fewer than 15 effective runs (Kish 1965: the square of the
weights' sum over the sum of their squares), three for each parameter of a law with five, they are evened out, by a
power below 1, until they leave as many; a ladder of 15 runs or fewer weighs all alike.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from scaling_fits.laws.solver import Floats
from scaling_fits.laws.table import RunTable

FRONTIER_WIDTH = 0.015  # a run 1.5 % worse than the best of its budget weighs half
LEAST_EFFECTIVE_RUNS = 15.0
_BISECTIONS = 40
_SAME_BUDGET = 0.2  # in log FLOPs: runs of one budget, as budgets are met


def excess(table: RunTable) -> Floats:
    """Log loss above the best run that cost less or, as budgets are met, up to 22 % more (R,), at least 0."""
    order = np.argsort(table.flops, kind="stable")
    log_flops = np.log(table.flops[order])
    log_loss = np.log(table.loss)
    best = np.minimum.accumulate(log_loss[order])
    reached = np.searchsorted(log_flops, np.log(table.flops) + _SAME_BUDGET, side="right") - 1
    result: Floats = np.maximum(log_loss - best[reached], 0.0)
    return result


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
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        enough = effective_runs(weight * np.exp(middle * log_shares)) >= LEAST_EFFECTIVE_RUNS
        low, high = (middle, high) if enough else (low, middle)
    return low
