"""Which seeds to buy at which sizes, so that what is extended to the target becomes sure enough for the least money."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_SEEDS = 64
"""At one size: where these do not suffice, something else is wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A size at which seeds can be bought."""

    size: int
    doublings: float
    """Of size above the target: negative."""
    values: tuple[float, ...]
    """log2 of those at which each seed is run."""
    price: float
    """Of a seed, in base runs."""
    have: float
    """Seeds that were run."""
    worth: float
    """Of a new seed, which need not be run at all values, in seeds that were."""
    variance: float
    """For one seed, of what is extended to the target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Purchase:
    """Seeds to add to some offers."""

    offers: tuple[Offer, ...]
    seeds: tuple[int, ...]
    cost: float
    """In base runs."""
    variance: float
    """At the target, afterwards."""


def cheapest(
    offers: Sequence[Offer], extras: Sequence[Offer], *, narrowing: float, scatter: float, budget: float
) -> Purchase:
    """The cheapest purchase that narrows the interval at the target, else, within the budget, the one that does most.

    Args:
        offers: Sizes that were run, two or more.
        extras: Sizes that were not; at most one of them is bought.
        narrowing: The standard deviation that is wanted, as a share of today's.
        scatter: Standard deviation of each size about the line, which no seed averages away.
        budget: In base runs.
    """
    goal = narrowing**2 * _variance(offers, [0] * len(offers), scatter)
    choices = [tuple(offers), *((*offers, extra) for extra in extras if extra.price <= budget)]
    plans = [_traded(_filled(choice, _least(choice), goal, scatter, budget), goal, scatter) for choice in choices]
    enough = [plan for plan in plans if plan.variance <= goal]
    return min(enough, key=lambda plan: plan.cost) if enough else min(plans, key=lambda plan: plan.variance)


def _least(offers: Sequence[Offer]) -> list[int]:
    """Of a new size one seed at least: without it there is no such size."""
    return [0 if offer.have else 1 for offer in offers]


def _filled(
    offers: tuple[Offer, ...], seeds: Sequence[int], goal: float, scatter: float, budget: float, but: int | None = None
) -> Purchase:
    """With seed after seed where it narrows most for its price, down to the goal; none where one says so."""
    now = list(seeds)
    cost = sum(n * offer.price for n, offer in zip(now, offers, strict=True))
    variance = _variance(offers, now, scatter)
    while variance > goal:
        steps = []
        for index, offer in enumerate(offers):
            if index != but and offer.have + now[index] < MOST_SEEDS and cost + offer.price <= budget:
                after = _variance(offers, [n + (i == index) for i, n in enumerate(now)], scatter)
                steps.append(((variance - after) / offer.price, index, after))
        if not steps:
            break
        _, index, variance = max(steps)
        now[index] += 1
        cost += offers[index].price
    return Purchase(offers=offers, seeds=tuple(now), cost=cost, variance=variance)


def _traded(plan: Purchase, goal: float, scatter: float) -> Purchase:
    """The same with single seeds traded for others, as long as that is cheaper: a last dear one may reach too far."""
    offers, least = plan.offers, _least(plan.offers)
    while plan.variance <= goal:
        others = [
            _filled(offers, [n - (i == index) for i, n in enumerate(plan.seeds)], goal, scatter, plan.cost, but=index)
            for index in range(len(offers))
            if plan.seeds[index] > least[index]
        ]
        cheaper = [other for other in others if other.variance <= goal and other.cost < plan.cost]
        if not cheaper:
            break
        plan = min(cheaper, key=lambda other: other.cost)
    return plan


def _variance(offers: Sequence[Offer], seeds: Sequence[int], scatter: float) -> float:
    """At the target, of a straight line through all sizes by generalised least squares, as in `transfer.drift`."""
    weights = [
        1 / (offer.variance / (offer.have + offer.worth * n) + scatter**2)
        for offer, n in zip(offers, seeds, strict=True)
    ]
    total, first, second = (
        sum(weight * offer.doublings**power for weight, offer in zip(weights, offers, strict=True))
        for power in range(3)
    )
    return second / (total * second - first**2) + scatter**2
