"""Back-tests: the largest budgets are held out, the other runs are fitted, and the held-out runs
are predicted.

Each back-test is a separate fit that never saw the runs it predicts. The first back-test holds out
the largest rung (the runs of the largest budget). Each later back-test also holds out smaller
budgets, down to the last of `CUTS`. All of them predict the largest rung. A forecast far beyond the
runs is therefore judged by a back-test over a similar distance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forerun._scaling_fits.forecast.posterior import LawPosterior
from forerun._scaling_fits.laws.forms import MIN_POINTS
from forerun._scaling_fits.laws.table import RunTable

OnStep = Callable[[str, float], None]
"""Function that is called with the name of each step of long work, and the share of the work done
before the step."""

CUTS = (1.25, 3.0, 10.0, 30.0, 100.0)
"""Divisors of the largest budget. Each back-test holds out the runs above one of the quotients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """One held-out run. Losses in nats per token."""

    params: float
    tokens: float
    loss_nats: float
    predicted_nats: float
    interval_nats: tuple[float, float] | None
    """Interval of the loss of one new run, in nats; None without a bootstrap."""

    @property
    def covered(self) -> bool | None:
        """Whether the run fell into its interval; None without one."""
        if self.interval_nats is None:
            return None
        low, high = self.interval_nats
        return low <= self.loss_nats <= high


@dataclass(frozen=True, kw_only=True, slots=True)
class Backtest:
    """Predictions of the runs of the largest budget by a fit without the runs above a cut."""

    runs: tuple[HeldOut, ...]
    num_fitted: int
    extrapolation: float
    """Largest held-out over largest fitted FLOPs."""

    @property
    def mean_error(self) -> float:
        """Mean of predicted loss / measured loss - 1: 0.01 is 1 % too high."""
        return float(np.mean([run.predicted_nats / run.loss_nats - 1 for run in self.runs]))

    @property
    def largest_error(self) -> float:
        """Largest of the absolute relative errors."""
        return max(abs(run.predicted_nats / run.loss_nats - 1) for run in self.runs)

    @property
    def num_covered(self) -> int | None:
        """Number of runs within their intervals; None without a bootstrap."""
        flags = [run.covered for run in self.runs]
        return None if None in flags else sum(bool(flag) for flag in flags)


def run_backtests(
    table: RunTable,
    fit: Callable[[RunTable], LawPosterior | None],
    *,
    level: float,
    has_intervals: bool,
    on_step: OnStep,
) -> tuple[Backtest, ...]:
    """Hold out the largest budgets, each time down to a smaller budget, and predict the runs of the
    largest one.

    Args:
        table: The runs.
        fit: Function that fits a part of the runs; returns None if that part identifies no law.
        level: Level of the intervals.
        has_intervals: Whether runs get intervals.
        on_step: Callback of each back-test.

    Returns:
        One back-test for each distance, the nearest first, without those for which too few runs
        are left.
    """
    largest = float(table.flops.max())
    top = table.flops > largest / CUTS[0]
    backtests: list[Backtest] = []
    fitted_before = -1
    for place, cut in enumerate(CUTS):
        on_step("holding out budgets", place / len(CUTS))
        below = table.select_runs((table.flops < largest / cut) & ~top)
        num_fitted = below.num_runs
        if num_fitted == fitted_before or below.num_places < MIN_POINTS:
            continue
        fitted_before = num_fitted
        posterior = fit(below)
        if posterior is not None:
            ratio = largest / float(below.flops.max())
            backtests.append(
                _predict_held_out(
                    posterior, table.select_runs(top), num_fitted, ratio, level, has_intervals
                )
            )
    return tuple(backtests)


def find_nearest_backtest(backtests: tuple[Backtest, ...], extrapolation: float) -> Backtest | None:
    """Return the back-test at the distance nearest to the requested one; None if there is none."""
    distance = np.log(max(extrapolation, 1.0))
    return min(
        backtests, key=lambda backtest: abs(np.log(backtest.extrapolation) - distance), default=None
    )


def _predict_held_out(
    posterior: LawPosterior,
    held: RunTable,
    num_fitted: int,
    ratio: float,
    level: float,
    has_intervals: bool,
) -> Backtest:
    """Return the held-out runs with their predictions by the fit without them."""
    tail = (1 - level) / 2
    quantiles = posterior.compute_quantiles(held.params, held.tokens, (0.5, tail, 1 - tail))
    middle, low, high = np.exp(quantiles)
    runs = tuple(
        HeldOut(
            params=float(n),
            tokens=float(d),
            loss_nats=float(loss),
            predicted_nats=float(predicted),
            interval_nats=(float(lower), float(upper)) if has_intervals else None,
        )
        for n, d, loss, predicted, lower, upper in zip(
            held.params, held.tokens, held.loss, middle, low, high, strict=True
        )
    )
    return Backtest(runs=runs, num_fitted=num_fitted, extrapolation=ratio)
