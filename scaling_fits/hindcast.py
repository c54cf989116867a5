"""Hindcasts: what would these runs, without their largest, have said about the largest?

A bootstrap of one law answers "had I drawn other runs", and not "is this the law": on public tasks its nominal
90 % interval covers half. Held-out budgets answer the second. They weigh the laws against each other, and
stretch the interval until it would have covered them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaling_fits import cloud, law
from scaling_fits.law import Form, LawFit
from scaling_fits.solver import Floats
from scaling_fits.table import RunTable

_CUTS = (1.25, 3.0, 10.0)  # hold out runs above largest / cut; the first is the top rung
_LEAST_FREEDOM = 2  # with one, an all but exact fit thinks itself free of noise and misses by hundreds of sd
_LEAST_DRAWS = 40
_DRAWS_SHARE = 4  # a hindcast's interval is read once: a quarter of the draws will do


_STRANGE = 5.0
_NO_BACKTEST = (
    "no back-test: without the largest rung too few runs are left; intervals are the bootstrap's alone, "
    "which cover too little where the law is wrong"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """One held-out run."""

    params: float
    tokens: float
    loss_nats: float
    predicted_nats: float
    interval_nats: tuple[float, float] | None
    """For one new run, not yet stretched; None without a bootstrap."""

    @property
    def covered(self) -> bool | None:
        """Whether the run fell into its interval."""
        low_high = self.interval_nats
        return None if low_high is None else low_high[0] <= self.loss_nats <= low_high[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Backtest:
    """The largest rung predicted from the runs below it."""

    runs: tuple[HeldOut, ...]
    num_fitted: int
    extrapolation: float
    """Largest held-out over largest fitted FLOPs."""

    @property
    def mean_error(self) -> float:
        """Mean of predicted over measured loss, less one: 0.01 is 1 % too high."""
        return float(np.mean([run.predicted_nats / run.loss_nats - 1 for run in self.runs]))

    @property
    def largest_error(self) -> float:
        """Largest of the absolute relative errors."""
        return max(abs(run.predicted_nats / run.loss_nats - 1) for run in self.runs)

    @property
    def num_covered(self) -> int | None:
        """Runs within their interval; None without a bootstrap."""
        flags = [run.covered for run in self.runs]
        return None if None in flags else sum(bool(flag) for flag in flags)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hindcast:
    """What the held-out budgets teach."""

    weights: tuple[float, ...]
    """Of the laws, by their held-out errors; 0 for an unidentified one."""
    inflation: float
    """Factor on both arms of a log-loss interval, at least 1."""
    backtest: Backtest | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Cut:
    """The runs below a cut, fitted; the runs above it, to be predicted. Logs of losses."""

    held: RunTable
    num_fitted: int
    extrapolation: float
    fits: tuple[LawFit, ...]
    predicted: Floats
    """Laws by held-out runs."""


def hindcast(table: RunTable, fits: tuple[LawFit, ...], *, num_draws: int, level: float, seed: int) -> Hindcast:
    """Hold out the largest budgets in turn, predict them from the rest, and learn from the misses."""
    usable = tuple(fit.form for fit in fits if fit.identified)
    if not usable:
        return Hindcast(weights=(0.0,) * len(fits), inflation=1.0, backtest=None, warnings=())
    draws = max(num_draws // _DRAWS_SHARE, min(num_draws, _LEAST_DRAWS))
    cuts = [cut for cut in (_cut(table, keep, usable, draws, seed) for keep in _keeps(table)) if cut]
    noise = min(fit.residual_sd for fit in fits if fit.residual_sd is not None)
    weights = _weights(fits, cuts, noise)
    if not cuts:
        return Hindcast(weights=weights, inflation=1.0, backtest=None, warnings=(_NO_BACKTEST,))
    used = tuple(weight for weight, fit in zip(weights, fits, strict=True) if fit.identified)
    inflation = _inflation(cuts, used, level, seed) if num_draws else 1.0
    warnings: tuple[str, ...] = ()
    if inflation > _STRANGE:
        warnings = (f"held-out budgets fell {inflation:.1f} interval arms away: the laws miss these runs",)
    return Hindcast(
        weights=weights, inflation=inflation, backtest=_backtest(cuts[0], used, level, seed), warnings=warnings
    )


def _keeps(table: RunTable) -> list[NDArray[np.bool_]]:
    """Which runs remain at each cut; cuts that hold out the same runs are one."""
    keeps: list[NDArray[np.bool_]] = []
    for cut in _CUTS:
        keep = table.flops < table.flops.max() / cut
        if keep.any() and not any((keep == other).all() for other in keeps):
            keeps.append(keep)
    return keeps


def _cut(table: RunTable, keep: NDArray[np.bool_], forms: tuple[Form, ...], num_draws: int, seed: int) -> _Cut | None:
    below, held = table.rows(keep), table.rows(~keep)
    fits = tuple(cloud.with_draws(below, law.fit_law(below, form), num_draws, seed) for form in forms)
    if not all(fit.identified and fit.degrees_of_freedom >= _LEAST_FREEDOM for fit in fits):
        return None
    predicted = np.stack([law.log_loss(fit.theta[None, :], held.params, held.tokens)[0] for fit in fits])
    return _Cut(
        held=held,
        num_fitted=below.num_runs,
        extrapolation=float(held.flops.max() / below.flops.max()),
        fits=fits,
        predicted=predicted,
    )


def _weights(fits: tuple[LawFit, ...], cuts: list[_Cut], noise: float) -> tuple[float, ...]:
    """Inverse mean squares of held-out log errors, each cut counting once, softened by the noise of a run."""
    errors = [((cut.predicted - np.log(cut.held.loss)) ** 2).mean(axis=1) for cut in cuts]
    count = sum(fit.identified for fit in fits)
    squares = iter((np.mean(errors, axis=0) if errors else np.zeros(count)) + noise**2 + 1e-12)
    raw = [1.0 / float(next(squares)) if fit.identified else 0.0 for fit in fits]
    return tuple(value / sum(raw) for value in raw)


def _misses(cut: _Cut, weights: tuple[float, ...], level: float, seed: int) -> Floats:
    """Log errors of the pooled prediction in units of its interval's arm on that side."""
    held = cut.held
    centre = cloud.pooled_log_loss(cut.fits, weights, held.params, held.tokens)
    low, high = cloud.new_run_quantiles(cut.fits, weights, held.params, held.tokens, level, seed)
    error = np.log(held.loss) - centre
    arm = np.where(error >= 0, high - centre, centre - low)
    result: Floats = np.abs(error) / np.maximum(arm, 1e-9)
    return result


