"""Suggestions of seeds to add for a hyperparameter that may have no optimum.

The interval of the regret comes from a trend through all sizes that is extended to the target. If
every size has the same number of seeds, the width of the interval falls as one over the square root
of that number.

Choosing the number of seeds for each size separately was tried on 24 simulated grids of gradient
clipping, and led to no earlier or cheaper verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun._transfer.basin.optimum import list_finite_rates
from forerun._transfer.design.next_runs import (
    MAX_SPENT_FACTOR,
    Suggestion,
    compute_run_cost,
    suggest_run,
)
from forerun._transfer.question import Point, Question
from forerun._transfer.regret.bounded_regret import BoundedRegret

MAX_SEEDS = 64
"""Maximum number of new seeds at one value. If this many do not decide, more seeds will not
either."""
MIN_NARROWING, MAX_NARROWING = 0.4, 0.9
"""Smallest and largest width of the interval that a round of new runs aims for, as shares of the
present width."""
MIN_WIDTH = 1e-9
"""Floor of widths, which avoids division by zero."""
RESERVE = 0.6
"""Width of the interval that a round aims for, as a share of the width that would just decide. It
is below 1 because the estimate moves when runs are added."""


def suggest_bounded_runs(
    points: Sequence[Point], bounded: BoundedRegret, question: Question
) -> list[Suggestion]:
    """Suggest seeds that narrow the regret's interval enough to decide, cheapest first.

    At every size, seeds are added at the transferred value, at the lowest and highest value tried,
    and at the best one. They cost at most `MAX_SPENT_FACTOR` times as much as all runs so far.

    Args:
        points: All runs that are judged.
        bounded: The regret estimated from them.
        question: The question of the verdict.
    """
    assert question.power is not None
    regret, cells = bounded.regret_nats, list[tuple[int, float]]()
    values_at_target = (
        bounded.transferred_log2,
        bounded.low_log2,
        bounded.high_log2,
        bounded.best_log2,
    )
    for size in sorted({p.size for p in points}):
        tried = list_finite_rates([p for p in points if p.size == size])
        # Octaves by which the transfer rule moves a value from this size to the target
        octaves = question.power * math.log2(question.target_size / size)
        nearest = {min(tried, key=lambda x: abs(x + octaves - at)) for at in values_at_target}
        cells += [(size, value) for value in sorted(nearest)]
    # Number of seeds that narrow the interval to the width that would decide
    value = regret.estimate
    half_width = regret.high - value if value < question.margin_nats else value - regret.low
    narrowing = RESERVE * abs(question.margin_nats - value) / max(half_width, MIN_WIDTH)
    narrowing = min(max(narrowing, MIN_NARROWING), MAX_NARROWING)
    num_needed = math.ceil(len({p.seed for p in points}) * (1 / narrowing**2 - 1))
    # Number of seeds that the round can pay for
    spent = sum(compute_run_cost(p.size, question) for p in points)
    affordable = int(
        MAX_SPENT_FACTOR * spent / sum(compute_run_cost(size, question) for size, _ in cells)
    )
    num_seeds = max(1, min(num_needed, affordable, MAX_SEEDS))
    reason = "this narrows the interval of the cost at the target"
    return [
        suggest_run(question, size, value, num_seeds, reason, mends=False)
        for size, value in sorted(
            cells, key=lambda cell: (compute_run_cost(cell[0], question), *cell)
        )
    ]
