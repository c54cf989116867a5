"""Hindcasts: what would these runs, without the largest, have predicted for the largest?

A bootstrap of one law answers "had I drawn other runs", and not "is this the law": on public tasks its nominal
90 % interval covers half. Held-out budgets answer the second. They weigh the laws against each other and say how
wrong all of them may be (`pooling`), and how much longer the arms of other intervals must be (`inflation`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proxies.core.notation import format_factor, format_percent
from scaling_fits.forecast import cloud, pooling
from scaling_fits.forecast.cloud import Cloud
from scaling_fits.forecast.pooling import Drift, Pool
from scaling_fits.laws import law
from scaling_fits.laws.forms import Form
from scaling_fits.laws.lack_of_fit import Trend, structure_of, trend
from scaling_fits.laws.law import LawFit
from scaling_fits.laws.solver import Floats
from scaling_fits.laws.table import RunTable
from scaling_fits.laws.weights import near_frontier

OnStep = Callable[[str, float], None]
"""Called with the name of each step of long work, and the share of the work before it."""

_CUTS = (1.25, 3.0, 10.0)  # hold out runs above largest / cut; the first is the top rung
_LEVELS = 2  # from the largest budget down, and again from the next one
_NEXT_LEVEL = 1.5
_SAME_BUDGET = 1.25
_GOOD_RUN = 1.02  # over the best loss of its budget: the runs one would launch
_LEAST_FREEDOM = 2  # with one, an all but exact fit thinks itself free of noise and misses by hundreds of sd
_LEAST_DRAWS = 40
_DRAWS_SHARE = 10  # a hindcast's interval is read once: a tenth of the draws will do
_MOST_STEPS = 150  # of a cut's search: only a law at a bound takes more, and up to 600
_STRANGE = 4.0
_SMALL_ERROR = 1e-3
"""Of a held-out loss: laws that predict it so well are no misfits, however exactly they fit the other runs."""
_TENFOLD = math.log(10.0)
_NO_BACKTEST = (
    "no back-test: without the largest rung too few runs are left; the weights of the laws and their error come from "
    "public families of runs, not from these runs"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """One held-out run."""

    params: float
    tokens: float
    loss_nats: float
    predicted_nats: float
    interval_nats: tuple[float, float] | None
    """For one new run; None without a bootstrap."""

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Hindcast:
    """What the held-out budgets teach."""

    pool: Pool
    """Over the identified laws, in their order; its drift counts the trend where that goes the same way."""
    trend: Trend | None
    """Among the largest runs; None where they are too few."""
    inflation: float
    """Factor on both arms of an interval of something else than a loss, at least 1."""
    backtest: Backtest | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Cut:
    """The runs below a cut, fitted; the runs above it, to be predicted. Logs of losses."""

    held: RunTable
    good: NDArray[np.bool_]
    """Of the held-out runs, those of the largest budget one would launch."""
    num_fitted: int
    log_best: float
    """Least log loss fitted."""
    ratio: float
    """Largest held-out over largest fitted FLOPs."""
    fits: tuple[LawFit, ...]
    predicted: Floats
    """Laws by held-out runs; a law too rich for the runs left counts as the simpler one before it."""

    @property
    def strong(self) -> list[int]:
        """Places of the laws that these runs can carry."""
        return [index for index, fit in enumerate(self.fits) if _strong(fit)]

    @property
    def errors(self) -> Floats:
        """Median log error of each law over the good runs (M,)."""
        return np.median((self.predicted - np.log(self.held.loss))[:, self.good], axis=1)


def skip_step(name: str, share: float) -> None:
    """Report nothing."""


def hindcast(
    table: RunTable,
    fits: tuple[LawFit, ...],
    *,
    near: bool,
    num_draws: int,
    level: float,
    seed: int,
    on_step: OnStep = skip_step,
) -> Hindcast:
    """Hold out the largest budgets in turn, predict them from the rest, and learn from the misses.

    `fits` are identified laws of `table`, weighed by nearness to the frontier if `near`; so are those of the cuts.
    """
    forms = tuple(fit.form for fit in fits)
    draws = max(num_draws // _DRAWS_SHARE, min(num_draws, _LEAST_DRAWS))
    levels: tuple[list[_Cut], ...] = tuple([] for _ in range(_LEVELS))
    keeps = _keeps(table)
    for place, (level_number, below, keep) in enumerate(keeps):
        on_step("holding out budgets", place / len(keeps))
        if cut := _cut(table.rows(below), keep, forms, near, 0 if level_number else draws, seed):
            levels[level_number].append(cut)
    cuts, every = levels[0], [cut for each in levels for cut in each]
    weighed = near_frontier(table) if near else table
    learned = pooling.learn(
        forms,
        np.array([cut.errors for cut in every]).reshape(-1, len(forms)),
        np.array([cut.ratio for cut in every]),
        structure_of(weighed, fits),
        num_draws=num_draws,
        seed=seed,
    )
    quietest = cloud.quietest(fits)
    found = trend(weighed, quietest)
    pool = learned if found is None else _with_trend(learned, found, seed)
    warnings = _trend_said(found, quietest.form)
    if not cuts:
        return Hindcast(pool=pool, trend=found, inflation=1.0, backtest=None, warnings=(_NO_BACKTEST, *warnings))
    inflation = _inflation(cuts, pool, level, seed) if num_draws else 1.0
    backtest = _backtest(cuts[0], pool, level, seed)
    if inflation > _STRANGE and backtest.largest_error > _SMALL_ERROR:
        wide = f"held-out budgets widen intervals {format_factor(inflation)} times beyond refits and noise"
        warnings = (f"{wide}: no law fits these runs", *warnings)
    return Hindcast(pool=pool, trend=found, inflation=inflation, backtest=backtest, warnings=warnings)


def _with_trend(pool: Pool, found: Trend, seed: int) -> Pool:
    """The pool with a drift as large as the trend, where the largest runs do better the larger they are.

    Hindcasts and trend tell of the same runs, so what the drift has of it already is not added again.
    """
    drift = pool.drift
    more = found.size - drift.applied
    if found.slope >= 0 or more <= 0:
        return pool
    sd = more * found.sd / abs(found.slope)
    normal_S = np.random.default_rng([seed, 3]).standard_normal(len(pool.drift_draws))
    return dataclasses.replace(
        pool,
        drift=Drift(mean=drift.mean + more, sd=math.hypot(drift.sd, sd), applied=drift.applied + more),
        drift_draws=pool.drift_draws + more + sd * normal_S,
    )


def _trend_said(found: Trend | None, form: str) -> tuple[str, ...]:
    """What a reader must know of a trend among the largest runs; nothing where it may be noise."""
    if found is None or found.size == 0:
        return ()
    way = "above" if found.slope > 0 else "below"
    text = (
        f"the largest runs (6ND from {found.from_flops:.2g}) lie {way} the {form} law, by "
        f"{format_percent(found.slope * _TENFOLD, is_signed=True)} of the loss per tenfold FLOPs (sd "
        f"{format_percent(found.sd * _TENFOLD)}): "
    )
    if found.slope > 0:
        text += "intervals beyond are wider because of it; check the batch and the rate of those runs"
    else:
        text += "predictions are lowered because of it"
    return (text,)


def _keeps(table: RunTable) -> list[tuple[int, NDArray[np.bool_], NDArray[np.bool_]]]:
    """Level by level the runs up to its largest budget, and which of these remain at each cut."""
    found: list[tuple[int, NDArray[np.bool_], NDArray[np.bool_]]] = []
    largest = float(table.flops.max())
    for level in range(_LEVELS):
        below = table.flops <= largest
        seen: list[NDArray[np.bool_]] = []
        for cut in _CUTS:
            keep = table.flops[below] < largest / cut
            if keep.any() and not any((keep == other).all() for other in seen):
                seen.append(keep)
        found += [(level, below, keep) for keep in seen]
        rest = table.flops[table.flops < largest / _NEXT_LEVEL]
        if not rest.size:
            break
        largest = float(rest.max())
    return found


def _cut(
    table: RunTable, keep: NDArray[np.bool_], forms: tuple[Form, ...], near: bool, num_draws: int, seed: int
) -> _Cut | None:
    """The runs to keep, fitted, and the others; None where too few are left."""
    below, held = table.rows(keep), table.rows(~keep)
    weighed = near_frontier(below) if near else below
    fits = tuple(cloud.with_draws(weighed, law.fit_law(weighed, form, _MOST_STEPS), num_draws, seed) for form in forms)
    if not _strong(fits[0]):
        return None
    rows: list[Floats] = []
    for fit in fits:
        rows.append(law.log_loss(fit.theta[None, :], held.params, held.tokens)[0] if _strong(fit) else rows[-1])
    top = held.flops > held.flops.max() / _SAME_BUDGET
    return _Cut(
        held=held,
        good=top & (held.loss <= _GOOD_RUN * held.loss[top].min()),
        num_fitted=below.num_runs,
        log_best=float(np.log(below.loss.min())),
        ratio=float(held.flops.max() / below.flops.max()),
        fits=fits,
        predicted=np.stack(rows),
    )


def _strong(fit: LawFit) -> bool:
    return fit.identified and fit.degrees_of_freedom >= _LEAST_FREEDOM


def _quantiles(cut: _Cut, pool: Pool, level: float, seed: int, *, misfit: bool) -> tuple[Floats, Floats]:
    """Ends of the interval of each held-out run, by the cut's own refits; with or without the laws' common error.

    The drift was learned from these very runs: it is not subtracted from them, and counts as an error like any.
    """
    strong = cut.strong
    fits = [cut.fits[index] for index in strong]
    num_draws = len(fits[0].draws)
    weights_SM = pool.weight_draws[:num_draws][:, strong]
    total_S1 = weights_SM.sum(axis=1, keepdims=True)
    own = Cloud(
        weight_draws=np.where(total_S1 > 0, weights_SM / np.maximum(total_S1, 1e-12), 1 / len(strong)),
        misfit_draws=pool.misfit_draws[:num_draws] * misfit,
        noise_draws=cloud.noise_draws(fits, num_draws, seed),
    )
    ratio_R = cut.held.flops / cut.held.flops.max() * cut.ratio
    drift_R = misfit * pool.drift.applied * pooling.beyond(ratio_R)
    return cloud.new_run_quantiles(
        fits, own, cut.held.params, cut.held.tokens, ratio_R, cut.log_best, level, doubt_R=drift_R
    )


_LEAST_WIDTH = 1e-4
"""Of an interval, in log loss: a table without noise leaves rounding errors, and no two seeds agree as closely."""


def _inflation(cuts: list[_Cut], pool: Pool, level: float, seed: int) -> float:
    """How many times as long the error that laws share makes the intervals of held-out runs: the mean over cuts."""
    factors = []
    for cut in cuts:
        with_, without = (_quantiles(cut, pool, level, seed, misfit=misfit) for misfit in (True, False))
        factors.append(float(np.mean((with_[1] - with_[0]) / np.maximum(without[1] - without[0], _LEAST_WIDTH))))
    return max(1.0, float(np.mean(factors)))


def _backtest(cut: _Cut, pool: Pool, level: float, seed: int) -> Backtest:
    held = cut.held
    strong = cut.strong
    shares = np.array(pool.weights)[strong]
    predicted = np.exp(
        cloud.pooled_log_loss([cut.fits[i] for i in strong], (shares / shares.sum()).tolist(), held.params, held.tokens)
    )
    ends: list[tuple[float, float] | None] = [None] * held.num_runs
    if len(cut.fits[0].draws):
        low, high = _quantiles(cut, pool, level, seed, misfit=True)
        ends = [(float(lo), float(hi)) for lo, hi in zip(np.exp(low), np.exp(high), strict=True)]
    columns = (held.params, held.tokens, held.loss, predicted)
    runs = tuple(
        HeldOut(params=float(n), tokens=float(d), loss_nats=float(y), predicted_nats=float(p), interval_nats=end)
        for n, d, y, p, end in zip(*columns, ends, strict=True)
    )
    return Backtest(runs=runs, num_fitted=cut.num_fitted, extrapolation=cut.ratio)
