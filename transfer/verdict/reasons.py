"""Sentences that explain a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from proxies.core.hyperparameters import LEARNING_RATE, hyperparameter_named
from proxies.core.notation import counted, format_nats, format_significant
from transfer.basin.optimum import Optimum, find_better_end
from transfer.basin.spikes import Spike
from transfer.question import Point, Question, at_size, written
from transfer.regret.bounded_regret import BoundedRegret
from transfer.regret.regret import AtTarget, Estimate

LIKELY_BEND_PROBABILITY, MIN_REPORTED_PROBABILITY = 0.5, 0.1
"""Probability of a bend from which on it is reported: if the rule's power is given, and if it is
measured."""

_WHERE = {"holds": "all of it under", "drifts": "all of it over", "cannot_tell": "on both sides of"}


def base(q: Question) -> str:
    """Format the base size, as `the base, width 32,`."""
    return f"the base, {at_size(q.axis, q.base_size)},"


def why_unusable(
    optimum: Optimum, q: Question, points: Sequence[Point], *, noise_known: bool
) -> str:
    """Explain why a size has no usable optimum. `points` are the runs of that size."""
    runs = (
        f"{at_size(q.axis, optimum.size)}: {counted(optimum.num_runs, 'run')}, "
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
            "end of the values "
            f"run is {format_nats(end.excess_nats)} nats worse than the best, so the optimum may "
            "lie there or beyond "
            f"only if the noise is at least {format_significant(end.noise_needed_nats, 2)} nats"
        )
    if optimum.status == "flat":
        return runs + "the learning-rate curve is flat within the noise"
    return runs + "the optimum may lie outside the values that were run"


def explain(outcome: str, regret: Estimate, offset: Estimate, q: Question) -> list[str]:
    """Explain the regret at the target, and how far the value lies from the optimum there."""
    octaves = f"{offset.value:+.2f} octaves [{offset.low:+.2f}, {offset.high:+.2f}]"
    reasons = [
        f"{_format_costs(q)} {cost(regret, q)}: {_WHERE[outcome]} the margin of {q.margin_nats:g}",
        f"the {_get_noun(q)} lies {octaves} from the optimum there",
    ]
    if q.target_size > q.base_size:
        return reasons
    return [*reasons, "the target is no larger than the base: nothing is transferred"]


def bent(optima: Sequence[Optimum], q: Question, at_target: AtTarget) -> list[str]:
    """Explain the bend of the line through the optima, if it is likely or the rule follows it."""
    bend, line = at_target.bend, at_target.line
    if bend is None or line.bends < (
        LIKELY_BEND_PROBABILITY if q.power is not None else MIN_REPORTED_PROBABILITY
    ):
        return []
    largest = at_size(q.axis, max(o.size for o in optima))
    return [
        (
            f"the line through the optima bends with probability {line.bends:.2f}: beyond "
            f"{largest} it moves by {bend.value:+.2f} octaves per doubling "
            f"[{bend.low:+.2f}, {bend.high:+.2f}] more than the "
            f"{at_target.drift.value:+.2f} up to there"
        )
    ]


def explain_bounded(outcome: str, bounded: BoundedRegret, q: Question) -> list[str]:
    """Explain the regret against the best of the values tried."""
    low, high = sorted(
        written(q.hyperparameter, end) for end in (bounded.low_log2, bounded.high_log2)
    )
    best, margin = f"the best value from {low} to {high}", f"the margin of {q.margin_nats:g}"
    regret = cost(bounded.regret_nats, q)
    return [
        f"{_format_costs(q)} {regret} more than {best}: {_WHERE[outcome]} {margin}",
        "not every size has an optimum among the values tried: nothing is known beyond them",
    ]


def cost(regret: Estimate, q: Question) -> str:
    """Format a regret in nats with its interval, capped at the largest regret that can be
    determined.
    """
    value, low, high = (
        f"more than {regret.most:.4g}" if regret.at_bound(nats) else f"{nats:.4f}"
        for nats in (regret.value, regret.low, regret.high)
    )
    estimate_text = (
        f"{value} nats" if regret.at_bound(regret.low) else f"{value} nats [{low}, {high}]"
    )
    if not regret.at_bound(regret.high):
        return f"{estimate_text} at level {q.level:g}"
    bound_text = "the best and the worst of the runs are that far apart"
    if q.untrained_nats is not None:
        bound_text = "a model that has learned nothing loses that much"
    return (
        f"{estimate_text} at level {q.level:g} ({bound_text}: beyond it a cost is not determined)"
    )


def _format_costs(q: Question) -> str:
    return f"at {at_size(q.axis, q.target_size)} the transferred {_get_noun(q)} costs"


def _get_noun(q: Question) -> str:
    return (
        "rate"
        if q.hyperparameter == LEARNING_RATE
        else hyperparameter_named(q.hyperparameter).label
    )


def rests_on(culprit: Point, q: Question) -> str:
    """Explain that the drift rests on a single run."""
    return (
        f"but without one run ({_describe_run(culprit, q)}) the cost is within the margin: "
        "a single run proves no drift"
    )


def left_out(spike: Spike, q: Question) -> str:
    """Explain that a run is left out because its repeats agree against it."""
    return (
        f"one run ({_describe_run(spike.point, q)}) lies {format_nats(spike.excess_nats)} nats "
        f"above its value's {counted(spike.num_repeats, 'other run')}, which agree: it is left out"
    )


def is_suspicious(spike: Spike, q: Question) -> str:
    """Explain that a run looks like a spike."""
    compared = (
        "the other run of its value" if spike.num_repeats else "what the values beside it say"
    )
    excess = format_nats(spike.excess_nats)
    return (
        f"one run ({_describe_run(spike.point, q)}) lies {excess} nats above {compared}: "
        "repeat it first"
    )


def _describe_run(point: Point, q: Question) -> str:
    return (
        f"{at_size(q.axis, point.size)}, {written(q.hyperparameter, point.log2_value)}, seed "
        f"{point.seed}"
    )


def cliff_near(
    optima: Sequence[Optimum], q: Question, at_target: AtTarget, nearest_octaves: float
) -> str:
    """Explain that runs of the largest size diverged too near the transferred value; return an
    empty string if they did not.
    """
    largest, value = max(optima, key=lambda optimum: optimum.size), at_target.transferred_log2
    if largest.cliff_octaves is None or largest.log2_value is None or value is None:
        return ""
    distance = largest.log2_value + largest.cliff_octaves - value
    if distance >= nearest_octaves:
        return _explain_moving_cliff(optima, q, value, nearest_octaves)
    return (
        f"but at {at_size(q.axis, largest.size)} runs diverged {distance:.1f} octaves above it, "
        f"less than {nearest_octaves:g}: a larger model may diverge at the value itself"
    )


def _explain_moving_cliff(
    optima: Sequence[Optimum], q: Question, value: float, nearest_octaves: float
) -> str:
    """Explain that the lowest diverged values fall from size to size and would reach the value at
    the target; return an empty string if they do not.
    """
    cliffs = [
        (math.log2(o.size), o.log2_value + o.cliff_octaves)
        for o in optima
        if o.log2_value is not None and o.cliff_octaves is not None
    ]
    if len(cliffs) < 2:
        return ""
    slope, cliff_at_target = np.polyfit(
        [size - math.log2(q.target_size) for size, _ in cliffs], [at for _, at in cliffs], 1
    )
    if slope >= 0 or cliff_at_target - value >= nearest_octaves:
        return ""
    return (
        f"but the values at which runs diverge fall by {-slope:.1f} octaves per doubling: at "
        f"{at_size(q.axis, q.target_size)} they would lie {cliff_at_target - value:+.1f} octaves "
        f"from it, less than {nearest_octaves:g}"
    )
