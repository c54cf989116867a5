"""The workers as the driver believes them to be: what each holds, since when it is busy, and when it is given up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from proxies.core import canon
from proxies.core.spec import RunSpec
from sweeps.run.backlog import Attempt
from sweeps.run.pool import HostCall, Pool, Report
from sweeps.store.live import RunningRun

FACTOR = 10.0
"""Times the longest call so far of its kind."""
FLOOR_SECONDS = 120.0
"""A busy machine, the first checkpoint of a large model on a slow disk: less is no sign of anything."""


class AdaptiveTimeouts:
    """Deadlines of calls by kind: what takes alike. A kind that has never been seen may take the longest of all."""

    def __init__(self, ceiling_seconds: float) -> None:
        """`ceiling_seconds`: longer is no call waited for."""
        self._ceiling_seconds = ceiling_seconds
        self._longest: dict[Hashable, float] = {}

    def seconds(self, kind: Hashable) -> float:
        """What a call of this kind may take."""
        if kind not in self._longest:
            return self._ceiling_seconds
        return min(self._ceiling_seconds, max(FLOOR_SECONDS, FACTOR * self._longest[kind]))

    def learn(self, kind: Hashable, seconds: float) -> None:
        """A call of this kind took so long."""
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))

    def missed(self, kind: Hashable) -> None:
        """A call of this kind was given up: the next one may take twice as long, for it may be we who were wrong."""
        self.learn(kind, 2 * self.seconds(kind) / FACTOR)


AWAY_SECONDS = 5.0
"""More than this between two looks, beyond what was asked for, is not the workers' time."""


@dataclass(kw_only=True, slots=True)
class Worker:
    """One of them."""

    bank_key: str = ""
    slots: dict[int, Attempt] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    """Slot -> optimizer steps done, as last reported."""
    busy_since: float | None = None
    """Monotonic seconds; None when idle."""
    kind: tuple[str, str] = ("", "")
    """Of its last call: the bank's key, and what the call does there."""
    built_key: str = ""
    """Of the bank that its host has built."""


class Crew:
    """Starts calls, takes in reports, and reports those that are silent for too long."""

    def __init__(
        self, pool: Pool, num_slots_for: Callable[[RunSpec], int], leases: AdaptiveTimeouts,
        clock: Callable[[], float], *, noise: bool = False, kinds: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Arguments as in `sweeps.run.driver`."""
        self.kinds = tuple(kinds) or ("",) * pool.num_workers
        self._pool, self._num_slots_for, self._leases, self._clock = pool, num_slots_for, leases, clock
        self._noise = noise
        self.workers = [Worker() for _ in range(pool.num_workers)]
        self._looked_at = clock()

    @property
    def busy(self) -> bool:
        """Whether a call is in flight."""
        return any(worker.busy_since is not None for worker in self.workers)

    def idle(self) -> Iterator[tuple[int, Worker]]:
        """Those without a call in flight, by number."""
        return ((index, worker) for index, worker in enumerate(self.workers) if worker.busy_since is None)

    def running(self) -> tuple[RunningRun, ...]:
        """Every run in a slot."""
        return tuple(
            RunningRun(
                run_id=attempt.run_id,
                worker=index,
                step=worker.steps.get(slot, 0),
                num_steps=attempt.spec.schedule.num_steps,
            )
            for index, worker in enumerate(self.workers)
            for slot, attempt in sorted(worker.slots.items())
        )

    def flops(self) -> list[float]:
        """FLOPs of every run in a slot."""
        return [attempt.flops for worker in self.workers for attempt in worker.slots.values()]

    def steps_done(self) -> dict[str, int]:
        """Optimizer steps done, as last reported, by the run in a slot."""
        return {
            held.run_id: worker.steps[slot]
            for worker in self.workers
            for slot, held in worker.slots.items()
            if slot in worker.steps
        }

    def start(
        self, index: int, admitted: Mapping[int, Attempt], max_steps: int,
        kept: Callable[[Attempt], tuple[int, str] | None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Begin a call on an idle worker; those admitted are in its slots already. No steps: it saves what it holds.

        `kept`: the step and the trunk under which a run's state is written for others.
        """
        worker = self.workers[index]
        some = next(iter(worker.slots.values()))
        worker.kind = (worker.bank_key, _what(worker, max_steps))
        call = HostCall(
            bank_key=worker.bank_key,
            num_slots=self._num_slots_for(some.spec),
            admit=tuple(
                (slot, cast(dict[str, canon.Json], canon.to_json(held.spec))) for slot, held in admitted.items()
            ),
            max_steps=max_steps,
            num_microbatches=some.standing.num_microbatches.get(self.kinds[index], 1),
            save=not max_steps,
            hold={slot: held.pause_step for slot, held in worker.slots.items()},
            trunks={slot: state for slot, held in worker.slots.items() if (state := kept(held))},
            noise=self._noise,
            again=some.again,
        )
        worker.busy_since = self._clock()
        self._pool.start(index, call)

    def wait(self, timeout_seconds: float) -> list[Report]:
        """What has arrived, and a report of our own for every worker that has not reported in time."""
        reports = self._pool.wait(timeout_seconds)
        now = self._clock()
        for report in reports:
            worker = self.workers[report.worker]
            if report.error is None and worker.busy_since is not None:
                self._leases.learn(worker.kind, now - worker.busy_since)
                worker.built_key = worker.bank_key
            worker.busy_since, worker.steps = None, report.steps
        self._forgive(now - self._looked_at - timeout_seconds)
        self._looked_at = now
        for index, worker in enumerate(self.workers):
            lease_seconds = self._leases.seconds(worker.kind)
            if worker.busy_since is not None and now - worker.busy_since > lease_seconds:
                self._leases.missed(worker.kind)
                problem = f"no report for {lease_seconds:.3g} s"
                reports.append(Report(worker=index, error=problem, cause="hung"))
        return reports

    def _forgive(self, away_seconds: float) -> None:
        """While it is we who were away (suspended, or busy with a slow disk), nobody was silent."""
        if away_seconds > AWAY_SECONDS:
            for worker in self.workers:
                if worker.busy_since is not None:
                    worker.busy_since += away_seconds

    def dismiss(self, index: int, *, restart: bool) -> list[Attempt]:
        """Give up on a worker; returns what it held. Raises PoolDead."""
        held = list(self.workers[index].slots.values())
        self.workers[index] = Worker()
        if restart:
            self._pool.restart(index)
        return held


def _what(worker: Worker, max_steps: int) -> str:
    """What the next call of a worker does: calls that do the same take alike."""
    if worker.built_key != worker.bank_key:
        return "build"
    if not max_steps:
        return "save"
    left = min(held.spec.schedule.num_steps - worker.steps.get(slot, 0) for slot, held in worker.slots.items())
    return "end" if left <= max_steps else "train"  # a run's end is judged on the validation set
