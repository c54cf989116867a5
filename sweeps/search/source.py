"""Sources of runs: a static list of runs, or a search that chooses runs as results arrive.

The module has the search itself (the past trials and a sampler), both sources, and the interface of
pruners, which give up runs of a source.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from forerun._proxies.core.canon import Json
from forerun._proxies.core.spec import RunResult, RunSpec
from forerun._sweeps.search.past_trials import PastTrials, compute_quasi_random_point
from forerun._sweeps.search.pruning import SearchPruner
from forerun._sweeps.search.samplers import SAMPLERS, SamplerOnPast
from forerun._sweeps.search.space import Params
from forerun._sweeps.store.ledger import SUGGESTION, Ledger


@dataclass(slots=True, eq=False)
class Search(PastTrials):
    """A search in progress: the past trials and a sampler.

    State that is kept between suggestions only saves time; every suggestion could be computed from
    the past trials alone.
    """

    sampler: str = field(default="tpe", kw_only=True)
    """Name of the sampler, a key of `forerun._sweeps.search.samplers.SAMPLERS`."""
    _sampler_on_past: SamplerOnPast | None = field(default=None, init=False)

    @property
    def learns(self) -> bool:
        """Whether the sampler uses outcomes."""
        return SAMPLERS[self.sampler].learns

    def suggest(self, losses_nats: Mapping[int, float | None]) -> Params:
        """Return the next trial's point, without adding it.

        Args:
            losses_nats: loss in nats of each trial by index, None if it diverged. Trials in flight
                are ignored, and so are outcomes that an earlier suggestion has seen.

        Raises:
            ValueError: a required outcome is missing.
        """
        if self.learns:
            if self.index < self.num_startup or self.num_seen < 1:
                return self.space.make_point(
                    compute_quasi_random_point(
                        self.study_seed, self.index, self.space.num_coordinates
                    )
                )
            self.add_outcomes(losses_nats)
        if self._sampler_on_past is None:
            self._sampler_on_past = SAMPLERS[self.sampler].begin(self)
        return self._sampler_on_past.ask()


class SourceSignal(enum.Enum):
    """The answer of a source when it has no run to give."""

    WAIT = "wait"
    """More runs may come once running ones have ended."""
    DONE = "done"
    """No more runs will come."""


class Pruner(Protocol):
    """A pruner looks at runs in progress and gives up runs that are not worth finishing."""

    def list_rungs(self, run_id: str) -> tuple[int, ...]:
        """Return the optimizer steps, ascending and before the last, at which the pruner judges a
        run of its source.
        """
        ...

    def judge_run(self, run_id: str, losses_nats: Sequence[float]) -> str:
        """Return why the run is given up, or an empty string if it goes on.

        Called at a rung with the losses, in nats, of all steps so far; the answer does not depend
        on when or how often it is called.
        """
        ...


class RunSource(Protocol):
    """A source gives out runs one by one, each once.

    A new source starts from the beginning; the driver skips runs that have an outcome.
    """

    @property
    def pruner(self) -> Pruner | None:
        """Pruner of the source's runs; None: all runs are trained to their end, also the runs that
        another source has pruned.
        """
        ...

    def next(self, results: Mapping[str, RunResult]) -> RunSpec | SourceSignal:
        """Return the next run, given every outcome so far by run id."""
        ...


def load_suggestions(ledger: Ledger, stage: str) -> list[Params]:
    """Return the recorded points of a search by index, up to the first point that a repair has
    lost; the search suggests the lost point again.
    """
    points_by_key = {
        record.key: cast(Params, record.body) for record in ledger.iterate_records(SUGGESTION)
    }
    points: list[Params] = []
    while (point := points_by_key.pop(_format_key(stage, len(points)), None)) is not None:
        points.append(point)
    return points


def _format_key(stage: str, index: int) -> str:
    """Return the key of a recorded suggestion."""
    return f"{stage}/{index}"


class StaticSource:
    """A source with a fixed list of runs.

    A bank holds runs of one key, so runs are given out key by key. The key with the costliest run
    comes first, which shortens the total time.
    """

    def __init__(self, specs: Iterable[RunSpec], bank_key_for: Callable[[RunSpec], str]) -> None:
        """Store the runs in order; `bank_key_for` as in `forerun._sweeps.run.driver`."""
        costs: dict[str, int] = {}
        runs = list(specs)
        for spec in runs:
            key = bank_key_for(spec)
            costs[key] = max(costs.get(key, 0), spec.flops)
        # A stable sort: the order within a key stays
        runs.sort(key=lambda spec: (-costs[bank_key_for(spec)], bank_key_for(spec)))
        self._runs = iter(runs)

    @property
    def pruner(self) -> None:
        """See `RunSource`."""

    def next(self, results: Mapping[str, RunResult]) -> RunSpec | SourceSignal:
        """See `RunSource`."""
        return next(self._runs, SourceSignal.DONE)


class SearchSource:
    """A source that runs a search: each point is suggested from the ledger, recorded in it, and
    made a run.

    A point is recorded with kind `suggestion` and key `stage/index` before its run is given out; a
    recorded point is never suggested again. A run that failed counts as diverged, because the
    sampler needs the same outcome of every trial each time it is asked.
    """

    def __init__(
        self,
        search: Search,
        make_run: Callable[[Params], RunSpec],
        ledger: Ledger,
        *,
        stage: str,
        num_trials: int,
        given: Sequence[Params] = (),
        pruner: SearchPruner | None = None,
    ) -> None:
        """Start a search, or extend a search that has ended.

        Args:
            search: the search, without trials; trials that ended earlier (`num_known`) have
                recorded points.
            make_run: makes the run of a point.
            ledger: open for writing.
            stage: name of the stage under which suggestions are recorded.
            num_trials: total number of trials.
            given: points that the search does not choose. They are the first trials after the
                `num_known` earlier ones.
            pruner: gives up trials, except the `given` ones, which show what the search would not
                have tried.
        """
        self._search, self._make_run, self._ledger, self._stage = search, make_run, ledger, stage
        self._num_trials = num_trials
        self._given = dict(enumerate(given, search.num_known))
        # Run ids, in order of their trials, whose outcomes were not looked up yet
        self._waiting = deque[str]()
        # Losses by trial index that were looked up, but that the search has not seen yet
        self._unseen_losses: dict[int, float | None] = {}
        self.pruner = pruner
        """See `RunSource`."""

    def next(self, results: Mapping[str, RunResult]) -> RunSpec | SourceSignal:
        """See `RunSource`. Raises what `Ledger.append` raises."""
        index = self._search.index
        if index == self._num_trials:
            return SourceSignal.DONE
        num_seen = self._search.num_seen
        # An outcome never changes, so each one is looked up once
        for i in range(index - len(self._waiting), num_seen):
            result = results.get(self._waiting[0])
            if result is None:
                return SourceSignal.WAIT
            loss_nats = (
                result.loss_nats
                if self.pruner is None
                else self.pruner.take_in(self._search.points[i], result)
            )
            self._waiting.popleft()
            if self._search.learns:
                self._unseen_losses[i] = loss_nats
        point = self._load_or_suggest(index)
        spec = self._make_run(point)
        self._search.add_point(point)
        run_id = spec.id
        self._waiting.append(run_id)
        if self.pruner is not None:
            self.pruner.begin(run_id, point, num_seen=num_seen, is_exempt=index in self._given)
        return spec

    def _load_or_suggest(self, index: int) -> Params:
        """Return the recorded point of a trial, or a new one, which is recorded."""
        key = _format_key(self._stage, index)
        recorded = self._ledger.find(SUGGESTION, key)
        if recorded is not None:
            return cast(Params, recorded.body)
        point = self._given[index] if index in self._given else self._suggest()
        self._ledger.append(SUGGESTION, key, cast(Json, point))
        return point

    def _suggest(self) -> Params:
        """Suggest the next point, and drop the losses that the search has seen."""
        point = self._search.suggest(self._unseen_losses)
        num_seen = len(self._search.losses)
        self._unseen_losses = {
            index: loss for index, loss in self._unseen_losses.items() if index >= num_seen
        }
        return point
