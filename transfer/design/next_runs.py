"""The cheapest runs that would help a verdict which cannot be given yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proxies.core.hyperparameters import LEARNING_RATE
from proxies.core.notation import counted, format_significant
from transfer.basin.optimum import HALF_WINDOW_OCTAVES, MIN_RATES, Optimum, best_rate, better_end, finite_rates
from transfer.question import Axis, Hyperparameter, Point, Question, at_size, written
from transfer.regret.bounded_regret import BoundedRegret
from transfer.regret.regret import AtTarget, estimate

MOST_SEEDS = 64
"""At one size: where these do not suffice, more runs alone do not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeOption:
    """A size at which seeds can be bought."""

    size: int
    doublings: float
    """Doublings of size above the target: negative."""
    values: tuple[float, ...]
    """log2 of those at which each seed is run."""
    price: float
    """What a seed costs, in base runs."""
    have: float
    """Seeds that were run."""
    worth: float
    """What a new seed, which need not be run at all values, is worth in seeds that were."""
    variance: float
    """For one seed, of what is extended to the target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedSeeds:
    """Seeds to add to some offers."""

    offers: tuple[SizeOption, ...]
    seeds: tuple[int, ...]
    cost: float
    """In base runs."""
    variance: float
    """At the target, afterwards."""


def cheapest(
    offers: Sequence[SizeOption], extras: Sequence[SizeOption], *, narrowing: float, scatter: float, budget: float
) -> AddedSeeds:
    """The cheapest purchase that narrows the interval at the target, else, within the budget, the one that does most.

    Args:
        offers: Sizes that were run, two or more.
        extras: Sizes that were not; at most one of them is bought.
        narrowing: The standard deviation to reach, as a share of today's.
        scatter: Standard deviation of each size about the line, which no seed averages away.
        budget: In base runs.
    """
    goal = narrowing**2 * _variance(offers, [0] * len(offers), scatter)
    choices = [tuple(offers), *((*offers, extra) for extra in extras if extra.price <= budget)]
    plans = [_traded(_filled(choice, _least(choice), goal, scatter, budget), goal, scatter) for choice in choices]
    enough = [plan for plan in plans if plan.variance <= goal]
    return min(enough, key=lambda plan: plan.cost) if enough else min(plans, key=lambda plan: plan.variance)


def _least(offers: Sequence[SizeOption]) -> list[int]:
    """The fewest seeds of each: a new size needs one, else there is no such size."""
    return [0 if offer.have else 1 for offer in offers]


def _filled(
    offers: tuple[SizeOption, ...],
    seeds: Sequence[int],
    goal: float,
    scatter: float,
    budget: float,
    but: int | None = None,
) -> AddedSeeds:
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
    return AddedSeeds(offers=offers, seeds=tuple(now), cost=cost, variance=variance)


def _traded(plan: AddedSeeds, goal: float, scatter: float) -> AddedSeeds:
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


def _variance(offers: Sequence[SizeOption], seeds: Sequence[int], scatter: float) -> float:
    """At the target, of a straight line through all sizes by generalised least squares, as in `regret.drift`."""
    weights = [
        1 / (offer.variance / (offer.have + offer.worth * n) + scatter**2)
        for offer, n in zip(offers, seeds, strict=True)
    ]
    total, first, second = (
        sum(weight * offer.doublings**power for weight, offer in zip(weights, offers, strict=True))
        for power in range(3)
    )
    return second / (total * second - first**2) + scatter**2


LARGER = (2, 4, 8)
"""Times the largest size: proxies that may be proposed."""
GRID_STEPS = (-2, -1, 0, 1, 2)
"""Values of a new size, in steps from where the others put its optimum."""
MOST_NARROWING, LEAST_NARROWING = 0.4, 0.9
"""A round of runs aims at an interval of at least two fifths, at most nine tenths of today's width."""
MIN_SEEDS = 2
"""New ones at a value, where the noise is unknown: with the first they are three."""
SD_LEVEL = 0.6827
"""The level of the interval of one standard deviation to either side."""
LEAST_WIDTH = 1e-9
"""Nothing is known so well."""
MOST_SPENT = 2.0
"""A round costs at most so many times what all runs so far did: the next one knows better what is worth buying."""
RESERVE = 0.6
"""Estimates move when runs are added: a plan aims at this share of the width that would just decide."""
COST_EXPONENTS: dict[Axis, float] = {"width": 2.0, "depth": 1.0, "batch": 0.0, "duration": 1.0, "params": 1.0}
"""A run's FLOPs grow with size to this power, all else being equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """Runs to add: one size, one value, some seeds that were not run there yet."""

    axis: Axis
    hyperparameter: Hyperparameter
    size: int
    log2_value: float
    num_seeds: int
    reason: str
    relative_cost: float
    """What all its runs cost, in runs at the base size."""
    mends: bool
    """Whether there is no verdict without these runs, or only one that rests on a single run; else they narrow the
    intervals of a verdict."""

    def __str__(self) -> str:
        """In words: `run width 128 at 2^-3 (2 seeds): ...`."""
        seeds = counted(self.num_seeds, "seed")
        value = written(self.hyperparameter, self.log2_value)
        what = value if self.hyperparameter == LEARNING_RATE else f"{self.hyperparameter} = {value}"
        return f"run {at_size(self.axis, self.size)} at {what} ({seeds}): {self.reason}"


def mend(optimum: Optimum, points: Sequence[Point], q: Question, *, noise_known: bool = True) -> list[Suggestion]:
    """What makes the optimum of one size usable. `points` are the runs of that size.

    Where the noise is unknown and the best value lies inside, seeds come first: they tell whether the end is worse.
    """
    seeds, rates, best, size = len({p.seed for p in points}), finite_rates(points), best_rate(points), optimum.size
    if best is None:
        low = min(p.log2_value for p in points)
        return [_run(q, size, low - k, seeds, "every run at this size diverged") for k in range(2, 2 + MIN_RATES)]
    step = _step(rates)
    below, above = _beyond(points, rates, best, step)
    end = better_end(points)
    assert end is not None
    if optimum.status != "too_few" and not noise_known and end.excess_nats > 0:
        noise = format_significant(end.noise_needed_nats, 2)
        why = f"the noise is unknown: under {noise} nats the optimum lies above the {end.name} end"
        why = why if end.name == "lower" else why.replace("above", "below")
        at = rates.index(best)
        return [_run(q, size, x, MIN_SEEDS, why) for x in sorted({end.log2_value, *rates[max(at - 1, 0) : at + 2]})]
    if optimum.status == "flat":
        why = "the learning-rate curve is no deeper than the noise"
        core = sorted(sorted(rates, key=lambda rate: abs(rate - best))[:MIN_RATES])
        return [_run(q, size, rate, seeds, why) for rate in (below[0], above[0])] + [
            _run(q, size, rate, max(seeds, 2), why) for rate in core
        ]
    if optimum.status == "too_few":
        near = [x for k in (1, 2, 3) for x in (best - k * step, best + k * step)]
        new = [x for x in near if x not in rates and rates[0] - 3 * step <= x <= above[0] + 1e-9]
        why = f"{counted(len(rates), 'finished value')}: there must be at least {MIN_RATES}"
        return [_run(q, size, x, seeds, why) for x in new[: MIN_RATES + 1 - len(rates)]]
    why = f"the optimum may lie at or beyond the {end.name} end of the values run"
    return [_run(q, size, x, seeds, why) for x in (above if end.name == "upper" else below)]


def again(point: Point, q: Question) -> Suggestion:
    """Repeat one run with other seeds, to see whether it holds."""
    return _run(q, point.size, point.log2_value, 2, "the verdict rests on a single run here")


def _beyond(
    points: Sequence[Point], rates: Sequence[float], best: float, step: float
) -> tuple[list[float], list[float]]:
    """The next values below and above the grid, two beyond an end that is itself the best one.

    Where runs above it diverged there is but one: halfway to that cliff.
    """
    cliff = min((p.log2_value for p in points if p.loss_nats is None and p.log2_value > rates[-1]), default=None)
    below = [rates[0] - k * step for k in ((1, 2) if best == rates[0] else (1,))]
    above = [rates[-1] + k * step for k in ((1, 2) if best == rates[-1] else (1,))]
    return below, above if cliff is None else [(rates[-1] + cliff) / 2]


def _run(q: Question, size: int, log2_value: float, num_seeds: int, reason: str, *, mends: bool = True) -> Suggestion:
    return Suggestion(
        axis=q.axis, hyperparameter=q.hyperparameter, size=size, log2_value=float(log2_value), num_seeds=num_seeds,
        reason=reason, relative_cost=num_seeds * _price(size, q), mends=mends,
    )  # fmt: skip


def sharpen_optima(
    points: Sequence[Point], optima: Sequence[Optimum], q: Question, at_target: AtTarget
) -> list[Suggestion]:
    """The cheapest runs that narrow the interval of the target's optimum enough to decide, if estimates stay.

    Args:
        points: All runs of the condition.
        optima: The usable optima, those of `at_target`.
        q: What is asked; the target's own size is never suggested.
        at_target: The extrapolation, with a value to transfer.
    """
    offers = [
        _seeds(points, optimum.size, q, _core(points, optimum), sd)
        for optimum, sd in zip(optima, at_target.sds, strict=True)
    ]
    last, line = offers[-1], at_target.line
    step = _step(finite_rates([p for p in points if p.size == last.size]))
    larger = []
    for size in _larger(last.size, q):
        beyond = float(line.slope[0] + line.bend[0])
        optimum_there = float(line.at_target[0]) + beyond * math.log2(size / q.target_size)
        centre = round(optimum_there / step) * step
        larger.append(_offer(size, q, [centre + k * step for k in GRID_STEPS], last.variance))
    scatter = estimate(line.target_scatter, SD_LEVEL)
    return _buy(
        points, offers, larger, q, narrowing=_allowed_share(at_target, q), scatter=(scatter.high - scatter.low) / 2,
        reason="this narrows the interval of the optimum at the target",
    )  # fmt: skip


def sharpen_bounded(points: Sequence[Point], bounded: BoundedRegret, q: Question) -> list[Suggestion]:
    """The cheapest runs that narrow the regret's interval enough to decide, where there need be no optimum.

    Seeds are bought at the transferred value, at the ends of those tried and at the best of them.

    Args:
        points: All runs of the condition.
        bounded: What they gave.
        q: What is asked; the target's own size is never suggested.
    """
    assert q.power is not None
    sizes = sorted({p.size for p in points})
    values_log2 = (bounded.transferred_log2, bounded.low_log2, bounded.high_log2, bounded.best_log2)
    offers = []
    for size in sizes:
        values = finite_rates([p for p in points if p.size == size])
        here = [at_target - q.power * math.log2(q.target_size / size) for at_target in values_log2]
        nearest = {min(values, key=lambda value: abs(value - x)) for x in here}
        offers.append(_seeds(points, size, q, sorted(nearest), 1.0))
    last = sizes[-1]
    values = finite_rates([p for p in points if p.size == last])
    larger = [
        _offer(size, q, [value + q.power * math.log2(size / last) for value in values], offers[-1].variance)
        for size in _larger(last, q)
    ]
    regret = bounded.regret_nats
    reach = regret.high - regret.value if regret.value < q.margin_nats else regret.value - regret.low
    return _buy(
        points, offers, larger, q, narrowing=abs(q.margin_nats - regret.value) / max(reach, LEAST_WIDTH), scatter=0.0,
        reason="this narrows the interval of the cost at the target",
    )  # fmt: skip


def _allowed_share(at_target: AtTarget, q: Question) -> float:
    """The standard deviation of the offset that would decide, as a share of today's, if the estimates stay."""
    assert at_target.transferred_log2 is not None
    allowed = math.sqrt(2 * q.margin_nats / float(at_target.curvature.at_target[0]))  # a parabola will do for planning
    offset = estimate(at_target.transferred_log2 - at_target.line.at_target, q.level)
    return abs(allowed - abs(offset.value)) / max((offset.high - offset.low) / 2, LEAST_WIDTH)


