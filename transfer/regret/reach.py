"""The largest target at which a value still holds, and the assumption that this makes."""

from __future__ import annotations

import math
from collections.abc import Callable

from proxies.core.notation import format_factor
from transfer.question import Outcome, Question, at_size

STEPS_PER_DOUBLING, MAX_DOUBLINGS = 8, 10
"""Steps per doubling, and largest number of doublings beyond the largest size, of the ratios that
are tried. Beyond its end no target is reported to hold."""


def find_largest_ratio(
    holds_at: Callable[[int], bool], largest_size: int, target_size: int, outcome: Outcome
) -> float | None:
    """Return the largest target, in multiples of the largest size, at which the value still holds.

    Args:
        holds_at: Whether the value holds at a target of this size.
        largest_size: The largest size that was run.
        target_size: The size that is asked about.
        outcome: The verdict there, by the regret's interval.

    Returns:
        The ratio, on a grid of eighths of a doubling, but never below a target that holds; None if
        the value does not even hold at the largest size.
    """
    target_doublings = math.log2(target_size / largest_size)
    # Highest step known to hold, lowest step known not to
    low, high = -1, STEPS_PER_DOUBLING * MAX_DOUBLINGS + 1
    if outcome == "holds":
        low = min(max(math.floor(target_doublings * STEPS_PER_DOUBLING), -1), high - 1)
    else:
        high = min(max(math.ceil(target_doublings * STEPS_PER_DOUBLING), 0), high)
    while high > low + 1:
        step = (low + high) // 2
        holds = holds_at(round(largest_size * 2 ** (step / STEPS_PER_DOUBLING)))
        low, high = (step, high) if holds else (low, step)
    ratio = 2 ** (low / STEPS_PER_DOUBLING) if low >= 0 else None
    if outcome == "holds":
        return max(ratio or 0.0, target_size / largest_size)
    return ratio


def describe_assumption(q: Question, largest_size: int) -> str | None:
    """Return the assumption of a verdict beyond the runs; None if the target lies within them."""
    if q.target_size <= largest_size:
        return None
    return f"assumes that nothing begins between {largest_size:,} and {q.target_size:,}"


def describe_reach(ratio: float | None, q: Question, largest_size: int) -> str:
    """Return a sentence on the largest target that the runs support."""
    largest = at_size(q.axis, largest_size)
    if ratio is None:
        return f"these runs support no target: the value does not surely hold even at {largest}"
    limit = at_size(q.axis, math.floor(ratio * largest_size))
    return (
        f"these runs support a target up to {format_factor(ratio)} times the largest size ({limit})"
    )
