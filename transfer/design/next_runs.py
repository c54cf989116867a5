"""The runs to add if the verdict is `cannot_tell`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from proxies.core.hyperparameters import LEARNING_RATE
from proxies.core.notation import counted, format_factor, format_significant
from transfer.basin.optimum import (
    MIN_RATES,
    Optima,
    Optimum,
    find_best_rate,
    find_better_end,
    list_finite_rates,
    noise_is_known,
)
from transfer.design.prospects import Proposal, Prospects, choose_round, look_ahead
from transfer.question import Axis, Hyperparameter, Point, Question, at_size, written

LARGER = (1.5, 2, 3, 4, 8)
"""Sizes of new proxies that may be suggested, in multiples of the largest size."""
NEW_GRIDS = ((-2, -1, 0, 1, 2), (-1.5, -0.5, 0.5, 1.5), (-2, 0, 2), (-1, 0, 1))
"""Grids suggested at a new size, in octaves from the optimum extrapolated from the other sizes."""
CENTER_STEP = 0.5
"""Rounding of the center of such a grid, in octaves."""
MIN_SEEDS = 2
"""New seeds at each value if the noise is unknown; with the first run there are then three."""
MAX_SPENT_FACTOR = 2.0
"""Largest cost of a round, in multiples of the cost of all runs so far. The next round is planned
with more information."""
COST_EXPONENTS: dict[Axis, float] = {
    "width": 2.0,
    "depth": 1.0,
    "batch": 0.0,
    "duration": 1.0,
    "params": 1.0,
}
"""Exponent with which the FLOPs of a run grow with size, all else being equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """Runs to add at one size and one value, with seeds that were not run there yet."""

    axis: Axis
    hyperparameter: Hyperparameter
    size: int
    log2_value: float
    num_seeds: int
    reason: str
    relative_cost: float
    """Cost of all its runs, in runs at the base size."""
    mends: bool
    """Whether there is no verdict without these runs, or only one that rests on a single run.
    Otherwise they narrow the intervals of a verdict."""

    def __str__(self) -> str:
        """Format the suggestion as a sentence: `run width 128 at 2^-3 (2 seeds): ...`."""
        seeds = counted(self.num_seeds, "seed")
        value = written(self.hyperparameter, self.log2_value)
        setting = (
            value if self.hyperparameter == LEARNING_RATE else f"{self.hyperparameter} = {value}"
        )
        return f"run {at_size(self.axis, self.size)} at {setting} ({seeds}): {self.reason}"


def suggest_mending_runs(
    optimum: Optimum, points: Sequence[Point], q: Question, *, noise_known: bool = True
) -> list[Suggestion]:
    """Suggest runs that make the optimum of one size usable. `points` are the runs of that size.

    If the noise is unknown and the best value lies inside the grid, seeds come first: they show
    whether the end is worse.
    """
    size, rates, best = optimum.size, list_finite_rates(points), find_best_rate(points)
    num_seeds = len({p.seed for p in points})
    if best is None:
        low = min(p.log2_value for p in points)
        return [
            suggest_run(q, size, low - k, num_seeds, "every run at this size diverged")
            for k in range(2, 2 + MIN_RATES)
        ]
    step = _compute_step(rates)
    below, above = _list_values_beyond(points, rates, best, step)
    end = find_better_end(points)
    assert end is not None
    if optimum.status != "too_few" and not noise_known and end.excess_nats > 0:
        noise = format_significant(end.noise_needed_nats, 2)
        reason = (
            f"the noise is unknown: under {noise} nats the optimum lies above the {end.name} end"
        )
        reason = reason if end.name == "lower" else reason.replace("above", "below")
        at = rates.index(best)
        return [
            suggest_run(q, size, x, MIN_SEEDS, reason)
            for x in sorted({end.log2_value, *rates[max(at - 1, 0) : at + 2]})
        ]
    if optimum.status == "flat":
        reason = "the learning-rate curve is no deeper than the noise"
        core = sorted(sorted(rates, key=lambda rate: abs(rate - best))[:MIN_RATES])
        return [suggest_run(q, size, rate, num_seeds, reason) for rate in (below[0], above[0])] + [
            suggest_run(q, size, rate, max(num_seeds, 2), reason) for rate in core
        ]
    if optimum.status == "too_few" and len(rates) >= MIN_RATES:
        reason = "the loss changes too much between the values run to place the optimum"
        beyond = [*(below if best == rates[0] else ()), *(above if best == rates[-1] else ())]
        return [
            suggest_run(q, size, x, num_seeds, reason)
            for x in sorted([*(best + k * step for k in STEPS_BETWEEN), *beyond])
        ]
    if optimum.status == "too_few":
        near = [x for k in (1, 2, 3) for x in (best - k * step, best + k * step)]
        new = [x for x in near if x not in rates and rates[0] - 3 * step <= x <= above[0] + 1e-9]
        reason = f"{counted(len(rates), 'finished value')}: there must be at least {MIN_RATES}"
        return [
            suggest_run(q, size, x, num_seeds, reason) for x in new[: MIN_RATES + 1 - len(rates)]
        ]
    reason = f"the optimum may lie at or beyond the {end.name} end of the values run"
    return [
        suggest_run(q, size, x, num_seeds, reason)
        for x in (above if end.name == "upper" else below)
    ]


