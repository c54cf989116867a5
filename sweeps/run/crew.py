"""The workers as the driver believes them to be: what each holds, since when it is busy, and when
it is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from proxies.core import canon
from proxies.core.notation import format_duration
from proxies.core.spec import RunSpec
from sweeps.run.backlog import Attempt
from sweeps.run.pool import HostCall, Pool, Report
from sweeps.store.live import RunningRun

FACTOR = 10.0
"""Times the longest call so far of its kind."""
FLOOR_SECONDS = 120.0
"""A busy machine, the first checkpoint of a large model on a slow disk: less is no sign of
anything."""


class AdaptiveTimeouts:
    """Deadlines of calls by kind: what takes alike. A kind that has never been seen may take the
    longest of all.
    """

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
        """A call of this kind was given up: the next one may take twice as long, for it may be we
        who were wrong.
        """
        self.learn(kind, 2 * self.seconds(kind) / FACTOR)


AWAY_SECONDS = 5.0
"""More than this between two looks, beyond what was asked for, is not the workers' time."""
LOOK_SECONDS = 1.0
"""Between two looks for workers that are silent."""
CALL_SECONDS = 2.0
"""Of training in a call. A stop is noticed between two, and one more may be queued."""
AHEAD = HostCall(bank_key="", num_slots=0, admit=(), seconds=CALL_SECONDS, ahead=True)


@dataclass(kw_only=True, slots=True)
class Worker:
    """One of them."""

    bank_key: str = ""
    slots: dict[int, Attempt] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    """Slot -> optimizer steps done, as last reported."""
    num_calls: int = 0
    """Under way, or waiting for the one that is."""
    busy_since: float = 0.0
    """Monotonic seconds: since when the first of these can be under way."""
    call_steps: int = 0
    """Optimizer steps that a run made in a call of this bank, at most; 0: none yet."""
    call_seconds: float = 0.0
    """That the last call took."""
    built_key: str = ""
    """Of the bank that its host has built."""

    @property
    def kind(self) -> tuple[str, str]:
        """What the call under way takes as long as: of one bank, calls that do the same."""
        if self.built_key != self.bank_key:
            return self.bank_key, "build"
        left = [
            held.spec.schedule.num_steps - self.steps.get(slot, 0)
            for slot, held in self.slots.items()
        ]
        may_end = min(left, default=0) <= 2 * self.call_steps or not self.call_steps
        # a run's end is judged on the validation set
        return self.bank_key, "end" if may_end else "train"


