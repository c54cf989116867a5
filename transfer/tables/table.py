"""Reading of tables of existing runs, and choice of the runs that are judged.

A table of runs has one row per run, with the loss, the sizes, and the hyperparameters of the run. A
table of optima has one row per size, with the optimal value of a hyperparameter at that size.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.tables.columns import drop_unfinished_rows, read_columns
from forerun._proxies.core.tables.table_files import Cells, Source, TableError
from forerun._transfer.question import AXES, Axis, Hyperparameter, Point
from forerun._transfer.tables import cells
from forerun._transfer.tables.cells import format_cell, read_sheet
from forerun._transfer.tables.columns import TableColumns, choose_question, find_columns

DERIVED_AXES = ("params", "duration")
"""Axes whose size is often computed from other sizes: the number of parameters from width and
depth, and the training duration (total tokens) from the number of parameters."""


MAX_VALUES, MAX_DESIGN_CELLS = 1000, 10**8
"""Limits of the runs of one size, so that a fit takes minutes at most: the number of different
hyperparameter values, and the number of cells in the design matrix of the fit. That matrix has a
row for each run and a column for each value and each seed."""


class TableRow(NamedTuple):
    """One row of a table as numbers."""

    size: int
    """Size along the axis to judge."""
    log2_value: float
    """Log2 of the value of the hyperparameter to judge."""
    loss_nats: float | None
    """Loss in nats; None if the run diverged, or if the table has optima instead of losses."""
    seed: int
    other_cells: Mapping[str, object]
    """Cells of all other axes and hyperparameters: numbers where possible, else text."""


def select_comparable_runs(
    path: Source, runs: Sequence[TableRow], axis: Axis, columns: Mapping[str, str]
) -> tuple[list[TableRow], list[str]]:
    """Return the largest set of runs that differ only in the axis and the hyperparameter to judge,
    with notes on the choice.

    A verdict is on one drift, and the effect of anything else that varies would be mistaken for
    that drift. Among sets of equal size, the one with the lowest loss is chosen, as a user would
    choose the best weight decay. The order of the rows does not matter.

    Args:
        path: The table, for messages.
        runs: At least one run.
        axis: Axis of the runs' `size`.
        columns: Column name in the table for each name in `TableRow.other_cells`.

    Raises:
        TableError: There are several sizes, but no two agree in everything else.
    """
    constant_names = _list_constant_names(runs, axis)
    runs_by_key = _group_runs(runs, constant_names)
    usable_keys = [key for key, group in runs_by_key.items() if _count_sizes(group) > 1]
    names = ", ".join(columns[name] for name in constant_names)
    if constant_names and not usable_keys and _count_sizes(runs) > 1:
        problem = (
            f"no two sizes agree in {names}: run some that do, or remove a column to ignore it"
        )
        raise TableError([problem], name=path.name)
    best = min(usable_keys or runs_by_key, key=lambda key: _make_rank_key(key, runs_by_key[key]))
    kept = runs_by_key[best]
    notes = []
    if constant_names:
        at = ", ".join(
            f"{columns[name]} {format_cell(value)}"
            for name, value in zip(constant_names, best, strict=True)
        )
        notes.append(
            f"{len(kept)} of {format_counted(len(runs), 'run')} are judged, those at {at}; the "
            "others are not used"
        )
    following = [
        columns[name]
        for name in kept[0].other_cells
        if len({run.other_cells[name] for run in kept}) > 1
    ]
    if following:
        notes.append(
            f"{', '.join(following)} changes together with {axis}: the verdict is on all of it "
            "together"
        )
    return kept, notes


def _list_constant_names(runs: Sequence[TableRow], axis: Axis) -> list[str]:
    """Return the names of the columns that must be constant over the judged runs: all columns that
    vary, except those that change only together with the axis.

    For example, the number of parameters follows from the width at a given depth, and a weight
    decay may be set to 1/width. No two sizes agree in such a column, so the table can only show the
    effect of both together.

    Columns of `DERIVED_AXES` may repeat a value at neighboring sizes (`loosely`). Such a column
    need not be constant either if it follows the size within every group of runs that agree in all
    other columns.
    """
    varying = [
        name for name in runs[0].other_cells if len({run.other_cells[name] for run in runs}) > 1
    ]
    independent = [
        name
        for name in varying
        if not _follows_size(runs, name, loosely=name in AXES and _has_derived_axis(axis, name))
    ]
    not_derived = [name for name in independent if name not in DERIVED_AXES]
    multi_size_groups = [
        group for group in _group_runs(runs, not_derived).values() if _count_sizes(group) > 1
    ]
    return [
        name
        for name in independent
        if name in not_derived
        or not multi_size_groups
        or not all(_follows_size(group, name, loosely=True) for group in multi_size_groups)
    ]


def _has_derived_axis(*names: str) -> bool:
    return any(name in DERIVED_AXES for name in names)


def _follows_size(runs: Sequence[TableRow], name: str, *, loosely: bool) -> bool:
    """Return whether a column has one value at each size and strictly rises, or strictly falls,
    with the size. With `loosely`, the value may also stay equal from one size to the next.
    """
    value_at = {run.size: run.other_cells[name] for run in runs}
    values = [value_at[size] for size in sorted(value_at)]
    numbers = [value for value in values if isinstance(value, float)]
    if len(numbers) < len(values) or any(
        value_at[run.size] != run.other_cells[name] for run in runs
    ):
        return False
    steps = [after - before for before, after in itertools.pairwise(numbers)]
    is_monotonic = all(step >= 0 for step in steps) or all(step <= 0 for step in steps)
    return bool(steps) and is_monotonic and (loosely or 0.0 not in steps)


def _make_rank_key(
    key: tuple[object, ...], runs: Sequence[TableRow]
) -> tuple[int, float, list[tuple[str, object]]]:
    """Return a sort key for a group of runs. The group with the most runs comes first, then the one
    with the lowest loss, then the one with the smallest constant values.
    """
    lowest_loss = min(
        (run.loss_nats for run in runs if run.loss_nats is not None), default=math.inf
    )
    # Numbers and texts cannot be compared, so the type comes before the value
    return -len(runs), lowest_loss, [(type(value).__name__, value) for value in key]


def _count_sizes(runs: Sequence[TableRow]) -> int:
    return len({run.size for run in runs})


def _group_runs(
    runs: Sequence[TableRow], names: Sequence[str]
) -> dict[tuple[object, ...], list[TableRow]]:
    groups: dict[tuple[object, ...], list[TableRow]] = {}
    for run in runs:
        groups.setdefault(tuple(run.other_cells[name] for name in names), []).append(run)
    return groups


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTable:
    """Contents of a table: runs, or published optima. One of `points` and `optima` is empty."""

    axis: Axis
    hyperparameter: Hyperparameter
    points: tuple[Point, ...]
    optima: tuple[tuple[int, float], ...]
    """Pairs of (size, log2 of the optimal value)."""
    notes: tuple[str, ...]
    """Sentences on the runs that are judged and the rows and columns that are not used."""
    dropped: tuple[tuple[int, str], ...]
    """Pairs of (row, reason) for rows without a finished run."""


def read_runs(
    path: Source,
    *,
    axis: Axis | None = None,
    hyperparameter: Hyperparameter | None = None,
    columns: Mapping[str, str] | None = None,
) -> RunTable:
    """Read a table, and choose the runs that show one drift.

    The columns are a `loss` (nats per token), sizes and hyperparameters, a `seed`, and a `state`;
    or, in a table of optima, sizes and optima (`forerun._transfer.tables.columns`).
    - A run whose loss is not finite, or the word `diverged`, diverged. An empty loss is refused,
      because that run may never have been trained. A run that did not finish is dropped.
    - Without a `seed` column all runs count as one seed, and equal settings are replicates.
    - A weight decay, warmup, or clip of 0 has no logarithm. If that hyperparameter is judged, such
      runs are left out with a note. Any other 0 is refused.

    Args:
        path: A file or pipe (`forerun._proxies.core.tables.table_files.read_cells`), or cells
            already read.
        axis: Size that grows; None for the only size that varies.
        hyperparameter: Hyperparameter to judge; None for the learning rate if it varies, else for
            the only one that varies.
        columns: The table's column name by role, where the user chose one.

    Raises:
        TableError: The kind of file is unknown, a column is missing, cells are bad (all of them are
            listed with row and column), an axis or hyperparameter must be named, or no two sizes
            agree in everything else.
    """
    given = dict(columns or {})
    sheet = read_sheet(path, given.values())
    names = find_columns(path, sheet.columns, given)
    finished = drop_unfinished_rows(sheet, names.states)
    if not finished.rows:
        dropped = format_counted(len(finished.dropped), "row")
        raise TableError([f"no run has finished ({dropped} dropped)"], name=path.name)
    sheet = dataclasses.replace(sheet, rows=finished.rows)
    grid, doubts = _read_grid(sheet, names)
    axis, hyperparameter = choose_question(path, sheet, names, grid, axis, hyperparameter)
    if names.optima:
        names = names._replace(
            values={**names.values, hyperparameter: names.optima[hyperparameter]}
        )
    bad_cells = list(finished.bad_cells)
    runs = _read_rows(grid, names, bad_cells, axis, hyperparameter)
    if bad_cells or doubts:
        raise TableError(doubts, bad_cells, name=path.name)
    if not runs:
        problem = f"every {names.values[hyperparameter]} is 0: nothing to judge"
        raise TableError([problem], name=path.name)
    kept, notes = select_comparable_runs(path, runs, axis, names.judgeable)
    if problems := _find_excess(kept, axis, names.values[hyperparameter]):
        raise TableError(problems, name=path.name)
    num_off = len(sheet.rows) - len(runs)
    first_notes = [*_list_notes(sheet, names, axis, hyperparameter, num_off), *finished.warnings]
    return _to_run_table(
        kept, axis, hyperparameter, names.loss is not None, [*first_notes, *notes], finished.dropped
    )


def _to_run_table(
    kept: Sequence[TableRow],
    axis: Axis,
    hyperparameter: Hyperparameter,
    has_loss: bool,
    notes: Sequence[str],
    dropped: Sequence[tuple[int, str]],
) -> RunTable:
    """Return the chosen rows as points if they have losses, else as optima."""
    ordered = sorted(kept, key=_to_sort_key)
    points = _to_points(ordered)
    all_notes = list(notes)
    if copies := len(ordered) - len(points):
        all_notes.append(f"rows that repeat another to the last digit: {copies}; each counts once")
    return RunTable(
        axis=axis,
        hyperparameter=hyperparameter,
        points=tuple(points) if has_loss else (),
        optima=() if has_loss else tuple((run.size, run.log2_value) for run in ordered),
        notes=tuple(all_notes),
        dropped=tuple(dropped),
    )


def _to_points(runs: Sequence[TableRow]) -> list[Point]:
    """Return the points of runs, without copies."""
    points = [
        Point(size=r.size, log2_value=r.log2_value, loss_nats=r.loss_nats, seed=r.seed)
        for r in runs
    ]
    # Rows with equal losses to the last digit are copies of one run, which counts once. Diverged
    # runs have no loss, so their rows cannot be recognized as copies and are all kept.
    with_loss = dict.fromkeys(point for point in points if point.loss_nats is not None)
    return [*with_loss, *(point for point in points if point.loss_nats is None)]


def _to_sort_key(run: TableRow) -> tuple[float, ...]:
    """Return a sort key from a run's content, so that a verdict does not depend on the order of the
    rows.
    """
    return run.size, run.log2_value, run.seed, math.inf if run.loss_nats is None else run.loss_nats


def _find_excess(runs: Sequence[TableRow], axis: Axis, value_name: str) -> list[str]:
    """Return a problem for each size with more values or seeds than a basin can be fitted to within
    minutes.
    """
    problems = []
    for size, group in itertools.groupby(sorted(runs, key=_to_sort_key), key=lambda run: run.size):
        pairs = [(run.seed, run.log2_value) for run in group]
        num_values = len({value for _, value in pairs})
        # A seed has an effect of its own in the fit if it was run at three values or more
        values_by_seed = Counter(seed for seed, _ in set(pairs))
        num_effects = num_values + sum(count > 2 for count in values_by_seed.values())
        if num_values > MAX_VALUES:
            problems.append(
                f"{axis} {size} has {format_counted(num_values, 'different value')} of "
                f"{value_name}: must be at most {MAX_VALUES:,}; round them to a grid, such as 16 "
                "values an octave"
            )
        if len(pairs) * num_effects > MAX_DESIGN_CELLS:
            problems.append(
                f"{axis} {size} has {format_counted(len(pairs), 'run')} of "
                f"{format_counted(len(values_by_seed), 'seed')}: runs times seeds and values must "
                f"be at most {MAX_DESIGN_CELLS:,}; leave out seeds"
            )
    return problems


_Grid = dict[str, list[cells.TableCell]]
"""Cells of the columns that are read, by role."""


def _read_grid(sheet: Cells, names: TableColumns) -> tuple[_Grid, list[str]]:
    """Return the cells by role, and problems of columns whose commas may be decimal or thousands
    separators.
    """
    optional = {"loss": names.loss, "seed": names.seed}
    column_names = {
        **names.judgeable,
        **names.optima,
        **{role: name for role, name in optional.items() if name is not None},
    }
    parsed_columns, doubts = read_columns(sheet, sheet.rows, column_names)
    grid = {
        role: [
            cells.TableCell(record.get(name), number, f"row {row}, column {name}")
            for (row, record), number in zip(sheet.rows, parsed_columns[role].values, strict=True)
        ]
        for role, name in column_names.items()
    }
    return grid, doubts


def _list_notes(
    sheet: Cells, names: TableColumns, axis: Axis, hyperparameter: Hyperparameter, num_off: int
) -> list[str]:
    size, value = names.sizes[axis], names.values[hyperparameter]
    notes = [f"judged: {hyperparameter} (column {value}) over {axis} (column {size})", *names.notes]
    if ignored := [name for name in sheet.columns if name and name not in names.used]:
        notes.append(f"columns ignored: {', '.join(ignored)}")
    if num_off:
        notes.append(
            f"{format_counted(num_off, 'run')} not used: {value} = 0 means off and has no logarithm"
        )
    return notes


def _read_rows(
    grid: _Grid,
    names: TableColumns,
    problems: list[str],
    axis: Axis,
    hyperparameter: Hyperparameter,
) -> list[TableRow]:
    """Return all rows except those where the hyperparameter is off. Problems with cells are
    appended to `problems`.
    """
    compared_names = [name for name in names.judgeable if name not in (axis, hyperparameter)]
    runs = []
    for place in range(len(grid[axis])):
        row = {role: column[place] for role, column in grid.items()}
        size = cells.parse_whole(row[axis], 1, problems)
        value = cells.parse_log2_value(row[hyperparameter], hyperparameter, problems)
        loss = cells.parse_loss(row["loss"], problems) if "loss" in row else None
        seed = cells.parse_whole(row["seed"], 0, problems) if "seed" in row else 0
        if value is not None:
            compared_cells = {name: row[name].comparable for name in compared_names}
            runs.append(
                TableRow(
                    size=size,
                    log2_value=value,
                    loss_nats=loss,
                    seed=seed,
                    other_cells=compared_cells,
                )
            )
    return runs
