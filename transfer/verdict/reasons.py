"""Sentences that explain a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from forerun._proxies.core.checks import Interval
from forerun._proxies.core.hyperparameters import LEARNING_RATE, get_hyperparameter
from forerun._proxies.core.notation import format_counted, format_nats, format_significant
from forerun._transfer.basin.optimum import Optimum, find_better_end
from forerun._transfer.basin.spikes import Spike
from forerun._transfer.question import (
    Outcome,
    Point,
    Question,
    format_size,
    format_value,
    from_log2,
)
from forerun._transfer.regret.bounded_regret import BoundedRegret
from forerun._transfer.regret.regret import TargetExtrapolation

LIKELY_BEND_PROBABILITY = 0.5
"""Minimum probability of a bend for the bend to be reported if the question gives an exponent."""
MIN_REPORTED_PROBABILITY = 0.1
"""The same if the exponent is measured, because the transferred value then follows the bend."""

_INTERVAL_POSITIONS = {
    "holds": "all of it under",
    "drifts": "all of it over",
    "cannot_tell": "on both sides of",
}
"""Position of the regret's interval relative to the margin, by outcome."""


def format_base(question: Question) -> str:
    """Format the base size of a question, as `the base, width 32,`."""
    return f"the base, {format_size(question.axis, question.base_size)},"


def explain_unusable(
    optimum: Optimum, question: Question, points: Sequence[Point], *, noise_known: bool
) -> str:
    """Explain why a size has no usable optimum. `points` are the runs of that size."""
    runs = (
        f"{format_size(question.axis, optimum.size)}: {format_counted(optimum.num_runs, 'run')}, "
        f"{optimum.num_diverged} diverged; "
    )
    if optimum.status == "too_few":
        return (
            runs
            + "too few values near the best one at which every run finished: no curve is fitted"
        )
    end = find_better_end(points)
    if not noise_known and end is not None and end.excess_nats > 0:
        return (
            f"{runs}the noise is unknown, since no value was run with two seeds: the {end.name} "
            f"end of the values run is {format_nats(end.excess_nats)} nats worse than the best, so "
            "the optimum may lie there or beyond only if the noise is at least "
            f"{format_significant(end.noise_needed_nats, 2)} nats"
        )
    if optimum.status == "flat":
        return runs + "the learning-rate curve is flat within the noise"
    return runs + "the optimum may lie outside the values that were run"


def explain_regret(
    outcome: Outcome, regret: Interval, offset: Interval, question: Question, most_nats: float
) -> list[str]:
    """Explain the regret at the target, and how far the value lies from the optimum there."""
    octaves = f"{offset.estimate:+.2f} octaves [{offset.low:+.2f}, {offset.high:+.2f}]"
    regret_text = format_regret(regret, question, most_nats)
    reasons = [
        (
            f"{_format_costs(question)} {regret_text}: {_INTERVAL_POSITIONS[outcome]} the margin "
            f"of {question.margin_nats:g}"
        ),
        f"the {_get_noun(question)} lies {octaves} from the optimum there",
    ]
    if question.target_size > question.base_size:
        return reasons
    return [*reasons, "the target is no larger than the base: nothing is transferred"]


def explain_bend(
    optima: Sequence[Optimum], question: Question, at_target: TargetExtrapolation
) -> list[str]:
    """Explain the bend of the line through the optima, if the bend is likely enough to report."""
    bend, line = at_target.bend, at_target.line
    if bend is None or line.bend_probability < (
        LIKELY_BEND_PROBABILITY if question.power is not None else MIN_REPORTED_PROBABILITY
    ):
        return []
    largest = format_size(question.axis, max(o.size for o in optima))
    return [
        (
            f"the line through the optima bends with probability {line.bend_probability:.2f}: "
            f"beyond {largest} it moves by {bend.estimate:+.2f} octaves per doubling "
            f"[{bend.low:+.2f}, {bend.high:+.2f}] more than the {at_target.drift.estimate:+.2f} up "
            "to there"
        )
    ]


def explain_bounded(
    outcome: Outcome, bounded: BoundedRegret, question: Question, most_nats: float
) -> list[str]:
    """Explain the regret against the best of the values tried."""
    # Of a beta, log2 falls as the value rises
    ends = sorted(
        (bounded.low_log2, bounded.high_log2),
        key=lambda end: from_log2(question.hyperparameter, end),
    )
    low, high = (format_value(question.hyperparameter, end) for end in ends)
    best = f"the best value from {low} to {high}"
    regret = format_regret(bounded.regret_nats, question, most_nats)
    return [
        (
            f"{_format_costs(question)} {regret} more than {best}: {_INTERVAL_POSITIONS[outcome]} "
            f"the margin of {question.margin_nats:g}"
        ),
        "not every size has an optimum among the values tried: nothing is known beyond them",
    ]


