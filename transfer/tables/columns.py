"""Recognition of a table's columns, and the choice of the axis and hyperparameter to judge."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE, WITH_OPTIMUM
from forerun._proxies.core.tables.columns import (
    BATCH_SIZE,
    COLUMN_NAMES,
    STATE_ROLES,
    choose_columns,
)
from forerun._proxies.core.tables.table_files import Cells, Source, TableError
from forerun._transfer.question import AXES, Axis, Hyperparameter
from forerun._transfer.tables.cells import TableCell

_Name = TypeVar("_Name", bound=str)
_MAY_BE_OPTIMIZER = re.compile(r"opt(_|\W)", re.IGNORECASE)
"""Start of a column name in which `opt` may stand for `optimum` or for `optimizer`."""

SIZE_COLUMNS: Mapping[Axis, tuple[str, ...]] = {axis: COLUMN_NAMES[axis] for axis in AXES}
VALUE_COLUMNS: Mapping[Hyperparameter, tuple[str, ...]] = {
    name: COLUMN_NAMES[name] for name in WITH_OPTIMUM
}
OPTIMUM_COLUMNS: Mapping[Hyperparameter, str] = {
    name: f"{name}_optimum" for name in (*WITH_OPTIMUM, BATCH_SIZE)
}
"""Names of the columns of optima, by hyperparameter."""


class TableColumns(NamedTuple):
    """Names of a table's columns, by role. A role is what a column holds: an axis, a
    hyperparameter, the optimum of a hyperparameter, `loss`, `seed`, or a state.
    """

    sizes: Mapping[Axis, str]
    values: Mapping[Hyperparameter, str]
    loss: str | None
    """Column of the loss; None if the table contains optima."""
    optima: Mapping[Hyperparameter, str]
    """Columns of optima by hyperparameter, if the table contains optima."""
    seed: str | None
    states: Mapping[str, str]
    """Columns that state whether a run has finished, by role."""
    ambiguous_optima: frozenset[str] = frozenset()
    """Columns that may hold either optima or settings of the optimizer (`opt_lr`), since the table
    also has a loss."""
    notes: tuple[str, ...] = ()
    """Notes on choices among several columns whose names mean the same."""

    @property
    def judgeable(self) -> dict[str, str]:
        """Column of every axis and hyperparameter in the table."""
        return dict([*self.sizes.items(), *self.values.items()])

    @property
    def used(self) -> set[str]:
        """Names of all columns that are read."""
        names = (
            *self.judgeable.values(),
            *self.optima.values(),
            self.loss,
            self.seed,
            *self.states.values(),
        )
        return {name for name in names if name is not None}


def find_columns(
    path: Source, names: Sequence[str], given: Mapping[str, str] | None = None
) -> TableColumns:
    """Recognize columns by their names. If several names fit one role, the best of these names is
    used.

    Args:
        path: The table, for messages.
        names: Names of its columns.
        given: The user's choices: the table's column name by role.

    Raises:
        TableError: There is no loss (or optimum), no size, or no hyperparameter; or a chosen column
            does not exist.
    """
    roles = (
        "loss",
        *SIZE_COLUMNS,
        *VALUE_COLUMNS,
        *OPTIMUM_COLUMNS.values(),
        "seed",
        *STATE_ROLES,
    )
    choice = choose_columns(names, roles, given or {})
    if choice.problems:
        raise TableError(choice.problems, name=path.name)
    columns = choice.columns
    chosen = set((given or {}).values())
    sizes = {axis: columns[axis] for axis in SIZE_COLUMNS if axis in columns}
    values = {name: columns[name] for name in VALUE_COLUMNS if name in columns}
    optima = {name: columns[role] for name, role in OPTIMUM_COLUMNS.items() if role in columns}
    loss = columns.get("loss")
    # A column such as `opt_lr` may be an optimum or a setting of the optimizer
    may_be_values = {
        column
        for name, column in optima.items()
        if name != BATCH_SIZE and _MAY_BE_OPTIMIZER.match(column)
    }
    ambiguous = frozenset(may_be_values - chosen if loss else ())
    # A table is read as runs if it has a loss and a hyperparameter, else as optima if it has any
    if loss is None or not values:
        loss = None if optima else loss
    else:
        optima = {}
    if problem := _describe_missing(names, sizes, values, loss, optima):
        raise TableError([problem], name=path.name)
    return TableColumns(
        sizes=sizes,
        values=values,
        loss=loss,
        optima=optima,
        seed=columns.get("seed"),
        ambiguous_optima=ambiguous,
        states={role: columns[role] for role in STATE_ROLES if role in columns},
        notes=tuple(choice.notes),
    )


def _describe_missing(
    names: Sequence[str],
    sizes: Mapping[Axis, str],
    values: Mapping[Hyperparameter, str],
    loss: str | None,
    optima: Mapping[Hyperparameter, str],
) -> str | None:
    """Return a sentence on the kinds of columns that a table lacks; None if it has all of them."""
    short_names = ", ".join(HYPERPARAMETERS[name].short or name for name in WITH_OPTIMUM)
    needed: list[tuple[bool, str, list[str]]] = [
        (bool(optima) or loss is not None, "loss (or lr_optimum)", ["loss"]),
        (bool(sizes), "size (width, depth, batch, tokens or params)", list(SIZE_COLUMNS)),
        (bool(values) or bool(optima), f"hyperparameter ({short_names})", list(VALUE_COLUMNS)),
    ]
    lacking = [(kind, roles) for is_there, kind, roles in needed if not is_there]
    if not lacking:
        return None
    known_names = "; ".join(
        f"{role}: {', '.join(COLUMN_NAMES[role])}" for _, roles in lacking for role in roles
    )
    present = ", ".join(filter(None, names)) or "none"
    return (
        f"no column for {' and '.join(kind for kind, _ in lacking)} (found: {present}); --column "
        f"{lacking[0][1][0]}=NAME takes any; known names are {known_names}"
    )


def choose_question(
    path: Source,
    sheet: Cells,
    columns: TableColumns,
    grid: Mapping[str, Sequence[TableCell]],
    axis: Axis | None,
    hyperparameter: Hyperparameter | None,
) -> tuple[Axis, Hyperparameter]:
    """Return the axis and the hyperparameter to judge: the given ones, or else the only ones that
    the table allows.

    Args:
        path: The table, for messages.
        sheet: Its cells.
        columns: Names of its columns.
        grid: Cells of each axis and hyperparameter.
        axis: Size that grows; None for the only size that varies.
        hyperparameter: Hyperparameter to judge; None for the learning rate if it varies, else for
            the only one that varies.

    Raises:
        TableError: There is no column for a given name, or several choices are possible; they are
            listed.
    """
    values = columns.optima or columns.values
    cells = {role: [cell.comparable for cell in column] for role, column in grid.items()}
    given = ((axis, columns.sizes), (hyperparameter, values))
    problems = [
        f"no column for {name} (found: {', '.join(filter(None, sheet.columns))})"
        for name, columns_by_name in given
        if name is not None and name not in columns_by_name
    ]
    if axis is None:
        sizes = [a for a in AXES if a in columns.sizes]
        varying = [a for a in sizes if len(set(cells[a])) > 1]
        axis = _require_single(_drop_params(varying, cells) or sizes, "axis", problems)
    if hyperparameter is None:
        present = [name for name in OPTIMUM_COLUMNS if name in values]
        varying_names = [name for name in present if len(set(cells[name])) > 1] or present
        hyperparameter = (
            LEARNING_RATE
            if LEARNING_RATE in varying_names
            else _require_single(varying_names, "hyperparameter", problems)
        )
    if axis is not None and hyperparameter is not None:
        name = columns.optima.get(hyperparameter, "")
        if name in columns.ambiguous_optima and len(set(cells[axis])) < len(cells[axis]):
            problems.append(
                f"column {name!r} may be the optimum of each {axis}, or the optimizer's value in "
                "each run, since sizes repeat and there is a loss: choose with --column "
                f"{OPTIMUM_COLUMNS[hyperparameter]}={name} or --column {hyperparameter}={name}"
            )
    if problems or axis is None or hyperparameter is None:
        raise TableError(problems, name=path.name)
    return axis, hyperparameter


def _drop_params(varying: list[Axis], cells: Mapping[str, Sequence[object]]) -> list[Axis]:
    """Return the sizes that vary, without parameters if these follow from the others."""
    other_axes: list[Axis] = [axis for axis in varying if axis != "params"]
    if not other_axes or len(other_axes) == len(varying):
        return varying
    shapes = list(zip(*(cells[axis] for axis in other_axes), strict=True))
    return (
        other_axes
        if len(set(zip(shapes, cells["params"], strict=True))) == len(set(shapes))
        else varying
    )


def _require_single(choices: Sequence[_Name], option: str, problems: list[str]) -> _Name | None:
    """Return the only choice. If there are several, append a problem and return None."""
    if len(choices) == 1:
        return choices[0]
    problems.append(f"the {option} may be {', '.join(choices)}: name one with --{option}")
    return None
