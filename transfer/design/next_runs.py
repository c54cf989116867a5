"""Suggestions of runs to add if the verdict is `cannot_tell`.

`suggest_mending_runs` makes an unusable optimum usable, and `plan_round` chooses the runs that are
most likely to decide.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from forerun._proxies.core.hyperparameters import LEARNING_RATE
from forerun._proxies.core.notation import format_counted, format_factor, format_significant
from forerun._transfer.basin.optimum import (
    MIN_RATES,
    Optima,
    Optimum,
    find_best_rate,
    find_better_end,
    has_repeated_value,
    list_finite_rates,
)
from forerun._transfer.design.rounds import Ensemble, Proposal, build_ensemble, choose_round
from forerun._transfer.question import (
    Axis,
    Hyperparameter,
    Point,
    Question,
    format_size,
    format_value,
)

LARGER_MULTIPLES = (1.5, 2, 3, 4, 8)
"""Sizes of new proxies that may be suggested, in multiples of the largest size."""
NEW_GRIDS = ((-2, -1, 0, 1, 2), (-1.5, -0.5, 0.5, 1.5), (-2, 0, 2), (-1, 0, 1))
"""Grids suggested at a new size, in octaves from the optimum extrapolated from the other sizes."""
CENTER_STEP = 0.5
"""Rounding of the center of a grid at a new size, in octaves."""
STEPS_BETWEEN = (-0.5, -0.25, 0.25, 0.5)
"""Distances of new values from the best one if its neighbors have a much larger loss, in steps of
the grid."""
FAR_OCTAVES = 2.0
"""Largest distance in octaves beyond the end of a fine grid at which an optimum is searched."""
FINER_OCTAVES = 0.24
"""Largest distance between neighboring rates, in octaves, between which no rate is proposed."""
SEEDS_ADDED = (1, 2, 4)
"""Numbers of new seeds that are proposed at the rates about an optimum."""
MIN_OUTSIDE_PROBABILITY = 0.01
"""Minimum probability that the optimum lies beyond an end of the rates. Below it, no rates beyond
that end are proposed."""
WIDER_STEPS = (1, 2, 3)
"""Numbers of rates that are proposed beyond an end."""
MIN_PROBABILITY = 0.1
"""Probability of a verdict below which the note says that one round may not be enough."""
MIN_SEEDS = 2
"""Number of new seeds at each value if the noise is unknown. With the first run, the value then has
three runs."""
MAX_SPENT_FACTOR = 2.0
"""Maximum cost of a round (the runs that are suggested together), in multiples of the cost of all
runs so far. The next round is planned with more information."""
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
    """Cost of all runs of the suggestion, in runs at the base size."""
    mends: bool
    """Whether a verdict needs these runs: without them there is no verdict, or only one that rests
    on a single run. Otherwise the runs narrow the intervals of a verdict."""

    def __str__(self) -> str:
        """Format the suggestion as a sentence: `run width 128 at 2^-3 (2 seeds): ...`."""
        seeds = format_counted(self.num_seeds, "seed")
        value = format_value(self.hyperparameter, self.log2_value)
        setting = (
            value if self.hyperparameter == LEARNING_RATE else f"{self.hyperparameter} = {value}"
        )
        return f"run {format_size(self.axis, self.size)} at {setting} ({seeds}): {self.reason}"


def suggest_mending_runs(
    optimum: Optimum, points: Sequence[Point], question: Question, *, noise_known: bool
) -> list[Suggestion]:
    """Suggest runs that make the optimum of one size usable.

    If the noise is unknown and the best value lies inside the grid, new seeds are suggested. They
    show whether the ends of the grid are really worse than the best value.

    Args:
        optimum: The optimum of the size, with a status other than `ok`.
        points: The runs of that size.
        question: The question of the verdict.
        noise_known: Whether any value was run with two seeds.
    """
    rates, best, end = list_finite_rates(points), find_best_rate(points), find_better_end(points)
    num_seeds = len({p.seed for p in points})

    def suggest(values: Iterable[float], reason: str, seeds: int = num_seeds) -> list[Suggestion]:
        return [suggest_run(question, optimum.size, x, seeds, reason) for x in values]

    if best is None or end is None:
        low = min(p.log2_value for p in points)
        # Leave a gap of one octave below the lowest rate, since a rate there is likely to diverge
        values = [low - k for k in range(2, 2 + MIN_RATES)]
        return suggest(values, "every run at this size diverged")
    step = _compute_step(rates)
    below, above = _list_values_beyond(points, rates, best, step)
    if optimum.status == "too_few" and len(rates) >= MIN_RATES:
        beyond = [*(below if best == rates[0] else ()), *(above if best == rates[-1] else ())]
        return suggest(
            sorted([*(best + k * step for k in STEPS_BETWEEN), *beyond]),
            "the loss changes too much between the values run to place the optimum",
        )
    if optimum.status == "too_few":
        # New rates nearest to the best one, at most three steps below the grid and one above it
        near = [x for k in (1, 2, 3) for x in (best - k * step, best + k * step)]
        new = [x for x in near if x not in rates and rates[0] - 3 * step <= x <= above[0] + 1e-9]
        return suggest(
            new[: MIN_RATES + 1 - len(rates)],
            f"{format_counted(len(rates), 'finished value')}: there must be at least {MIN_RATES}",
        )
    if not noise_known and end.excess_nats > 0:
        noise = format_significant(end.noise_needed_nats, 2)
        side, at = "above" if end.name == "lower" else "below", rates.index(best)
        return suggest(
            sorted({end.log2_value, *rates[max(at - 1, 0) : at + 2]}),
            f"the noise is unknown: under {noise} nats the optimum lies {side} the {end.name} end",
            MIN_SEEDS,
        )
    if optimum.status == "flat":
        reason = "the learning-rate curve is no deeper than the noise"
        core = sorted(sorted(rates, key=lambda rate: abs(rate - best))[:MIN_RATES])
        ends = suggest((below[0], above[0]), reason)
        return ends + suggest(core, reason, max(num_seeds, 2))
    return suggest(
        above if end.name == "upper" else below,
        f"the optimum may lie at or beyond the {end.name} end of the values run",
    )


def suggest_repeats(point: Point, question: Question) -> Suggestion:
    """Suggest other seeds of one run, to check whether its loss is reproducible."""
    return suggest_run(
        question, point.size, point.log2_value, 2, "the verdict rests on a single run here"
    )


def _list_values_beyond(
    points: Sequence[Point], rates: Sequence[float], best: float, step: float
) -> tuple[list[float], list[float]]:
    """Return the next values below the grid, and the next values above it: one value at each end.
    At an end that is itself the best value, there are more, up to `FAR_OCTAVES` or two steps away,
    whichever is farther.

    If runs above the upper end diverged, the only value above lies halfway between that end and the
    lowest diverged value.
    """
    cliff = min(
        (p.log2_value for p in points if p.loss_nats is None and p.log2_value > rates[-1]),
        default=None,
    )
    far = [step, 2 * step, *([FAR_OCTAVES] if 2 * step < FAR_OCTAVES else [])]
    below = [rates[0] - octaves for octaves in (far if best == rates[0] else far[:1])]
    above = [rates[-1] + octaves for octaves in (far if best == rates[-1] else far[:1])]
    return below, above if cliff is None else [(rates[-1] + cliff) / 2]


def suggest_run(
    question: Question,
    size: int,
    log2_value: float,
    num_seeds: int,
    reason: str,
    *,
    mends: bool = True,
) -> Suggestion:
    """Return the suggestion to run one value at one size, with its cost."""
    return Suggestion(
        axis=question.axis,
        hyperparameter=question.hyperparameter,
        size=size,
        log2_value=float(log2_value),
        num_seeds=num_seeds,
        reason=reason,
        relative_cost=num_seeds * compute_run_cost(size, question),
        mends=mends,
    )


def plan_round(
    points: Sequence[Point],
    optima: Optima,
    question: Question,
    mending_runs: Sequence[Suggestion] = (),
    repeats: Sequence[Suggestion] = (),
) -> tuple[list[Suggestion], str | None]:
    """Choose the runs that are most likely to lead to a verdict for their cost.

    Candidates are finer rates between the best one and its neighbors, rates beyond the ends, larger
    sizes, and more seeds (`forerun._transfer.design.rounds`). The round costs at most
    `MAX_SPENT_FACTOR` times as much as all runs so far.

    Args:
        points: All runs that are judged.
        optima: Optima of these runs.
        question: The question of the verdict.
            Runs at the target size are never suggested.
        mending_runs: Runs that make unusable optima usable. Other runs may replace them, if those
            are more likely to decide.
        repeats: Runs that check a suspicious one. They are part of the round in any case.

    Returns:
        The runs, cheapest first, and a sentence on their cost and the probability that they decide;
        None if that probability cannot be estimated or nothing is suggested.
    """
    spent = sum(compute_run_cost(p.size, question) for p in points)
    # Larger sizes at which the smallest grid is affordable
    larger = [
        size
        for size in list_larger_sizes(max(p.size for p in points), question)
        if min(map(len, NEW_GRIDS)) * compute_run_cost(size, question) <= MAX_SPENT_FACTOR * spent
    ]
    ensemble = build_ensemble(points, optima, question, larger)
    if ensemble is None:
        return [*repeats, *mending_runs], None
    runs, probability = _choose_runs(
        points, optima, question, ensemble, mending_runs, repeats, spent
    )
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
    question: Question,
    ensemble: Ensemble,
    mending_runs: Sequence[Suggestion],
    repeats: Sequence[Suggestion],
    spent: float,
) -> tuple[list[Suggestion], float]:
    """Choose the runs of a round, and return them with the probability that they decide."""
    fixed_repeats = _to_proposals(repeats, ensemble)
    fixed = fixed_repeats + _to_proposals(mending_runs, ensemble)
    options = _list_options(points, optima, question, ensemble)
    is_known = has_repeated_value(points)
    # While an optimum is unusable and the noise is only a guess, a round may cost less
    max_cost = (1.0 if mending_runs and not is_known else MAX_SPENT_FACTOR) * spent
    chosen = choose_round(ensemble, options, fixed, spent=spent, max_cost=max_cost)
    runs, unusable = [*repeats, *mending_runs], set[int]()
    if mending_runs and len(fixed) == len(runs) and is_known:
        # Other runs may make an unusable optimum usable too, and be more likely to decide
        alternative = choose_round(ensemble, options, fixed_repeats, spent=spent, max_cost=max_cost)
        if alternative.credited_probability > chosen.credited_probability:
            chosen, runs, fixed = alternative, list(repeats), fixed_repeats
            unusable = {optimum.size for optimum in optima.optima if optimum.status != "ok"}
    # The fixed proposals come first in a round
    for proposal in chosen.proposals[len(fixed) :]:
        mends, count = proposal.size in unusable, proposal.num_seeds
        runs += [
            suggest_run(question, proposal.size, x, count, proposal.reason, mends=mends)
            for x in proposal.values
        ]
    return _merge_suggestions(runs), chosen.probability


def _to_proposals(runs: Sequence[Suggestion], ensemble: Ensemble) -> list[Proposal]:
    """Convert runs to proposals; leave out runs of a size that the posterior does not cover."""
    return [
        Proposal(run.size, (run.log2_value,), run.num_seeds, run.relative_cost, run.reason)
        for run in runs
        if run.size in ensemble.sizes
    ]


def _merge_suggestions(runs: Sequence[Suggestion]) -> list[Suggestion]:
    """Merge suggestions of the same size and value."""
    merged: dict[tuple[int, float], Suggestion] = {}
    for run in runs:
        key = run.size, run.log2_value
        earlier = merged.get(key)
        merged[key] = (
            run
            if earlier is None
            else dataclasses.replace(
                earlier,
                num_seeds=earlier.num_seeds + run.num_seeds,
                relative_cost=earlier.relative_cost + run.relative_cost,
                mends=earlier.mends or run.mends,
            )
        )
    return list(merged.values())


def _list_options(
    points: Sequence[Point], optima: Optima, question: Question, ensemble: Ensemble
) -> list[tuple[Proposal, ...]]:
    """List the options of a round. An option is a set of proposals that are taken together: one
    proposal for one size, proposals of one kind for all sizes, or one proposal for a larger size.
    """
    kinds: dict[str, list[Proposal]] = {}
    for column, size in enumerate(optima.fitted):
        draws, (low, high) = ensemble.optimum[:, column], ensemble.bounds[column]
        outside = float(np.mean(draws < low)), float(np.mean(draws > high))
        size_runs = [p for p in points if p.size == size]
        for kind, proposal in _propose_at_size(size_runs, outside, question):
            kinds.setdefault(kind, []).append(proposal)
    options: list[tuple[Proposal, ...]] = []
    options += [(proposal,) for proposals in kinds.values() for proposal in proposals]
    options += [tuple(proposals) for proposals in kinds.values() if len(proposals) > 1]
    num_seeds = len({p.seed for p in points if p.size == optima.fitted[-1]})
    reason = "a larger proxy: it shows whether the optimum moves on"
    for column in range(ensemble.num_fitted, len(ensemble.sizes)):
        center = round(float(ensemble.optimum[:, column].mean()) / CENTER_STEP) * CENTER_STEP
        options += [
            (
                _propose(
                    question,
                    ensemble.sizes[column],
                    [center + k for k in octaves],
                    count,
                    reason,
                    True,
                ),
            )
            for count, octaves in itertools.product(sorted({1, 2, num_seeds}), NEW_GRIDS)
        ]
    return options


def _propose(
    question: Question,
    size: int,
    values: Sequence[float],
    num_seeds: int,
    reason: str,
    has_own_intercepts: bool = False,
) -> Proposal:
    cost = len(values) * num_seeds * compute_run_cost(size, question)
    return Proposal(size, tuple(values), num_seeds, cost, reason, has_own_intercepts)


def _propose_at_size(
    size_runs: Sequence[Point], outside: tuple[float, float], question: Question
) -> Iterator[tuple[str, Proposal]]:
    """Yield the proposals at one size, each with the name of its kind.

    Args:
        size_runs: The runs of the size.
        outside: Probability that the optimum lies below the values that were run, and above them.
        question: The question of the verdict.
    """
    rates, best, size = list_finite_rates(size_runs), find_best_rate(size_runs), size_runs[0].size
    num_seeds = len({p.seed for p in size_runs})
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
        reason = "a finer grid about the best value places the optimum"
        if finer:
            yield kind, _propose(question, size, finer, num_seeds, reason)
    has_cliff = any(p.loss_nats is None and p.log2_value > rates[-1] for p in size_runs)
    ends = zip(
        ("lower", "upper"),
        _list_values_beyond(size_runs, rates, best, step),
        outside,
        (-step, step),
        strict=True,
    )
    for name, beyond, probability, stride in ends:
        if probability < MIN_OUTSIDE_PROBABILITY:
            continue
        for count in (1,) if has_cliff and name == "upper" else WIDER_STEPS:
            values = [beyond[0] + k * stride for k in range(count)]
            reason = f"the optimum may lie at or beyond the {name} end of the values run"
            yield f"{name} {count}", _propose(question, size, values, num_seeds, reason)
    near = sorted(sorted(rates, key=lambda rate: abs(rate - best))[: MIN_RATES + 1])
    for count in SEEDS_ADDED:
        reason = "more seeds about the best value place the optimum"
        yield f"{count} seeds", _propose(question, size, near, count, reason, True)


def list_larger_sizes(largest: int, question: Question) -> list[int]:
    """Return the sizes between the largest one and the target that may be suggested. They are
    multiples of the base size, as widths must be.
    """
    sizes = [
        round(multiple * largest)
        for multiple in LARGER_MULTIPLES
        if multiple * largest < question.target_size
    ]
    return [size for size in sizes if size % question.base_size == 0]


def compute_run_cost(size: int, question: Question) -> float:
    """Compute the cost of one run at a size, in runs at the base size."""
    return float((size / question.base_size) ** COST_EXPONENTS[question.axis])


def _compute_step(values: Sequence[float]) -> float:
    return float(np.median(np.diff(values))) if len(values) > 1 else 1.0
