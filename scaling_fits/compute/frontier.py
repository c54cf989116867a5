"""The frontier (approach 1 of arXiv 2203.15556): the lowest loss that any size reaches at each amount of compute.

Each size is a curve of loss over FLOPs, from runs of several lengths or from points along runs, joined in logs by a
monotone cubic. Where the lowest curve changes from one size to the next, both are equally good: there N* is their
geometric mean, exactly so where valleys over log N are parabolas, however the sizes are spaced. Those handovers make
the laws of N and D; the loss is taken at the middle of each size's stretch, where that size itself is the best.
Intervals are by leaving out one size at a time, since the points of one size stand and fall together.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from scaling_fits.compute import compute_fit, compute_laws
from scaling_fits.compute.compute_fit import ComputeFit, Optimum
from scaling_fits.compute.compute_laws import Laws, Points
from scaling_fits.compute.options import OptimaError, option_problems
from scaling_fits.compute.power_laws import Floats, PowerLaw, PowerLawError, fit_power_law
from scaling_fits.laws.table import RunTable

RUN_COLUMNS = ("run", "run_id")
"""Columns that say which rows are points of one run."""

_GRID = 2000
_LONGEST_GAP = math.log(20.0)  # FLOPs between two points of a curve; further apart it is not joined
_MANY_LENGTHS = 8  # evenly spaced token counts of one size: points along a run, not runs
_LEAST_HANDOVERS = 4  # so that 3 sizes in between have their own stretch
_LONG_END = 2.0  # times the median stretch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Curves:
    """Curves on one grid; NaN where a size has no curve."""

    log_flops: Floats
    """(grid,)"""
    log_params: Floats
    """(sizes,), ascending"""
    log_loss: Floats
    """(sizes, grid)"""
    log_tokens: Floats
    """(sizes, grid)"""

    def without(self, size: int) -> _Curves:
        keep = np.arange(len(self.log_params)) != size
        return _Curves(log_flops=self.log_flops, log_params=self.log_params[keep], log_loss=self.log_loss[keep],
                       log_tokens=self.log_tokens[keep])  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Frontier:
    """All in logs, by FLOPs."""

    flops: Floats
    """Of the handovers (H,)."""
    params: Floats
    tokens: Floats
    middles: Floats
    """FLOPs at the middle of each stretch between two handovers (H - 1,)."""
    losses: Floats
    """At the middles (H - 1,)."""


def fit_frontier(table: RunTable, bootstrap: int = 400, level: float = 0.9, seed: int = 0) -> ComputeFit:
    """The handovers from size to size and the laws through them.

    Raises:
        OptimaError: options out of range.
    """
    problems = option_problems(bootstrap, level, seed)
    if problems:
        raise OptimaError(problems)
    curves, warnings = _curves(table)
    warnings = [*table.warnings, *_mid_schedule(table), *warnings]
    found = _frontier(curves)
    laws = None
    if len(found.flops) < _LEAST_HANDOVERS:
        warnings.append(f"the frontier goes from size to size {len(found.flops)} times, and {_LEAST_HANDOVERS} are "
                        "wanted: add sizes, each with several lengths, whose loss over FLOPs cross")  # fmt: skip
    else:
        laws = _laws(curves, found, bootstrap=bootstrap, level=level, seed=seed)
        warnings += compute_laws.law_warnings(len(found.flops), laws) + _ends(curves, found)
    return compute_fit.assembled(
        table, "frontier", _handovers(table, found, laws), laws, warnings, method=None, bootstrap=bootstrap,
        level=level, seed=seed,
    )  # fmt: skip


def _curves(table: RunTable) -> tuple[_Curves, list[str]]:
    logs = np.log(np.stack([table.flops, table.loss, table.tokens]))
    grid = np.linspace(logs[0].min(), logs[0].max(), _GRID)
    log_params, losses, tokens = [], [], []
    lonely = 0
    for params in np.unique(table.params):
        flops, loss, length = _merged(logs[:, table.params == params])
        if len(flops) < 2:
            lonely += 1
            continue
        inside = (grid >= flops[0]) & (grid <= flops[-1])
        cell = np.clip(np.searchsorted(flops, grid) - 1, 0, len(flops) - 2)
        inside &= np.diff(flops)[cell] <= _LONGEST_GAP
        log_params.append(math.log(params))
        losses.append(np.where(inside, PchipInterpolator(flops, loss)(grid), np.nan))
        tokens.append(np.where(inside, np.interp(grid, flops, length), np.nan))
    shape = (len(log_params), _GRID)
    curves = _Curves(log_flops=grid, log_params=np.array(log_params), log_loss=np.array(losses).reshape(shape),
                     log_tokens=np.array(tokens).reshape(shape))  # fmt: skip
    return curves, [f"{lonely} of the sizes: one length only, and so no curve; left out"] if lonely else []


def _merged(logs: Floats) -> Floats:
    """Rows (FLOPs, loss, tokens) of one size by FLOPs, repeated runs averaged."""
    flops = np.round(logs[0], 6)
    return np.stack([logs[:, flops == value].mean(axis=1) for value in np.unique(flops)], axis=1)


def _frontier(curves: _Curves) -> _Frontier:
    """Handovers between sizes that both have a curve there; a crossing that noise repeats counts once."""
    there: NDArray[np.bool_] = np.isfinite(curves.log_loss)
    if len(there) < 2:
        return _Frontier(**{field.name: np.empty(0) for field in dataclasses.fields(_Frontier)})
    loss = np.where(there, curves.log_loss, np.inf)
    owner = np.where(there.sum(axis=0) >= 2, loss.argmin(axis=0), -1)
    crossings: dict[tuple[int, int], list[int]] = {}
    for cell in np.flatnonzero(owner[1:] != owner[:-1]):
        pair = (int(min(owner[cell : cell + 2])), int(max(owner[cell : cell + 2])))
        if pair[0] >= 0 and there[pair, cell].all() and there[pair, cell + 1].all():
            crossings.setdefault(pair, []).append(int(cell))
    rows = sorted(_handover(curves, pair, cells) for pair, cells in crossings.items())
    flops, params, tokens = np.array(rows).reshape(-1, 3).T
    middles = (flops[1:] + flops[:-1]) / 2
    at = np.searchsorted(curves.log_flops, middles).clip(0, _GRID - 1)
    return _Frontier(flops=flops, params=params, tokens=tokens, middles=middles, losses=loss.min(axis=0)[at])


def _handover(curves: _Curves, pair: tuple[int, int], cells: list[int]) -> tuple[float, float, float]:
    """Logs of FLOPs, N and D where two sizes are equally good."""
    places = []
    for cell in cells:
        before, after = (float(np.subtract(*curves.log_loss[pair, at])) for at in (cell, cell + 1))
        share = before / (before - after) if before != after else 0.5
        places.append(cell + min(max(share, 0.0), 1.0))
    place = float(np.mean(places))
    at = min(round(place), _GRID - 1)
    flops = float(np.interp(place, np.arange(_GRID), curves.log_flops))
    return flops, float(curves.log_params[list(pair)].mean()), float(curves.log_tokens[list(pair), at].mean())


def _laws(curves: _Curves, found: _Frontier, *, bootstrap: int, level: float, seed: int) -> Laws:
    """The laws through handovers and middles; what noise a run has is taken from the loss about its law."""
    none = np.zeros(len(found.flops))
    points = Points(
        flops=np.exp(found.flops), params=np.exp(found.params), tokens=np.exp(found.tokens), params_variance=none,
        tokens_variance=none, loss_flops=np.exp(found.middles), loss=np.exp(found.losses), loss_variance=none[1:],
        noise_sd=0.0,
    )  # fmt: skip
    bare = compute_laws.loss_law(points, slice(None), num_draws=0, seed=seed)
    off = found.losses - np.log([bare.at(flops) for flops in points.loss_flops.tolist()])
    noise_sd = math.sqrt(float((off**2).sum()) / max(len(off) - 2, 1))
    laws = compute_laws.fit_laws(dataclasses.replace(points, noise_sd=noise_sd), bootstrap=bootstrap, level=level,
                                seed=seed)  # fmt: skip
    assert laws.params is not None and laws.tokens is not None  # handovers have sizes
    left = [_frontier(curves.without(size)) for size in range(len(curves.log_params))]
    params, tokens = (
        _jackknifed(law, [(each.flops, getattr(each, what)) for each in left])
        for what, law in (("params", laws.params), ("tokens", laws.tokens))
    )
    return dataclasses.replace(laws, params=params, tokens=tokens)


def _law(log_flops: Floats, values: Floats) -> PowerLaw:
    return fit_power_law({"flops": np.exp(log_flops)}, values, np.zeros(len(values)))


def _jackknifed(law: PowerLaw, parts: list[tuple[Floats, Floats]]) -> PowerLaw:
    """The law with the covariance of its value at the centre and its exponent under leaving out sizes.

    Where that is the smaller one, the regression's own is kept: neighbours' handovers share a size.
    """
    thetas = []
    for flops, values in parts:
        try:
            part = _law(flops, values)
        except PowerLawError:  # too few handovers without this size: it says nothing
            continue
        thetas.append((math.log(part.at(math.exp(law.centre[0]))), part.exponents[0]))
    if len(thetas) < 3:
        return law
    off = np.array(thetas) - np.mean(thetas, axis=0)
    covariance = (len(off) - 1) / len(off) * off.T @ off
    if covariance[1, 1] <= law.covariance[1][1]:
        return law
    return dataclasses.replace(law, covariance=tuple(tuple(row) for row in covariance.tolist()))


def _handovers(table: RunTable, found: _Frontier, laws: Laws | None) -> tuple[Optimum, ...]:
    """Each handover as an optimum; its loss is the law's, since the two sizes there are both a little off."""
    return tuple(
        Optimum(
            flops=math.exp(flops), status="ok", reason=None, params=math.exp(params), params_interval=None,
            tokens=math.exp(tokens), tokens_interval=None, loss_nats=laws.loss.at(math.exp(flops)) if laws else None,
            loss_interval=None, num_runs=table.num_runs, num_sizes=2,
        )
        for flops, params, tokens in zip(found.flops, found.params, found.tokens, strict=True)
    )  # fmt: skip


