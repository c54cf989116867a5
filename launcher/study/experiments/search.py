"""The search of a study, as its plan and its ledger tell it: phases, trials, growth of the ranges,
repeats of the best trials, and the winner.

A search has one phase, and one more each time that its ranges grow. The ledger records each growth.
Everything else is a pure function of plan and results, so a resumed search continues as the
uninterrupted one would have. `find_run_problems` tells, before anything runs, whether the runs at
the ends of a search space are possible. This module imports neither torch nor Optuna.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from forerun._launcher.study.experiments.conventions import ConventionDecisions, decide_conventions
from forerun._launcher.study.experiments.ladder import build_ladder
from forerun._launcher.study.experiments.sizes import build_run_at, list_axis_sizes
from forerun._launcher.study.plan.study import SEARCH_STAGE, Study
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.optimizers import RECIPES
from forerun._proxies.core.rules import find_decay_problems
from forerun._proxies.core.spec import RunResult, RunSpec
from forerun._sweeps.search.growth import (
    Edge,
    find_open_edges,
    grow_space,
    make_probes,
    rank_trials,
)
from forerun._sweeps.search.source import load_suggestions
from forerun._sweeps.search.space import Params, SearchSpace
from forerun._transfer.question import AXES

if TYPE_CHECKING:
    from forerun._sweeps.search.repeats import Comparison
    from forerun._sweeps.store.ledger import Ledger


def find_run_problems(study: Study, space: SearchSpace) -> list[str]:
    """Return the problems with the runs of every stage, at the ends of the search space."""
    makers: dict[str, Callable[[Params], list[RunSpec]]] = {
        "search": lambda point: [study.build_trial(point)],
        "transfer": lambda point: [
            build_run_at(study, axis, size, point, 0)
            for axis in AXES
            if axis != "params"
            for size in list_axis_sizes(study, axis)
        ],
        "ladder": lambda point: build_ladder(study, point),
    }
    problems: dict[str, None] = {}
    for stage, make in makers.items():
        for point in (space.lowest, space.highest):
            try:
                reasons = [reason for run in make(point) for reason in _find_decay_problems(run)]
            except SpecError as error:
                reasons = error.problems
            problems.update(dict.fromkeys(f"{stage}: {reason}" for reason in reasons))
    return list(problems)


def _find_decay_problems(run: RunSpec) -> list[str]:
    """Return the problems with weight decays so large that one step would erase a weight."""
    place = f"at width {run.shape.width} and {format_counted(run.schedule.num_steps, 'step')}"
    recipe = RECIPES[run.optimizer]
    problems = find_decay_problems(run.parametrization, recipe, run.ratios, run.hparams)
    return [f"{problem} {place}" for problem in problems]


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
    """Points of the phase's first trials: in the first phase, those of the plan; later, points
    beyond the ends that moved.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedTrials:
    """Repeats of the best trials, as far as outcomes tell which are needed."""

    candidates: tuple[int, ...]
    """Indexes of the trials, best first."""
    specs: tuple[RunSpec, ...]
    """Runs of the repeats, without the trials' own runs."""
    comparison: Comparison | None
    """Comparison of the candidates; None before all repeats have ended."""


def load_phases(study: Study, ledger: Ledger) -> tuple[Phase, ...]:
    """Return the phases so far."""
    num_trials, given = study.plan.search.num_trials, study.plan.first_points
    phases = [Phase(space=study.space, num_trials=num_trials, num_known=0, given=given)]
    for body in _read_growths(ledger):
        last, edges = phases[-1], [canon.decode(Edge, edge) for edge in body["edges"]]
        phases.append(
            Phase(
                space=grow_space(last.space, edges),
                num_trials=last.num_trials + int(body["num_trials"]),
                num_known=last.num_trials,
                given=tuple(body["points"]),
            )
        )
    return tuple(phases)


def _read_growths(ledger: Ledger) -> list[Any]:
    return [record.body for record in ledger.read_records(GROWTH)]


def load_trial_points(ledger: Ledger) -> list[Params]:
    """Return the points of the trials so far, by index.

    A repair may have lost the record of a growth but kept the suggestions after it. Those points
    are not trials until the growth is recorded again, which follows from the earlier trials.
    """
    plan = cast(dict[str, Any], ledger.plan)
    more = sum(int(body["num_trials"]) for body in _read_growths(ledger))
    return load_suggestions(ledger, SEARCH_STAGE)[: plan["search"]["num_trials"] + more]


def load_trial_results(study: Study, ledger: Ledger) -> list[RunResult | None]:
    """Return the results of the trials so far, by index, as the search used them; None for a trial
    that has not ended.
    """
    results = ledger.get_first_results()
    return [results.get(study.get_trial_id(point)) for point in load_trial_points(ledger)]


def load_ended_losses(study: Study, ledger: Ledger) -> list[float | None] | None:
    """Return the losses of all trials up to the last phase, in nats; None before all have ended.

    The loss of a trial that diverged or was pruned is None.
    """
    results = load_trial_results(study, ledger)
    if len(results) < load_phases(study, ledger)[-1].num_trials or None in results:
        return None
    return [result.loss_nats for result in results if result is not None]


