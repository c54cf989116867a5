"""The driver's view of its workers: what each holds, since when it has been busy, and when it is
given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from forerun._proxies.core import canon
from forerun._proxies.core.notation import format_duration
from forerun._sweeps.run.backlog import OpenRun
from forerun._sweeps.run.pool import HostCall, Pool, Report
from forerun._sweeps.store.live_state import RunningRun

TIMEOUT_FACTOR = 10.0
"""A call times out after this many times the longest call so far of its kind."""
MIN_TIMEOUT_SECONDS = 120.0
"""Minimum timeout in seconds: a busy machine, or the first checkpoint of a large model on a slow
disk, may take that long.
"""


class AdaptiveTimeouts:
    """Timeouts of calls by kind; calls of one kind take about equally long.

    A kind without a finished call has the maximum timeout.
    """

    def __init__(self, ceiling_seconds: float) -> None:
        """Create timeouts of at most `ceiling_seconds`."""
        self._ceiling_seconds = ceiling_seconds
        self._longest: dict[Hashable, float] = {}

    def get_timeout(self, kind: Hashable) -> float:
        """Return the timeout of calls of this kind, in seconds."""
        longest = self._longest.get(kind, math.inf)
        return min(self._ceiling_seconds, max(MIN_TIMEOUT_SECONDS, TIMEOUT_FACTOR * longest))

    def add_duration(self, kind: Hashable, seconds: float) -> None:
        """Record the duration of a call of this kind, in seconds."""
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))

    def double_timeout(self, kind: Hashable) -> None:
        """Double the timeout of this kind after a call was given up, since the timeout may have
        been too short.
        """
        self.add_duration(kind, 2 * self.get_timeout(kind) / TIMEOUT_FACTOR)


MAX_DRIVER_PAUSE_SECONDS = 5.0
"""Maximum delay of the driver between two waits, in seconds beyond the timeout of the wait. A
longer delay (the driver was busy or suspended) does not count as silence of the workers.
"""
SILENCE_CHECK_SECONDS = 1.0
"""Seconds between two checks for silent workers."""
CALL_SECONDS = 2.0
"""Seconds of training in a call. A stop is noticed between two calls, and one more may be
queued.
"""
CALL_AHEAD = HostCall(bank_key="", num_slots=0, admit=(), seconds=CALL_SECONDS, is_ahead=True)


@dataclass(kw_only=True, slots=True)
class WorkerState:
    """State of one worker."""

    bank_key: str = ""
    slots: dict[int, OpenRun] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    """Slot -> optimizer steps done, as last reported."""
    num_calls: int = 0
    """Number of calls in progress or queued."""
    busy_since: float = 0.0
    """Monotonic seconds since which the first of these calls can be in progress."""
    call_steps: int = 0
    """Maximum number of optimizer steps that a run made in one call of this bank; 0: none yet."""
    call_seconds: float = 0.0
    """Duration of the last call, in seconds."""
    built_key: str = ""
    """Key of the bank that the worker's host has built."""

    @property
    def kind(self) -> tuple[str, str]:
        """Kind of the call in progress: its bank and what it does. Calls of one kind take about
        equally long.
        """
        if self.built_key != self.bank_key:
            return self.bank_key, "build"
        left = [
            open_run.spec.schedule.num_steps - self.steps.get(slot, 0)
            for slot, open_run in self.slots.items()
        ]
        # Twice, because a call may make more steps than any call before it
        may_end = min(left, default=0) <= 2 * self.call_steps or not self.call_steps
        # The end of a run takes longer, because the run is evaluated on the validation set
        return self.bank_key, "end" if may_end else "train"