STEPS_BETWEEN = (-0.5, -0.25, 0.25, 0.5)
"""New values about the best one if its neighbors have a much larger loss, in steps of the grid."""


def suggest_repeats(point: Point, q: Question) -> Suggestion:
    """Suggest other seeds of one run, to check whether its loss is reproducible."""
    return suggest_run(q, point.size, point.log2_value, 2, "the verdict rests on a single run here")


def _list_values_beyond(
    points: Sequence[Point], rates: Sequence[float], best: float, step: float
) -> tuple[list[float], list[float]]:
    """Return the next values below and above the grid. If an end is itself the best value, they
    extend up to two octaves beyond it.

    If runs above the upper end diverged, the only value above is halfway to the lowest of them.
    """
    cliff = min(
        (p.log2_value for p in points if p.loss_nats is None and p.log2_value > rates[-1]),
        default=None,
    )
    far = [step, 2 * step, *([FAR_OCTAVES] if 2 * step < FAR_OCTAVES else [])]
    below = [rates[0] - octaves for octaves in (far if best == rates[0] else far[:1])]
    above = [rates[-1] + octaves for octaves in (far if best == rates[-1] else far[:1])]
    return below, above if cliff is None else [(rates[-1] + cliff) / 2]


FAR_OCTAVES = 2.0
"""Distance in octaves beyond the end of a fine grid at which an optimum is still searched."""


def suggest_run(
    q: Question, size: int, log2_value: float, num_seeds: int, reason: str, *, mends: bool = True
) -> Suggestion:
    """Return the suggestion to run one value at one size, with its cost."""
    return Suggestion(
        axis=q.axis,
        hyperparameter=q.hyperparameter,
        size=size,
        log2_value=float(log2_value),
        num_seeds=num_seeds,
        reason=reason,
        relative_cost=num_seeds * compute_run_cost(size, q),
        mends=mends,
    )


def plan_round(
    points: Sequence[Point],
    optima: Optima,
    q: Question,
    first: Sequence[Suggestion] = (),
    repeats: Sequence[Suggestion] = (),
) -> tuple[list[Suggestion], str | None]:
    """Choose the runs most likely to decide, by the probability of a verdict per cost.

    Finer rates between the best one and its neighbors, rates beyond the ends, larger sizes, and
    more seeds compete (`transfer.design.prospects`). The round costs at most `MAX_SPENT_FACTOR`
    times what all runs so far did.

    Args:
        points: All runs of the condition.
        optima: Optima of these runs.
        q: The question; the target's own size is never suggested.
        first: Runs that make unusable optima usable. Other runs replace them if these are more
            likely to decide.
        repeats: Runs that check a suspicious one. They are part of the round in any case.

    Returns:
        The runs, cheapest first, and a sentence on their cost and the probability that they decide;
        None if that probability cannot be estimated or nothing is suggested.
    """
    spent = sum(compute_run_cost(p.size, q) for p in points)
    larger = [
        size
        for size in list_larger_sizes(max(p.size for p in points), q)
        if min(map(len, NEW_GRIDS)) * compute_run_cost(size, q) <= MAX_SPENT_FACTOR * spent
    ]
    prospects = look_ahead(points, optima, q, larger, np.random.default_rng(0))
    if prospects is None:
        return [*repeats, *first], None
    runs, probability = _choose_runs(points, optima, q, prospects, first, repeats, spent)
    cost = sum(run.relative_cost for run in runs) / spent
    chance = f"would decide with a probability of about {probability:.1f}"
    if probability < MIN_PROBABILITY:
        chance = "bring a verdict nearer, but one round may not decide"
    note = f"the runs to decide cost {format_factor(cost, 2)} times what was spent and {chance}"
    runs = sorted(runs, key=lambda run: (run.relative_cost, run.size, run.log2_value))
    return runs, note if runs else None


