"""Detection of single runs whose loss a gradient spike has lifted above their loss basin.

Two runs of one value cannot show which of them is wrong. A suspicious run is therefore repeated
(`find_suspect`). It is left out only if at least two other runs of its value agree against it
(`find_outvoted`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun._transfer.basin.noise import USUAL_NOISE_SHARE
from forerun._transfer.question import Point

MIN_REPEATS = 2
"""Number of other runs of the same value that can outvote a run."""
OUTVOTED_SDS = 6.0
"""Distance of an outvoted run above its repeats, in standard deviations of one run."""
OUTVOTED_SPREADS = 3.0
"""Distance of an outvoted run above its repeats, in multiples of the difference between the highest
and the lowest repeat."""
SUSPECT_NOISES, SUSPECT_USUAL = 2.5, 5.0
"""Minimum excess of a suspicious run, in multiples of the fitted noise (which a spike inflates),
and in multiples of the usual noise. The excess must exceed the larger of the two."""
SD_OF_MEDIAN_DEVIATION = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""


_Cell = tuple[int, float]
"""Size, and log2 of the value, of runs that differ in their seed only."""


class Spike(NamedTuple):
    """A run that lies above its repeats, or above the line between its neighbors."""

    point: Point
    excess_nats: float
    num_repeats: int
    """Number of other runs of the same value."""


def find_outvoted(points: Sequence[Point]) -> Spike | None:
    """Return the run that lies furthest above at least two repeats that agree; None if there is
    none.
    """
    losses = _group_losses(points)
    excesses = {}
    for key, (*repeats, top) in losses.items():
        if len(repeats) < MIN_REPEATS:
            continue
        excess = top - statistics.median(repeats)
        other_cells = [cell for other_key, cell in losses.items() if other_key != key]
        sd = max(_estimate_noise([*other_cells, repeats]), USUAL_NOISE_SHARE * repeats[0])
        if excess > max(OUTVOTED_SDS * sd, OUTVOTED_SPREADS * (repeats[-1] - repeats[0])):
            excesses[key] = excess
    return _find_largest(excesses, losses, points)


def find_suspect(points: Sequence[Point], noise_nats: float) -> Spike | None:
    """Return the run that most looks like a spike, among the runs with at most one repeat; None if
    there is no such run.

    A run is compared with its one repeat, or with the straight line between the neighboring values:
    a basin lies below that line, a spike above it.
    """
    losses = _group_losses(points)
    diverged = {(p.size, p.log2_value) for p in points if p.loss_nats is None}
    excesses = {}
    for size in sorted({size for size, _ in losses}):
        values = sorted(value for key_size, value in losses.keys() - diverged if key_size == size)
        mean = {value: statistics.fmean(losses[size, value]) for value in values}
        for index, value in enumerate(values):
            cell, excess = losses[size, value], 0.0
            if len(cell) == 2:
                excess = cell[1] - cell[0]
            elif len(cell) == 1 and 0 < index < len(values) - 1:
                ends = [values[index - 1], values[index + 1]]
                excess = mean[value] - float(np.interp(value, ends, [mean[end] for end in ends]))
            if excess > max(
                SUSPECT_NOISES * noise_nats, SUSPECT_USUAL * USUAL_NOISE_SHARE * mean[value]
            ):
                excesses[size, value] = excess
    return _find_largest(excesses, losses, points)


def _group_losses(points: Sequence[Point]) -> dict[_Cell, list[float]]:
    """Return the losses of the finished runs of each cell, lowest first."""
    losses: dict[_Cell, list[float]] = {}
    for point in points:
        if point.loss_nats is not None:
            losses.setdefault((point.size, point.log2_value), []).append(point.loss_nats)
    return {key: sorted(cell) for key, cell in losses.items()}


def _find_largest(
    excesses: dict[_Cell, float], losses: dict[_Cell, list[float]], points: Sequence[Point]
) -> Spike | None:
    """Return the run with the highest loss in the cell with the largest excess; None without a
    cell.
    """
    if not excesses:
        return None
    key = max(excesses, key=lambda key: excesses[key])
    *repeats, top = losses[key]
    point = next(p for p in points if (p.size, p.log2_value) == key and p.loss_nats == top)
    return Spike(point, excesses[key], len(repeats))


def _estimate_noise(cells: Sequence[Sequence[float]]) -> float:
    """Estimate the standard deviation of one run about the median of all runs of its value, from
    the median of the absolute deviations.
    """
    deviations = [
        abs(loss - statistics.median(cell)) for cell in cells if len(cell) > 1 for loss in cell
    ]
    return SD_OF_MEDIAN_DEVIATION * statistics.median(deviations) if deviations else 0.0
