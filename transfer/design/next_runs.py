"""The cheapest runs that would help a verdict which cannot be given yet."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from proxies.core.hyperparameters import LEARNING_RATE
from proxies.core.notation import counted, format_factor, format_significant
from transfer.basin.optimum import MIN_RATES, Optima, Optimum, best_rate, better_end, finite_rates, noise_is_known
from transfer.design.prospects import Proposal, Prospects, choose_round, look_ahead
from transfer.question import Axis, Hyperparameter, Point, Question, at_size, written
from transfer.regret.bounded_regret import BoundedRegret

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


LARGER = (1.5, 2, 3, 4, 8)
"""Times the largest size: proxies that may be proposed."""
NEW_GRIDS = ((-2, -1, 0, 1, 2), (-1.5, -0.5, 0.5, 1.5), (-2, 0, 2), (-1, 0, 1))
"""Grids of a new size that are proposed, in octaves from where the others put its optimum."""
CENTER_STEP = 0.5
"""Octaves to which the center of such a grid is rounded."""
MOST_NARROWING, LEAST_NARROWING = 0.4, 0.9
"""A round of runs aims at an interval of at least two fifths, at most nine tenths of today's width."""
MIN_SEEDS = 2
"""New ones at a value, where the noise is unknown: with the first they are three."""
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
    if optimum.status == "too_few" and len(rates) >= MIN_RATES:
        why = "the loss changes too much between the values run to place the optimum"
        beyond = [*(below if best == rates[0] else ()), *(above if best == rates[-1] else ())]
        return [_run(q, size, x, seeds, why) for x in sorted([*(best + k * step for k in STEPS_BETWEEN), *beyond])]
    if optimum.status == "too_few":
        near = [x for k in (1, 2, 3) for x in (best - k * step, best + k * step)]
        new = [x for x in near if x not in rates and rates[0] - 3 * step <= x <= above[0] + 1e-9]
        why = f"{counted(len(rates), 'finished value')}: there must be at least {MIN_RATES}"
        return [_run(q, size, x, seeds, why) for x in new[: MIN_RATES + 1 - len(rates)]]
    why = f"the optimum may lie at or beyond the {end.name} end of the values run"
    return [_run(q, size, x, seeds, why) for x in (above if end.name == "upper" else below)]


STEPS_BETWEEN = (-0.5, -0.25, 0.25, 0.5)
"""New values about the best one where the others lose too much, in steps of the grid."""


def again(point: Point, q: Question) -> Suggestion:
    """Repeat one run with other seeds, to see whether it holds."""
    return _run(q, point.size, point.log2_value, 2, "the verdict rests on a single run here")


def _beyond(
    points: Sequence[Point], rates: Sequence[float], best: float, step: float
) -> tuple[list[float], list[float]]:
    """The next values below and above the grid, and where an end is itself the best one, up to two octaves beyond.

    Where runs above it diverged there is but one: halfway to that cliff.
    """
    cliff = min((p.log2_value for p in points if p.loss_nats is None and p.log2_value > rates[-1]), default=None)
    far = [step, 2 * step, *([FAR_OCTAVES] if 2 * step < FAR_OCTAVES else [])]
    below = [rates[0] - octaves for octaves in (far if best == rates[0] else far[:1])]
    above = [rates[-1] + octaves for octaves in (far if best == rates[-1] else far[:1])]
    return below, above if cliff is None else [(rates[-1] + cliff) / 2]


FAR_OCTAVES = 2.0
"""An optimum may lie this far beyond the end of a fine grid."""


def _run(q: Question, size: int, log2_value: float, num_seeds: int, reason: str, *, mends: bool = True) -> Suggestion:
    return Suggestion(
        axis=q.axis, hyperparameter=q.hyperparameter, size=size, log2_value=float(log2_value), num_seeds=num_seeds,
        reason=reason, relative_cost=num_seeds * _price(size, q), mends=mends,
    )  # fmt: skip


