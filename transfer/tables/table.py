"""Tables of existing runs: a loss, sizes, and hyperparameters; or sizes with their optimal learning
rate.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from proxies.core.notation import counted
from proxies.core.tables.columns import drop_unfinished, read_columns
from proxies.core.tables.table_files import Cells, Source
from transfer.question import AXES, Axis, Hyperparameter, Point
from transfer.tables import cells
from transfer.tables.cells import TableError, format_cell, read_sheet
from transfer.tables.columns import TableColumns, choose_question, find_columns

COMPOSITE = ("params", "duration")
"""Sizes that follow from other sizes: parameters from a shape, tokens from parameters."""


MAX_VALUES, MAX_DESIGN_CELLS = 1000, 10**8
"""Limits of one size: values, and cells of the design matrices of a fit (values by values, runs by
values and seeds)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """One row of a table as numbers."""

    size: int
    log2_value: float
    loss_nats: float | None
    seed: int
    others: Mapping[str, object]
    """Cells of all other axes and hyperparameters: numbers where possible, else text."""


def select_comparable_runs(
    path: Source, runs: Sequence[TableRow], axis: Axis, columns: Mapping[str, str]
) -> tuple[list[TableRow], list[str]]:
    """Return the largest set of runs that agree in everything else that varies, with notes on the
    choice.

    One drift is judged at a time, and anything else that varies would be mistaken for it. Among
    sets of equal size, the one with the lowest loss is chosen, as a user would choose the best
    weight decay. The order of the rows does not matter.

    Args:
        path: The table, for messages.
        runs: At least one run.
        axis: Axis of the runs' `size`.
        columns: The table's column name of each of the `others`.

    Raises:
        TableError: There are several sizes, but no two agree in everything else.
    """
    held_names = _list_held_names(runs, axis)
    runs_by_key = _group_runs(runs, held_names)
    usable_keys = [key for key, group in runs_by_key.items() if _count_sizes(group) > 1]
    names = ", ".join(columns[name] for name in held_names)
    if held_names and not usable_keys and _count_sizes(runs) > 1:
        problem = (
            f"no two sizes agree in {names}: run some that do, or remove a column to ignore it"
        )
        raise TableError(path, [problem])
    best = min(usable_keys or runs_by_key, key=lambda key: _rank_slice(key, runs_by_key[key]))
    kept = runs_by_key[best]
    notes = []
    if held_names:
        at = ", ".join(
            f"{columns[name]} {format_cell(value)}"
            for name, value in zip(held_names, best, strict=True)
        )
        notes.append(
            f"{len(kept)} of {counted(len(runs), 'run')} are judged, those at {at}; the others are "
            "not used"
        )
    following = [
        columns[name] for name in kept[0].others if len({run.others[name] for run in kept}) > 1
    ]
    if following:
        notes.append(
            f"{', '.join(following)} changes together with {axis}: the verdict is on all of it "
            "together"
        )
    return kept, notes


def _list_held_names(runs: Sequence[TableRow], axis: Axis) -> list[str]:
    """Return the names that must be held constant: all that vary, except those that change only
    together with the axis.

    For example, parameters follow from width at a given depth, and a weight decay may be set to
    1/width. No two sizes agree in such a column, so the table can only be judged on the effect of
    both together.
    """
    varying = [name for name in runs[0].others if len({run.others[name] for run in runs}) > 1]
    independent = [
        name
        for name in varying
        if not _follows_size(runs, name, loosely=name in AXES and _has_composite(axis, name))
    ]
    plain = [name for name in independent if name not in COMPOSITE]
    multi_size_groups = [
        group for group in _group_runs(runs, plain).values() if _count_sizes(group) > 1
    ]
    return [
        name
        for name in independent
        if name in plain
        or not multi_size_groups
        or not all(_follows_size(group, name, loosely=True) for group in multi_size_groups)
    ]


