"""Laws of the best learning rate or batch against size and duration: log value = c + a log N + b
log D.

From runs over a grid, with columns learning_rate or lr, and batch_tokens or batch. An exponent that
the cells do not identify, since they have one N, one D or a fixed D / N, is left out, and the law
then answers only where that still holds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import counted, format_factor, format_percent
from proxies.core.tables.columns import COLUMN_NAMES
from scaling_fits.compute import isoflop_curves
from scaling_fits.compute.isoflop_curves import MOST_OUTSIDE, LocalFit
from scaling_fits.compute.optima import CellStatus, OptimaError, OptimaFit
from scaling_fits.compute.power_laws import Floats, Pair, PowerLaw, fit_power_law, told
from scaling_fits.laws.law import CannotTellError, check_size, option_problems
from scaling_fits.laws.table import RunTable

# The best learning rate and batch of each cell, a cell being all runs of one (N, D).
#
# Log loss is a quadratic in log2 learning rate and log2 batch together, where a cell varies both:
# with a batch that is off, the learning rate's optimum moves too. Runs far above the best say
# nothing about the bottom and are left out; how far is chosen over all cells at once
# (`isoflop_curves`).

AXES = ("learning_rate", "batch")

_GAP = 1.03  # tokens further apart are two cells: whole steps make them differ a little
_EXCESSES = (math.inf, 0.08, 0.04, 0.02, 0.01, 0.005)  # in log loss above the cell's best run
_LEAST_VALUES = 3  # distinct values on an axis that is fitted
_NUM_JUDGES = {1: 4, 2: 9}  # lowest runs, by number of axes, that judge how far to go
_LEAST_RUNS = {1: 5, 2: 12}  # runs that are kept in any case, by number of axes


@dataclass(frozen=True, kw_only=True, slots=True)
class CellOptimum:
    """The optimum of one cell, or why nobody can say. Values and intervals by axis; absent where
    not varied.
    """

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
        return CellOptimum(
            params=self.params,
            tokens=self.tokens,
            status=status,
            reason=reason,
            num_runs=len(self.y),
        )


def cell_optima(
    table: RunTable, columns: dict[str, Floats], *, bootstrap: int, level: float, seed: int
) -> tuple[list[CellOptimum], list[str]]:
    """The optimum of each cell of `table`, `columns` holding the runs' values by axis; and what to
    know about them.
    """
    cells, warnings = _cells(table, columns)
    early = [_refused_early(cell) for cell in cells]
    fitted = [cell for cell, refused in zip(cells, early, strict=True) if refused is None]
    fits = [[_fit_window(cell, excess) for cell in fitted] for excess in _EXCESSES]
    best, drawn = isoflop_curves.chosen(
        fits,
        lambda group, theta: _bottom(fitted[group], theta),
        num_draws=bootstrap,
        rng=np.random.default_rng([seed, 3]),
    )
    rest = zip(best, drawn, strict=True)
    return [
        _judged(cell, *next(rest), level) if refused is None else cell.without(*refused)
        for cell, refused in zip(cells, early, strict=True)
    ], warnings


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
        f"only the runs of the better value were used in {counted(halved, 'cell')} with two "
        "values on one axis"
    )
    return cells, [text] if halved else []


def _refused_early(cell: _Cell) -> tuple[CellStatus, str] | None:
    if not cell.axes:
        return (
            "too_few",
            f"fewer than {_LEAST_VALUES} values of {' and of '.join(AXES)}: run more of them",
        )
    more = cell.num_coefficients + 1 - len(cell.y)
    if more > 0 or int(np.linalg.matrix_rank(cell.design)) < cell.num_coefficients:
        size = counted(cell.num_coefficients, "coefficient")
        curve = (
            f"{counted(len(cell.y), 'run')} for the {size} of a curve in {' and '.join(cell.axes)}"
        )
        return "too_few", f"{curve}: add {max(more, 1)} or more, not on their line"
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


def _fit_window(cell: _Cell, excess: float) -> LocalFit:
    above, design = cell.y - cell.y.min(), cell.design
    ranked = np.sort(above)
    # on until off one line
    for least in range(min(_LEAST_RUNS[len(cell.axes)], len(cell.y)), len(cell.y) + 1):
        inside: NDArray[np.bool_] = above <= max(excess, float(ranked[least - 1]))
        if np.linalg.matrix_rank(design[inside]) == cell.num_coefficients:
            break
    judges = above[inside] <= ranked[min(_NUM_JUDGES[len(cell.axes)], len(ranked)) - 1]
    return isoflop_curves.fit_local(design[inside], cell.y[inside], cell.weight[inside], judges)


def _bottom(cell: _Cell, theta_MP: Floats) -> Floats:
    """Rows (place on each axis, log loss) of the minimum of each row's quadratic; NaN where there
    is none.
    """
    axes = len(cell.axes)
    slope, bend = theta_MP[:, 1 : axes + 1], theta_MP[:, axes + 1 : 2 * axes + 1]
    if axes == 1:
        determinant = 2 * bend[:, 0]
        z = -slope / np.where(determinant > 0, determinant, np.nan)[:, None]
    else:
        cross = theta_MP[:, 5]
        determinant = 4 * bend[:, 0] * bend[:, 1] - cross**2
        determinant = np.where((determinant > 0) & (bend[:, 0] > 0), determinant, np.nan)
        z = (
            np.stack(
                [
                    cross * slope[:, 1] - 2 * bend[:, 1] * slope[:, 0],
                    cross * slope[:, 0] - 2 * bend[:, 0] * slope[:, 1],
                ],
                axis=1,
            )
            / determinant[:, None]
        )
    loss = theta_MP[:, 0] + (slope * z).sum(axis=1) / 2
    return np.concatenate([cell.centre + z, loss[:, None]], axis=1)


def _judged(cell: _Cell, fit: LocalFit, draws: Floats, level: float) -> CellOptimum:
    at, low, high = (
        _bottom(cell, fit.theta[None, :])[0],
        cell.points.min(axis=0),
        cell.points.max(axis=0),
    )
    if not np.isfinite(at).all():
        return cell.without(
            "no_valley",
            f"no minimum in {' and '.join(cell.axes)}: widen the values run, and look "
            "at the runs that stand out",
        )
    for axis, place, values in zip(cell.axes, at, cell.points.T, strict=False):
        if not values.min() < place < values.max():
            return cell.without("edge", _add(axis, values, low=bool(place <= values.min())))
    inside = ((draws[:, :-1] > low) & (draws[:, :-1] < high)).all(axis=1)
    if len(draws) and 1 - inside.mean() > MOST_OUTSIDE:
        noise = (
            f"the noise leaves {format_percent(1 - inside.mean())} of the optimum's draws "
            "outside the values run"
        )
        return cell.without(
            "flat", f"{noise}: widen {' and '.join(cell.axes)}, or repeat runs with other seeds"
        )
    intervals: dict[str, Pair] = {}
    variances = dict.fromkeys(cell.axes, 0.0)
    if len(draws):
        ends, sds = isoflop_curves.spread_of(draws[inside, :-1], level)
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


Hyperparameter = Literal["learning_rate", "batch"]
COLUMNS: dict[Hyperparameter, tuple[str, ...]] = {
    "learning_rate": COLUMN_NAMES["learning_rate"],
    "batch": COLUMN_NAMES["batch"],
}
"""Names of the column of each, the first that is there counting."""

_LEAST_SPREAD = 0.05  # log N or log D of cells that count as different
# sd of log D off its line over log N, below which their exponents cannot be told apart
_LEAST_APART = 0.1
_NEAR = 1.25  # factor within which a quantity left out of the law counts as the same
_FAR = 30.0  # times the largest N or D of a cell

Design = Literal["both", "params", "tokens", "ratio", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperparameterFit(OptimaFit):
    """The law of one hyperparameter, with the optima behind it."""

    form: Hyperparameter
    column: str
    """The column it came from, which gives its unit."""
    design: Design
    """What varies over the cells: `ratio`: N and D in step, so that one exponent stands for
    both."""
    law: PowerLaw | None
    cells: tuple[CellOptimum, ...]

    @property
    def used(self) -> tuple[CellOptimum, ...]:
        """Cells with an optimum of this hyperparameter."""
        return tuple(cell for cell in self.cells if self.form in cell.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperparameterPrediction:
    """The best value at one size and duration."""

    params: float
    tokens: float
    value: float
    interval: tuple[float, float] | None
    """Of the optimum itself: the law's error and the scatter of optima about it."""
    level: float
    warnings: tuple[str, ...]