def find_pruned_trials(study: Study, ledger: Ledger) -> list[int]:
    """Return the indexes of the trials that the search pruned. Another stage may have trained the
    same run to its end; that does not count here.
    """
    results = enumerate(load_trial_results(study, ledger))
    return [index for index, result in results if result and result.status == "pruned"]


def find_search_edges(
    study: Study, ledger: Ledger, losses: Sequence[float | None]
) -> tuple[list[Edge], list[str]]:
    """Return the range ends beyond which the optimum may lie, and the reasons why other such ends
    cannot move. All trials of the last phase must have ended.
    """
    space = load_phases(study, ledger)[-1].space
    edges: list[Edge] = []
    stopped: list[str] = []
    for edge in find_open_edges(
        space, load_trial_points(ledger), losses, find_pruned_trials(study, ledger)
    ):
        problems = find_run_problems(study, grow_space(space, [*edges, edge]))
        if problems:
            stopped.append(f"{edge.axis}'s {edge.side} end stays: {problems[0]}")
        else:
            edges.append(edge)
    return edges, stopped


def grow_ranges(
    study: Study, ledger: Ledger, losses: Sequence[float | None]
) -> dict[str, Json] | None:
    """Return the record of how the ranges grow after a phase has ended; None if they do not."""
    search, done = study.plan.search, load_phases(study, ledger)
    if len(done) > search.max_extensions:
        return None
    edges, _ = find_search_edges(study, ledger, losses)
    if not edges:
        return None
    best = load_trial_points(ledger)[rank_trials(losses)[0]]
    given = make_probes(done[-1].space, edges, best)  # the last point of each edge is its new end
    return {
        "edges": [canon.to_json(edge) for edge in edges],
        "points": [canon.to_json(point) for point in given],
        "num_trials": max(len(given), search.extension_trials),
    }


def repeat_best_trials(
    study: Study, ledger: Ledger, losses: Sequence[float | None]
) -> RepeatedTrials | None:
    """Return the repeats of the best trials; None if the plan asks for none, or no trial
    finished.
    """
    search, best_first = study.plan.search, rank_trials(losses)
    if not search.num_replicates or not best_first:
        return None
    from forerun._sweeps.search.repeats import (
        MAX_CANDIDATES,
        allocate_repeats,
        choose_num_candidates,
        compare_candidates,
    )

    # Two trials may be the same run, which is then one candidate: the better of both indexes.
    index_by_run: dict[str, int] = {}
    points = load_trial_points(ledger)
    for index in best_first:
        index_by_run.setdefault(study.get_trial_id(points[index]), index)
        if len(index_by_run) == MAX_CANDIDATES:
            break
    num_candidates = choose_num_candidates(search.num_replicates, len(index_by_run))
    candidates = tuple(index_by_run.values())[:num_candidates]
    specs = {  # by candidate and number of the repeat; seed 0 is the trial's own
        (candidate, number): study.build_trial(points[index], number + 1)
        for candidate, index in enumerate(candidates)
        for number in range(search.num_replicates)
    }
    results = ledger.get_results()
    outcomes = {
        repeat: results[spec.id].loss_nats for repeat, spec in specs.items() if spec.id in results
    }
    counts = allocate_repeats(len(candidates), search.num_replicates, search.parallelism, outcomes)
    repeats = [
        (candidate, number) for candidate, count in enumerate(counts) for number in range(count)
    ]
    has_ended = all(repeat in outcomes for repeat in repeats)
    return RepeatedTrials(
        candidates=candidates,
        specs=tuple(specs[repeat] for repeat in repeats),
        comparison=compare_candidates(counts, outcomes) if has_ended else None,
    )


def find_winner(study: Study, ledger: Ledger, losses: Sequence[float | None]) -> int | None:
    """Return the index of the best trial, by its repeats if there are any; None before these have
    ended, or if no trial finished.
    """
    repeats, best_first = repeat_best_trials(study, ledger, losses), rank_trials(losses)
    if repeats is None:
        return best_first[0] if best_first else None
    if repeats.comparison is None:
        return None
    return repeats.candidates[repeats.comparison.standings[0].candidate]


def decide_ties(
    study: Study, ledger: Ledger, losses: Sequence[float | None]
) -> ConventionDecisions | None:
    """Return the decisions between the best trial's values and conventional ones; None before there
    is a best trial.
    """
    best = find_winner(study, ledger, losses)
    if best is None:
        return None
    return decide_conventions(
        study,
        load_phases(study, ledger)[-1].space,
        load_trial_points(ledger)[best],
        ledger.get_results(),
    )


def count_search_runs(study: Study, ledger: Ledger) -> tuple[int, int]:
    """Return the number of runs of the search that have ended, and the number asked for so far."""
    results, losses = ledger.get_first_results(), load_ended_losses(study, ledger)
    num_done = sum(result is not None for result in load_trial_results(study, ledger))
    ids: set[str] = set()
    if losses is not None:
        stages: list[RepeatedTrials | ConventionDecisions | None] = [
            repeat_best_trials(study, ledger, losses)
        ]
        if grow_ranges(study, ledger, losses) is None:
            stages.append(decide_ties(study, ledger, losses))
        ids = {spec.id for stage in stages if stage for spec in stage.specs}
    num_wanted = load_phases(study, ledger)[-1].num_trials + len(ids)
    return num_done + sum(run_id in results for run_id in ids), num_wanted