def _has_composite(*names: str) -> bool:
    return any(name in COMPOSITE for name in names)


def _follows_size(runs: Sequence[TableRow], name: str, *, loosely: bool) -> bool:
    """Return whether a column strictly rises, or strictly falls, with size, with one value at each
    size. With `loosely` it may also stay equal.
    """
    value_at = {run.size: run.others[name] for run in runs}
    values = [value_at[size] for size in sorted(value_at)]
    numbers = [value for value in values if isinstance(value, float)]
    if len(numbers) < len(values) or any(value_at[run.size] != run.others[name] for run in runs):
        return False
    steps = [after - before for before, after in pairwise(numbers)]
    one_way = all(step >= 0 for step in steps) or all(step <= 0 for step in steps)
    return bool(steps) and one_way and (loosely or 0.0 not in steps)


def _rank_slice(
    key: tuple[object, ...], runs: Sequence[TableRow]
) -> tuple[int, float, list[tuple[str, object]]]:
    """Return a sort key that depends on content only: most runs, then lowest loss, then smallest
    values.
    """
    lowest_loss = min(
        (run.loss_nats for run in runs if run.loss_nats is not None), default=math.inf
    )
    return -len(runs), lowest_loss, [(type(value).__name__, value) for value in key]


def _count_sizes(runs: Sequence[TableRow]) -> int:
    return len({run.size for run in runs})


