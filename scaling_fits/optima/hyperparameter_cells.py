"""The best learning rate and batch size of each cell, where a cell is all runs of one (N, D).

Log loss is fitted by a quadratic in log2 learning rate and log2 batch together if a cell varies
both: with a batch that is off, the optimal learning rate moves too. Runs far above the best one
give no information about the minimum and are left out. The window, that is the excess of log loss
up to which runs are fitted, is chosen over all cells at once (`local_fits`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from forerun._proxies.core.notation import format_counted, format_percent
from forerun._scaling_fits.laws.solver import Bools, Floats
from forerun._scaling_fits.laws.table import RunTable
from forerun._scaling_fits.optima.local_fits import (
    MAX_OUTSIDE_SHARE,
    LocalFit,
    compute_spread,
    find_minima,
    fit_local,
)
from forerun._scaling_fits.optima.optima_fit import CellStatus
from forerun._scaling_fits.optima.power_laws import Pair

AXES = ("learning_rate", "batch")

# Ratio of tokens above which runs belong to two cells; whole steps make tokens differ a little
_GAP = 1.03
# Windows in log loss above the cell's best run
_EXCESSES = (math.inf, 0.08, 0.04, 0.02, 0.01, 0.005)
_MIN_VALUES = 3  # Minimum number of distinct values on an axis that is fitted
_NUM_SCORED = {1: 4, 2: 9}  # Number of lowest runs whose errors score a window, by number of axes
_MIN_RUNS = {1: 5, 2: 12}  # Minimum number of runs in a window, by number of axes


@dataclass(frozen=True, kw_only=True, slots=True)
class CellOptimum:
    """The optimum of one cell, or the reason why there is none. Values and intervals are by axis,
    and absent for an axis that does not vary.
    """

    params: float
    tokens: float
    status: CellStatus = "ok"
    reason: str | None = None
    """Problem and the runs to add; None if the status is `ok`."""
    values: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, Pair] = field(default_factory=dict)
    """Intervals by axis; empty without draws."""
    log_variances: dict[str, float] = field(default_factory=dict)
    loss_nats: float | None = None
    num_runs: int


class _Cell(NamedTuple):
    params: float
    tokens: float
    axes: tuple[str, ...]
    """Axes that vary in this cell."""
    points: Floats
    """Log2 values (R, axes)."""
    y: Floats
    """Log loss (R,)."""
    weight: Floats

    @property
    def num_coefficients(self) -> int:
        return 3 if len(self.axes) == 1 else 6

    @property
    def center(self) -> Floats:
        """Values of the best run."""
        return self.points[self.y.argmin()]

    @property
    def design(self) -> Floats:
        """Columns of a quadratic about the center: 1, z, z squared, and the product of two axes."""
        z = self.points - self.center
        columns = [np.ones(len(z)), *z.T, *(z**2).T]
        columns += [z[:, i] * z[:, j] for i, j in itertools.combinations(range(z.shape[1]), 2)]
        return np.stack(columns, axis=1)

    def build_refusal(self, status: CellStatus, reason: str) -> CellOptimum:
        """Return a result without an optimum, with the reason."""
        return CellOptimum(
            params=self.params,
            tokens=self.tokens,
            status=status,
            reason=reason,
            num_runs=len(self.y),
        )


def find_cell_optima(
    table: RunTable, columns: dict[str, Floats], *, bootstrap: int, level: float, seed: int
) -> tuple[list[CellOptimum], list[str]]:
    """Find the optimum of each cell of `table`, and return them with warnings. `columns` holds the
    runs' values by axis.
    """
    cells, warnings = _group_cells(table, columns)
    obstacles = [_find_obstacle(cell) for cell in cells]
    fitted = [cell for cell, obstacle in zip(cells, obstacles, strict=True) if obstacle is None]
    fits = [[_fit_window(cell, excess) for cell in fitted] for excess in _EXCESSES]
    minima = iter(
        find_minima(
            fits,
            lambda group, theta: _find_minimum(fitted[group], theta),
            num_draws=bootstrap,
            rng=np.random.default_rng([seed, 3]),
        )
    )
    optima = [
        cell.build_refusal(*obstacle) if obstacle else _to_optimum(cell, *next(minima), level)
        for cell, obstacle in zip(cells, obstacles, strict=True)
    ]
    return optima, warnings


def _group_cells(table: RunTable, columns: dict[str, Floats]) -> tuple[list[_Cell], list[str]]:
    cells, num_reduced = [], 0
    for params in np.unique(table.params):
        places = np.flatnonzero(table.params == params)
        places = places[np.argsort(table.tokens[places], kind="stable")]
        apart = table.tokens[places][1:] > _GAP * table.tokens[places][:-1]
        for group in np.split(places, np.flatnonzero(apart) + 1):
            best = group[table.loss[group].argmin()]
            keep, axes = group, []
            for axis, column in columns.items():
                if len(np.unique(column[group])) >= _MIN_VALUES:
                    axes.append(axis)
                elif len(np.unique(column[group])) > 1:
                    # Two values show no minimum: keep the runs of the better one
                    keep, num_reduced = keep[column[keep] == column[best]], num_reduced + 1
            cells.append(
                _Cell(
                    params=float(params),
                    tokens=math.exp(float(np.log(table.tokens[group]).mean())),
                    axes=tuple(axes),
                    points=np.log2(np.stack([columns[axis][keep] for axis in axes], axis=1))
                    if axes
                    else np.empty((0, 0)),
                    y=np.log(table.loss[keep]),
                    weight=table.weight[keep] / table.weight[keep].mean(),
                )
            )
    text = (
        f"only the runs of the better value were used in {format_counted(num_reduced, 'cell')} "
        "with two values on one axis"
    )
    return cells, [text] if num_reduced else []


def _find_obstacle(cell: _Cell) -> tuple[CellStatus, str] | None:
    if not cell.axes:
        return (
            "too_few",
            f"fewer than {_MIN_VALUES} values of {' and of '.join(AXES)}: run more of them",
        )
    more = cell.num_coefficients + 1 - len(cell.y)
    if more > 0 or int(np.linalg.matrix_rank(cell.design)) < cell.num_coefficients:
        size = format_counted(cell.num_coefficients, "coefficient")
        runs = format_counted(len(cell.y), "run")
        curve = f"{runs} for the {size} of a curve in {' and '.join(cell.axes)}"
        return "too_few", f"{curve}: add {max(more, 1)} or more that do not lie on one line"
    for axis, values in zip(cell.axes, cell.points.T, strict=True):
        best = values[cell.y.argmin()]
        if best in (values.min(), values.max()):
            return "edge", _describe_values_to_add(axis, values, low=best == values.min())
    return None


def _describe_values_to_add(axis: str, values: Floats, *, low: bool) -> str:
    steps = np.diff(np.unique(values))
    end = values.min() - np.median(steps) if low else values.max() + np.median(steps)
    side, beyond = ("smallest", "smaller") if low else ("largest", "larger")
    return f"the best {axis} is the {side} that was run: add {beyond} ones, {2.0**end:.3g} first"


def _fit_window(cell: _Cell, excess: float) -> LocalFit:
    above, design = cell.y - cell.y.min(), cell.design
    ranked = np.sort(above)
    # Widen the window until the runs determine all coefficients
    for num_inside in range(min(_MIN_RUNS[len(cell.axes)], len(cell.y)), len(cell.y) + 1):
        inside: Bools = above <= max(excess, float(ranked[num_inside - 1]))
        if np.linalg.matrix_rank(design[inside]) == cell.num_coefficients:
            break
    is_scored = above[inside] <= ranked[min(_NUM_SCORED[len(cell.axes)], len(ranked)) - 1]
    return fit_local(design[inside], cell.y[inside], cell.weight[inside], is_scored)


def _find_minimum(cell: _Cell, theta_MP: Floats) -> Floats:
    """Compute rows (value on each axis, log loss) of the minimum of each row's quadratic; NaN if
    there is none.
    """
    axes = len(cell.axes)
    slope, curvature = theta_MP[:, 1 : axes + 1], theta_MP[:, axes + 1 : 2 * axes + 1]
    if axes == 1:
        determinant = 2 * curvature[:, 0]
        z = -slope / np.where(determinant > 0, determinant, np.nan)[:, None]
    else:
        cross = theta_MP[:, 5]
        determinant = 4 * curvature[:, 0] * curvature[:, 1] - cross**2
        determinant = np.where((determinant > 0) & (curvature[:, 0] > 0), determinant, np.nan)
        z = (
            np.stack(
                [
                    cross * slope[:, 1] - 2 * curvature[:, 1] * slope[:, 0],
                    cross * slope[:, 0] - 2 * curvature[:, 0] * slope[:, 1],
                ],
                axis=1,
            )
            / determinant[:, None]
        )
    loss = theta_MP[:, 0] + (slope * z).sum(axis=1) / 2
    return np.concatenate([cell.center + z, loss[:, None]], axis=1)


def _to_optimum(cell: _Cell, at: Floats, draws: Floats, level: float) -> CellOptimum:
    """Return the optimum of a cell from the log2 values and the log loss of its curve's minimum."""
    low, high = cell.points.min(axis=0), cell.points.max(axis=0)
    if not np.isfinite(at).all():
        return cell.build_refusal(
            "no_valley",
            f"no minimum in {' and '.join(cell.axes)}: run a wider range of values, and check the "
            "runs that stand out",
        )
    for axis, place, values in zip(cell.axes, at, cell.points.T, strict=False):
        if not values.min() < place < values.max():
            return cell.build_refusal(
                "edge", _describe_values_to_add(axis, values, low=bool(place <= values.min()))
            )
    inside = ((draws[:, :-1] > low) & (draws[:, :-1] < high)).all(axis=1)
    if len(draws) and 1 - inside.mean() > MAX_OUTSIDE_SHARE:
        noise = (
            f"the noise leaves {format_percent(1 - inside.mean())} of the optimum's draws outside "
            "the values run"
        )
        return cell.build_refusal(
            "flat", f"{noise}: widen {' and '.join(cell.axes)}, or repeat runs with other seeds"
        )
    intervals: dict[str, Pair] = {}
    variances = dict.fromkeys(cell.axes, 0.0)
    if len(draws):
        ends, sds = compute_spread(draws[inside, :-1], level)
        intervals = {
            axis: (float(a), float(b)) for axis, (a, b) in zip(cell.axes, 2.0**ends, strict=True)
        }
        variances = dict(zip(cell.axes, ((sds * math.log(2)) ** 2).tolist(), strict=True))
    return CellOptimum(
        params=cell.params,
        tokens=cell.tokens,
        intervals=intervals,
        log_variances=variances,
        values={axis: float(2.0 ** at[i]) for i, axis in enumerate(cell.axes)},
        loss_nats=math.exp(at[-1]),
        num_runs=len(cell.y),
    )