class WorkerStates:
    """State of a pool's workers, which starts their calls and takes in their reports.

    A worker that is silent for too long gets a report with the cause `hung`. The cost of a call
    does not depend on the number of workers.
    """

    def __init__(
        self,
        pool: Pool,
        timeouts: AdaptiveTimeouts,
        clock: Callable[[], float],
        *,
        noise: bool = False,
        kinds: Sequence[str] = (),
    ) -> None:
        """Create the workers' state; arguments as in `forerun._sweeps.run.driver`."""
        self.kinds = tuple(kinds) or ("",) * pool.num_workers
        self._pool, self._timeouts, self._clock, self._noise = pool, timeouts, clock, noise
        self.workers = [WorkerState() for _ in range(pool.num_workers)]
        self._idle = set(range(pool.num_workers))
        self._may_go_on: list[int] = []  # training workers, once per report
        self._worker_of_run: dict[str, int] = {}  # run id -> the worker that had it last
        self._waited_at = self._looked_at = clock()

    @property
    def is_busy(self) -> bool:
        """Whether a call is in flight."""
        return len(self._idle) < len(self.workers)

    def list_idle(self) -> list[tuple[int, WorkerState]]:
        """Return the workers without a call in flight, by number."""
        return [(index, self.workers[index]) for index in sorted(self._idle)]

    def take_training(self) -> Iterator[tuple[int, WorkerState]]:
        """Yield the workers that are training and whose next steps may be started.

        Each is yielded once per report.
        """
        indices, self._may_go_on = self._may_go_on, []
        return ((index, self.workers[index]) for index in indices if self.workers[index].num_calls)

    def list_running_runs(self) -> tuple[RunningRun, ...]:
        """Return every run in a slot."""
        return tuple(
            RunningRun(
                run_id=open_run.run_id,
                worker=index,
                step=worker.steps.get(slot, 0),
                num_steps=open_run.spec.schedule.num_steps,
            )
            for index, worker in enumerate(self.workers)
            for slot, open_run in sorted(worker.slots.items())
        )

    def list_flops(self) -> list[float]:
        """Return the FLOPs of every run in a slot."""
        return [open_run.flops for worker in self.workers for open_run in worker.slots.values()]

    def get_steps(self, run_id: str) -> int | None:
        """Return the optimizer steps of a run in a slot, as last reported; None if the run is in no
        slot or its steps are unknown.
        """
        worker = self.workers[self._worker_of_run.get(run_id, 0)]
        steps = (
            worker.steps.get(slot)
            for slot, open_run in worker.slots.items()
            if open_run.run_id == run_id
        )
        return next(steps, None)

    def start(
        self,
        index: int,
        admitted: Mapping[int, OpenRun],
        seconds: float = CALL_SECONDS,
        plan_saved_state: Callable[[OpenRun], tuple[int, str] | None] = lambda _: None,
    ) -> None:
        """Start a call on an idle worker, whose slots already have the admitted runs.

        Args:
            index: number of the worker.
            admitted: the runs that start with this call, by slot.
            seconds: time limit for training; 0: the worker saves what it holds.
            plan_saved_state: returns the step and the trunk id under which a run's state is saved
                for other runs; None: it is not saved.
        """
        worker = self.workers[index]
        any_run = next(iter(worker.slots.values()))
        call = HostCall(
            bank_key=worker.bank_key,
            num_slots=any_run.spec.numerics.num_slots,
            admit=tuple(
                (slot, cast(dict[str, canon.Json], canon.to_json(open_run.spec)))
                for slot, open_run in admitted.items()
            ),
            seconds=seconds,
            num_microbatches=any_run.retry_plan.num_microbatches.get(self.kinds[index], 1),
            save=not seconds,
            hold={slot: open_run.pause_step for slot, open_run in worker.slots.items()},
            trunks={
                slot: state
                for slot, open_run in worker.slots.items()
                if (state := plan_saved_state(open_run))
            },
            noise=self._noise,
            is_rerun=any_run.is_rerun,
        )
        for slot, open_run in admitted.items():
            self._worker_of_run[open_run.run_id] = index
            worker.steps.pop(slot, None)  # the steps of the slot's earlier run
        if worker.built_key != worker.bank_key:
            worker.call_steps = 0
        self._start_call(index, call)
        if seconds and not any_run.is_rerun:
            self._may_go_on.append(index)

    def queue_continuation(self, index: int) -> None:
        """Have a worker continue after its call without waiting for the driver, if the pool can
        queue a call.

        If calls take much longer than they should (a step of many seconds), no call is queued,
        because a stop would wait for both.
        """
        worker = self.workers[index]
        is_quick = worker.built_key == worker.bank_key and worker.call_seconds <= 2 * CALL_SECONDS
        if is_quick and worker.num_calls <= self._pool.calls_ahead:
            self._start_call(index, CALL_AHEAD)

    def _start_call(self, index: int, call: HostCall) -> None:
        """Pass a call to the pool, and count it."""
        worker = self.workers[index]
        if not worker.num_calls:
            worker.busy_since = self._clock()
            self._idle.discard(index)
        worker.num_calls += 1
        self._pool.start(index, call)

    def wait(self, timeout_seconds: float) -> list[Report]:
        """Return the reports that have arrived, and a report with the cause `hung` for every worker
        whose call takes too long.
        """
        reports = self._pool.wait(timeout_seconds)
        now = self._clock()
        for report in reports:
            self._update_worker(report, now)
        self._discount_absence(now - self._waited_at - timeout_seconds)
        self._waited_at = now
        return (
            [*reports, *self._report_silent(now)]
            if now - self._looked_at >= SILENCE_CHECK_SECONDS
            else reports
        )

    def _update_worker(self, report: Report, now: float) -> None:
        """Update a worker's state from its report."""
        worker = self.workers[report.worker]
        if report.error is None and worker.num_calls:
            gained = [step - worker.steps.get(slot, step) for slot, step in report.steps.items()]
            _, activity = worker.kind
            if activity != "build":
                activity = "end" if report.finished else "train"
            self._timeouts.add_duration((worker.bank_key, activity), now - worker.busy_since)
            worker.built_key = worker.bank_key
            worker.call_steps = max([worker.call_steps, *gained])
            worker.call_seconds = now - worker.busy_since
        worker.steps, worker.busy_since = report.steps, now
        worker.num_calls = max(0, worker.num_calls - 1)
        if not worker.num_calls:
            self._idle.add(report.worker)
        elif report.error is None and not report.needs_reply:
            self._may_go_on.append(report.worker)

    def _report_silent(self, now: float) -> list[Report]:
        """Return a report for every worker whose call takes too long, and double the timeout of its
        kind of call.
        """
        self._looked_at, silent = now, []
        for index, worker in enumerate(self.workers):
            if worker.num_calls and now - worker.busy_since > (
                seconds := self._timeouts.get_timeout(worker.kind)
            ):
                self._timeouts.double_timeout(worker.kind)
                silent.append(
                    Report(
                        worker=index,
                        error=f"no report for {format_duration(seconds)}",
                        cause="hung",
                    )
                )
        return silent

    def _discount_absence(self, away_seconds: float) -> None:
        """Discount the time for which the driver itself was away (suspended, or busy with a slow
        disk).
        """
        if away_seconds > MAX_DRIVER_PAUSE_SECONDS:
            for worker in self.workers:
                worker.busy_since += away_seconds

    def dismiss(self, index: int, *, restart: bool) -> list[OpenRun]:
        """Give up on a worker, and return the runs that it held. Raises PoolDead."""
        open_runs = list(self.workers[index].slots.values())
        self.workers[index] = WorkerState()
        self._idle.add(index)
        if restart:
            self._pool.restart(index)
        return open_runs