def fit_runs_law(
    table: RunTable, form: Hyperparameter, bootstrap: int = 400, level: float = 0.9, seed: int = 0
) -> HyperparameterFit:
    """The law from runs over learning rates and batches; the table's `extra` holds their columns.

    Raises:
        OptimaError: the column is missing or has cells that are not above zero, or options out of
            range.
    """
    problems = option_problems(bootstrap, level, seed)
    known: dict[Hyperparameter, tuple[str, ...]] = {
        axis: (table.column_names.get(axis, axis), *names) for axis, names in COLUMNS.items()
    }
    names = {
        axis: name
        for axis in COLUMNS
        if (name := next((name for name in known[axis] if name in table.extra), ""))
    }
    if form not in names:
        problems.append(
            f"no column {' or '.join(map(repr, COLUMNS[form]))}: the table must have the runs' "
            f"{form}, under one of "
            f"these names or by --column {form}=NAME"
        )
    columns = {str(axis): table.extra[name] for axis, name in names.items()}
    problems += [
        problem
        for axis, name in names.items()
        for problem in _bad_cells(table, name, columns[axis])
    ]
    if problems:
        raise OptimaError(problems)
    cells, warnings = cell_optima(table, columns, bootstrap=bootstrap, level=level, seed=seed)
    law, design, more = _law_of(form, cells)
    return HyperparameterFit(
        form=form,
        column=names[form],
        status="converged" if law else "unidentified",
        design=design,
        law=law,
        cells=tuple(cells),
        level=level,
        bootstrap=bootstrap,
        seed=seed,
        num_runs=table.num_runs,
        dropped=table.dropped,
        warnings=(*table.warnings, *warnings, *more),
    )


