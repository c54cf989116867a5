"""Detection of single runs that a gradient spike has lifted above their loss basin. Some of these
runs must be repeated, and some are left out.

Two runs of one value cannot show which of them is wrong. A suspicious run is therefore repeated,
and left out only if at least two other runs of its value agree against it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
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
    cells = _group_finished(points)
    spikes = []
    for key, cell in cells.items():
        *repeats, top = _sort_by_loss(cell)
        if len(repeats) < MIN_REPEATS:
            continue
        losses = _get_losses(repeats)
        excess = _get_losses([top])[0] - statistics.median(losses)
        other_cells = [cell_runs for cell_key, cell_runs in cells.items() if cell_key != key]
        sd = max(_estimate_noise([*other_cells, repeats]), USUAL_NOISE_SHARE * losses[0])
        if excess > max(OUTVOTED_SDS * sd, OUTVOTED_SPREADS * (losses[-1] - losses[0])):
            spikes.append(Spike(point=top, excess_nats=excess, num_repeats=len(repeats)))
    return max(spikes, key=lambda spike: spike.excess_nats, default=None)


def find_suspect(points: Sequence[Point], noise_nats: float) -> Spike | None:
    """Return the run that most looks like a spike, among the runs with at most one repeat; None if
    there is no such run.

    A run is compared with its one repeat, or with the straight line between the neighboring values:
    a basin lies below that line, a spike above it.
    """
    cells = _group_finished(points)
    diverged = {(p.size, p.log2_value) for p in points if p.loss_nats is None}
    spikes = []
    for size in sorted({size for size, _ in cells}):
        values = sorted(
            value
            for cell_size, value in cells
            if cell_size == size and (cell_size, value) not in diverged
        )
        mean = {value: statistics.fmean(_get_losses(cells[size, value])) for value in values}
        for index, value in enumerate(values):
            cell = _sort_by_loss(cells[size, value])
            excess = 0.0
            if len(cell) == 2:
                excess = _get_losses(cell)[1] - _get_losses(cell)[0]
            elif len(cell) == 1 and 0 < index < len(values) - 1:
                ends = [values[index - 1], values[index + 1]]
                excess = mean[value] - float(np.interp(value, ends, [mean[end] for end in ends]))
            if excess > max(
                SUSPECT_NOISES * noise_nats, SUSPECT_USUAL * USUAL_NOISE_SHARE * mean[value]
            ):
                spikes.append(Spike(point=cell[-1], excess_nats=excess, num_repeats=len(cell) - 1))
    return max(spikes, key=lambda spike: spike.excess_nats, default=None)


def _group_finished(points: Sequence[Point]) -> dict[tuple[int, float], list[Point]]:
    """Return the finished runs by size and value."""
    cells: dict[tuple[int, float], list[Point]] = defaultdict(list)
    for point in points:
        if point.loss_nats is not None:
            cells[point.size, point.log2_value].append(point)
    return cells


def _sort_by_loss(cell: Sequence[Point]) -> list[Point]:
    """Return finished runs, lowest loss first."""
    return sorted(cell, key=lambda p: p.loss_nats or 0.0)  # `or 0.0` is for the type checker


def _get_losses(points: Sequence[Point]) -> list[float]:
    return [point.loss_nats for point in points if point.loss_nats is not None]


def _estimate_noise(cells: Sequence[Sequence[Point]]) -> float:
    """Estimate the standard deviation of one run about the median of all runs of its value, from
    the median of the absolute deviations.
    """
    deviations = [
        abs(loss - statistics.median(_get_losses(cell)))
        for cell in cells
        if len(cell) > 1
        for loss in _get_losses(cell)
    ]
    return SD_OF_MEDIAN_DEVIATION * statistics.median(deviations) if deviations else 0.0
