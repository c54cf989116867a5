"""The search of a study: its phases, whether it continues, repeats of its best trials, and
comparisons with conventional values. No torch, no Optuna.

A search has one phase, and one more each time that its ranges grow, which is a record. Everything
else is a pure function of plan and results, so a resumed search continues as the uninterrupted one
would have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from launcher.experiments.conventions import ConventionDecisions, settled
from launcher.experiments.ladder import ladder_runs
from launcher.experiments.sweep_grids import axis_sizes, run_at
from launcher.plan.study import SEARCH_STAGE, Study
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.checks import SpecError
from proxies.core.notation import counted
from proxies.core.optimizers import RECIPES
from proxies.core.rules import decay_problems
from proxies.core.spec import RunResult, RunSpec
from sweeps.search.growth import Edge, grown, open_edges, probes, ranked
from sweeps.search.source import suggested
from sweeps.search.space import Params, SearchSpace
from transfer.question import AXES

if TYPE_CHECKING:
    from sweeps.search.replicates import Comparison
    from sweeps.store.ledger import Ledger


def implied_problems(study: Study, space: SearchSpace) -> list[str]:
    """Return the problems with the runs of every stage, at the ends of the search space."""
    makers: dict[str, Callable[[Params], list[RunSpec]]] = {
        "search": lambda point: [study.trial(point)],
        "transfer": lambda point: [
            run_at(study, axis, size, point, 0)
            for axis in AXES
            if axis != "params"
            for size in axis_sizes(study, axis)
        ],
        "ladder": lambda point: ladder_runs(study, point),
    }
    problems: dict[str, None] = {}
    for stage, make in makers.items():
        for point in (space.lowest, space.highest):
            try:
                found = [
                    f"{problem} at width {run.shape.width} and "
                    f"{counted(run.schedule.num_steps, 'step')}"
                    # at every size and duration, a step must leave something of a weight
                    for run in make(point)
                    for problem in decay_problems(
                        run.parametrization, RECIPES[run.optimizer], run.ratios, run.hparams
                    )
                ]
            except SpecError as error:
                found = error.problems
            problems.update(dict.fromkeys(f"{stage}: {problem}" for problem in found))
    return list(problems)


GROWTH = "growth"
"""Kind of the records of ranges that grew, with the first points beyond the old ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A search in one space, or its continuation in a wider one."""

    space: SearchSpace
    num_trials: int
    """Number of trials, including those of earlier phases."""
    num_known: int
    """Number of trials of earlier phases."""
    given: tuple[Params, ...]
    """Points of its first trials: the plan's, or points beyond an edge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedTrials:
    """Repeats of the best trials, as far as outcomes tell which are needed."""

    candidates: tuple[int, ...]
    """Indexes of the trials, best first."""
    specs: tuple[RunSpec, ...]
    comparison: Comparison | None
    """Comparison of the candidates; None before all repeats have ended."""


def phases(study: Study, ledger: Ledger) -> tuple[Phase, ...]:
    """Return the phases so far."""
    search = study.plan.search
    found = [
        Phase(
            space=study.space,
            num_trials=search.num_trials,
            num_known=0,
            given=study.plan.first_points,
        )
    ]
    for record in ledger.records(GROWTH):
        body, last = cast(dict[str, Any], record.body), found[-1]
        edges = [canon.decode(Edge, edge) for edge in body["edges"]]
        given = tuple(cast(list[Params], body["points"]))
        found.append(
            Phase(
                space=grown(last.space, edges),
                num_trials=last.num_trials + int(body["num_trials"]),
                num_known=last.num_trials,
                given=given,
            )
        )
    return tuple(found)


def trial_points(ledger: Ledger) -> list[Params]:
    """Return the points of the trials so far, by index.

    A repair may have lost the record of a growth but kept what was suggested after it. Until the
    ranges grow again, as the earlier trials will cause, those points are not trials.
    """
    search = cast(dict[str, Any], ledger.plan)["search"]
    more = sum(
        int(cast(dict[str, Any], record.body)["num_trials"]) for record in ledger.records(GROWTH)
    )
    return suggested(ledger, SEARCH_STAGE)[: search["num_trials"] + more]


def trial_results(study: Study, ledger: Ledger) -> list[RunResult | None]:
    """Return the results of the trials so far, by index, as the search used them; None for a trial
    that has not ended.
    """
    results = ledger.first_results()
    return [results.get(study.trial_id(point)) for point in trial_points(ledger)]


def ended_losses(study: Study, ledger: Ledger) -> list[float | None] | None:
    """Return the losses of all trials up to the last phase, with None for a trial that diverged or
    was pruned; None before all have ended.
    """
    found = trial_results(study, ledger)
    if len(found) < phases(study, ledger)[-1].num_trials or None in found:
        return None
    return [result.loss_nats for result in found if result is not None]


