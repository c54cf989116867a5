"""Runs that are alike in all but one axis and one hyperparameter.

One drift is judged at a time. Whatever else varies in a table would be taken for it, so that only runs that agree in
the rest can be judged together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from transfer.question import AXES, Axis
from transfer.tables.cells import shown
from transfer.tables.sheet import TableError

COMPOSITE = ("params", "duration")
"""Sizes that follow from others by nature: parameters from a shape, tokens from parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One row of a table, read."""

    size: int
    log2_value: float
    loss_nats: float | None
    seed: int
    others: Mapping[str, object]
    """What it says of all other axes and hyperparameters: a number where it is one, else text."""


def largest_alike(
    path: Path, runs: Sequence[Run], axis: Axis, columns: Mapping[str, str]
) -> tuple[list[Run], list[str]]:
    """The largest set of runs that agree in whatever else varies, the first of equal ones; and what to say of it.

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
        problem = f"no two sizes agree in {names}: run some that do, or leave a column out to have it ignored"
        raise TableError(path, [problem])
    best = max(fit or slices, key=lambda key: len(slices[key]))
    kept = slices[best]
    notes = []
    if held:
        at = ", ".join(f"{columns[what]} {shown(value)}" for what, value in zip(held, best, strict=True))
        notes.append(f"{len(kept)} of {len(runs)} runs are judged, those at {at}; the others are left aside")
    follow = [columns[what] for what in kept[0].others if len({run.others[what] for run in kept}) > 1]
    if follow:
        notes.append(f"along with the {axis} goes {', '.join(follow)}: what is judged is all of it together")
    return kept, notes


def _held(runs: Sequence[Run], axis: Axis) -> list[str]:
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


def _follows(runs: Sequence[Run], what: str, *, loosely: bool) -> bool:
    """Whether a column only rises, or only falls, with size, with one value at each; `loosely`: it may also stay."""
    at = {run.size: run.others[what] for run in runs}
    values = [at[size] for size in sorted(at)]
    numbers = [value for value in values if isinstance(value, float)]
    if len(numbers) < len(values) or any(at[run.size] != run.others[what] for run in runs):
        return False
    steps = [after - before for before, after in pairwise(numbers)]
    one_way = all(step >= 0 for step in steps) or all(step <= 0 for step in steps)
    return bool(steps) and one_way and (loosely or 0.0 not in steps)


def _num_sizes(runs: Sequence[Run]) -> int:
    return len({run.size for run in runs})


def _grouped(runs: Sequence[Run], by: Sequence[str]) -> dict[tuple[object, ...], list[Run]]:
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.others[what] for what in by), []).append(run)
    return groups
