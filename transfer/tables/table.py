"""Tables of runs people already have: a loss, sizes and hyperparameters; or sizes and their optimal learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proxies.core.table_files import Cells
from transfer.question import Axis, Hyperparameter, Point
from transfer.tables import cells
from transfer.tables.alike import Run, largest_alike
from transfer.tables.columns import KNOWN, Columns, find_columns, what_to_judge
from transfer.tables.sheet import TableError, read_sheet


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTable:
    """What a table holds: runs, or optima that somebody else has read off theirs. The other one is empty."""

    axis: Axis
    hyperparameter: Hyperparameter
    points: tuple[Point, ...]
    optima: tuple[tuple[int, float], ...]
    """(size, log2 of the optimal learning rate)."""
    notes: tuple[str, ...]
    """What is judged, and what was left aside."""


def read_runs(path: Path, *, axis: Axis | None = None, hyperparameter: Hyperparameter | None = None) -> RunTable:
    """Read a table, and choose the runs of one drift from it.

    Columns are a `loss` (nats per token), sizes and hyperparameters (`transfer.tables.columns`) and optionally a
    `seed`; or sizes and `lr_optimum`. A loss that is not finite, or the word `diverged`, is a run that diverged; an
    empty one may be a run that never was, so it is refused. Without a `seed` column all runs count as one seed, and
    runs alike in everything as replicates. Where the hyperparameter to judge is weight decay, warmup or clip, its 0 has
    no octave: nothing is wrong with such runs, so they are left aside with a note. Any other 0 is refused.

    Args:
        path: .csv, .jsonl or .parquet.
        axis: What grows; None: the only size that varies.
        hyperparameter: None: the learning rate if it varies, else the only one that does.

    Raises:
        TableError: an unknown kind of file, a missing column, bad cells (all of them with row and column), an axis
            or hyperparameter that must be named, or no two sizes that agree in the rest.
        OSError: the file cannot be opened.
    """
    sheet = read_sheet(path, KNOWN)
    columns = find_columns(path, sheet.columns)
    axis, hyperparameter = what_to_judge(path, sheet, columns, axis, hyperparameter)
    runs = _runs(path, sheet, columns, axis, hyperparameter)
    if not runs:
        raise TableError(path, [f"every {columns.values[hyperparameter]} is 0: nothing to judge"])
    kept, said = largest_alike(path, runs, axis, columns.judgeable)
    read = [Point(size=r.size, log2_value=r.log2_value, loss_nats=r.loss_nats, seed=r.seed) for r in kept]
    # To the last digit the same loss is the same run, copied: as evidence it counts once. Divergence has no digits.
    points = [*dict.fromkeys(p for p in read if p.loss_nats is not None), *(p for p in read if p.loss_nats is None)]
    if copies := len(read) - len(points):
        said = [*said, f"{copies} rows repeat another to the last digit, and count once"]
    optima = [(run.size, run.log2_value) for run in kept]
    return RunTable(
        axis=axis,
        hyperparameter=hyperparameter,
        points=() if columns.loss is None else tuple(points),
        optima=tuple(optima) if columns.loss is None else (),
        notes=(*_notes(sheet, columns, axis, hyperparameter, num_off=len(sheet.rows) - len(runs)), *said),
    )


def _notes(sheet: Cells, columns: Columns, axis: Axis, hyperparameter: Hyperparameter, num_off: int) -> list[str]:
    size, value = columns.sizes[axis], columns.values[hyperparameter]
    notes = [f"judged: {hyperparameter} (column {value}) over {axis} (column {size})"]
    if ignored := [name for name in sheet.columns if name not in columns.used]:
        notes.append(f"columns ignored: {', '.join(ignored)}")
    if num_off:
        notes.append(f"{num_off} runs left aside: {value} 0 is off, and at no octave")
    return notes


def _runs(path: Path, sheet: Cells, columns: Columns, axis: Axis, hyperparameter: Hyperparameter) -> list[Run]:
    """All rows but those where the hyperparameter is off."""
    problems: list[str] = []
    rest = {what: name for what, name in columns.judgeable.items() if what not in (axis, hyperparameter)}
    runs = []
    for number, row in sheet.rows:

        def at(name: str, number: int = number) -> str:
            return f"row {number}, column {name}"

        name = columns.sizes[axis]
        size = cells.whole(row.get(name), at(name), 1, problems)
        name = columns.values[hyperparameter]
        value = cells.octaves(row.get(name), hyperparameter, at(name), problems)
        loss = None if columns.loss is None else cells.loss(row.get(columns.loss), at(columns.loss), problems)
        seed = 0 if columns.seed is None else cells.whole(row.get(columns.seed), at(columns.seed), 0, problems)
        others = {what: cells.plain(row.get(name)) for what, name in rest.items()}
        if value is not None:
            runs.append(Run(size=size, log2_value=value, loss_nats=loss, seed=seed, others=others))
    if problems:
        raise TableError(path, problems)
    return runs