class Crew:
    """Starts calls, takes in reports, and reports those that are silent for too long. A call costs
    the same whatever the number of workers.
    """

    def __init__(
        self,
        pool: Pool,
        num_slots_for: Callable[[RunSpec], int],
        leases: AdaptiveTimeouts,
        clock: Callable[[], float],
        *,
        noise: bool = False,
        kinds: Sequence[str] = (),
    ) -> None:
        """Arguments as in `sweeps.run.driver`."""
        self.kinds = tuple(kinds) or ("",) * pool.num_workers
        self._pool, self._num_slots_for, self._leases, self._clock = (
            pool,
            num_slots_for,
            leases,
            clock,
        )
        self._noise = noise
        self.workers = [Worker() for _ in range(pool.num_workers)]
        self._idle = set(range(pool.num_workers))
        self._may_go_on: list[int] = []
        self._held: dict[str, int] = {}  # run id -> the worker that it was given to last
        self._waited_at = self._looked_at = clock()

    @property
    def busy(self) -> bool:
        """Whether a call is in flight."""
        return len(self._idle) < len(self.workers)

    def idle(self) -> list[tuple[int, Worker]]:
        """Those without a call in flight, by number."""
        return [(index, self.workers[index]) for index in sorted(self._idle)]

    def training(self) -> Iterator[tuple[int, Worker]]:
        """Those that train on, and could be told to go on after that; each once a report."""
        may, self._may_go_on = self._may_go_on, []
        return ((index, self.workers[index]) for index in may if self.workers[index].num_calls)

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

    def steps_done(self, run_id: str) -> int | None:
        """Optimizer steps done, as last reported, by a run in a slot; None where it is in none, or
        nothing is known.
        """
        worker = self.workers[self._held.get(run_id, 0)]
        there = (
            worker.steps.get(slot) for slot, held in worker.slots.items() if held.run_id == run_id
        )
        return next(there, None)

    def start(
        self,
        index: int,
        admitted: Mapping[int, Attempt],
        seconds: float = CALL_SECONDS,
        kept: Callable[[Attempt], tuple[int, str] | None] = lambda _: None,
    ) -> None:
        """Begin a call on an idle worker; those admitted are in its slots already. 0 seconds: it
        saves what it holds.

        `kept`: the step and the trunk under which a run's state is written for others.
        """
        worker = self.workers[index]
        some = next(iter(worker.slots.values()))
        call = HostCall(
            bank_key=worker.bank_key,
            num_slots=self._num_slots_for(some.spec),
            admit=tuple(
                (slot, cast(dict[str, canon.Json], canon.to_json(held.spec)))
                for slot, held in admitted.items()
            ),
            seconds=seconds,
            num_microbatches=some.standing.num_microbatches.get(self.kinds[index], 1),
            save=not seconds,
            hold={slot: held.pause_step for slot, held in worker.slots.items()},
            trunks={slot: state for slot, held in worker.slots.items() if (state := kept(held))},
            noise=self._noise,
            again=some.again,
        )
        for slot, held in admitted.items():
            self._held[held.run_id] = index
            worker.steps.pop(slot, None)  # of the run before it
        if worker.built_key != worker.bank_key:
            worker.call_steps = 0
        self._begin(index, call)
        if seconds and not some.again:
            self._may_go_on.append(index)

    def go_on(self, index: int) -> None:
        """Have a worker train on when its call has ended, so that it does not wait for us; if the
        pool can do that.

        Where a call takes much longer than it should (a step of many seconds), none waits: a stop
        would wait for both.
        """
        worker = self.workers[index]
        quick = worker.built_key == worker.bank_key and worker.call_seconds <= 2 * CALL_SECONDS
        if quick and worker.num_calls <= self._pool.calls_ahead:
            self._begin(index, AHEAD)

    def _begin(self, index: int, call: HostCall) -> None:
        worker = self.workers[index]
        if not worker.num_calls:
            worker.busy_since = self._clock()
            self._idle.discard(index)
        worker.num_calls += 1
        self._pool.start(index, call)

    def wait(self, timeout_seconds: float) -> list[Report]:
        """What has arrived, and a report of our own for every worker that has not reported in
        time.
        """
        reports = self._pool.wait(timeout_seconds)
        now = self._clock()
        for report in reports:
            self._take_in(report, now)
        self._forgive(now - self._waited_at - timeout_seconds)
        self._waited_at = now
        return [*reports, *self._silent(now)] if now - self._looked_at >= LOOK_SECONDS else reports

    def _take_in(self, report: Report, now: float) -> None:
        worker = self.workers[report.worker]
        if report.error is None and worker.num_calls:
            gained = [step - worker.steps.get(slot, step) for slot, step in report.steps.items()]
            _, what = worker.kind
            if what != "build":
                what = "end" if report.finished else "train"
            self._leases.learn((worker.bank_key, what), now - worker.busy_since)
            worker.built_key = worker.bank_key
            worker.call_steps = max([worker.call_steps, *gained])
            worker.call_seconds = now - worker.busy_since
        worker.steps, worker.busy_since = report.steps, now
        worker.num_calls = max(0, worker.num_calls - 1)
        if not worker.num_calls:
            self._idle.add(report.worker)
        elif report.error is None and not report.needs_reply:
            self._may_go_on.append(report.worker)

    def _silent(self, now: float) -> list[Report]:
        """A report for every worker whose call takes too long."""
        self._looked_at, silent = now, []
        for index, worker in enumerate(self.workers):
            if worker.num_calls and now - worker.busy_since > (
                seconds := self._leases.seconds(worker.kind)
            ):
                self._leases.missed(worker.kind)
                silent.append(
                    Report(
                        worker=index,
                        error=f"no report for {format_duration(seconds)}",
                        cause="hung",
                    )
                )
        return silent

    def _forgive(self, away_seconds: float) -> None:
        """While it is we who were away (suspended, or busy with a slow disk), nobody was silent."""
        if away_seconds > AWAY_SECONDS:
            for worker in self.workers:
                worker.busy_since += away_seconds

    def dismiss(self, index: int, *, restart: bool) -> list[Attempt]:
        """Give up on a worker; returns what it held. Raises PoolDead."""
        held = list(self.workers[index].slots.values())
        self.workers[index] = Worker()
        self._idle.add(index)
        if restart:
            self._pool.restart(index)
        return held
