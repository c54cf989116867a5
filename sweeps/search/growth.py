"""Whether a search brackets its optimum, and how its ranges grow where it does not. Standard
library only.

A pure function of the trials in index order, asked when all of them have ended.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from sweeps.search.space import OFF, Axis, Params, Range, SearchSpace

Side = Literal["low", "high"]

EDGE_SHARE, MOST_EDGE_OCTAVES = 1 / 8, 1.0
"""What counts as near an end: this share of the range, and no more octaves than that."""
TOP_SHARE, LEAST_TOP = 1 / 8, 3
"""The best finished trials that are looked at: one trial's luck is no reason to search
elsewhere."""
GROWTH_OCTAVES, PROBES_PER_OCTAVE = 2.0, 2
PROBES = round(GROWTH_OCTAVES * PROBES_PER_OCTAVE)
DIVERGES_ABOVE = "learning_rate"
"""The one axis that makes a trial diverge; nothing says so of the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """An end of an axis's range at which the best trials lie; and the range with that end moved."""

    axis: str
    side: Side
    range: Range
    wider: Range


def ranked(losses: Sequence[float | None]) -> list[int]:
    """Indices of what finished, the best first; of equals, the earlier."""
    return [
        index
        for _, index in sorted(
            (loss, index) for index, loss in enumerate(losses) if loss is not None
        )
    ]


def open_edges(
    space: SearchSpace,
    points: Sequence[Params],
    losses: Sequence[float | None],
    pruned: Collection[int] = (),
) -> tuple[Edge, ...]:
    """Ends that do not bracket the optimum: the best finished trial is near, and half of the best
    few.

    Only ranges in log2 are looked at; they have ends by choice, not by nature. Trials that diverged
    above the best learning rate bracket it from above; those that were pruned say nothing of an
    end, for nobody knows what they would have lost, and count only in how many the best few are.

    Args:
        space: as it was searched.
        points: of the trials, by index.
        losses: of each in nats, None where it diverged or was pruned.
        pruned: which of them were.
    """
    finished = ranked(losses)
    if len(finished) < LEAST_TOP:
        return ()
    num_top = max(LEAST_TOP, math.ceil(TOP_SHARE * (len(finished) + len(pruned))))
    top = [points[index] for index in finished[:num_top]]
    diverged = [
        points[index] for index, loss in enumerate(losses) if loss is None and index not in pruned
    ]
    edges = []
    for axis in space.axes:
        if axis.fixed or axis.choices or axis.whole or axis.scale == "linear":
            continue
        side = _side(axis, [point[axis.name] for point in top])
        above = any(point[axis.name] > top[0][axis.name] for point in diverged)
        if side is None or (side == "high" and axis.name == DIVERGES_ABOVE and above):
            continue
        edge = Edge(axis=axis.name, side=side, range=axis.range, wider=_wider(axis, side))
        edges += [edge] if edge.wider != edge.range else []
    return tuple(edges)


def _side(axis: Axis, values: Sequence[float]) -> Side | None:
    """The end that the first value and half of all are near; an axis that is off has no end."""
    if values[0] == OFF and axis.can_be_off:
        return None
    low, high = (axis.octaves(end) for end in axis.range)
    reach = min(abs(high - low) * EDGE_SHARE, MOST_EDGE_OCTAVES)
    octaves = [axis.octaves(value) for value in values if value != OFF or not axis.can_be_off]
    ends: tuple[tuple[Side, float], ...] = (("low", low), ("high", high))
    for side, end in ends:
        near = [abs(value - end) <= reach for value in octaves]
        if near[0] and 2 * sum(near) >= len(values):
            return side
    return None


def _wider(axis: Axis, side: Side) -> Range:
    """The range with one end moved by `GROWTH_OCTAVES`; a complement stays within (0, 1)."""
    low, high = axis.range
    factor = 2.0**GROWTH_OCTAVES
    if axis.scale == "log2_complement":
        return (
            (max(0.0, 1 - (1 - low) * factor), high)
            if side == "low"
            else (low, 1 - (1 - high) / factor)
        )
    return (low / factor, high) if side == "low" else (low, high * factor)


def grown(space: SearchSpace, edges: Sequence[Edge]) -> SearchSpace:
    """The space with those edges moved."""
    for edge in edges:
        space = space.grown(edge.axis, edge.wider)
    return space


def probes(space: SearchSpace, edges: Sequence[Edge], best: Params) -> tuple[Params, ...]:
    """The best point at values beyond each edge, `PROBES_PER_OCTAVE` evenly: what tells whether it
    is better there.

    Args:
        space: before it grew.
        edges: that move.
        best: the best finished trial.
    """
    found = []
    for edge in edges:
        inner = space.axis(edge.axis)
        outer = space.grown(edge.axis, edge.wider).axis(edge.axis)
        start, end = (axis.octaves(axis.range[edge.side == "high"]) for axis in (inner, outer))
        number = max(1, round(abs(end - start) * PROBES_PER_OCTAVE))
        octaves = [start + (end - start) * (step + 1) / number for step in range(number)]
        found += [{**best, edge.axis: outer.value(2.0**octave)} for octave in octaves]
    return tuple(found)
