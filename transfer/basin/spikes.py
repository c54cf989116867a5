"""Single runs that a gradient spike has lifted off their loss basin: which to repeat, and which are
outvoted.

Two runs of one value cannot tell which of them is wrong. So a suspicious run is repeated, and left
out only when at least two other runs of its value agree against it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transfer.basin.noise import USUAL_NOISE_SHARE
from transfer.question import Point

MIN_REPEATS = 2
"""Other runs of the same value that can outvote one."""
OUTVOTED_SDS = 6.0
"""Standard deviations of one run by which it must lie above its repeats."""
OUTVOTED_SPREADS = 3.0
"""The same in multiples of how far the repeats lie apart."""
SUSPECT_NOISES, SUSPECT_USUAL = 2.5, 5.0
"""Excess of a suspicious run, in multiples of the fitted noise (which a spike inflates), and of the
usual noise."""
SD_OF_MEDIAN_DEVIATION = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spike:
    """One run that lies above what its neighbors or repeats say."""

    point: Point
    excess_nats: float
    num_repeats: int
    """Other runs of its value."""


def find_outvoted(points: Sequence[Point]) -> Spike | None:
    """Return the run that lies furthest above at least two repeats that agree; None if there is
    none.
    """
    cells = _finished_cells(points)
    spikes = []
    for key, cell in cells.items():
        *repeats, top = sorted(cell, key=lambda p: p.loss_nats or 0.0)
        if len(repeats) < MIN_REPEATS:
            continue
        losses = _losses(repeats)
        excess = _losses([top])[0] - statistics.median(losses)
        others = [other for name, other in cells.items() if name != key]
        sd = max(_noise_of_seeds([*others, repeats]), USUAL_NOISE_SHARE * losses[0])
        if excess > max(OUTVOTED_SDS * sd, OUTVOTED_SPREADS * (losses[-1] - losses[0])):
            spikes.append(Spike(point=top, excess_nats=excess, num_repeats=len(repeats)))
    return max(spikes, key=lambda spike: spike.excess_nats, default=None)


def find_suspect(points: Sequence[Point], noise_nats: float) -> Spike | None:
    """Return the run that most looks like a spike and has at most one repeat; None if there is
    none.

    A run is compared with its one repeat, or with the straight line between the neighboring values:
    a basin lies below that line, a spike above it.
    """
    cells = _finished_cells(points)
    diverged = {(p.size, p.log2_value) for p in points if p.loss_nats is None}
    spikes = []
    for size in sorted({size for size, _ in cells}):
        values = sorted(
            value for own, value in cells if own == size and (own, value) not in diverged
        )
        mean = {value: statistics.fmean(_losses(cells[size, value])) for value in values}
        for index, value in enumerate(values):
            cell = sorted(cells[size, value], key=lambda p: p.loss_nats or 0.0)
            excess = 0.0
            if len(cell) == 2:
                excess = _losses(cell)[1] - _losses(cell)[0]
            elif len(cell) == 1 and 0 < index < len(values) - 1:
                ends = [values[index - 1], values[index + 1]]
                excess = mean[value] - float(np.interp(value, ends, [mean[end] for end in ends]))
            if excess > max(
                SUSPECT_NOISES * noise_nats, SUSPECT_USUAL * USUAL_NOISE_SHARE * mean[value]
            ):
                spikes.append(Spike(point=cell[-1], excess_nats=excess, num_repeats=len(cell) - 1))
    return max(spikes, key=lambda spike: spike.excess_nats, default=None)


def _finished_cells(points: Sequence[Point]) -> dict[tuple[int, float], list[Point]]:
    """Runs that finished, by size and value."""
    cells: dict[tuple[int, float], list[Point]] = defaultdict(list)
    for point in points:
        if point.loss_nats is not None:
            cells[point.size, point.log2_value].append(point)
    return cells


def _losses(points: Sequence[Point]) -> list[float]:
    return [point.loss_nats for point in points if point.loss_nats is not None]


def _noise_of_seeds(cells: Sequence[Sequence[Point]]) -> float:
    """Standard deviation of one run about its value's median, by the median of all deviations."""
    deviations = [
        abs(loss - statistics.median(_losses(cell)))
        for cell in cells
        if len(cell) > 1
        for loss in _losses(cell)
    ]
    return SD_OF_MEDIAN_DEVIATION * statistics.median(deviations) if deviations else 0.0