def _bad_cells(table: RunTable, name: str, column: Floats) -> list[str]:
    lines = table.lines or tuple(range(len(column)))
    return [
        f"row {lines[i]}, column {name!r}: "
        f"{'missing' if math.isnan(column[i]) else f'{column[i]:g}'}: must be a number"
        " above 0"
        for i in np.flatnonzero(~(column > 0))
    ]


def _law_of(
    form: Hyperparameter, cells: list[CellOptimum]
) -> tuple[PowerLaw | None, Design, list[str]]:
    """The law through the cells that have an optimum, what they vary, and what to know of the
    others.
    """
    used = [cell for cell in cells if form in cell.values]
    warnings = [
        f"cell N = {cell.params:.3g}, D = {cell.tokens:.3g}: "
        f"{cell.reason or f'does not vary {form}'}"
        for cell in cells
        if form not in cell.values
    ]
    design, inputs, why = _design_of(used)
    least = len(inputs) + 2
    if not inputs or len(used) < least:
        missing = f"{len(used)} of {counted(len(cells), 'cell')} with an optimum of {form}"
        warnings.append(
            f"{missing}: "
            f"{why[0] if why and not inputs else f'at least {least} are needed for a law in '}"
            f"{' and '.join(inputs)}; run cells at other N and D"
        )
        return None, "none", warnings
    logs = np.log([cell.values[form] for cell in used])
    law = fit_power_law(inputs, logs, np.array([cell.log_variances[form] for cell in used]))
    return law, design, warnings + why


def _design_of(used: list[CellOptimum]) -> tuple[Design, dict[str, Floats], list[str]]:
    """What the cells vary, the law's inputs by that, and what is left out."""
    params, tokens = (
        np.array([getattr(cell, name) for cell in used]) for name in ("params", "tokens")
    )
    if len(used) < 2:
        return "none", {}, ["one cell does not make a law"]
    n, d = np.log(params) - np.log(params).mean(), np.log(tokens) - np.log(tokens).mean()
    varied = np.ptp(n) > _LEAST_SPREAD, np.ptp(d) > _LEAST_SPREAD
    if not any(varied):
        return "none", {}, ["all have one N and one D"]
    if not varied[1]:
        return (
            "params",
            {"params": params},
            [f"all cells have D = {tokens[0]:.3g}: the exponent of D is left out"],
        )
    if not varied[0]:
        return (
            "tokens",
            {"tokens": tokens},
            [f"all cells have N = {params[0]:.3g}: the exponent of N is left out"],
        )
    off = d - n * (n @ d) / (n @ n)
    if math.sqrt(float((off**2).mean())) < _LEAST_APART:
        why = "N and D grow together over the cells: the one exponent is of N with D growing along"
        return "ratio", {"params": params}, [why]
    return "both", {"params": params, "tokens": tokens}, []


