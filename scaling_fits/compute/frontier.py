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

from scaling_fits.compute import compute_laws
from scaling_fits.compute.compute_laws import Laws, Points
from scaling_fits.compute.optima import ComputeFit, Optimum, Options, assembled
from scaling_fits.compute.power_laws import Floats, PowerLaw, PowerLawError, fit_power_law
from scaling_fits.laws.table import RunTable

_GRID = 2000
_LONGEST_GAP = math.log(20.0)  # FLOPs between two points of a curve; further apart it is not joined
_LEAST_HANDOVERS = 4  # so that 3 sizes in between have their own stretch


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
    options = Options(bootstrap=bootstrap, level=level, seed=seed)
    curves, warnings = _curves(table)
    warnings = [*table.warnings, *warnings]
    found = _frontier(curves)
    laws = None
    if len(found.flops) < _LEAST_HANDOVERS:
        warnings.append(f"the frontier goes from size to size {len(found.flops)} times, and {_LEAST_HANDOVERS} are "
                        "wanted: add sizes, each with several lengths, whose loss over FLOPs cross")  # fmt: skip
    else:
        laws = _laws(curves, found, options)
        warnings += compute_laws.law_warnings(len(found.flops), laws)
    return assembled(
        "frontier", _handovers(table, found, laws), laws, warnings, options, num_runs=table.num_runs,
        largest_flops=float(table.flops.max()), flops_given=table.flops_given, dropped=table.dropped,
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


def _laws(curves: _Curves, found: _Frontier, options: Options) -> Laws:
    """The laws through handovers and middles."""
    points = _points(found, options.seed)
    laws = compute_laws.fit_laws(points, bootstrap=options.bootstrap, level=options.level, seed=options.seed)
    left = [_frontier(curves.without(size)) for size in range(len(curves.log_params))]
    params, tokens = (
        _jackknifed(law, [(each.flops, getattr(each, what)) for each in left])
        for what, law in (("params", laws.params), ("tokens", laws.tokens))
    )
    return dataclasses.replace(laws, params=params, tokens=tokens)


def _points(found: _Frontier, seed: int) -> Points:
    """Handovers know no noise of their own: that of a run is taken from the losses about their law."""
    none = np.zeros(len(found.flops))
    points = Points(
        flops=np.exp(found.flops), params=np.exp(found.params), tokens=np.exp(found.tokens), params_variance=none,
        tokens_variance=none, loss_flops=np.exp(found.middles), loss=np.exp(found.losses),
        loss_variance=np.zeros(len(found.losses)), noise_sd=0.0,
    )  # fmt: skip
    bare = compute_laws.loss_law(points, slice(None), num_draws=0, seed=seed)
    off = found.losses - np.log([bare.at(at) for at in points.loss_flops.tolist()])
    return dataclasses.replace(points, noise_sd=math.sqrt(float((off**2).sum()) / max(len(off) - 2, 1)))


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
            flops=math.exp(flops), params=math.exp(params), tokens=math.exp(tokens),
            loss_nats=laws.loss.at(math.exp(flops)) if laws else None, num_runs=table.num_runs, num_sizes=2,
        )
        for flops, params, tokens in zip(found.flops, found.params, found.tokens, strict=True)
    )  # fmt: skip