def pruned_trials(study: Study, ledger: Ledger) -> list[int]:
    """Return the indexes of trials that were pruned. Results of the same runs in other stages do
    not belong to the search.
    """
    ended = enumerate(trial_results(study, ledger))
    return [index for index, result in ended if result is not None and result.status == "pruned"]


def edges_of(
    study: Study, ledger: Ledger, losses: Sequence[float | None]
) -> tuple[list[Edge], list[str]]:
    """Return the ends of the ranges that do not bracket the optimum once a phase has ended, and the
    reasons why some of them cannot move.
    """
    space = phases(study, ledger)[-1].space
    edges: list[Edge] = []
    stopped: list[str] = []
    for edge in open_edges(space, trial_points(ledger), losses, pruned_trials(study, ledger)):
        problems = implied_problems(study, grown(space, [*edges, edge]))
        edges += [] if problems else [edge]
        stopped += [f"{edge.axis}'s {edge.side} end stays: {problems[0]}"] if problems else []
    return edges, stopped


def growth(study: Study, ledger: Ledger, losses: Sequence[float | None]) -> dict[str, Json] | None:
    """Return the record of how the ranges grow after a phase has ended; None if they do not."""
    search, done = study.plan.search, phases(study, ledger)
    if len(done) > search.max_extensions:
        return None
    edges, _ = edges_of(study, ledger, losses)
    if not edges:
        return None
    best = trial_points(ledger)[ranked(losses)[0]]
    given = probes(done[-1].space, edges, best)  # all: the new end is told by the last of each
    return {
        "edges": [canon.to_json(edge) for edge in edges],
        "points": [canon.to_json(point) for point in given],
        "num_trials": max(len(given), search.extension_trials),
    }


def replicated(
    study: Study, ledger: Ledger, losses: Sequence[float | None]
) -> RepeatedTrials | None:
    """Return the repeats of the best trials; None if the plan asks for none, or no trial
    finished.
    """
    search, best_first = study.plan.search, ranked(losses)
    if not search.num_replicates or not best_first:
        return None
    from sweeps.search.replicates import MOST_CANDIDATES, compare, num_candidates, replicates

    first: dict[str, int] = {}  # two trials may be one run
    points = trial_points(ledger)
    for index in best_first:
        first.setdefault(study.trial_id(points[index]), index)
        if len(first) == MOST_CANDIDATES:
            break
    candidates = tuple(first.values())[: num_candidates(search.num_replicates, len(first))]
    specs = {
        (which, number): study.trial(points[index], number + 1)
        for which, index in enumerate(candidates)
        for number in range(search.num_replicates)
    }
    results = ledger.results()
    outcomes = {
        one: results[spec.id].loss_nats for one, spec in specs.items() if spec.id in results
    }
    counts = replicates(len(candidates), search.num_replicates, search.parallelism, outcomes)
    asked = [(which, number) for which, count in enumerate(counts) for number in range(count)]
    done = all(one in outcomes for one in asked)
    return RepeatedTrials(
        candidates=candidates,
        specs=tuple(specs[one] for one in asked),
        comparison=compare(counts, outcomes) if done else None,
    )


def winner(study: Study, ledger: Ledger, losses: Sequence[float | None]) -> int | None:
    """Return the index of the best trial, by its repeats if there are any; None before these have
    ended, or if no trial finished.
    """
    again, best_first = replicated(study, ledger, losses), ranked(losses)
    if again is None:
        return best_first[0] if best_first else None
    return (
        again.candidates[again.comparison.standings[0].candidate]
        if again.comparison is not None
        else None
    )


def ties(
    study: Study, ledger: Ledger, losses: Sequence[float | None]
) -> ConventionDecisions | None:
    """Return the decisions between the best trial's values and conventional ones; None before there
    is a best trial.
    """
    best = winner(study, ledger, losses)
    if best is None:
        return None
    return settled(
        study, phases(study, ledger)[-1].space, trial_points(ledger)[best], ledger.results()
    )


def num_asked(study: Study, ledger: Ledger) -> tuple[int, int]:
    """Return the number of runs of the search that have ended, and the number asked for so far."""
    results, losses = ledger.first_results(), ended_losses(study, ledger)
    done = sum(result is not None for result in trial_results(study, ledger))
    ids: set[str] = set()
    if losses is not None:
        again, decided = replicated(study, ledger, losses), None
        if growth(study, ledger, losses) is None:
            decided = ties(study, ledger, losses)
        ids = {spec.id for found in (again, decided) if found for spec in found.specs}
    return done + sum(id in results for id in ids), phases(study, ledger)[-1].num_trials + len(ids)
