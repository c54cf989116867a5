"""Where the optimum of each size lies, how sure that is, or why nobody can say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from transfer.basin.basins import BasinPosterior, fit_basins, likeliest_place
from transfer.basin.noise import SizeRuns
from transfer.basin.shapes import Floats, rise
from transfer.question import Point

EndName = Literal["lower", "upper"]
OptimumStatus = Literal["ok", "edge", "flat", "too_few"]

MIN_RATES = 4
"""A basin has three parameters; a fourth rate shows whether it is one."""
FEWEST_RATES = 3
"""Enough at a size where others have four, and so say what the noise is."""
HALF_WINDOW_OCTAVES, MOST_EXCESS_NATS = 4.5, 1.0
"""Rates further from the best one, or this much worse, are left out: they say nothing about the
minimum."""
MOST_OUTSIDE = 0.05
"""Posterior share of optima outside the rates that were run, above which an optimum is not
believed."""
CURVE_SAMPLES = 33
ONE_IN_TWENTY = 1.645 * math.sqrt(2.0)
"""Times the noise of one run: a difference of two runs that luck exceeds one time in twenty, to one
side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """The optimum of one size. Numbers are None where the status says that there are none to be
    had.
    """

    size: int
    status: OptimumStatus
    """`edge`: it may lie outside the rates that were run; `flat`: no basin above the noise;
    `too_few` rates."""
    log2_value: float | None = None
    interval_log2: tuple[float, float] | None = None
    """At the verdict's level."""
    loss_nats: float | None = None
    """The fitted basin's loss at its minimum, mean over the seeds there are; the verdict does not
    rest on it."""
    lowest_run_nats: float | None = None
    """Lowest mean loss of a value at which every run finished; None if there is no such value."""
    num_runs: int
    num_diverged: int
    cliff_octaves: float | None = None
    """From the optimum up to the lowest rate above it at which a run diverged."""
    curve: tuple[tuple[float, float], ...] = ()
    """The fitted basin, (log2_value, loss in nats), over the window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optima:
    """All sizes, and the posterior of those that were fitted."""

    optima: tuple[Optimum, ...]
    """By size, ascending."""
    fitted: tuple[int, ...]
    """Widths of the columns of `basins`."""
    basins: BasinPosterior | None
    """None when no size has enough rates."""


def find_optima(
    points: Sequence[Point], *, level: float, draws: int, rng: np.random.Generator
) -> Optima:
    """Fit one basin per size, all sizes sharing noise and shape (`transfer.basin.basins`).

    A rate at which any run diverged lies on the cliff: its survivors are a biased sample and left
    out.
    """
    by_size = {
        size: list(group)
        for size, group in itertools.groupby(
            sorted(points, key=lambda p: p.size), key=lambda p: p.size
        )
    }
    most = max(len(finite_rates(group)) for group in by_size.values())
    least = FEWEST_RATES if most >= MIN_RATES else MIN_RATES
    windows = {size: _window(group, least) for size, group in by_size.items()}
    runs = {size: _runs(window) for size, window in windows.items() if window}
    fitted = tuple(runs)
    basins = fit_basins(list(runs.values()), draws=draws, rng=rng) if fitted else None
    optima = []
    for size, group in by_size.items():
        if basins is None or size not in runs:
            optima.append(_unusable(size, group, "too_few"))
        else:
            optima.append(_optimum(size, group, runs[size], basins, fitted.index(size), level))
    return Optima(optima=tuple(optima), fitted=fitted, basins=basins)


def place_at(points: Sequence[Point], shape: int) -> float | None:
    """The optimum of one size by its own runs, at a shape that is given; None with too few
    rates.
    """
    window = _window(points, FEWEST_RATES)
    return likeliest_place(_runs(window), shape) if window else None


def finite_rates(points: Sequence[Point]) -> list[float]:
    """Rates, ascending, at which every run of these points finished."""
    diverged = {p.log2_value for p in points if p.loss_nats is None}
    return sorted({p.log2_value for p in points} - diverged)


def best_rate(points: Sequence[Point]) -> float | None:
    """The rate with the lowest mean loss among `finite_rates`, or None without any."""
    mean = _mean_losses(points)
    return min(mean, key=lambda rate: mean[rate]) if mean else None


def noise_is_known(points: Sequence[Point]) -> bool:
    """Whether any value of any size was run twice: else the noise is a guess, and what the curve
    misses.
    """
    cells = [(p.size, p.log2_value) for p in points if p.loss_nats is not None]
    return len(cells) > len(set(cells))


@dataclass(frozen=True, kw_only=True, slots=True)
class BetterEnd:
    """The end of the values run at one size that is the better one."""

    name: EndName
    log2_value: float
    excess_nats: float
    """Over the best value."""

    @property
    def noise_needed_nats(self) -> float:
        """The noise of one run with which the end would seem so much worse by luck one time in
        twenty.
        """
        return self.excess_nats / ONE_IN_TWENTY


def better_end(points: Sequence[Point]) -> BetterEnd | None:
    """The end nearer to the best loss, of runs at one size; None where all diverged."""
    mean = _mean_losses(points)
    if not mean:
        return None
    low, high = min(mean), max(mean)
    name, at = ("lower", low) if mean[low] < mean[high] else ("upper", high)
    return BetterEnd(
        name=cast(EndName, name), log2_value=at, excess_nats=mean[at] - min(mean.values())
    )


def _mean_losses(points: Sequence[Point]) -> dict[float, float]:
    """By rate, of `finite_rates`."""
    losses: dict[float, list[float]] = {rate: [] for rate in finite_rates(points)}
    for point in points:
        if point.log2_value in losses and point.loss_nats is not None:
            losses[point.log2_value].append(point.loss_nats)
    return {rate: float(np.mean(at_rate)) for rate, at_rate in losses.items()}


def _window(points: Sequence[Point], least_rates: int) -> list[Point]:
    """The runs a basin is fitted to: none when there are too few rates."""
    mean, best = _mean_losses(points), best_rate(points)
    if best is None or len(mean) < least_rates:
        return []
    limit = mean[best] + MOST_EXCESS_NATS
    near = [
        r
        for r, loss in mean.items()
        if abs(r - best) <= HALF_WINDOW_OCTAVES + 1e-9 and loss <= limit
    ]
    if len(near) < least_rates:
        near = [
            rate
            for rate in sorted(mean, key=lambda rate: abs(rate - best))[:MIN_RATES]
            if mean[rate] <= limit
        ]
    # A curve through rates that lose more than that fits them exactly, and may put its minimum
    # anywhere between.
    kept = set(near)
    return [p for p in points if p.log2_value in kept] if len(near) >= least_rates else []


def _runs(window: Sequence[Point]) -> SizeRuns:
    """Columns for the fit. A seed has its own intercept when it was run at three rates or more."""
    rates_of: dict[int, set[float]] = {}
    for point in window:
        rates_of.setdefault(point.seed, set()).add(point.log2_value)
    own = {seed for seed, rates in rates_of.items() if len(rates) >= FEWEST_RATES}
    names = [p.seed if p.seed in own else -1 for p in window]
    _, group = np.unique(names, return_inverse=True)
    if len(window) - (int(group.max()) + 1) - 2 < 1:
        group = np.zeros(len(window), dtype=np.int64)  # too few runs to tell seeds from noise
    return SizeRuns(
        log2_value=np.array([p.log2_value for p in window]),
        loss_nats=np.array([p.loss_nats for p in window], dtype=np.float64),
        group=group.astype(np.int64),
    )


def _optimum(
    size: int,
    points: Sequence[Point],
    runs: SizeRuns,
    basins: BasinPosterior,
    column: int,
    level: float,
) -> Optimum:
    side = basins.side[:, column]
    below, above = float(np.mean(side < 0)), float(np.mean(side > 0))
    if below + above > MOST_OUTSIDE or side[0] != 0:
        return _unusable(size, points, "flat" if min(below, above) > MOST_OUTSIDE / 2 else "edge")
    best = float(basins.optimum[0, column])
    lowest_nats = min(_mean_losses(points).values(), default=None)
    cliffs = [p.log2_value - best for p in points if p.loss_nats is None and p.log2_value > best]
    return Optimum(
        size=size,
        status="ok",
        log2_value=best,
        interval_log2=interval(basins.optimum[:, column], level),
        loss_nats=float(basins.minimum_nats[column]),
        lowest_run_nats=lowest_nats,
        num_runs=len(points),
        num_diverged=sum(p.loss_nats is None for p in points),
        cliff_octaves=min(cliffs, default=None),
        curve=_curve(runs, basins, column),
    )


def _unusable(size: int, points: Sequence[Point], status: OptimumStatus) -> Optimum:
    num_diverged = sum(p.loss_nats is None for p in points)
    lowest_nats = min(_mean_losses(points).values(), default=None)
    return Optimum(
        size=size,
        status=status,
        lowest_run_nats=lowest_nats,
        num_runs=len(points),
        num_diverged=num_diverged,
    )


def _curve(runs: SizeRuns, basins: BasinPosterior, column: int) -> tuple[tuple[float, float], ...]:
    x = np.linspace(runs.log2_value.min(), runs.log2_value.max(), CURVE_SAMPLES)
    # a kink between two samples would be drawn too high
    x = np.union1d(x, basins.optimum[:1, column])
    curvature, shape = basins.curvature[0, column], basins.shape[:1]
    loss = basins.minimum_nats[column] + rise(x - basins.optimum[0, column], curvature, shape)
    return tuple(zip(x.tolist(), loss.tolist(), strict=True))


def interval(rows: Floats, level: float) -> tuple[float, float]:
    """Equal-tailed interval of the draws (rows 1 and on), widened where needed to hold the
    estimate, row 0.
    """
    low, high = np.quantile(rows[1:], [(1 - level) / 2, (1 + level) / 2])
    return min(float(low), float(rows[0])), max(float(high), float(rows[0]))
