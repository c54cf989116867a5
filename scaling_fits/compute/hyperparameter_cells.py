"""The best learning rate and batch of each cell, a cell being all runs of one (N, D).

Log loss is a quadratic in log2 learning rate and log2 batch together, where a cell varies both: with a batch that is
off, the learning rate's optimum moves too. Runs far above the best say nothing about the bottom and are left out;
how far is chosen over all cells at once (`valleys`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scaling_fits.compute import valleys
from scaling_fits.compute.optima import CellStatus
from scaling_fits.compute.power_laws import Pair
from scaling_fits.compute.valleys import MOST_OUTSIDE, Floats, LocalFit
from scaling_fits.laws.table import RunTable

AXES = ("learning_rate", "batch")

_GAP = 1.03  # tokens further apart are two cells: whole steps make them differ a little
_EXCESSES = (math.inf, 0.08, 0.04, 0.02, 0.01, 0.005)  # in log loss above the cell's best run
_LEAST_VALUES = 3  # distinct values on an axis that is fitted
_NUM_JUDGES = {1: 4, 2: 9}  # lowest runs, by number of axes, that judge how far to go
_LEAST_RUNS = {1: 5, 2: 12}  # runs that are kept in any case, by number of axes


@dataclass(frozen=True, kw_only=True, slots=True)
class CellOptimum:
    """The optimum of one cell, or why nobody can say. Values and intervals by axis; absent where not varied."""

    params: float
    tokens: float
    status: CellStatus = "ok"
    reason: str | None = None
    """What is wrong and what to run; None where the status is ok."""
    values: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, Pair] = field(default_factory=dict)
    """Empty without draws."""
    log_variances: dict[str, float] = field(default_factory=dict)
    loss_nats: float | None = None
    num_runs: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Cell:
    params: float
    tokens: float
    axes: tuple[str, ...]
    """Those that vary here."""
    points: Floats
    """log2 values (R, axes)."""
    y: Floats
    """Log loss (R,)."""
    weight: Floats

    @property
    def num_coefficients(self) -> int:
        return 3 if len(self.axes) == 1 else 6

    @property
    def centre(self) -> Floats:
        """The best run's place."""
        return np.asarray(self.points[self.y.argmin()])

    @property
    def design(self) -> Floats:
        """Columns of a quadratic about the centre: 1, z, z squared, and the product of two axes."""
        z = self.points - self.centre
        columns = [np.ones(len(z)), *z.T, *(z**2).T]
        columns += [z[:, i] * z[:, j] for i, j in itertools.combinations(range(z.shape[1]), 2)]
        return np.stack(columns, axis=1)

    def without(self, status: CellStatus, reason: str) -> CellOptimum:
        """No optimum, and why."""
        return CellOptimum(params=self.params, tokens=self.tokens, status=status, reason=reason, num_runs=len(self.y))


def cell_optima(
    table: RunTable, columns: dict[str, Floats], *, bootstrap: int, level: float, seed: int
) -> tuple[list[CellOptimum], list[str]]:
    """The optimum of each cell of `table`, `columns` holding the runs' values by axis; and what to know about them."""
    cells, warnings = _cells(table, columns)
    early = [_refused_early(cell) for cell in cells]
    fitted = [cell for cell, refused in zip(cells, early, strict=True) if refused is None]
    fits = [[_fit(cell, excess) for cell in fitted] for excess in _EXCESSES]
    best, drawn = valleys.chosen(
        fits, lambda group, theta: _bottom(fitted[group], theta), num_draws=bootstrap,
        rng=np.random.default_rng([seed, 3]),
    )  # fmt: skip
    rest = zip(best, drawn, strict=True)
    return [_judged(cell, *next(rest), level) if refused is None else cell.without(*refused)
            for cell, refused in zip(cells, early, strict=True)], warnings  # fmt: skip


def _cells(table: RunTable, columns: dict[str, Floats]) -> tuple[list[_Cell], list[str]]:
    cells, halved = [], 0
    for params in np.unique(table.params):
        places = np.flatnonzero(table.params == params)
        places = places[np.argsort(table.tokens[places], kind="stable")]
        apart = table.tokens[places][1:] > _GAP * table.tokens[places][:-1]
        for group in np.split(places, np.flatnonzero(apart) + 1):
            best = group[table.loss[group].argmin()]
            keep, axes = group, []
            for axis, column in columns.items():
                if len(np.unique(column[group])) >= _LEAST_VALUES:
                    axes.append(axis)
                elif len(np.unique(column[group])) > 1:
                    keep, halved = keep[column[keep] == column[best]], halved + 1
            cells.append(_Cell(
                params=float(params), tokens=math.exp(float(np.log(table.tokens[group]).mean())), axes=tuple(axes),
                points=np.log2(np.stack([columns[axis][keep] for axis in axes], axis=1)) if axes else np.empty((0, 0)),
                y=np.log(table.loss[keep]), weight=table.weight[keep] / table.weight[keep].mean(),
            ))  # fmt: skip
    text = f"{halved} cells have two values only on one axis: the better one's runs were used, and the other's left out"
    return cells, [text] if halved else []