def _group_runs(
    runs: Sequence[TableRow], names: Sequence[str]
) -> dict[tuple[object, ...], list[TableRow]]:
    groups: dict[tuple[object, ...], list[TableRow]] = {}
    for run in runs:
        groups.setdefault(tuple(run.others[name] for name in names), []).append(run)
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
    """Read a table, and choose the runs of one drift from it.

    The columns are a `loss` (nats per token), sizes and hyperparameters
    (`transfer.tables.columns`), a `seed`, and a `state`; or sizes and optima (`lr_optimum`). A loss
    that is not finite, or the word `diverged`, is a run that diverged. An empty loss is refused,
    because that run may never have been trained. A run that did not finish is dropped. Without a
    `seed` column all runs count as one seed, and identical settings count as replicates. A weight
    decay, warmup, or clip of 0 has no logarithm: if that hyperparameter is judged, such runs are
    left out with a note. Any other 0 is refused.

    Args:
        path: A file or pipe (`proxies.core.tables.table_files.read_cells`), or cells already read.
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
    finished = drop_unfinished(sheet, names.states)
    if not finished.rows:
        raise TableError(
            path, [f"no run has finished ({counted(len(finished.dropped), 'row')} dropped)"]
        )
    sheet = dataclasses.replace(sheet, rows=finished.rows)
    numbers, doubts, comparable = _read_numbers(sheet, names)
    axis, hyperparameter = choose_question(path, sheet, names, comparable, axis, hyperparameter)
    if names.optima:
        names = dataclasses.replace(
            names, values={**names.values, hyperparameter: names.optima[hyperparameter]}
        )
    bad_cells = list(finished.bad_cells)
    runs = _read_rows(sheet, names, numbers, comparable, bad_cells, axis, hyperparameter)
    if bad_cells or doubts:
        raise TableError(path, doubts, bad_cells)
    if not runs:
        raise TableError(path, [f"every {names.values[hyperparameter]} is 0: nothing to judge"])
    kept, notes = select_comparable_runs(path, runs, axis, names.judgeable)
    if problems := _find_excess(kept, axis, names.values[hyperparameter]):
        raise TableError(path, problems)
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
    # A loss that repeats to the last digit is a copied row and counts once. Divergence has no
    # digits, so its rows are all kept.
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
    values: dict[int, set[float]] = {}
    seeds: dict[int, dict[int, set[float]]] = {}
    for run in runs:
        values.setdefault(run.size, set()).add(run.log2_value)
        seeds.setdefault(run.size, {}).setdefault(run.seed, set()).add(run.log2_value)
    num_runs = Counter(run.size for run in runs)
    problems = []
    for size in sorted(values):
        if len(values[size]) > MAX_VALUES:
            problems.append(
                f"{axis} {size} has {counted(len(values[size]), 'different value')} of "
                f"{value_name}: must be at most "
                f"{MAX_VALUES:,}; round them to a grid, such as 16 values an octave"
            )
        num_effects = len(values[size]) + sum(len(of_seed) > 2 for of_seed in seeds[size].values())
        if num_runs[size] * num_effects > MAX_DESIGN_CELLS:
            problems.append(
                f"{axis} {size} has {counted(num_runs[size], 'run')} of "
                f"{counted(len(seeds[size]), 'seed')}: runs "
                f"times seeds and values must be at most {MAX_DESIGN_CELLS:,}; leave out seeds"
            )
    return problems


_Column = Sequence[float | None]


def _read_numbers(
    sheet: Cells, names: TableColumns
) -> tuple[dict[str, _Column], list[str], dict[str, list[object]]]:
    """Return numbers by role, problems of columns whose commas have two readings, and cells as they
    are compared.
    """
    optional = {
        role: column_names
        for role, column_names in (("loss", names.loss), ("seed", names.seed))
        if column_names is not None
    }
    column_names = {**names.judgeable, **names.optima, **optional}
    read, doubts = read_columns(sheet, sheet.rows, column_names)
    numbers = {role: column.values for role, column in read.items()}
    comparable = {
        role: [
            cells.to_comparable(record.get(column_names[role]), number)
            for (_, record), number in zip(sheet.rows, numbers[role], strict=True)
        ]
        for role in {**names.judgeable, **names.optima}
    }
    return numbers, doubts, comparable


def _list_notes(
    sheet: Cells, names: TableColumns, axis: Axis, hyperparameter: Hyperparameter, num_off: int
) -> list[str]:
    size, value = names.sizes[axis], names.values[hyperparameter]
    notes = [f"judged: {hyperparameter} (column {value}) over {axis} (column {size})", *names.notes]
    if ignored := [name for name in sheet.columns if name and name not in names.used]:
        notes.append(f"columns ignored: {', '.join(ignored)}")
    if num_off:
        notes.append(
            f"{counted(num_off, 'run')} not used: {value} = 0 means off, which has no octave"
        )
    return notes


def _read_rows(
    sheet: Cells,
    names: TableColumns,
    numbers: Mapping[str, _Column],
    comparable: Mapping[str, Sequence[object]],
    problems: list[str],
    axis: Axis,
    hyperparameter: Hyperparameter,
) -> list[TableRow]:
    """Return all rows except those where the hyperparameter is off. Problems with cells are
    appended to `problems`.
    """
    others = [name for name in names.judgeable if name not in (axis, hyperparameter)]
    size_name, value_name = names.sizes[axis], names.values[hyperparameter]
    runs = []
    for place, (row, record) in enumerate(sheet.rows):

        def at(name: str, row: int = row) -> str:
            return f"row {row}, column {name}"

        size = cells.whole(record.get(size_name), numbers[axis][place], at(size_name), 1, problems)
        value = cells.octaves(
            record.get(value_name),
            numbers[hyperparameter][place],
            hyperparameter,
            at(value_name),
            problems,
        )
        loss, seed = None, 0
        if names.loss is not None:
            loss = cells.loss(
                record.get(names.loss), numbers["loss"][place], at(names.loss), problems
            )
        if names.seed is not None:
            seed = cells.whole(
                record.get(names.seed), numbers["seed"][place], at(names.seed), 0, problems
            )
        if value is not None:
            other_cells = {name: comparable[name][place] for name in others}
            runs.append(
                TableRow(size=size, log2_value=value, loss_nats=loss, seed=seed, others=other_cells)
            )
    return runs