def _seeds(points: Sequence[Point], size: int, q: Question, values: Sequence[float], sd: float) -> SizeOption:
    """More seeds at some values of a size; `sd` is of what they sharpen, now."""
    own = [p for p in points if p.size == size]
    have = len({p.seed for p in own})
    worth = _spread(values) / max(_spread(finite_rates(own)), LEAST_WIDTH)
    return _offer(size, q, values, max(sd, LEAST_WIDTH) ** 2 * have, have, worth)


def _offer(
    size: int, q: Question, values: Sequence[float], variance: float, have: float = 0, worth: float = 1.0
) -> SizeOption:
    """Seeds at some values of a size; by default of a new one."""
    return SizeOption(
        size=size, doublings=math.log2(size / q.target_size), values=tuple(values), have=have, worth=worth,
        price=len(values) * _price(size, q), variance=variance,
    )  # fmt: skip


def _larger(largest: int, q: Question) -> list[int]:
    return [by * largest for by in LARGER if by * largest < q.target_size]


def _buy(
    points: Sequence[Point], offers: Sequence[SizeOption], larger: Sequence[SizeOption], q: Question, *,
    narrowing: float, scatter: float, reason: str,
) -> list[Suggestion]:  # fmt: skip
    """A round of runs, cheapest first; `narrowing` would just decide."""
    found = cheapest(
        offers, larger, scatter=scatter, narrowing=min(max(RESERVE * narrowing, MOST_NARROWING), LEAST_NARROWING),
        budget=MOST_SPENT * sum(_price(p.size, q) for p in points),
    )  # fmt: skip
    runs = [
        _run(q, offer.size, value, seeds, reason if offer.have else f"a larger proxy: {reason}", mends=False)
        for offer, seeds in zip(found.offers, found.seeds, strict=True)
        if seeds
        for value in offer.values
    ]
    return sorted(runs, key=lambda run: (run.relative_cost, run.size, run.log2_value))


def _price(size: int, q: Question) -> float:
    """Return the cost of one run, in base runs."""
    return float((size / q.base_size) ** COST_EXPONENTS[q.axis])


def _core(points: Sequence[Point], optimum: Optimum) -> list[float]:
    """The values about an optimum, four or more."""
    centre = optimum.log2_value
    assert centre is not None
    values = finite_rates([p for p in points if p.size == optimum.size])
    near = [value for value in values if abs(value - centre) <= HALF_WINDOW_OCTAVES]
    return near if len(near) >= MIN_RATES else sorted(sorted(values, key=lambda value: abs(value - centre))[:MIN_RATES])


def _spread(values: Sequence[float]) -> float:
    """Squares about the mean: what one seed says of a slope, and so of an optimum."""
    return float(np.var(values)) * len(values)


def _step(values: Sequence[float]) -> float:
    return float(np.median(np.diff(values))) if len(values) > 1 else 1.0