def _refused_early(cell: _Cell) -> tuple[CellStatus, str] | None:
    if not cell.axes:
        return "too_few", f"fewer than {_LEAST_VALUES} values of {' and of '.join(AXES)}: run more of them"
    more = cell.num_coefficients + 1 - len(cell.y)
    if more > 0 or int(np.linalg.matrix_rank(cell.design)) < cell.num_coefficients:
        return "too_few", (f"{len(cell.y)} runs for the {cell.num_coefficients} numbers of a valley in "
                           f"{' and '.join(cell.axes)}: add {max(more, 1)} or more, off their lines")  # fmt: skip
    for axis, values in zip(cell.axes, cell.points.T, strict=True):
        best = values[cell.y.argmin()]
        if best in (values.min(), values.max()):
            return "edge", _add(axis, values, low=best == values.min())
    return None


def _add(axis: str, values: Floats, *, low: bool) -> str:
    steps = np.diff(np.unique(values))
    end = values.min() - np.median(steps) if low else values.max() + np.median(steps)
    side, beyond = ("smallest", "smaller") if low else ("largest", "larger")
    return f"the best {axis} is the {side} one run: add {beyond} ones, {2.0**end:.3g} first"


def _fit(cell: _Cell, excess: float) -> LocalFit:
    above, design = cell.y - cell.y.min(), cell.design
    ranked = np.sort(above)
    for least in range(min(_LEAST_RUNS[len(cell.axes)], len(cell.y)), len(cell.y) + 1):  # on until off one line
        inside: NDArray[np.bool_] = above <= max(excess, float(ranked[least - 1]))
        if np.linalg.matrix_rank(design[inside]) == cell.num_coefficients:
            break
    judges = above[inside] <= ranked[min(_NUM_JUDGES[len(cell.axes)], len(ranked)) - 1]
    return valleys.fit_local(design[inside], cell.y[inside], cell.weight[inside], judges)


def _bottom(cell: _Cell, theta_MP: Floats) -> Floats:
    """Rows (place on each axis, log loss) of the minimum of each row's quadratic; NaN where there is none."""
    axes = len(cell.axes)
    slope, bend = theta_MP[:, 1 : axes + 1], theta_MP[:, axes + 1 : 2 * axes + 1]
    if axes == 1:
        determinant = 2 * bend[:, 0]
        z = -slope / np.where(determinant > 0, determinant, np.nan)[:, None]
    else:
        cross = theta_MP[:, 5]
        determinant = 4 * bend[:, 0] * bend[:, 1] - cross**2
        determinant = np.where((determinant > 0) & (bend[:, 0] > 0), determinant, np.nan)
        z = np.stack([cross * slope[:, 1] - 2 * bend[:, 1] * slope[:, 0],
                      cross * slope[:, 0] - 2 * bend[:, 0] * slope[:, 1]], axis=1) / determinant[:, None]  # fmt: skip
    loss = theta_MP[:, 0] + (slope * z).sum(axis=1) / 2
    return np.concatenate([cell.centre + z, loss[:, None]], axis=1)


def _judged(cell: _Cell, fit: LocalFit, draws: Floats, level: float) -> CellOptimum:
    at, low, high = _bottom(cell, fit.theta[None, :])[0], cell.points.min(axis=0), cell.points.max(axis=0)
    if not np.isfinite(at).all():
        return cell.without("no_valley", f"no minimum in {' and '.join(cell.axes)}: widen the values run, and look "
                            "at the runs that stand out")  # fmt: skip
    for axis, place, values in zip(cell.axes, at, cell.points.T, strict=False):
        if not values.min() < place < values.max():
            return cell.without("edge", _add(axis, values, low=bool(place <= values.min())))
    inside = ((draws[:, :-1] > low) & (draws[:, :-1] < high)).all(axis=1)
    if len(draws) and 1 - inside.mean() > MOST_OUTSIDE:
        noise = f"the noise leaves {1 - inside.mean():.0%} of the optimum's draws outside the values run"
        return cell.without("flat", f"{noise}: widen {' and '.join(cell.axes)}, or repeat runs with other seeds")
    intervals: dict[str, Pair] = {}
    variances = dict.fromkeys(cell.axes, 0.0)
    if len(draws):
        ends, sds = valleys.spread_of(draws[inside, :-1], level)
        intervals = {axis: (float(a), float(b)) for axis, (a, b) in zip(cell.axes, 2.0**ends, strict=True)}
        variances = dict(zip(cell.axes, ((sds * math.log(2)) ** 2).tolist(), strict=True))
    return CellOptimum(
        params=cell.params, tokens=cell.tokens, intervals=intervals, log_variances=variances,
        values={axis: float(2.0 ** at[i]) for i, axis in enumerate(cell.axes)}, loss_nats=math.exp(at[-1]),
        num_runs=len(cell.y),
    )  # fmt: skip
