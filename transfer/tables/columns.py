"""Which column of a table is what, and which drift it can be asked about."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from proxies.core.hyperparameters import HYPERPARAMETERS, WITH_OPTIMUM
from proxies.core.tables.columns import BATCH_SIZE, COLUMN_NAMES, STATE_ROLES, choose_columns
from proxies.core.tables.table_files import Cells, Source
from transfer.question import AXES, Axis, Hyperparameter
from transfer.tables.cells import TableError

_Name = TypeVar("_Name", bound=str)
_MAY_BE_OPTIMIZER = re.compile(r"opt(_|\W)", re.IGNORECASE)

SIZE_COLUMNS: Mapping[Axis, tuple[str, ...]] = {axis: COLUMN_NAMES[axis] for axis in AXES}
VALUE_COLUMNS: Mapping[Hyperparameter, tuple[str, ...]] = {name: COLUMN_NAMES[name] for name in WITH_OPTIMUM}
OPTIMUM_COLUMNS: Mapping[Hyperparameter, str] = {name: f"{name}_optimum" for name in (*WITH_OPTIMUM, BATCH_SIZE)}
"""Our names of the columns of optima, by hyperparameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableColumns:
    """What a table's columns are called."""

    sizes: Mapping[Axis, str]
    values: Mapping[Hyperparameter, str]
    loss: str | None
    """None: the table is one of optima."""
    optima: Mapping[Hyperparameter, str]
    """Columns of optima, where the table is one of optima."""
    seed: str | None
    states: Mapping[str, str]
    """Columns that tell whether a run has finished, by role."""
    ambiguous_optima: frozenset[str] = frozenset()
    """Columns of optima that may be values of the optimizer instead, since the table has a loss."""
    notes: tuple[str, ...] = ()
    """Choices among several columns whose names mean the same thing."""

    @property
    def judgeable(self) -> dict[str, str]:
        """Every axis and hyperparameter there is, and its column."""
        return dict([*self.sizes.items(), *self.values.items()])

    @property
    def used(self) -> set[str]:
        """All columns that are read."""
        names = (*self.judgeable.values(), *self.optima.values(), self.loss, self.seed, *self.states.values())
        return {name for name in names if name is not None}


def find_columns(path: Source, names: Sequence[str], given: Mapping[str, str] | None = None) -> TableColumns:
    """Recognize columns by their names; of several names for one thing the best one is used.

    Args:
        path: The table, for messages.
        names: Names of its columns.
        given: The user's choices, theirs by ours.

    Raises:
        TableError: No loss (or optimum), no size, or no hyperparameter; or a choice that cannot be met.
    """
    wanted = ("loss", *SIZE_COLUMNS, *VALUE_COLUMNS, *OPTIMUM_COLUMNS.values(), "seed", *STATE_ROLES)
    choice = choose_columns(names, wanted, given or {})
    if choice.problems:
        raise TableError(path, choice.problems)
    columns = choice.columns
    chosen = set((given or {}).values())
    sizes = {axis: columns[axis] for axis in SIZE_COLUMNS if axis in columns}
    values = {name: columns[name] for name in VALUE_COLUMNS if name in columns}
    optima = {name: columns[ours] for name, ours in OPTIMUM_COLUMNS.items() if ours in columns}
    loss = columns.get("loss")
    may_be_values = {name for ours, name in optima.items() if ours != BATCH_SIZE and _MAY_BE_OPTIMIZER.match(name)}
    ambiguous = frozenset(may_be_values - chosen if loss else ())
    if loss is None or not values:
        loss = None if optima else loss
    else:
        optima = {}
    shorts = ", ".join(HYPERPARAMETERS[name].short or name for name in WITH_OPTIMUM)
    needed: list[tuple[bool, str, list[str]]] = [
        (bool(optima) or loss is not None, "loss (or lr_optimum)", ["loss"]),
        (bool(sizes), "size (width, depth, batch, tokens or params)", list(SIZE_COLUMNS)),
        (bool(values) or bool(optima), f"hyperparameter ({shorts})", list(VALUE_COLUMNS)),
    ]
    lacking = [(what, roles) for there, what, roles in needed if not there]
    if lacking:
        known = "; ".join(f"{role}: {', '.join(COLUMN_NAMES[role])}" for _, roles in lacking for role in roles)
        found = ", ".join(filter(None, names)) or "none"
        problem = (
            f"no column for {' and '.join(what for what, _ in lacking)} (found: {found}); "
            f"--column {lacking[0][1][0]}=NAME takes any; known names are {known}"
        )
        raise TableError(path, [problem])
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


def what_to_judge(
    path: Source,
    sheet: Cells,
    columns: TableColumns,
    cells: Mapping[str, Sequence[object]],
    axis: Axis | None,
    hyperparameter: Hyperparameter | None,
) -> tuple[Axis, Hyperparameter]:
    """Return axis and hyperparameter: as given, else as the table leaves no choice.

    Args:
        path: The table, for messages.
        sheet: Its cells.
        columns: What its columns are called.
        cells: Comparable cells of each axis and hyperparameter.
        axis: What grows; None: the only size that varies.
        hyperparameter: None: the learning rate if it varies, else the only one that does.

    Raises:
        TableError: No column for what was given, or several that may be meant: they are listed.
    """
    values = columns.optima or columns.values
    given = ((axis, columns.sizes), (hyperparameter, values))
    problems = [
        f"no column for {name} (found: {', '.join(filter(None, sheet.columns))})"
        for name, there in given
        if name is not None and name not in there
    ]
    if axis is None:
        sizes = [a for a in AXES if a in columns.sizes]
        varying = [a for a in sizes if len(set(cells[a])) > 1]
        axis = _only(_without_params(varying, cells) or sizes, "axis", problems)
    if hyperparameter is None:
        there = [h for h in OPTIMUM_COLUMNS if h in values]
        moving = [h for h in there if len(set(cells[h])) > 1] or there
        hyperparameter = "learning_rate" if "learning_rate" in moving else _only(moving, "hyperparameter", problems)
    if axis is not None and hyperparameter is not None:
        name = columns.optima.get(hyperparameter, "")
        if name in columns.ambiguous_optima and len(set(cells[axis])) < len(cells[axis]):
            problems.append(
                f"column {name!r} may be the optimum of each {axis}, or the optimizer's value in each run, since sizes "
                f"repeat and there is a loss: choose with --column {OPTIMUM_COLUMNS[hyperparameter]}={name} or "
                f"--column {hyperparameter}={name}"
            )
    if problems or axis is None or hyperparameter is None:
        raise TableError(path, problems)
    return axis, hyperparameter


def _without_params(varying: list[Axis], cells: Mapping[str, Sequence[object]]) -> list[Axis]:
    """Return the sizes that vary, without parameters if these follow from the others."""
    others: list[Axis] = [axis for axis in varying if axis != "params"]
    if not others or len(others) == len(varying):
        return varying
    shapes = list(zip(*(cells[axis] for axis in others), strict=True))
    return others if len(set(zip(shapes, cells["params"], strict=True))) == len(set(shapes)) else varying


def _only(choices: Sequence[_Name], option: str, problems: list[str]) -> _Name | None:
    if len(choices) == 1:
        return choices[0]
    problems.append(f"the {option} may be {', '.join(choices)}: name one with --{option}")
    return None
