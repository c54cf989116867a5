"""A verdict in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from proxies.core.hyperparameters import LEARNING_RATE, hyperparameter_named
from proxies.core.notation import counted, format_nats, format_significant
from transfer.basin.optimum import Optimum, better_end
from transfer.basin.spikes import Spike
from transfer.question import Point, Question, at_size, written
from transfer.regret.bounded_regret import BoundedRegret
from transfer.regret.regret import AtTarget, Estimate

LIKELY_BENT, LEAST_TOLD = 0.5, 0.1
"""Probability of a bend from which on a reader is told."""

_WHERE = {"holds": "all of it under", "drifts": "all of it over", "cannot_tell": "on both sides of"}


def base(q: Question) -> str:
    """The base size, as `base width 32`."""
    return f"the base, {at_size(q.axis, q.base_size)},"


def why_unusable(
    optimum: Optimum, q: Question, points: Sequence[Point], *, noise_known: bool
) -> str:
    """Why a size has no optimum to go by. `points` are the runs of that size."""
    runs = (
        f"{at_size(q.axis, optimum.size)}: {counted(optimum.num_runs, 'run')}, "
        f"{optimum.num_diverged} diverged; "
    )
    if optimum.status == "too_few":
        return (
            runs
            + "too few values near the best one at which every run finished: no curve is fitted"
        )
    end = better_end(points)
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
    """The cost at the target, and how far the value is from the optimum there."""
    reach = f"{offset.value:+.2f} octaves [{offset.low:+.2f}, {offset.high:+.2f}]"
    reasons = [
        f"{_costs(q)} {cost(regret, q)}: {_WHERE[outcome]} the margin of {q.margin_nats:g}",
        f"the {_noun(q)} lies {reach} from the optimum there",
    ]
    if q.target_size > q.base_size:
        return reasons
    return [*reasons, "the target is no larger than the base: nothing is transferred"]


def bent(optima: Sequence[Optimum], q: Question, at_target: AtTarget) -> list[str]:
    """That the line through the optima bends, where it likely does, or where the rule follows
    it.
    """
    bend, line = at_target.bend, at_target.line
    if bend is None or line.bends < (LIKELY_BENT if q.power is not None else LEAST_TOLD):
        return []
    largest = at_size(q.axis, max(o.size for o in optima))
    return [
        (
            f"the line through the optima bends with probability {line.bends:.2f}: beyond "
            f"{largest} it moves by "
            f"{bend.value:+.2f} octaves per doubling [{bend.low:+.2f}, {bend.high:+.2f}] more than "
            "the "
            f"{at_target.drift.value:+.2f} up to there"
        )
    ]


def explain_bounded(outcome: str, bounded: BoundedRegret, q: Question) -> list[str]:
    """The same against the best of the values tried."""
    low, high = sorted(
        written(q.hyperparameter, end) for end in (bounded.low_log2, bounded.high_log2)
    )
    best, margin = f"the best value from {low} to {high}", f"the margin of {q.margin_nats:g}"
    return [
        f"{_costs(q)} {cost(bounded.regret_nats, q)} more than {best}: {_WHERE[outcome]} {margin}",
        "not every size has an optimum among the values tried: nothing is known beyond them",
    ]


def cost(regret: Estimate, q: Question) -> str:
    """Nats with their interval, up to what can be lost at all."""
    value, low, high = (
        f"more than {regret.most:.4g}" if regret.at_bound(nats) else f"{nats:.4f}"
        for nats in (regret.value, regret.low, regret.high)
    )
    known = f"{value} nats" if regret.at_bound(regret.low) else f"{value} nats [{low}, {high}]"
    if not regret.at_bound(regret.high):
        return f"{known} at level {q.level:g}"
    what = "the best and the worst of the runs are that far apart"
    if q.untrained_nats is not None:
        what = "a model that has learned nothing loses that much"
    return f"{known} at level {q.level:g} ({what}: beyond it a cost is not determined)"


def _costs(q: Question) -> str:
    return f"at {at_size(q.axis, q.target_size)} the transferred {_noun(q)} costs"


def _noun(q: Question) -> str:
    return (
        "rate"
        if q.hyperparameter == LEARNING_RATE
        else hyperparameter_named(q.hyperparameter).label
    )


def rests_on(culprit: Point, q: Question) -> str:
    """That one run alone makes the drift."""
    return (
        f"but without one run ({_place(culprit, q)}) the cost is within the margin: a single "
        "run proves no drift"
    )


def left_out(spike: Spike, q: Question) -> str:
    """That a run is left out, since its repeats agree against it."""
    return (
        f"one run ({_place(spike.point, q)}) lies {format_nats(spike.excess_nats)} nats above its "
        "value's "
        f"{counted(spike.num_repeats, 'other run')}, which agree: it is left out"
    )


def is_suspicious(spike: Spike, q: Question) -> str:
    """That a run looks like a spike."""
    compared = (
        "the other run of its value" if spike.num_repeats else "what the values beside it say"
    )
    excess = format_nats(spike.excess_nats)
    return (
        f"one run ({_place(spike.point, q)}) lies {excess} nats above {compared}: repeat it first"
    )


def _place(point: Point, q: Question) -> str:
    return (
        f"{at_size(q.axis, point.size)}, {written(q.hyperparameter, point.log2_value)}, seed "
        f"{point.seed}"
    )


def cliff_near(
    optima: Sequence[Optimum], q: Question, at_target: AtTarget, nearest_octaves: float
) -> str:
    """A sentence if runs of the largest size diverged too near the transferred value; else
    nothing.
    """
    largest, value = max(optima, key=lambda optimum: optimum.size), at_target.transferred_log2
    if largest.cliff_octaves is None or largest.log2_value is None or value is None:
        return ""
    distance = largest.log2_value + largest.cliff_octaves - value
    if distance >= nearest_octaves:
        return _cliff_moves(optima, q, value, nearest_octaves)
    return (
        f"but at {at_size(q.axis, largest.size)} runs diverged {distance:.1f} octaves above it, "
        "less than "
        f"{nearest_octaves:g}: a larger model may diverge at the value itself"
    )


def _cliff_moves(
    optima: Sequence[Optimum], q: Question, value: float, nearest_octaves: float
) -> str:
    """A sentence if the lowest diverged values fall from size to size, and would reach the value at
    the target.
    """
    cliffs = [
        (math.log2(o.size), o.log2_value + o.cliff_octaves)
        for o in optima
        if o.log2_value is not None and o.cliff_octaves is not None
    ]
    if len(cliffs) < 2:
        return ""
    slope, there = np.polyfit(
        [size - math.log2(q.target_size) for size, _ in cliffs], [at for _, at in cliffs], 1
    )
    if slope >= 0 or there - value >= nearest_octaves:
        return ""
    return (
        f"but the values at which runs diverge fall by {-slope:.1f} octaves per doubling: at "
        f"{at_size(q.axis, q.target_size)} they would lie {there - value:+.1f} octaves from it, "
        f"less than {nearest_octaves:g}"
    )