def plan_round(
    points: Sequence[Point],
    found: Optima,
    q: Question,
    first: Sequence[Suggestion] = (),
    repeats: Sequence[Suggestion] = (),
) -> tuple[list[Suggestion], str | None]:
    """Choose the runs that would likely decide, by what each of many proposals would decide per cost.

    Finer rates between the best one and its neighbors, rates beyond the ends, larger sizes and more seeds compete
    (`transfer.design.prospects`). All together cost at most `MOST_SPENT` times what all runs so far did.

    Args:
        points: All runs of the condition.
        found: Their optima.
        q: What is asked; the target's own size is never suggested.
        first: Runs that mend unusable optima; others take their place if these decide more.
        repeats: Runs that check a suspicious one; they are part of the round in any case.

    Returns:
        The runs, cheapest first, and a sentence on their cost and what they would decide; None where nothing is known.
    """
    spent = sum(_price(p.size, q) for p in points)
    larger = [
        size
        for size in _larger(max(p.size for p in points), q)
        if min(map(len, NEW_GRIDS)) * _price(size, q) <= MOST_SPENT * spent
    ]
    prospects = look_ahead(points, found, q, larger, np.random.default_rng(0))
    if prospects is None:
        return [*repeats, *first], None
    fixed, again_fixed = (_propose(runs, prospects) for runs in ([*repeats, *first], repeats))
    options, is_known = _options(points, found, q, prospects), noise_is_known(points)
    # A guess of the noise that must be mended first justifies no expensive round
    most = (1.0 if first and not is_known else MOST_SPENT) * spent
    chosen = choose_round(prospects, options, fixed, spent=spent, most=most)
    runs, unusable = [*repeats, *first], set[int]()
    if first and len(fixed) == len(runs) and is_known:
        # Other runs may place an unusable optimum too, and decide more
        alternative = choose_round(prospects, options, again_fixed, spent=spent, most=most)
        if alternative.value > chosen.value:
            chosen, runs, fixed = alternative, list(repeats), again_fixed
            unusable = {optimum.size for optimum in found.optima if optimum.status != "ok"}
    for proposal in chosen.proposals[len(fixed) :]:
        mends, count = proposal.size in unusable, proposal.num_seeds
        runs += [_run(q, proposal.size, x, count, proposal.reason, mends=mends) for x in proposal.values]
    runs = _merge(runs)
    cost = sum(run.relative_cost for run in runs) / spent
    chance = f"would decide with a probability of about {chosen.probability:.1f}"
    if chosen.probability < LEAST_CHANCE:
        chance = "bring a verdict nearer, but one round may not decide"
    note = f"the runs to decide cost {format_factor(cost, 2)} times what was spent and {chance}"
    return sorted(runs, key=lambda run: (run.relative_cost, run.size, run.log2_value)), note if runs else None


def _propose(runs: Sequence[Suggestion], prospects: Prospects) -> list[Proposal]:
    """Return runs as proposals, where the posterior has their size."""
    return [
        Proposal(
            size=run.size,
            values=(run.log2_value,),
            num_seeds=run.num_seeds,
            cost=run.relative_cost,
            reason=run.reason,
        )
        for run in runs
        if run.size in prospects.sizes
    ]


def _merge(runs: Sequence[Suggestion]) -> list[Suggestion]:
    """Return one suggestion for each size and value."""
    merged: dict[tuple[int, float], Suggestion] = {}
    for run in runs:
        key = run.size, run.log2_value
        before = merged.get(key)
        merged[key] = (
            run
            if before is None
            else dataclasses.replace(
                before,
                num_seeds=before.num_seeds + run.num_seeds,
                relative_cost=before.relative_cost + run.relative_cost,
                mends=before.mends or run.mends,
            )
        )
    return list(merged.values())


LEAST_CHANCE = 0.1
"""Probability of a verdict below which a round is said to be one of several."""
FINER_OCTAVES = 0.24
"""Rates closer than this are not divided further."""
SEEDS_ADDED = (1, 2, 4)
"""New seeds that are proposed at the rates about an optimum."""
LEAST_OUTSIDE = 0.01
"""Least probability of an optimum beyond an end for which rates beyond it are proposed."""
WIDER_STEPS = (1, 2, 3)
"""Rates beyond an end that are proposed."""


