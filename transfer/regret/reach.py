"""The largest target size at which a transferred value still holds, and the assumption that a
verdict makes beyond the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from forerun._proxies.core.notation import format_factor
from forerun._transfer.question import Outcome, Question, format_size

STEPS_PER_DOUBLING, MAX_DOUBLINGS = 8, 10
"""Grid of target sizes that are tried: steps per doubling, and number of doublings beyond the
largest size that was run. No larger target is reported to hold, unless it is the target of the
question."""


def find_largest_ratio(
    holds_at: Callable[[int], bool], largest_size: int, target_size: int, outcome: Outcome
) -> float | None:
    """Find by bisection the largest target, in multiples of the largest size, at which the value
    still holds.

    Args:
        holds_at: Whether the value holds at a target of this size.
        largest_size: The largest size that was run.
        target_size: Target of the question.
        outcome: The verdict at `target_size`, by the regret's interval.

    Returns:
        The ratio, on the grid of `STEPS_PER_DOUBLING`, but never below a target that holds; None if
        the value does not even hold at the largest size.
    """
    target_doublings = math.log2(target_size / largest_size)
    # Highest step at which the value holds, and lowest step at which it does not. Step 0 is the
    # largest size, and -1 means that the value does not hold there
    low, high = -1, STEPS_PER_DOUBLING * MAX_DOUBLINGS + 1
    # The outcome at the target narrows the search
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


def describe_assumption(question: Question, largest_size: int) -> str | None:
    """Return the assumption that a verdict makes beyond the runs; None if the target lies within
    them.
    """
    if question.target_size <= largest_size:
        return None
    return f"assumes that nothing begins between {largest_size:,} and {question.target_size:,}"


def describe_reach(ratio: float | None, question: Question, largest_size: int) -> str:
    """Return a sentence on the largest target that the runs support."""
    largest = format_size(question.axis, largest_size)
    if ratio is None:
        return f"these runs support no target: the value does not surely hold even at {largest}"
    limit = format_size(question.axis, math.floor(ratio * largest_size))
    return (
        f"these runs support a target up to {format_factor(ratio)} times the largest size ({limit})"
    )
