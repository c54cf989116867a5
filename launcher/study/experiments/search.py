"""The search of a study, as its plan and its ledger tell it (`SearchState`): phases, trials, growth
of the ranges, repeats of the best trials, and the winner.

A search has one phase, and one more each time that its ranges grow. The ledger records each growth.
Everything else is a pure function of plan and results, so a resumed search continues as the
uninterrupted one would have. `find_run_problems` tells, before anything runs, whether the runs at
the ends of a search space are possible. This module imports neither torch nor Optuna.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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


class SearchState:
    """The search of a study at one moment: what its trials and their repeats have shown so far.

    Each property is computed once, when it is first read. Make a new state after the ledger has
    changed.
    """

    def __init__(self, study: Study, ledger: Ledger) -> None:
        self._study, self._ledger = study, ledger

    # ---- Trials ----

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Phases so far."""
        plan = self._study.plan
        phases = [
            Phase(
                space=self._study.space,
                num_trials=plan.search.num_trials,
                num_known=0,
                given=plan.first_points,
            )
        ]
        for record in self._ledger.read_records(GROWTH):
            last, body = phases[-1], cast(Any, record.body)
            phases.append(
                Phase(
                    space=grow_space(
                        last.space, [canon.decode(Edge, edge) for edge in body["edges"]]
                    ),
                    num_trials=last.num_trials + int(body["num_trials"]),
                    num_known=last.num_trials,
                    given=tuple(body["points"]),
                )
            )
        return tuple(phases)

    @functools.cached_property
    def points(self) -> list[Params]:
        """Points of the trials so far, by index.

        A repair may have lost the record of a growth but kept the suggestions after it. Those
        points are not trials until the growth is recorded again, which follows from the earlier
        trials.
        """
        return load_suggestions(self._ledger, SEARCH_STAGE)[: self.phases[-1].num_trials]

    @functools.cached_property
    def results(self) -> list[RunResult | None]:
        """Results of the trials so far, by index, as the search used them; None for a trial that
        has not ended.
        """
        results = self._ledger.get_first_results()
        return [results.get(self._study.get_trial_id(point)) for point in self.points]

    @property
    def num_ended(self) -> int:
        """Number of trials that have ended."""
        return sum(result is not None for result in self.results)

    @property
    def losses(self) -> list[float | None] | None:
        """Losses of all trials up to the last phase, in nats; None before all have ended.

        The loss of a trial that diverged or was pruned is None.
        """
        if self.num_ended < self.phases[-1].num_trials:
            return None
        return [result.loss_nats for result in self.results if result is not None]

    @property
    def pruned(self) -> list[int]:
        """Indexes of the trials that the search pruned. Another stage may have trained the same
        run to its end; that does not count here.
        """
        return [
            index
            for index, result in enumerate(self.results)
            if result is not None and result.status == "pruned"
        ]

    # ---- Growth of the ranges ----

    def find_edges(self) -> tuple[list[Edge], list[str]]:
        """Return the range ends beyond which the optimum may lie, and the reasons why other such
        ends cannot move; both are empty before all trials of the last phase have ended.
        """
        space = self.phases[-1].space
        edges: list[Edge] = []
        stopped: list[str] = []
        for edge in find_open_edges(space, self.points, self.losses or (), self.pruned):
            problems = find_run_problems(self._study, grow_space(space, [*edges, edge]))
            if problems:
                stopped.append(f"{edge.axis}'s {edge.side} end stays: {problems[0]}")
            else:
                edges.append(edge)
        return edges, stopped

    @functools.cached_property
    def growth(self) -> dict[str, Json] | None:
        """Record of how the ranges grow after the last phase has ended; None if they do not."""
        search, losses = self._study.plan.search, self.losses
        if losses is None or len(self.phases) > search.max_extensions:
            return None
        edges, _ = self.find_edges()
        if not edges:
            return None
        best = self.points[rank_trials(losses)[0]]
        # The last point of each edge is its new end.
        given = make_probes(self.phases[-1].space, edges, best)
        return {
            "edges": [canon.to_json(edge) for edge in edges],
            "points": [canon.to_json(point) for point in given],
            "num_trials": max(len(given), search.extension_trials),
        }

    # ---- The winner ----

    @functools.cached_property
    def repeats(self) -> RepeatedTrials | None:
        """Repeats of the best trials; None if the plan asks for none, if no trial finished, or
        before all trials have ended.
        """
        study, search, best_first = self._study, self._study.plan.search, self._ranking
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
        for index in best_first:
            index_by_run.setdefault(study.get_trial_id(self.points[index]), index)
        num_candidates = choose_num_candidates(
            search.num_replicates, min(len(index_by_run), MAX_CANDIDATES)
        )
        candidates = tuple(index_by_run.values())[:num_candidates]
        specs = {  # by candidate and number of the repeat; seed 0 is the trial's own
            (candidate, number): study.build_trial(self.points[index], number + 1)
            for candidate, index in enumerate(candidates)
            for number in range(search.num_replicates)
        }
        results = self._ledger.get_results()
        outcomes = {
            repeat: results[spec.id].loss_nats
            for repeat, spec in specs.items()
            if spec.id in results
        }
        counts = allocate_repeats(
            len(candidates), search.num_replicates, search.parallelism, outcomes
        )
        repeats = [
            (candidate, number) for candidate, count in enumerate(counts) for number in range(count)
        ]
        has_ended = all(repeat in outcomes for repeat in repeats)
        return RepeatedTrials(
            candidates=candidates,
            specs=tuple(specs[repeat] for repeat in repeats),
            comparison=compare_candidates(counts, outcomes) if has_ended else None,
        )

    @property
    def _ranking(self) -> list[int]:
        """Indexes of the finished trials, best first; empty before all trials have ended."""
        return rank_trials(self.losses or ())

    @property
    def winner(self) -> int | None:
        """Index of the best trial, by its repeats if there are any; None before all trials and
        repeats have ended, or if no trial finished.
        """
        if self.repeats is None:
            return next(iter(self._ranking), None)
        if self.repeats.comparison is None:
            return None
        return self.repeats.candidates[self.repeats.comparison.standings[0].candidate]

    @functools.cached_property
    def ties(self) -> ConventionDecisions | None:
        """Decisions between the winner's values and conventional ones; None before there is a
        winner.
        """
        if self.winner is None:
            return None
        return decide_conventions(
            self._study,
            self.phases[-1].space,
            self.points[self.winner],
            self._ledger.get_results(),
        )

    @property
    def extra_runs(self) -> dict[str, tuple[RunSpec, ...]]:
        """Runs of the search other than its trials, as far as outcomes tell: those that repeat the
        best trials (`replicate`), and those that compare values (`convention`). Dashboards show
        these names, and W&B keeps them.
        """
        runs = {"replicate": self.repeats.specs} if self.repeats else {}
        if self.growth is None and self.ties is not None:
            runs["convention"] = self.ties.specs
        return runs

    def count_runs(self) -> tuple[int, int]:
        """Return the number of runs of the search that have ended, and the number asked for so
        far.
        """
        ids = {spec.id for specs in self.extra_runs.values() for spec in specs}
        num_ended = self.num_ended + len(ids & self._ledger.get_first_results().keys())
        return num_ended, self.phases[-1].num_trials + len(ids)
