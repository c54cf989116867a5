"""The optimum of each size with its interval, or the reason why there is none.

A basin is the loss as a function of the log learning rate at one size. Values of another
hyperparameter are called rates here too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from forerun._transfer.basin.basins import BasinPosterior, find_likeliest_optimum, fit_basins
from forerun._transfer.basin.noise import SizeRuns
from forerun._transfer.basin.shapes import Floats, compute_rise
from forerun._transfer.question import Point

EndName = Literal["lower", "upper"]
OptimumStatus = Literal["ok", "edge", "flat", "too_few"]

MIN_RATES = 4
"""Minimum number of rates for a basin. A basin has three parameters, and a fourth rate shows
whether it fits."""
MIN_RATES_GIVEN_NOISE = 3
"""Minimum number of rates of a size if another size has `MIN_RATES` and so determines the noise."""
HALF_WINDOW_OCTAVES, MAX_EXCESS_NATS = 4.5, 1.0
"""Distance from the best rate in octaves, and excess loss in nats, beyond which a rate is left out
because it gives no information about the minimum."""
MAX_OUTSIDE_SHARE = 0.05
"""Posterior probability that an optimum lies outside the rates that were run, above which the
optimum is not used."""
CURVE_SAMPLES = 33
"""Number of points of a fitted curve that are reported."""
ONE_IN_TWENTY = 1.645 * math.sqrt(2.0)
"""Difference of two runs of one value, in multiples of the noise of one run, that chance exceeds
one time in twenty (one-sided): the 95 % quantile of a normal distribution times sqrt(2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """The optimum of one size. Estimates are None unless `status` is `ok`."""

    size: int
    status: OptimumStatus
    """Whether the optimum can be used. `edge`: it may lie outside the rates that were run; `flat`:
    the basin does not rise above the noise; `too_few`: there are too few rates."""
    log2_value: float | None = None
    interval_log2: tuple[float, float] | None = None
    """Interval of `log2_value` at the verdict's level."""
    loss_nats: float | None = None
    """Loss of the fitted basin at its minimum in nats, mean over the available seeds. The verdict
    does not use it."""
    lowest_run_nats: float | None = None
    """Lowest mean loss of a value at which every run finished; None if there is no such value."""
    num_runs: int
    num_diverged: int
    cliff_octaves: float | None = None
    """Octaves from the optimum up to the lowest rate above it at which a run diverged; None if
    there is none."""
    curve: tuple[tuple[float, float], ...] = ()
    """Points (log2_value, loss in nats) of the fitted basin over the window."""


class Optima(NamedTuple):
    """The optima of all sizes, and the posterior of those that were fitted."""

    optima: tuple[Optimum, ...]
    """Optima in ascending order of size."""
    fitted: tuple[int, ...]
    """Size of each column of `basins`."""
    basins: BasinPosterior | None
    """Posterior of the fitted sizes; None if no size has enough rates."""


def find_optima(
    points: Sequence[Point], *, level: float, draws: int, rng: np.random.Generator
) -> Optima:
    """Fit one basin per size. All sizes share noise and shape (`forerun._transfer.basin.basins`).

    A rate at which any run diverged is left out, because the runs that finished there are a biased
    sample.
    """
    by_size: dict[int, list[Point]] = {}
    for point in sorted(points, key=lambda p: p.size):
        by_size.setdefault(point.size, []).append(point)
    max_rates = max(len(list_finite_rates(group)) for group in by_size.values())
    min_rates = MIN_RATES_GIVEN_NOISE if max_rates >= MIN_RATES else MIN_RATES
    windows = {size: _select_window(group, min_rates) for size, group in by_size.items()}
    runs = {size: _to_size_runs(window) for size, window in windows.items() if window}
    fitted = tuple(runs)
    basins = fit_basins(list(runs.values()), draws=draws, rng=rng) if fitted else None
    optima = []
    for size, group in by_size.items():
        if basins is None or size not in runs:
            optima.append(_describe_size(size, group, "too_few"))
        else:
            optima.append(
                _describe_optimum(size, group, runs[size], basins, fitted.index(size), level)
            )
    return Optima(optima=tuple(optima), fitted=fitted, basins=basins)


def find_optimum_at_shape(points: Sequence[Point], shape: int) -> float | None:
    """Return log2 of the optimum of one size, fitted with a given shape to the runs of that size
    alone; None if there are too few rates.
    """
    window = _select_window(points, MIN_RATES_GIVEN_NOISE)
    return find_likeliest_optimum(_to_size_runs(window), shape) if window else None


def list_finite_rates(points: Sequence[Point]) -> list[float]:
    """Return the rates, in ascending order, at which every run finished."""
    diverged = {p.log2_value for p in points if p.loss_nats is None}
    return sorted({p.log2_value for p in points} - diverged)


def find_best_rate(points: Sequence[Point]) -> float | None:
    """Return the rate with the lowest mean loss, among those at which every run finished; None if
    there is none.
    """
    mean = _compute_mean_losses(points)
    return min(mean, key=lambda rate: mean[rate]) if mean else None


def has_repeated_value(points: Sequence[Point]) -> bool:
    """Return whether any value of any size was run twice. If not, the noise is estimated from the
    misfit of the curve alone, which is a guess.
    """
    cells = [(p.size, p.log2_value) for p in points if p.loss_nats is not None]
    return len(cells) > len(set(cells))


class BetterEnd(NamedTuple):
    """The end of the values run at one size that has the lower loss."""

    name: EndName
    log2_value: float
    excess_nats: float
    """Mean loss above that of the best value, in nats."""

    @property
    def noise_needed_nats(self) -> float:
        """Noise of one run, in nats, at which chance would make the end look this much worse one
        time in twenty.
        """
        return self.excess_nats / ONE_IN_TWENTY


def find_better_end(points: Sequence[Point]) -> BetterEnd | None:
    """Return the end with the lower loss, given runs at one size; None if all diverged."""
    mean = _compute_mean_losses(points)
    if not mean:
        return None
    low, high = min(mean), max(mean)
    name: EndName = "lower" if mean[low] < mean[high] else "upper"
    end = low if name == "lower" else high
    return BetterEnd(name=name, log2_value=end, excess_nats=mean[end] - min(mean.values()))


def _compute_mean_losses(points: Sequence[Point]) -> dict[float, float]:
    """Compute the mean loss at each of `list_finite_rates`."""
    losses: dict[float, list[float]] = {rate: [] for rate in list_finite_rates(points)}
    for point in points:
        if point.log2_value in losses and point.loss_nats is not None:
            losses[point.log2_value].append(point.loss_nats)
    return {rate: float(np.mean(at_rate)) for rate, at_rate in losses.items()}


def _select_window(points: Sequence[Point], min_rates: int) -> list[Point]:
    """Return the runs a basin is fitted to; empty if there are too few rates."""
    mean, best = _compute_mean_losses(points), find_best_rate(points)
    if best is None or len(mean) < min_rates:
        return []
    limit = mean[best] + MAX_EXCESS_NATS
    rates_in_window = [
        r
        for r, loss in mean.items()
        if abs(r - best) <= HALF_WINDOW_OCTAVES + 1e-9 and loss <= limit
    ]
    if len(rates_in_window) < min_rates:
        # On a coarse grid, use the nearest rates, however far away they are
        rates_in_window = [
            rate
            for rate in sorted(mean, key=lambda rate: abs(rate - best))[:MIN_RATES]
            if mean[rate] <= limit
        ]
    # Rates with a larger excess are left out even if too few remain: a curve can fit a few distant
    # rates exactly, and may have its minimum anywhere between them
    kept_rates = set(rates_in_window)
    return (
        [p for p in points if p.log2_value in kept_rates]
        if len(rates_in_window) >= min_rates
        else []
    )


def _to_size_runs(window: Sequence[Point]) -> SizeRuns:
    """Return the columns of a fit. A seed has an intercept of its own if it was run at three rates
    or more.
    """
    rates_of: dict[int, set[float]] = {}
    for point in window:
        rates_of.setdefault(point.seed, set()).add(point.log2_value)
    paired_seeds = {seed for seed, rates in rates_of.items() if len(rates) >= MIN_RATES_GIVEN_NOISE}
    # All other seeds share one intercept, which has the number -1
    intercepts = [p.seed if p.seed in paired_seeds else -1 for p in window]
    _, group = np.unique(intercepts, return_inverse=True)
    if len(window) - (int(group.max()) + 1) - 2 < 1:
        # Too few runs to separate the seeds' intercepts from noise
        group = np.zeros(len(window), dtype=np.int64)
    return SizeRuns(
        log2_value=np.array([p.log2_value for p in window]),
        loss_nats=np.array([p.loss_nats for p in window], dtype=np.float64),
        group=group.astype(np.int64),
    )


def _describe_optimum(
    size: int,
    points: Sequence[Point],
    runs: SizeRuns,
    basins: BasinPosterior,
    column: int,
    level: float,
) -> Optimum:
    """Return the optimum of a fitted size from one column of the posterior."""
    side = basins.side[:, column]
    below, above = float(np.mean(side < 0)), float(np.mean(side > 0))
    if below + above > MAX_OUTSIDE_SHARE or side[0] != 0:
        # An optimum may lie beyond both ends only where the basin is flat
        is_flat = min(below, above) > MAX_OUTSIDE_SHARE / 2
        return _describe_size(size, points, "flat" if is_flat else "edge")
    best = float(basins.optimum[0, column])
    cliffs = [p.log2_value - best for p in points if p.loss_nats is None and p.log2_value > best]
    return dataclasses.replace(
        _describe_size(size, points, "ok"),
        log2_value=best,
        interval_log2=compute_bounds(basins.optimum[:, column], level),
        loss_nats=float(basins.minimum_nats[column]),
        cliff_octaves=min(cliffs, default=None),
        curve=_sample_curve(runs, basins, column),
    )


def _describe_size(size: int, points: Sequence[Point], status: OptimumStatus) -> Optimum:
    """Return an optimum without estimates."""
    return Optimum(
        size=size,
        status=status,
        lowest_run_nats=min(_compute_mean_losses(points).values(), default=None),
        num_runs=len(points),
        num_diverged=sum(p.loss_nats is None for p in points),
    )


def _sample_curve(
    runs: SizeRuns, basins: BasinPosterior, column: int
) -> tuple[tuple[float, float], ...]:
    x = np.linspace(runs.log2_value.min(), runs.log2_value.max(), CURVE_SAMPLES)
    # Include the minimum itself: a kink between two samples would be drawn too high
    x = np.union1d(x, basins.optimum[:1, column])
    curvature, shape = basins.curvature[0, column], basins.shape[:1]
    loss = basins.minimum_nats[column] + compute_rise(
        x - basins.optimum[0, column], curvature, shape
    )
    return tuple(zip(x.tolist(), loss.tolist(), strict=True))


def compute_bounds(rows: Floats, level: float) -> tuple[float, float]:
    """Return the equal-tailed interval of the draws (rows from 1 on), widened if needed to include
    the estimate in row 0.
    """
    low, high = np.quantile(rows[1:], [(1 - level) / 2, (1 + level) / 2])
    return min(float(low), float(rows[0])), max(float(high), float(rows[0]))
