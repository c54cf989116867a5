"""The frontier (approach 1 of arXiv 2203.15556): the lowest loss that any size reaches at each amount of compute.

Each size is a curve of loss over FLOPs, from runs of several lengths or from points along runs, joined in logs by a
monotone cubic. Where the lowest curve changes from one size to the next, both are equally good: there N* is their
geometric mean, exactly so where valleys over log N are parabolas, however the sizes are spaced. Those handovers make
the laws of N and D; the loss is taken at the middle of each size's stretch, where that size itself is the best.
Intervals are by leaving out one size at a time, since the points of one size stand and fall together.

A table of optima, which is what papers publish, is read too: one row a budget, with the best loss and, if told, its N
and D. A table is of optima if it lacks `params` or `tokens`, or if somebody says so. Nothing is searched for: the laws
of N, D and the loss go through the rows as they are.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from scaling_fits.compute import compute_laws
from scaling_fits.compute.compute_laws import Laws, exact_points
from scaling_fits.compute.optima import ComputeFit, OptimaError, Optimum, Options, assembled
from scaling_fits.compute.power_laws import Floats, PowerLaw, PowerLawError, fit_power_law
from scaling_fits.laws import traps
from scaling_fits.laws.table import DroppedRow, RunTable, columns_of, read_columns

_GRID = 2000
_LONGEST_GAP = math.log(20.0)  # FLOPs between two points of a curve; further apart it is not joined
_LEAST_HANDOVERS = 4  # so that 3 sizes in between have their own stretch
_LONG_END = 2.0  # times the median stretch
_ONE_BUDGET = 1.03  # FLOPs of optima no further apart than this are one budget, as in an isoFLOP table


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
        warnings += compute_laws.law_warnings(len(found.flops), laws) + _ends(curves, found)
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
    points = exact_points(
        np.exp(found.flops), np.exp(found.params), np.exp(found.tokens), loss_flops=np.exp(found.middles),
        loss=np.exp(found.losses), log_loss=found.losses, seed=options.seed,
    )  # fmt: skip
    laws = compute_laws.fit_laws(points, bootstrap=options.bootstrap, level=options.level, seed=options.seed)
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
            flops=math.exp(flops), params=math.exp(params), tokens=math.exp(tokens),
            loss_nats=laws.loss.at(math.exp(flops)) if laws else None, num_runs=table.num_runs, num_sizes=2,
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OptimaTable:
    """Optima as columns, by FLOPs."""

    flops: Floats
    loss: Floats
    params: Floats | None
    """None, like the tokens, where the table has neither."""
    tokens: Floats | None
    flops_given: bool
    dropped: tuple[DroppedRow, ...]
    warnings: tuple[str, ...]
    """What was assumed, and what is odd."""


def is_of_optima(path: Path, params_column: str = "params") -> bool:
    """Whether a table can only be of optima, for it has FLOPs and lacks `params` or `tokens`.

    Raises:
        TableError: it cannot be read.
    """
    columns = columns_of(path)
    return "flops" in columns and not {params_column, "tokens"} <= set(columns)


def read_optima(path: Path, params_column: str = "params") -> OptimaTable:
    """A table of `flops, loss[, params, tokens]`: without one of the sizes it is FLOPs over 6 times the other.

    Raises:
        TableError: the file cannot be read, a column is missing, or cells are bad.
        OptimaError: a budget with several rows.
    """
    there = set(columns_of(path))
    sizes = [name for name, column in (("params", params_column), ("tokens", "tokens")) if column in there]
    wanted = ("loss",) if len(sizes) == 2 else ("flops", "loss")
    columns, dropped, lines = read_columns(path, wanted, ("flops", *sizes), {"params": params_column})
    given = "flops" in columns
    lacking = [name for name in ("params", "tokens") if name not in columns]
    said = "every row is taken for the best of its budget"
    if lacking:
        said += f", for the table has no column {' or '.join(map(repr, lacking))}"
    if len(lacking) == 1:
        columns[lacking[0]] = columns["flops"] / (6.0 * columns[sizes[0]])
        said += f" (taken to be flops / (6 * {sizes[0]}))"
    if not lacking:
        columns.setdefault("flops", 6.0 * columns["params"] * columns["tokens"])
    order = np.argsort(columns["flops"], kind="stable")
    flops = columns["flops"][order]
    if (several := np.flatnonzero(flops[1:] < _ONE_BUDGET * flops[:-1])).size:
        rows = traps.rows_text(sorted(lines[order[place]] for place in (several[0], several[0] + 1)))
        said = f"{rows} are both of budget {flops[several[0]]:.4g}, and an optimum is one row: keep the best of each "
        raise OptimaError([said + "budget, or give params and tokens of every run without --optima"])
    odd = (
        [traps.loss_unit(columns["loss"], lines)] if len(lacking) == 2
        else traps.warnings_of(columns, [{} for _ in lines], lines, params_column)
    )  # fmt: skip
    return OptimaTable(
        flops=flops, loss=columns["loss"][order], flops_given=given, dropped=dropped,
        params=columns["params"][order] if "params" in columns else None,
        tokens=columns["tokens"][order] if "tokens" in columns else None,
        warnings=(said, *(warning for warning in odd if warning is not None)),
    )  # fmt: skip


def fit_optima(table: OptimaTable, bootstrap: int = 400, level: float = 0.9, seed: int = 0) -> ComputeFit:
    """The laws through the rows.

    Raises:
        OptimaError: options out of range.
    """
    options = Options(bootstrap=bootstrap, level=level, seed=seed)
    count, warnings, laws = len(table.flops), list(table.warnings), None
    if count < compute_laws.LEAST_OPTIMA:
        warnings.append(f"{count} optima: at least {compute_laws.LEAST_OPTIMA} are wanted, each of another budget")
    else:
        points = exact_points(
            table.flops, table.params, table.tokens, loss_flops=table.flops, loss=table.loss,
            log_loss=np.log(table.loss), seed=seed,
        )  # fmt: skip
        laws = compute_laws.fit_laws(points, bootstrap=bootstrap, level=level, seed=seed)
        warnings += compute_laws.law_warnings(count, laws)
    columns = (None if column is None else column.tolist() for column in (table.params, table.tokens))
    sizes = zip(*(column or [None] * count for column in columns), strict=True)
    optima = [
        Optimum(flops=flops, loss_nats=loss, params=params, tokens=tokens, num_runs=1, num_sizes=1)
        for flops, loss, (params, tokens) in zip(table.flops.tolist(), table.loss.tolist(), sizes, strict=True)
    ]
    return assembled(
        "frontier", optima, laws, warnings, options, num_runs=count, largest_flops=float(table.flops.max()),
        flops_given=table.flops_given, dropped=table.dropped, rows="optima",
    )  # fmt: skip
