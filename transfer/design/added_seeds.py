"""The cheapest seeds and larger sizes to add for a hyperparameter that may have no optimum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transfer.basin.optimum import list_finite_rates
from transfer.design.next_runs import (
    MAX_SPENT_FACTOR,
    Suggestion,
    compute_run_cost,
    list_larger_sizes,
    suggest_run,
)
from transfer.question import Point, Question
from transfer.regret.bounded_regret import BoundedRegret

MAX_SEEDS = 64
"""Maximum number of seeds at one size. If these do not suffice, more seeds alone do not help."""
MIN_NARROWING, MAX_NARROWING = 0.4, 0.9
"""Bounds of the width that a round aims at, as shares of today's interval."""
MIN_WIDTH = 1e-9
"""Floor of widths and standard deviations, which avoids division by zero."""
RESERVE = 0.6
"""Share of the width that would just decide, at which a plan aims, since estimates move when runs
are added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeOption:
    """A size at which seeds can be added, with their cost and the information that they give."""

    size: int
    doublings: float
    """Doublings of size above the target; negative."""
    values: tuple[float, ...]
    """Log2 of the values at which each seed is run."""
    price: float
    """Cost of one seed, in runs at the base size."""
    have: float
    """Number of seeds that were run."""
    worth: float
    """Information of a new seed relative to a seed that was run. A new seed need not be run at all
    values."""
    variance: float
    """Variance for one seed of the quantity that is extrapolated to the target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedSeeds:
    """The seeds to add at each of several sizes."""

    offers: tuple[SizeOption, ...]
    seeds: tuple[int, ...]
    cost: float
    """Cost in runs at the base size."""
    variance: float
    """Variance at the target after the runs."""


def choose_added_seeds(
    offers: Sequence[SizeOption],
    extras: Sequence[SizeOption],
    *,
    narrowing: float,
    scatter: float,
    budget: float,
) -> AddedSeeds:
    """Return the cheapest seeds that narrow the interval at the target to the goal, or the best
    that fit the budget.

    Args:
        offers: Sizes that were run, two or more.
        extras: Sizes that were not run; at most one of them is added.
        narrowing: The standard deviation to reach, as a share of today's.
        scatter: Standard deviation of each size about the line, which no seed averages away.
        budget: Largest cost, in runs at the base size.
    """
    goal = narrowing**2 * _compute_variance(offers, [0] * len(offers), scatter)
    choices = [tuple(offers), *((*offers, extra) for extra in extras if extra.price <= budget)]
    plans = [
        _exchange_seeds(
            _add_seeds(choice, _get_min_seeds(choice), goal, scatter, budget), goal, scatter
        )
        for choice in choices
    ]
    enough = [plan for plan in plans if plan.variance <= goal]
    return (
        min(enough, key=lambda plan: plan.cost)
        if enough
        else min(plans, key=lambda plan: plan.variance)
    )


def _get_min_seeds(offers: Sequence[SizeOption]) -> list[int]:
    """Return the minimum number of new seeds of each size: 1 at a new size, else 0."""
    return [0 if offer.have else 1 for offer in offers]


def _add_seeds(
    offers: tuple[SizeOption, ...],
    seeds: Sequence[int],
    goal: float,
    scatter: float,
    budget: float,
    excluded: int | None = None,
) -> AddedSeeds:
    """Add seeds one at a time where they reduce the variance most per cost, until the goal or the
    budget is reached. The offer at index `excluded` gets none.
    """
    num_added = list(seeds)
    cost = sum(n * offer.price for n, offer in zip(num_added, offers, strict=True))
    variance = _compute_variance(offers, num_added, scatter)
    while variance > goal:
        steps = []
        for index, offer in enumerate(offers):
            if (
                index != excluded
                and offer.have + num_added[index] < MAX_SEEDS
                and cost + offer.price <= budget
            ):
                after = _compute_variance(
                    offers, [n + (i == index) for i, n in enumerate(num_added)], scatter
                )
                steps.append(((variance - after) / offer.price, index, after))
        if not steps:
            break
        _, index, variance = max(steps)
        num_added[index] += 1
        cost += offers[index].price
    return AddedSeeds(offers=offers, seeds=tuple(num_added), cost=cost, variance=variance)


def _exchange_seeds(plan: AddedSeeds, goal: float, scatter: float) -> AddedSeeds:
    """Exchange single seeds for others as long as the plan gets cheaper: the last, expensive seed
    may exceed the goal.
    """
    offers, min_seeds = plan.offers, _get_min_seeds(plan.offers)
    while plan.variance <= goal:
        alternatives = [
            _add_seeds(
                offers,
                [n - (i == index) for i, n in enumerate(plan.seeds)],
                goal,
                scatter,
                plan.cost,
                excluded=index,
            )
            for index in range(len(offers))
            if plan.seeds[index] > min_seeds[index]
        ]
        cheaper = [
            alternative
            for alternative in alternatives
            if alternative.variance <= goal and alternative.cost < plan.cost
        ]
        if not cheaper:
            break
        plan = min(cheaper, key=lambda alternative: alternative.cost)
    return plan


