"""What to run: a fixed list of runs, or a search that decides as results come in."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, cast

from proxies.canon import Json
from proxies.spec import RunResult, RunSpec
from sweeps.ledger import Ledger
from sweeps.samplers import Sampler
from sweeps.space import Params, SearchSpace
from sweeps.suggest import DEFAULT_NUM_STARTUP, suggest

SUGGESTION = "suggestion"
"""Kind of the records of a search's points."""


class Signal(enum.Enum):
    """What a source says when it has no run to give."""

    WAIT = "wait"
    """More may come once running ones have ended."""
    DONE = "done"
    """Nothing more will come."""


class Source(Protocol):
    """Gives out runs one by one, each once. A new source starts over; the driver skips what has an outcome."""

    def next(self, results: Mapping[str, RunResult]) -> RunSpec | Signal:
        """The next run, given every outcome so far by run id."""
        ...


def suggested(ledger: Ledger, stage: str) -> list[Params]:
    """Points of a search by index; up to the first that a repair has lost, which is suggested again."""
    points: list[Params] = []
    while (record := ledger.find(SUGGESTION, _key(stage, len(points)))) is not None:
        points.append(cast(Params, record.body))
    return points


def _key(stage: str, index: int) -> str:
    return f"{stage}/{index}"


class StaticSource:
    """A list of runs. Banks hold runs of one key, so they come key by key, the costliest first: it ends the sooner."""

    def __init__(self, specs: Iterable[RunSpec], bank_key_for: Callable[[RunSpec], str]) -> None:
        """`bank_key_for` as in `sweeps.drive`."""
        costs: dict[str, int] = {}
        runs = list(specs)
        for spec in runs:
            key = bank_key_for(spec)
            costs[key] = max(costs.get(key, 0), spec.flops)
        runs.sort(key=lambda spec: (-costs[bank_key_for(spec)], bank_key_for(spec)))  # stable within a key
        self._runs = iter(runs)

    def next(self, results: Mapping[str, RunResult]) -> RunSpec | Signal:
        """See `Source`."""
        return next(self._runs, Signal.DONE)


class SearchSource:
    """A search: each point is suggested from the ledger, recorded in it, and made a run.

    A point is recorded as kind `suggestion`, key `stage/index`, before its run is given out; a recorded point is
    never suggested anew. A run that failed for other reasons counts as diverged: it must be told something, and
    always the same.
    """

    def __init__(
        self,
        space: SearchSpace,
        make_run: Callable[[Params], RunSpec],
        ledger: Ledger,
        *,
        stage: str,
        study_seed: int,
        num_trials: int,
        parallelism: int,
        sampler: Sampler = "tpe",
        num_startup: int = DEFAULT_NUM_STARTUP,
        given: Sequence[Params] = (),
        num_known: int = 0,
    ) -> None:
        """A search, or what follows where one went on beyond its end.

        Args:
            space: as it is now.
            make_run: a point's run.
            ledger: open for writing.
            stage: under which suggestions are recorded.
            study_seed: of the whole search.
            num_trials: in all.
            parallelism: trials in flight at once, P of `sweeps.suggest`; from the plan, never from the machine.
            sampler: of `sweeps.samplers`.
            num_startup: trials of its design.
            given: points not suggested but known from elsewhere: those of trials `num_known` and after.
            num_known: trials that all ended before this; their points are recorded.
        """
        self._space = space
        self._make_run = make_run
        self._ledger = ledger
        self._stage = stage
        self._study_seed = study_seed
        self._num_trials = num_trials
        self._parallelism = parallelism
        self._sampler: Sampler = sampler
        self._num_startup = num_startup
        self._given = given
        self._num_known = num_known
        self._points: list[Params] = []
        self._run_ids: list[str] = []
        self._told: dict[int, float | None] = {}  # of the first trials, in order

    @property
    def run_ids(self) -> tuple[str, ...]:
        """Run ids of the trials given out so far, by index; two trials may be one run."""
        return tuple(self._run_ids)

    def next(self, results: Mapping[str, RunResult]) -> RunSpec | Signal:
        """See `Source`. Raises what `Ledger.append` raises."""
        index = len(self._points)
        if index == self._num_trials:
            return Signal.DONE
        num_seen = max(index - self._parallelism + 1, min(self._num_known, index))
        for i in range(len(self._told), num_seen):  # what has an outcome keeps it: each is looked up once
            result = results.get(self._run_ids[i])
            if result is None:
                return Signal.WAIT
            self._told[i] = result.loss_nats
        point = self._point(index)
        spec = self._make_run(point)
        self._points.append(point)
        self._run_ids.append(spec.id)
        return spec

    def _point(self, index: int) -> Params:
        """The recorded point of a trial, or a new one, recorded."""
        key = _key(self._stage, index)
        recorded = self._ledger.find(SUGGESTION, key)
        if recorded is not None:
            return cast(Params, recorded.body)
        if self._num_known <= index < self._num_known + len(self._given):
            point = self._given[index - self._num_known]
        else:
            point = suggest(
                self._space,
                self._study_seed,
                index,
                self._told,
                self._parallelism,
                sampler=self._sampler,
                num_startup=self._num_startup,
                earlier=self._points,
                num_known=self._num_known,
            )
        self._ledger.append(SUGGESTION, key, cast(Json, point))
        return point
