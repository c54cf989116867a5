"""Where the learning-rate optimum of each width lies, how sure that is, or why nobody can say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from proxies.checks import Checks
from transfer.valley import Floats, Runs, Valleys, fit_valleys, rise

OptimumStatus = Literal["ok", "edge", "flat", "too_few"]

MIN_RATES = 4
"""A valley has three parameters; a fourth rate shows whether it is one."""
HALF_WINDOW_OCTAVES = 2.5
"""Rates further from the best one are left out: far slopes would bend the minimum."""
MOST_OUTSIDE = 0.05
"""Posterior share of optima outside the rates that were run, above which an optimum is not believed."""
CURVE_SAMPLES = 33


class TransferError(ValueError):
    """Input no verdict can be made from. `problems` lists everything that is wrong with it."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run: where it was, and what it reached."""

    width: int
    """Model width, or any other size that doubles (parameters, say)."""
    log2_lr: float
    loss_nats: float | None
    """Validation loss at the end, nats per token; None: it diverged."""
    seed: int = 0
    """Runs of one seed share data order and initialisation."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("width")
        checks.number("log2_lr")
        if self.loss_nats is not None:
            checks.number("loss_nats")
        checks.whole("seed", least=0)
        if checks.problems:
            raise TransferError(checks.problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """The optimum of one width. Numbers are None where the status says that there are none to be had."""

    width: int
    status: OptimumStatus
    """`edge`: it may lie outside the rates that were run; `flat`: no valley above the noise; `too_few` rates."""
    log2_lr: float | None
    interval_log2: tuple[float, float] | None
    """At the verdict's level."""
    loss_nats: float | None
    """Of the fitted valley at its minimum, mean over the seeds there are; the verdict does not rest on it."""
    num_runs: int
    num_diverged: int
    cliff_octaves: float | None
    """From the optimum up to the lowest rate above it at which a run diverged."""
    curve: tuple[tuple[float, float], ...]
    """The fitted valley, (log2_lr, loss in nats), over the window."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("width", "num_runs")
        checks.whole("num_diverged", least=0)
        checks.one_of("status", get_args(OptimumStatus))
        checks.that((self.status == "ok") == (self.log2_lr is not None), "log2_lr: given exactly when status is ok")
        checks.that((self.log2_lr is None) == (self.interval_log2 is None), "log2_lr without an interval")
        if checks.problems:
            raise TransferError(checks.problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class Optima:
    """All widths, and the posterior of those that were fitted."""

    optima: tuple[Optimum, ...]
    """By width, ascending."""
    fitted: tuple[int, ...]
    """Widths of the columns of `valleys`."""
    valleys: Valleys | None
    """None when no width has enough rates."""

    def column(self, width: int) -> int | None:
        """Column of a width in `valleys`, or None where its optimum is not usable."""
        usable = {o.width for o in self.optima if o.status == "ok"}
        return self.fitted.index(width) if width in usable else None


def find_optima(points: Sequence[Point], *, level: float, draws: int, rng: np.random.Generator) -> Optima:
    """Fit one valley per width, all widths sharing noise and asymmetry (`transfer.valley`).

    A rate at which any run diverged lies on the cliff: its survivors are a biased sample and left out.
    """
    by_width = {
        width: list(group)
        for width, group in itertools.groupby(sorted(points, key=lambda p: p.width), key=lambda p: p.width)
    }
    windows = {width: _window(group) for width, group in by_width.items()}
    runs = {width: _runs(window) for width, window in windows.items() if window}
    fitted = tuple(runs)
    valleys = fit_valleys(list(runs.values()), draws=draws, rng=rng) if fitted else None
    optima = []
    for width, group in by_width.items():
        if valleys is None or width not in runs:
            optima.append(_unusable(width, group, "too_few"))
        else:
            optima.append(_optimum(width, group, runs[width], valleys, fitted.index(width), level))
    return Optima(optima=tuple(optima), fitted=fitted, valleys=valleys)


def finite_rates(points: Sequence[Point]) -> list[float]:
    """Rates, ascending, at which every run of these points finished."""
    diverged = {p.log2_lr for p in points if p.loss_nats is None}
    return sorted({p.log2_lr for p in points} - diverged)


def best_rate(points: Sequence[Point]) -> float | None:
    """The rate with the lowest mean loss among `finite_rates`, or None without any."""
    mean = {
        rate: float(np.mean([p.loss_nats for p in points if p.log2_lr == rate and p.loss_nats is not None]))
        for rate in finite_rates(points)
    }
    return min(mean, key=lambda rate: mean[rate]) if mean else None


def _window(points: Sequence[Point]) -> list[Point]:
    """The runs a valley is fitted to: none when there are too few rates."""
    rates, best = finite_rates(points), best_rate(points)
    if best is None or len(rates) < MIN_RATES:
        return []
    near = [rate for rate in rates if abs(rate - best) <= HALF_WINDOW_OCTAVES + 1e-9]
    if len(near) < MIN_RATES:
        near = sorted(rates, key=lambda rate: abs(rate - best))[:MIN_RATES]
    return [p for p in points if p.log2_lr in near]


def _runs(window: Sequence[Point]) -> Runs:
    """Columns for the fit. A seed has its own intercept when it was run at three rates or more."""
    rates_of = {p.seed: {q.log2_lr for q in window if q.seed == p.seed} for p in window}
    own = sorted(seed for seed, rates in rates_of.items() if len(rates) >= MIN_RATES - 1)
    names = [p.seed if p.seed in own else -1 for p in window]
    _, group = np.unique(names, return_inverse=True)
    if len(window) - (int(group.max()) + 1) - 2 < 1:
        group = np.zeros(len(window), dtype=np.int64)  # too few runs to tell seeds from noise
    return Runs(
        log2_lr=np.array([p.log2_lr for p in window]),
        loss_nats=np.array([p.loss_nats for p in window], dtype=np.float64),
        group=group.astype(np.int64),
    )


def _optimum(width: int, points: Sequence[Point], runs: Runs, valleys: Valleys, column: int, level: float) -> Optimum:
    side = valleys.side[:, column]
    below, above = float(np.mean(side < 0)), float(np.mean(side > 0))
    if below + above > MOST_OUTSIDE or side[0] != 0:
        return _unusable(width, points, "flat" if min(below, above) > MOST_OUTSIDE / 2 else "edge")
    best = float(valleys.optimum[0, column])
    cliffs = [p.log2_lr - best for p in points if p.loss_nats is None and p.log2_lr > best]
    return Optimum(
        width=width,
        status="ok",
        log2_lr=best,
        interval_log2=interval(valleys.optimum[:, column] + valleys.shape_error, level),
        loss_nats=float(valleys.minimum_nats[column]),
        num_runs=len(points),
        num_diverged=sum(p.loss_nats is None for p in points),
        cliff_octaves=min(cliffs, default=None),
        curve=_curve(runs, valleys, column),
    )


def _unusable(width: int, points: Sequence[Point], status: OptimumStatus) -> Optimum:
    return Optimum(
        width=width, status=status, log2_lr=None, interval_log2=None, loss_nats=None, num_runs=len(points),
        num_diverged=sum(p.loss_nats is None for p in points), cliff_octaves=None, curve=(),
    )  # fmt: skip


def _curve(runs: Runs, valleys: Valleys, column: int) -> tuple[tuple[float, float], ...]:
    x = np.linspace(runs.log2_lr.min(), runs.log2_lr.max(), CURVE_SAMPLES)
    curvature, asymmetry = valleys.curvature[0, column], valleys.asymmetry[:1]
    loss = valleys.minimum_nats[column] + rise(x - valleys.optimum[0, column], curvature, asymmetry)
    return tuple(zip(x.tolist(), loss.tolist(), strict=True))


def interval(rows: Floats, level: float) -> tuple[float, float]:
    """Equal-tailed interval of the draws (rows 1 and on), widened where needed to hold the estimate, row 0."""
    low, high = np.quantile(rows[1:], [(1 - level) / 2, (1 + level) / 2])
    return min(float(low), float(rows[0])), max(float(high), float(rows[0]))
