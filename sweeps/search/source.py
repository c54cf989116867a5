"""What to run: a fixed list of runs, or a search that decides as results come in."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from proxies.core.canon import Json
from proxies.core.spec import RunResult, RunSpec
from sweeps.search.past_trials import PastTrials, quasi_random
from sweeps.search.pruning import SearchPruner
from sweeps.search.samplers import SAMPLERS, SamplerOnPast
from sweeps.search.space import Params
from sweeps.store.ledger import SUGGESTION, Ledger


@dataclass(slots=True, eq=False)
class Search(PastTrials):
    """One search as its trials come: what is kept between suggestions is only what any one of them
    would work out.
    """

    sampler: str = field(default="tpe", kw_only=True)
    """A name of `sweeps.search.samplers.SAMPLERS`."""
    _asker: SamplerOnPast | None = field(default=None, init=False)

    @property
    def learns(self) -> bool:
        """Whether it looks at outcomes."""
        return SAMPLERS[self.sampler].learns

    def suggest(self, told: Mapping[int, float | None]) -> Params:
        """The next trial's point; it is not added.

        Args:
            told: loss in nats of each trial by index, None where it diverged; trials in flight are
                not looked at, nor is what an earlier suggestion saw looked at again.

        Raises:
            ValueError: an outcome that is needed is missing.
        """
        if self.learns:
            if self.index < self.num_startup or self.num_seen < 1:
                return self.space.at(
                    quasi_random(self.study_seed, self.index, self.space.num_coordinates)
                )
            self.see(told)
        if self._asker is None:
            self._asker = SAMPLERS[self.sampler].begin(self)
        return self._asker.ask()


class SourceSignal(enum.Enum):
    """What a source says when it has no run to give."""

    WAIT = "wait"
    """More may come once running ones have ended."""
    DONE = "done"
    """Nothing more will come."""


class Pruner(Protocol):
    """Looks at runs on their way, and gives up those that are not worth their end."""

    def rungs(self, run_id: str) -> tuple[int, ...]:
        """Optimizer steps, ascending and before its last, at which it looks at a run that its
        source has given.
        """
        ...

    def verdict(self, run_id: str, losses_nats: Sequence[float]) -> str:
        """Why the run is given up, or empty if it goes on; asked at a rung, with the losses of all
        its steps so far.

        Whenever it is asked, and however often: the same.
        """
        ...


class RunSource(Protocol):
    """Gives out runs one by one, each once. A new source starts over; the driver skips what has an
    outcome.
    """

    @property
    def pruner(self) -> Pruner | None:
        """Who looks at its runs; None: all are run to their end, also those that another source has
        pruned.
        """
        ...

    def next(self, results: Mapping[str, RunResult]) -> RunSpec | SourceSignal:
        """The next run, given every outcome so far by run id."""
        ...


def suggested(ledger: Ledger, stage: str) -> list[Params]:
    """Points of a search by index; up to the first that a repair has lost, which is suggested
    again.
    """
    found = {record.key: cast(Params, record.body) for record in ledger.stream(SUGGESTION)}
    points: list[Params] = []
    while (point := found.pop(_key(stage, len(points)), None)) is not None:
        points.append(point)
    return points


def _key(stage: str, index: int) -> str:
    return f"{stage}/{index}"


class StaticSource:
    """A list of runs. Banks hold runs of one key, so they come key by key, the costliest first: it
    ends the sooner.
    """

    def __init__(self, specs: Iterable[RunSpec], bank_key_for: Callable[[RunSpec], str]) -> None:
        """`bank_key_for` as in `sweeps.run.driver`."""
        costs: dict[str, int] = {}
        runs = list(specs)
        for spec in runs:
            key = bank_key_for(spec)
            costs[key] = max(costs.get(key, 0), spec.flops)
        # stable within a key
        runs.sort(key=lambda spec: (-costs[bank_key_for(spec)], bank_key_for(spec)))
        self._runs = iter(runs)

    @property
    def pruner(self) -> None:
        """See `RunSource`."""

    def next(self, results: Mapping[str, RunResult]) -> RunSpec | SourceSignal:
        """See `RunSource`."""
        return next(self._runs, SourceSignal.DONE)


class SearchSource:
    """A search: each point is suggested from the ledger, recorded in it, and made a run.

    A point is recorded as kind `suggestion`, key `stage/index`, before its run is given out; a
    recorded point is never suggested anew. A run that failed for other reasons counts as diverged:
    it must be told something, and always the same.
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
        """A search, or what follows where one went on beyond its end.

        Args:
            search: of which no trial is known yet; trials that ended before this (`num_known`) have
                recorded points.
            make_run: a point's run.
            ledger: open for writing.
            stage: under which suggestions are recorded.
            num_trials: in all.
            given: points from elsewhere, or beyond an end: those of the first trials that are not
                known.
            pruner: gives trials up; but none of those `given`: they show what the search would not
                have tried.
        """
        self._search, self._make_run, self._ledger, self._stage = search, make_run, ledger, stage
        self._num_trials = num_trials
        self._given = dict(enumerate(given, search.num_known))
        # ids of the trials whose outcomes were not looked up, in order
        self._waiting = deque[str]()
        # of the trials before them; only what the search has not seen
        self._told: dict[int, float | None] = {}
        self.pruner = pruner
        """See `RunSource`."""

    def next(self, results: Mapping[str, RunResult]) -> RunSpec | SourceSignal:
        """See `RunSource`. Raises what `Ledger.append` raises."""
        index = self._search.index
        if index == self._num_trials:
            return SourceSignal.DONE
        num_seen = self._search.num_seen
        # what has an outcome keeps it: each is looked up once
        for i in range(index - len(self._waiting), num_seen):
            result = results.get(self._waiting[0])
            if result is None:
                return SourceSignal.WAIT
            told = (
                result.loss_nats
                if self.pruner is None
                else self.pruner.take_in(self._search.points[i], result)
            )
            self._waiting.popleft()
            if self._search.learns:
                self._told[i] = told
        point = self._point(index)
        spec = self._make_run(point)
        self._search.add(point)
        run_id = spec.id
        self._waiting.append(run_id)
        if self.pruner is not None:
            self.pruner.begin(run_id, point, num_seen=num_seen, whole=index in self._given)
        return spec

    def _point(self, index: int) -> Params:
        """The recorded point of a trial, or a new one, recorded."""
        key = _key(self._stage, index)
        recorded = self._ledger.find(SUGGESTION, key)
        if recorded is not None:
            return cast(Params, recorded.body)
        point = self._given[index] if index in self._given else self._suggested()
        self._ledger.append(SUGGESTION, key, cast(Json, point))
        return point

    def _suggested(self) -> Params:
        point = self._search.suggest(self._told)
        num_seen = len(self._search.losses)
        self._told = {index: loss for index, loss in self._told.items() if index >= num_seen}
        return point
