"""Growth of a search's ranges: whether the best trials bracket the optimum, and how ranges grow if
they do not.

All functions are pure functions of the trials in index order, called when all trials have ended.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from forerun._sweeps.search.space import OFF, Axis, Params, Range, SearchSpace

Side = Literal["low", "high"]

EDGE_SHARE, MAX_EDGE_OCTAVES = 1 / 8, 1.0
"""A value counts as near an end of a range if it lies within this share of the range in octaves,
and within this many octaves, of that end."""
TOP_SHARE, MIN_TOP_TRIALS = 1 / 8, 3
"""Share, and minimum number, of the best finished trials that are considered: one lucky trial is no
reason to search elsewhere.
"""
GROWTH_OCTAVES, PROBES_PER_OCTAVE = 2.0, 2
"""Octaves by which an end of a range moves, and trials per octave that probe the new part."""
NUM_PROBES = round(GROWTH_OCTAVES * PROBES_PER_OCTAVE)
"""Number of probes beyond one moved edge."""
DIVERGES_ABOVE = "learning_rate"
"""The only axis whose high values are known to make trials diverge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """An end of an axis's range near which the best trials lie, and the range with that
    end moved.
    """

    axis: str
    side: Side
    range: Range
    wider: Range


def rank_trials(losses: Sequence[float | None]) -> list[int]:
    """Return the indices of finished trials, the best first; of equal losses, the earlier trial
    first.
    """
    return [
        index
        for _, index in sorted(
            (loss, index) for index, loss in enumerate(losses) if loss is not None
        )
    ]


def find_open_edges(
    space: SearchSpace,
    points: Sequence[Params],
    losses: Sequence[float | None],
    pruned: Collection[int] = (),
) -> tuple[Edge, ...]:
    """Return the ends of ranges that do not bracket the optimum: the best finished trial is near
    such an end, and so are half of the best few trials.

    Only ranges in log2 are considered: their ends were chosen, while the ends of a linear range are
    natural limits. Trials that diverged above the best learning rate bracket it from above. Pruned
    trials say nothing about an end, because their final loss is unknown; they only count toward the
    number of best trials considered.

    Args:
        space: the space that was searched.
        points: points of the trials, by index.
        losses: loss of each trial in nats, None if it diverged or was pruned.
        pruned: indices of the pruned trials.
    """
    finished = rank_trials(losses)
    if len(finished) < MIN_TOP_TRIALS:
        return ()
    num_top = max(MIN_TOP_TRIALS, math.ceil(TOP_SHARE * (len(finished) + len(pruned))))
    top = [points[index] for index in finished[:num_top]]
    diverged = [
        points[index] for index, loss in enumerate(losses) if loss is None and index not in pruned
    ]
    edges = []
    for axis in space.axes:
        if axis.is_fixed or axis.choices or axis.is_integer or axis.scale == "linear":
            continue
        side = _find_side(axis, [point[axis.name] for point in top])
        diverged_above = any(point[axis.name] > top[0][axis.name] for point in diverged)
        if side is None or (side == "high" and axis.name == DIVERGES_ABOVE and diverged_above):
            continue
        edge = Edge(axis=axis.name, side=side, range=axis.range, wider=_widen(axis, side))
        edges += [edge] if edge.wider != edge.range else []
    return tuple(edges)


def _find_side(axis: Axis, values: Sequence[float]) -> Side | None:
    """Return the end that the first value and half of all values are near; None if there is none.

    An axis that is off in the first value has no such end.
    """
    if values[0] == OFF and axis.can_be_off:
        return None
    low, high = (axis.octaves(end) for end in axis.range)
    reach = min(abs(high - low) * EDGE_SHARE, MAX_EDGE_OCTAVES)
    octaves = [axis.octaves(value) for value in values if value != OFF or not axis.can_be_off]
    ends: tuple[tuple[Side, float], ...] = (("low", low), ("high", high))
    for side, end in ends:
        near = [abs(value - end) <= reach for value in octaves]
        if near[0] and 2 * sum(near) >= len(values):
            return side
    return None


def _widen(axis: Axis, side: Side) -> Range:
    """Return the range with one end moved by `GROWTH_OCTAVES`; a complement stays within (0, 1)."""
    low, high = axis.range
    factor = 2.0**GROWTH_OCTAVES
    if axis.scale == "log2_complement":
        return (
            (max(0.0, 1 - (1 - low) * factor), high)
            if side == "low"
            else (low, 1 - (1 - high) / factor)
        )
    return (low / factor, high) if side == "low" else (low, high * factor)


def grow_space(space: SearchSpace, edges: Sequence[Edge]) -> SearchSpace:
    """Return the space with the ranges of `edges` widened."""
    for edge in edges:
        space = space.widen_axis(edge.axis, edge.wider)
    return space


def make_probes(space: SearchSpace, edges: Sequence[Edge], best: Params) -> tuple[Params, ...]:
    """Return probes: copies of the best point with one value moved beyond an edge.

    The probes of an edge are evenly spaced, `PROBES_PER_OCTAVE` in each octave. Their losses show
    whether the optimum lies there.

    Args:
        space: the space before it grows.
        edges: the edges that move.
        best: point of the best finished trial.
    """
    points = []
    for edge in edges:
        inner = space.axis(edge.axis)
        outer = space.widen_axis(edge.axis, edge.wider).axis(edge.axis)
        # A range is (low, high): False is index 0, and True is index 1
        start, end = (axis.octaves(axis.range[edge.side == "high"]) for axis in (inner, outer))
        num_probes = max(1, round(abs(end - start) * PROBES_PER_OCTAVE))
        octaves = [start + (end - start) * (step + 1) / num_probes for step in range(num_probes)]
        points += [{**best, edge.axis: outer.value(2.0**octave)} for octave in octaves]
    return tuple(points)