def _choose_runs(
    points: Sequence[Point],
    optima: Optima,
    q: Question,
    prospects: Prospects,
    first: Sequence[Suggestion],
    repeats: Sequence[Suggestion],
    spent: float,
) -> tuple[list[Suggestion], float]:
    """Choose the runs of a round, and return them with the probability that they decide."""
    fixed = _to_proposals([*repeats, *first], prospects)
    fixed_repeats = _to_proposals(repeats, prospects)
    options, is_known = _list_options(points, optima, q, prospects), noise_is_known(points)
    # A guess of the noise that must be mended first justifies no expensive round
    max_cost = (1.0 if first and not is_known else MAX_SPENT_FACTOR) * spent
    chosen = choose_round(prospects, options, fixed, spent=spent, most=max_cost)
    runs, unusable = [*repeats, *first], set[int]()
    if first and len(fixed) == len(runs) and is_known:
        # Other runs may make an unusable optimum usable too, and be more likely to decide
        alternative = choose_round(prospects, options, fixed_repeats, spent=spent, most=max_cost)
        if alternative.value > chosen.value:
            chosen, runs, fixed = alternative, list(repeats), fixed_repeats
            unusable = {optimum.size for optimum in optima.optima if optimum.status != "ok"}
    for proposal in chosen.proposals[len(fixed) :]:
        mends, count = proposal.size in unusable, proposal.num_seeds
        runs += [
            suggest_run(q, proposal.size, x, count, proposal.reason, mends=mends)
            for x in proposal.values
        ]
    return _merge_suggestions(runs), chosen.probability


def _to_proposals(runs: Sequence[Suggestion], prospects: Prospects) -> list[Proposal]:
    """Convert runs to proposals, as far as the posterior covers their size."""
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


def _merge_suggestions(runs: Sequence[Suggestion]) -> list[Suggestion]:
    """Merge suggestions of the same size and value."""
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


MIN_PROBABILITY = 0.1
"""Probability of a verdict below which the note says that one round may not be enough."""
FINER_OCTAVES = 0.24
"""Distance in octaves below which rates are not subdivided further."""
SEEDS_ADDED = (1, 2, 4)
"""Numbers of new seeds that are proposed at the rates about an optimum."""
MIN_OUTSIDE_PROBABILITY = 0.01
"""Minimum probability of an optimum beyond an end at which rates beyond that end are proposed."""
WIDER_STEPS = (1, 2, 3)
"""Numbers of rates that are proposed beyond an end."""