def _ends(curves: _Curves, found: _Frontier) -> list[str]:
    """Says where one size has the frontier's end to itself."""
    warnings = []
    stretch = float(np.median(np.diff(found.flops)))
    there = np.isfinite(curves.log_loss).any(axis=0)
    last, first = float(curves.log_flops[there][-1]), float(curves.log_flops[there][0])
    loss = np.where(np.isfinite(curves.log_loss), curves.log_loss, np.inf)
    for name, length, cell in (("top", last - found.flops[-1], _GRID - 1), ("bottom", found.flops[0] - first, 0)):
        if length > _LONG_END * stretch:
            size = math.exp(curves.log_params[int(loss[:, cell].argmin())])
            warnings.append(f"size {size:.3g} alone owns the {name} of the frontier, a factor of "
                            f"{math.exp(length):.3g} in FLOPs: nothing there says what is best; left out")  # fmt: skip
    return warnings


def _mid_schedule(table: RunTable) -> list[str]:
    """Says so where rows look like points along a run rather than its end."""
    consequence = (
        "a point before the schedule's end lies above the loss of a run that ends there, so the frontier is too high"
        " and too flat: use runs that end there, or a schedule held constant"
    )
    for column in RUN_COLUMNS:
        ids = table.extra.get(column)
        if ids is not None:
            many = [run for run in np.unique(ids[~np.isnan(ids)]) if len(np.unique(table.tokens[ids == run])) > 1]
            return [f"{len(many)} runs have several rows each (column {column!r}): {consequence}"] if many else []
    even = sum(_evenly_spaced(table.tokens[table.params == size]) for size in np.unique(table.params))
    return [f"{even} sizes have rows at even steps of tokens, like points along a run: {consequence}"] if even else []


def _evenly_spaced(tokens: Floats) -> bool:
    """Whether most steps between token counts are one and the same."""
    counts = np.unique(tokens)
    if len(counts) < _MANY_LENGTHS:
        return False
    steps = np.diff(counts)
    return bool((np.abs(steps / np.median(steps) - 1) < 0.02).mean() > 0.8)