def _inflation(cuts: list[_Cut], weights: tuple[float, ...], level: float, seed: int) -> float:
    """The smallest factor of at least 1 under which, at every cut, `level` of the held-out runs is covered."""
    worst = [np.quantile(_misses(cut, weights, level, seed), level, method="higher") for cut in cuts]
    return max(1.0, float(max(worst)))


def _backtest(cut: _Cut, weights: tuple[float, ...], level: float, seed: int) -> Backtest:
    held = cut.held
    predicted = np.exp(cloud.pooled_log_loss(cut.fits, weights, held.params, held.tokens))
    ends: list[tuple[float, float] | None] = [None] * held.num_runs
    if len(cut.fits[0].draws):
        low, high = cloud.new_run_quantiles(cut.fits, weights, held.params, held.tokens, level, seed)
        ends = [(float(lo), float(hi)) for lo, hi in zip(np.exp(low), np.exp(high), strict=True)]
    columns = (held.params, held.tokens, held.loss, predicted)
    runs = tuple(
        HeldOut(params=float(n), tokens=float(d), loss_nats=float(y), predicted_nats=float(p), interval_nats=end)
        for n, d, y, p, end in zip(*columns, ends, strict=True)
    )
    return Backtest(runs=runs, num_fitted=cut.num_fitted, extrapolation=cut.extrapolation)
