"""Tables of runs people already have: a loss, sizes and hyperparameters; or sizes and their optimal learning rate."""

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
from transfer.tables.cells import TableError, read_sheet, shown
from transfer.tables.columns import TableColumns, find_columns, what_to_judge

# Runs that are alike in all but one axis and one hyperparameter.
#
# One drift is judged at a time. Whatever else varies in a table would be taken for it, so that only runs that agree in
# the rest can be judged together.

COMPOSITE = ("params", "duration")
"""Sizes that follow from others by nature: parameters from a shape, tokens from parameters."""


MAX_VALUES, MAX_DESIGN_CELLS = 1000, 10**8
"""Limits of one size: basins are fitted to matrices of values by values, and of runs by values and seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """One row of a table, read."""

    size: int
    log2_value: float
    loss_nats: float | None
    seed: int
    others: Mapping[str, object]
    """What it says of all other axes and hyperparameters: a number where it is one, else text."""


def largest_alike(
    path: Source, runs: Sequence[TableRow], axis: Axis, columns: Mapping[str, str]
) -> tuple[list[TableRow], list[str]]:
    """Return the largest set of runs that agree in whatever else varies, and what to say of it.

    Of equally large sets the one with the lowest loss is taken, as a user would pick the best weight decay. The order
    of the rows never decides.

    Args:
        path: Of the table, for messages.
        runs: At least one.
        axis: What the runs' `size` is.
        columns: What the table calls each of the `others`.

    Raises:
        TableError: several sizes, of which no two agree in the rest.
    """
    held = _held(runs, axis)
    slices = _grouped(runs, held)
    fit = [key for key, group in slices.items() if _num_sizes(group) > 1]
    names = ", ".join(columns[what] for what in held)
    if held and not fit and _num_sizes(runs) > 1:
        problem = f"no two sizes agree in {names}: run some that do, or remove a column to ignore it"
        raise TableError(path, [problem])
    best = min(fit or slices, key=lambda key: _slice_rank(key, slices[key]))
    kept = slices[best]
    notes = []
    if held:
        at = ", ".join(f"{columns[what]} {shown(value)}" for what, value in zip(held, best, strict=True))
        notes.append(f"{len(kept)} of {counted(len(runs), 'run')} are judged, those at {at}; the others are not used")
    follow = [columns[what] for what in kept[0].others if len({run.others[what] for run in kept}) > 1]
    if follow:
        notes.append(f"{', '.join(follow)} changes together with {axis}: the verdict is on all of it together")
    return kept, notes


def _held(runs: Sequence[TableRow], axis: Axis) -> list[str]:
    """What else must be constant: all that varies, except for what only changes along with the axis.

    Parameters follow from width at any given depth, and a weight decay may be set as 1/width: no two sizes agree in
    such a column, and what can be asked of the table is what comes of both together.
    """
    varying = [what for what in runs[0].others if len({run.others[what] for run in runs}) > 1]
    free = [what for what in varying if not _follows(runs, what, loosely=what in AXES and _composite(axis, what))]
    plain = [what for what in free if what not in COMPOSITE]
    several = [group for group in _grouped(runs, plain).values() if _num_sizes(group) > 1]
    return [
        what
        for what in free
        if what in plain or not several or not all(_follows(group, what, loosely=True) for group in several)
    ]


def _composite(*names: str) -> bool:
    return any(name in COMPOSITE for name in names)


def _follows(runs: Sequence[TableRow], what: str, *, loosely: bool) -> bool:
    """Whether a column only rises, or only falls, with size, with one value at each; `loosely`: it may also stay."""
    at = {run.size: run.others[what] for run in runs}
    values = [at[size] for size in sorted(at)]
    numbers = [value for value in values if isinstance(value, float)]
    if len(numbers) < len(values) or any(at[run.size] != run.others[what] for run in runs):
        return False
    steps = [after - before for before, after in pairwise(numbers)]
    one_way = all(step >= 0 for step in steps) or all(step <= 0 for step in steps)
    return bool(steps) and one_way and (loosely or 0.0 not in steps)


def _slice_rank(key: tuple[object, ...], runs: Sequence[TableRow]) -> tuple[int, float, list[tuple[str, object]]]:
    """Return a rank that depends on content only: most runs, then lowest loss, then smallest values."""
    lowest_loss = min((run.loss_nats for run in runs if run.loss_nats is not None), default=math.inf)
    return -len(runs), lowest_loss, [(type(value).__name__, value) for value in key]


def _num_sizes(runs: Sequence[TableRow]) -> int:
    return len({run.size for run in runs})


def _grouped(runs: Sequence[TableRow], by: Sequence[str]) -> dict[tuple[object, ...], list[TableRow]]:
    groups: dict[tuple[object, ...], list[TableRow]] = {}
    for run in runs:
        groups.setdefault(tuple(run.others[what] for what in by), []).append(run)
    return groups


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTable:
    """What a table holds: runs, or optima that somebody else has read off theirs. The other one is empty."""

    axis: Axis
    hyperparameter: Hyperparameter
    points: tuple[Point, ...]
    optima: tuple[tuple[int, float], ...]
    """(size, log2 of the optimal value)."""
    notes: tuple[str, ...]
    """What is judged, and what was left aside."""
    dropped: tuple[tuple[int, str], ...]
    """(row, reason) of rows that hold no finished run."""


def read_runs(
    path: Source,
    *,
    axis: Axis | None = None,
    hyperparameter: Hyperparameter | None = None,
    columns: Mapping[str, str] | None = None,
) -> RunTable:
    """Read a table, and choose the runs of one drift from it.

    Columns are a `loss` (nats per token), sizes and hyperparameters (`transfer.tables.columns`), a `seed` and a
    `state`; or sizes and optima (`lr_optimum`). A loss that is not finite, or the word `diverged`, is a run that
    diverged; an empty one may be a run that never was, so it is refused. A run that did not finish is dropped. Without
    a `seed` column all runs count as one seed, and runs alike in everything as replicates. Where the hyperparameter to
    judge is weight decay, warmup or clip, its 0 has no octave: such runs are left aside with a note. Any other 0 is
    refused.

    Args:
        path: A file or pipe (`proxies.core.tables.table_files.read_cells`), or cells already read.
        axis: What grows; None: the only size that varies.
        hyperparameter: None: the learning rate if it varies, else the only one that does.
        columns: The table's own names by ours, where a user chose.

    Raises:
        TableError: An unknown kind of file, a missing column, bad cells (all of them with row and column), an axis
            or hyperparameter that must be named, or no two sizes that agree in the rest.
    """
    given = dict(columns or {})
    sheet = read_sheet(path, given.values())
    names = find_columns(path, sheet.columns, given)
    finished = drop_unfinished(sheet, names.states)
    if not finished.rows:
        raise TableError(path, [f"no run has finished ({counted(len(finished.dropped), 'row')} dropped)"])
    sheet = dataclasses.replace(sheet, rows=finished.rows)
    numbers, doubts, comparable = _read_numbers(sheet, names)
    axis, hyperparameter = what_to_judge(path, sheet, names, comparable, axis, hyperparameter)
    if names.optima:
        names = dataclasses.replace(names, values={**names.values, hyperparameter: names.optima[hyperparameter]})
    bad_cells = list(finished.bad_cells)
    runs = _runs(sheet, names, numbers, comparable, bad_cells, axis, hyperparameter)
    if bad_cells or doubts:
        raise TableError(path, doubts, bad_cells)
    if not runs:
        raise TableError(path, [f"every {names.values[hyperparameter]} is 0: nothing to judge"])
    kept, notes = largest_alike(path, runs, axis, names.judgeable)
    if problems := _find_excess(kept, axis, names.values[hyperparameter]):
        raise TableError(path, problems)
    kept = sorted(kept, key=_content)
    points = _to_points(kept)
    if copies := len(kept) - len(points):
        notes = [*notes, f"rows that repeat another to the last digit: {copies}; each counts once"]
    notes = [*_notes(sheet, names, axis, hyperparameter, len(sheet.rows) - len(runs)), *finished.warnings, *notes]
    return RunTable(
        axis=axis,
        hyperparameter=hyperparameter,
        points=() if names.loss is None else tuple(points),
        optima=tuple((run.size, run.log2_value) for run in kept) if names.loss is None else (),
        notes=tuple(notes),
        dropped=tuple(finished.dropped),
    )


def _to_points(runs: Sequence[TableRow]) -> list[Point]:
    """Return the points of runs, each once."""
    points = [Point(size=r.size, log2_value=r.log2_value, loss_nats=r.loss_nats, seed=r.seed) for r in runs]
    # To the last digit the same loss is the same run, copied: as evidence it counts once. Divergence has no digits.
    with_loss = dict.fromkeys(point for point in points if point.loss_nats is not None)
    return [*with_loss, *(point for point in points if point.loss_nats is None)]


def _content(run: TableRow) -> tuple[float, ...]:
    """Return a sort key from a run's content: a table's verdict must not depend on the order of its rows."""
    return run.size, run.log2_value, run.seed, math.inf if run.loss_nats is None else run.loss_nats


def _find_excess(runs: Sequence[TableRow], axis: Axis, value_name: str) -> list[str]:
    """Return a problem for each size with more values or seeds than a basin is fitted to in minutes."""
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
                f"{axis} {size} has {counted(len(values[size]), 'different value')} of {value_name}: must be at most "
                f"{MAX_VALUES:,}; round them to a grid, such as 16 values an octave"
            )
        num_effects = len(values[size]) + sum(len(of_seed) > 2 for of_seed in seeds[size].values())
        if num_runs[size] * num_effects > MAX_DESIGN_CELLS:
            problems.append(
                f"{axis} {size} has {counted(num_runs[size], 'run')} of {counted(len(seeds[size]), 'seed')}: runs "
                f"times seeds and values must be at most {MAX_DESIGN_CELLS:,}; leave out seeds"
            )
    return problems


_Column = Sequence[float | None]


def _read_numbers(sheet: Cells, names: TableColumns) -> tuple[dict[str, _Column], list[str], dict[str, list[object]]]:
    """Return numbers by our names, columns whose commas have two readings, and cells as they are compared."""
    optional = {ours: theirs for ours, theirs in (("loss", names.loss), ("seed", names.seed)) if theirs is not None}
    theirs = {**names.judgeable, **names.optima, **optional}
    read, doubts = read_columns(sheet, sheet.rows, theirs)
    numbers = {ours: column.values for ours, column in read.items()}
    comparable = {
        ours: [
            cells.to_comparable(record.get(theirs[ours]), number)
            for (_, record), number in zip(sheet.rows, numbers[ours], strict=True)
        ]
        for ours in {**names.judgeable, **names.optima}
    }
    return numbers, doubts, comparable


def _notes(sheet: Cells, names: TableColumns, axis: Axis, hyperparameter: Hyperparameter, num_off: int) -> list[str]:
    size, value = names.sizes[axis], names.values[hyperparameter]
    notes = [f"judged: {hyperparameter} (column {value}) over {axis} (column {size})", *names.notes]
    if ignored := [name for name in sheet.columns if name and name not in names.used]:
        notes.append(f"columns ignored: {', '.join(ignored)}")
    if num_off:
        notes.append(f"{counted(num_off, 'run')} not used: {value} = 0 means off, which has no octave")
    return notes


def _runs(
    sheet: Cells,
    names: TableColumns,
    numbers: Mapping[str, _Column],
    comparable: Mapping[str, Sequence[object]],
    problems: list[str],
    axis: Axis,
    hyperparameter: Hyperparameter,
) -> list[TableRow]:
    """Return all rows but those where the hyperparameter is off, and add what is wrong with a cell to `problems`."""
    others = [what for what in names.judgeable if what not in (axis, hyperparameter)]
    size_name, value_name = names.sizes[axis], names.values[hyperparameter]
    runs = []
    for place, (row, record) in enumerate(sheet.rows):

        def at(name: str, row: int = row) -> str:
            return f"row {row}, column {name}"

        size = cells.whole(record.get(size_name), numbers[axis][place], at(size_name), 1, problems)
        value = cells.octaves(
            record.get(value_name), numbers[hyperparameter][place], hyperparameter, at(value_name), problems
        )
        loss, seed = None, 0
        if names.loss is not None:
            loss = cells.loss(record.get(names.loss), numbers["loss"][place], at(names.loss), problems)
        if names.seed is not None:
            seed = cells.whole(record.get(names.seed), numbers["seed"][place], at(names.seed), 0, problems)
        if value is not None:
            held = {what: comparable[what][place] for what in others}
            runs.append(TableRow(size=size, log2_value=value, loss_nats=loss, seed=seed, others=held))
    return runs