def format_regret(regret: Interval, question: Question, most_nats: float) -> str:
    """Format a regret in nats with its interval. Numbers that reach `most_nats`, the largest regret
    that can be determined, are given as lower bounds.
    """
    value, low, high = (
        f"more than {most_nats:.4g}" if nats >= most_nats else f"{nats:.4f}"
        for nats in (regret.estimate, regret.low, regret.high)
    )
    level = f"at level {question.level:g}"
    estimate_text = f"{value} nats" + (f" [{low}, {high}]" if regret.low < most_nats else "")
    if regret.high < most_nats:
        return f"{estimate_text} {level}"
    bound_text = "the best and the worst of the runs are that far apart"
    if question.untrained_nats is not None:
        bound_text = "a model that has learned nothing loses that much"
    return f"{estimate_text} {level} ({bound_text}: beyond it a cost is not determined)"


def _format_costs(question: Question) -> str:
    size = format_size(question.axis, question.target_size)
    return f"at {size} the transferred {_get_noun(question)} costs"


def _get_noun(question: Question) -> str:
    return (
        "rate"
        if question.hyperparameter == LEARNING_RATE
        else get_hyperparameter(question.hyperparameter).label
    )


def explain_culprit(culprit: Point, question: Question) -> str:
    """Explain that the drift rests on a single run."""
    return (
        f"but without one run ({_describe_run(culprit, question)}) the cost is within the margin: "
        "a single run proves no drift"
    )


def explain_left_out(spike: Spike, question: Question) -> str:
    """Explain that a run is left out because its repeats agree against it."""
    return (
        f"one run ({_describe_run(spike.point, question)}) lies {format_nats(spike.excess_nats)} "
        f"nats above its value's {format_counted(spike.num_repeats, 'other run')}, which agree: it "
        "is left out"
    )


def explain_suspect(spike: Spike, question: Question) -> str:
    """Explain that the loss of a run looks like a gradient spike."""
    compared = (
        "the other run of its value" if spike.num_repeats else "what the values beside it say"
    )
    excess = format_nats(spike.excess_nats)
    return (
        f"one run ({_describe_run(spike.point, question)}) lies {excess} nats above {compared}: "
        "repeat it first"
    )


def _describe_run(point: Point, question: Question) -> str:
    return (
        f"{format_size(question.axis, point.size)}, "
        f"{format_value(question.hyperparameter, point.log2_value)}, seed {point.seed}"
    )


def explain_cliff(
    optima: Sequence[Optimum],
    question: Question,
    at_target: TargetExtrapolation,
    min_octaves: float,
) -> str:
    """Explain that runs diverged at values less than `min_octaves` above the transferred value,
    at the largest size or, by extrapolation, at the target. Return an empty string if none did. The
    cliff of a size is the lowest value above the optimum at which a run diverged.
    """
    largest, value = max(optima, key=lambda optimum: optimum.size), at_target.transferred_log2
    if largest.cliff_octaves is None or largest.log2_value is None or value is None:
        return ""
    distance = largest.log2_value + largest.cliff_octaves - value
    if distance >= min_octaves:
        return _explain_moving_cliff(optima, question, value, min_octaves)
    return (
        f"but at {format_size(question.axis, largest.size)} runs diverged {distance:.1f} octaves "
        f"above it, less than {min_octaves:g}: a larger model may diverge at the value itself"
    )


def _explain_moving_cliff(
    optima: Sequence[Optimum], question: Question, value: float, min_octaves: float
) -> str:
    """Explain that the cliffs fall from size to size and would come too near the transferred value
    at the target. Return an empty string if they do not.
    """
    cliffs = [
        (math.log2(o.size), o.log2_value + o.cliff_octaves)
        for o in optima
        if o.log2_value is not None and o.cliff_octaves is not None
    ]
    if len(cliffs) < 2:
        return ""
    doublings = [log2_size - math.log2(question.target_size) for log2_size, _ in cliffs]
    slope, cliff_at_target = np.polyfit(doublings, [cliff for _, cliff in cliffs], 1)
    if slope >= 0 or cliff_at_target - value >= min_octaves:
        return ""
    return (
        f"but the values at which runs diverge fall by {-slope:.1f} octaves per doubling: at "
        f"{format_size(question.axis, question.target_size)} they would lie "
        f"{cliff_at_target - value:+.1f} octaves from it, less than {min_octaves:g}"
    )