def predict_value(fit: HyperparameterFit, params: float, tokens: float) -> HyperparameterPrediction:
    """The best value at N and D, with an interval.

    Raises:
        LawError: what is no size of a run.
        CannotTellError: no law was identified, or none that holds at this N and D.
    """
    sizes = {"params": float(params), "tokens": float(tokens)}
    check_size(**sizes)
    if fit.law is None:
        raise CannotTellError(fit.warnings)
    _refuse_outside(fit, sizes)
    at = [sizes[name] for name in fit.law.inputs]
    largest = {name: max(getattr(cell, name) for cell in fit.used) for name in sizes}
    far = [
        f"{name} = {size:.3g} is {format_factor(size / largest[name])} times the largest of any "
        "cell"
        for name, size in sizes.items()
        if size > _FAR * largest[name]
    ]
    return HyperparameterPrediction(
        **sizes,
        value=fit.law.at(*at),
        interval=fit.law.interval_at(*at, level=fit.level) if fit.bootstrap else None,
        level=fit.level,
        warnings=(*fit.warnings, *far),
    )


def _refuse_outside(fit: HyperparameterFit, sizes: dict[str, float]) -> None:
    """A law without D says nothing at another D, one of a fixed D / N nothing off that ratio."""

    def value(name: str, of: dict[str, float]) -> float:
        if name != "D at this N":
            return of[name]
        n, d = (np.log([getattr(cell, what) for cell in fit.used]) for what in ("params", "tokens"))
        slope = float(np.polyfit(n, d, 1)[0])
        return math.exp(math.log(of["tokens"]) - slope * math.log(of["params"]))

    left_out = {"params": "tokens", "tokens": "params", "ratio": "D at this N"}.get(fit.design)
    if left_out is None:
        return
    known = [value(left_out, {"params": cell.params, "tokens": cell.tokens}) for cell in fit.used]
    asked = value(left_out, sizes)
    if not min(known) / _NEAR <= asked <= max(known) * _NEAR:
        off = max(asked / max(known), min(known) / asked)
        reason = (
            f"the cells do not show how {fit.form} changes with {left_out}, and this size is "
            "off theirs by a factor of"
        )
        raise CannotTellError((f"{reason} {off:.3g}: run cells that vary {left_out}",))


def fit_body(fit: HyperparameterFit) -> dict[str, Json]:
    """What `fit --form learning_rate|batch --json` prints. An exponent that is not identified is
    null.
    """
    law, names = fit.law, ("coefficient", "params_exponent", "tokens_exponent")
    known = ("coefficient", *(f"{name}_exponent" for name in law.inputs)) if law else ()
    values, intervals = told(law, known, fit.level if fit.bootstrap else None)
    empty: dict[str, Json] = {"value": None, "interval": None}
    return fit.body(
        fit.form, dict.fromkeys(names) | values, dict.fromkeys(names) | intervals, [empty, empty]
    ) | {
        "column": fit.column,
        "design": fit.design,
        "cells": [_cell(cell) for cell in fit.cells],
        "scatter": None if law is None else law.scatter,
    }


def _cell(cell: CellOptimum) -> Json:
    return {
        "params": cell.params,
        "tokens": cell.tokens,
        "status": cell.status,
        "reason": cell.reason,
        **cell.values,
        **{f"{axis}_interval": list(ends) for axis, ends in cell.intervals.items()},
        "loss": cell.loss_nats,
        "num_runs": cell.num_runs,
    }


def prediction_body(
    fit: HyperparameterFit, prediction: HyperparameterPrediction
) -> dict[str, Json]:
    """What `predict FIT --params N --tokens D --json` prints of such a law."""
    values = {
        field.name: canon.to_json(getattr(prediction, field.name))
        for field in dataclasses.fields(prediction)
    }
    return {"form": fit.form, "column": fit.column, **values}