def _compute_variance(offers: Sequence[SizeOption], seeds: Sequence[int], scatter: float) -> float:
    """Compute the variance at the target of a straight line through all sizes by generalized least
    squares, as in `regret.drift`.
    """
    weights = [
        1 / (offer.variance / (offer.have + offer.worth * n) + scatter**2)
        for offer, n in zip(offers, seeds, strict=True)
    ]
    total, first, second = (
        sum(weight * offer.doublings**power for weight, offer in zip(weights, offers, strict=True))
        for power in range(3)
    )
    return second / (total * second - first**2) + scatter**2


def suggest_bounded_runs(
    points: Sequence[Point], bounded: BoundedRegret, q: Question
) -> list[Suggestion]:
    """Suggest the cheapest runs that narrow the regret's interval enough to decide, for a
    hyperparameter that may have no optimum.

    Seeds are added at the transferred value, at the ends of the values tried, and at the best of
    them.

    Args:
        points: All runs of the condition.
        bounded: The regret estimated from them.
        q: The question; the target's own size is never suggested.
    """
    assert q.power is not None
    sizes = sorted({p.size for p in points})
    values_log2 = (bounded.transferred_log2, bounded.low_log2, bounded.high_log2, bounded.best_log2)
    offers = []
    for size in sizes:
        values = list_finite_rates([p for p in points if p.size == size])
        values_here = [
            at_target - q.power * math.log2(q.target_size / size) for at_target in values_log2
        ]
        nearest = {min(values, key=lambda value: abs(value - x)) for x in values_here}
        offers.append(_to_size_option(points, size, q, sorted(nearest), 1.0))
    last = sizes[-1]
    values = list_finite_rates([p for p in points if p.size == last])
    larger = [
        _build_option(
            size,
            q,
            [value + q.power * math.log2(size / last) for value in values],
            offers[-1].variance,
        )
        for size in list_larger_sizes(last, q)
    ]
    regret = bounded.regret_nats
    reach = (
        regret.high - regret.value if regret.value < q.margin_nats else regret.value - regret.low
    )
    return _suggest_added_seeds(
        points,
        offers,
        larger,
        q,
        narrowing=abs(q.margin_nats - regret.value) / max(reach, MIN_WIDTH),
        scatter=0.0,
        reason="this narrows the interval of the cost at the target",
    )


def _to_size_option(
    points: Sequence[Point], size: int, q: Question, values: Sequence[float], sd: float
) -> SizeOption:
    """Return the option of more seeds at some values of a size. `sd` is the current standard
    deviation of the quantity that they sharpen.
    """
    size_runs = [p for p in points if p.size == size]
    num_seeds = len({p.seed for p in size_runs})
    worth = _sum_squares(values) / max(_sum_squares(list_finite_rates(size_runs)), MIN_WIDTH)
    return _build_option(size, q, values, max(sd, MIN_WIDTH) ** 2 * num_seeds, num_seeds, worth)


def _build_option(
    size: int,
    q: Question,
    values: Sequence[float],
    variance: float,
    have: float = 0,
    worth: float = 1.0,
) -> SizeOption:
    """Return the option of seeds at some values of a size; with the defaults, of a new size."""
    return SizeOption(
        size=size,
        doublings=math.log2(size / q.target_size),
        values=tuple(values),
        have=have,
        worth=worth,
        price=len(values) * compute_run_cost(size, q),
        variance=variance,
    )


def _suggest_added_seeds(
    points: Sequence[Point],
    offers: Sequence[SizeOption],
    larger: Sequence[SizeOption],
    q: Question,
    *,
    narrowing: float,
    scatter: float,
    reason: str,
) -> list[Suggestion]:
    """Suggest a round of added seeds, cheapest first. `narrowing` is the share of today's width
    that would just decide.
    """
    added = choose_added_seeds(
        offers,
        larger,
        scatter=scatter,
        narrowing=min(max(RESERVE * narrowing, MIN_NARROWING), MAX_NARROWING),
        budget=MAX_SPENT_FACTOR * sum(compute_run_cost(p.size, q) for p in points),
    )
    runs = [
        suggest_run(
            q,
            offer.size,
            value,
            seeds,
            reason if offer.have else f"a larger proxy: {reason}",
            mends=False,
        )
        for offer, seeds in zip(added.offers, added.seeds, strict=True)
        if seeds
        for value in offer.values
    ]
    return sorted(runs, key=lambda run: (run.relative_cost, run.size, run.log2_value))


def _sum_squares(values: Sequence[float]) -> float:
    """Sum the squared deviations from the mean, which measure the information of one seed on a
    slope and thus on an optimum.
    """
    return float(np.var(values)) * len(values)