def _options(points: Sequence[Point], found: Optima, q: Question, prospects: Prospects) -> list[tuple[Proposal, ...]]:
    """Return what can be run: for each size, for all sizes together, and for one larger size."""
    by_size = {size: [p for p in points if p.size == size] for size in found.fitted}
    kinds: dict[str, list[Proposal]] = {}
    for column, (size, own) in enumerate(by_size.items()):
        low, high = prospects.bounds[column]
        outside = (
            float(np.mean(prospects.optimum[:, column] < low)),
            float(np.mean(prospects.optimum[:, column] > high)),
        )
        for kind, values, num_seeds, reason, is_new_grid in _proposals_at(own, outside):
            cost = len(values) * num_seeds * _price(size, q)
            proposal = Proposal(
                size=size, values=values, num_seeds=num_seeds, cost=cost, reason=reason, is_new_grid=is_new_grid
            )
            kinds.setdefault(kind, []).append(proposal)
    options: list[tuple[Proposal, ...]] = []
    options += [(proposal,) for proposals in kinds.values() for proposal in proposals]
    options += [tuple(proposals) for proposals in kinds.values() if len(proposals) > 1]
    num_seeds = len({p.seed for p in by_size[found.fitted[-1]]})
    for column, size in enumerate(prospects.sizes[prospects.num_fitted :], start=prospects.num_fitted):
        center = round(float(prospects.optimum[:, column].mean()) / CENTER_STEP) * CENTER_STEP
        for count, octaves in itertools.product(sorted({1, 2, num_seeds}), NEW_GRIDS):
            values = tuple(center + k for k in octaves)
            cost = len(values) * count * _price(size, q)
            reason = "a larger proxy: it shows whether the optimum moves on"
            proposal = Proposal(size=size, values=values, num_seeds=count, cost=cost, reason=reason, is_new_grid=True)
            options.append((proposal,))
    return options


def _proposals_at(
    own: Sequence[Point], outside: tuple[float, float]
) -> Iterator[tuple[str, tuple[float, ...], int, str, bool]]:
    """Yield proposals at one size: kind, values, seeds, reason, and whether the seeds are new.

    Args:
        own: The runs of the size.
        outside: Probability that the optimum lies below, and above, the values that were run.
    """
    rates, best, num_seeds = finite_rates(own), best_rate(own), len({p.seed for p in own})
    if best is None or len(rates) < 2:
        return
    at, step = rates.index(best), _step(rates)
    gaps = list(itertools.pairwise(rates[max(at - 1, 0) : at + 2]))
    for kind, shares in (("halves", (0.5,)), ("thirds", (1 / 3, 2 / 3))):
        finer = [low + share * (high - low) for low, high in gaps for share in shares if high - low > FINER_OCTAVES]
        if finer:
            yield kind, tuple(finer), num_seeds, "a finer grid about the best value places the optimum", False
    ends = zip(("lower", "upper"), _beyond(own, rates, best, step), outside, (-step, step), strict=True)
    for name, beyond, probability, stride in ends:
        has_cliff = name == "upper" and any(p.loss_nats is None and p.log2_value > rates[-1] for p in own)
        for count in () if probability < LEAST_OUTSIDE else (1,) if has_cliff else WIDER_STEPS:
            values = tuple(beyond[0] + k * stride for k in range(count))
            reason = f"the optimum may lie at or beyond the {name} end of the values run"
            yield f"{name} {count}", values, num_seeds, reason, False
    near = sorted(sorted(rates, key=lambda rate: abs(rate - best))[: MIN_RATES + 1])
    for count in SEEDS_ADDED:
        yield f"{count} seeds", tuple(near), count, "more seeds about the best value place the optimum", True


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
    """Return larger sizes below the target, each a multiple of the base, as a width must be."""
    sizes = [round(by * largest) for by in LARGER if by * largest < q.target_size]
    return [size for size in sizes if size % q.base_size == 0]


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


def _spread(values: Sequence[float]) -> float:
    """Squares about the mean: what one seed says of a slope, and so of an optimum."""
    return float(np.var(values)) * len(values)


def _step(values: Sequence[float]) -> float:
    return float(np.median(np.diff(values))) if len(values) > 1 else 1.0