def _list_options(
    points: Sequence[Point], optima: Optima, q: Question, prospects: Prospects
) -> list[tuple[Proposal, ...]]:
    """List the options of a round: proposals for one size, for all sizes together, and for one
    larger size.
    """
    by_size = {size: [p for p in points if p.size == size] for size in optima.fitted}
    kinds: dict[str, list[Proposal]] = {}
    for column, (size, size_runs) in enumerate(by_size.items()):
        low, high = prospects.bounds[column]
        outside = (
            float(np.mean(prospects.optimum[:, column] < low)),
            float(np.mean(prospects.optimum[:, column] > high)),
        )
        for kind, values, num_seeds, reason, is_new_grid in _propose_at_size(size_runs, outside):
            cost = len(values) * num_seeds * compute_run_cost(size, q)
            proposal = Proposal(
                size=size,
                values=values,
                num_seeds=num_seeds,
                cost=cost,
                reason=reason,
                is_new_grid=is_new_grid,
            )
            kinds.setdefault(kind, []).append(proposal)
    options: list[tuple[Proposal, ...]] = []
    options += [(proposal,) for proposals in kinds.values() for proposal in proposals]
    options += [tuple(proposals) for proposals in kinds.values() if len(proposals) > 1]
    num_seeds = len({p.seed for p in by_size[optima.fitted[-1]]})
    for column, size in enumerate(
        prospects.sizes[prospects.num_fitted :], start=prospects.num_fitted
    ):
        center = round(float(prospects.optimum[:, column].mean()) / CENTER_STEP) * CENTER_STEP
        for count, octaves in itertools.product(sorted({1, 2, num_seeds}), NEW_GRIDS):
            values = tuple(center + k for k in octaves)
            cost = len(values) * count * compute_run_cost(size, q)
            reason = "a larger proxy: it shows whether the optimum moves on"
            proposal = Proposal(
                size=size,
                values=values,
                num_seeds=count,
                cost=cost,
                reason=reason,
                is_new_grid=True,
            )
            options.append((proposal,))
    return options


def _propose_at_size(
    size_runs: Sequence[Point], outside: tuple[float, float]
) -> Iterator[tuple[str, tuple[float, ...], int, str, bool]]:
    """Yield the proposals at one size as (kind, values, seeds, reason, whether the seeds are new).

    Args:
        size_runs: The runs of the size.
        outside: Probability that the optimum lies below, and above, the values that were run.
    """
    rates, best, num_seeds = (
        list_finite_rates(size_runs),
        find_best_rate(size_runs),
        len({p.seed for p in size_runs}),
    )
    if best is None or len(rates) < 2:
        return
    at, step = rates.index(best), _compute_step(rates)
    gaps = list(itertools.pairwise(rates[max(at - 1, 0) : at + 2]))
    for kind, shares in (("halves", (0.5,)), ("thirds", (1 / 3, 2 / 3))):
        finer = [
            low + share * (high - low)
            for low, high in gaps
            for share in shares
            if high - low > FINER_OCTAVES
        ]
        if finer:
            yield (
                kind,
                tuple(finer),
                num_seeds,
                "a finer grid about the best value places the optimum",
                False,
            )
    ends = zip(
        ("lower", "upper"),
        _list_values_beyond(size_runs, rates, best, step),
        outside,
        (-step, step),
        strict=True,
    )
    for name, beyond, probability, stride in ends:
        has_cliff = name == "upper" and any(
            p.loss_nats is None and p.log2_value > rates[-1] for p in size_runs
        )
        for count in (
            () if probability < MIN_OUTSIDE_PROBABILITY else (1,) if has_cliff else WIDER_STEPS
        ):
            values = tuple(beyond[0] + k * stride for k in range(count))
            reason = f"the optimum may lie at or beyond the {name} end of the values run"
            yield f"{name} {count}", values, num_seeds, reason, False
    near = sorted(sorted(rates, key=lambda rate: abs(rate - best))[: MIN_RATES + 1])
    for count in SEEDS_ADDED:
        yield (
            f"{count} seeds",
            tuple(near),
            count,
            "more seeds about the best value place the optimum",
            True,
        )


def list_larger_sizes(largest: int, q: Question) -> list[int]:
    """Return the larger sizes below the target that are multiples of the base, as widths must
    be.
    """
    sizes = [round(by * largest) for by in LARGER if by * largest < q.target_size]
    return [size for size in sizes if size % q.base_size == 0]


def compute_run_cost(size: int, q: Question) -> float:
    """Compute the cost of one run at a size, in runs at the base size."""
    return float((size / q.base_size) ** COST_EXPONENTS[q.axis])


def _compute_step(values: Sequence[float]) -> float:
    return float(np.median(np.diff(values))) if len(values) > 1 else 1.0
