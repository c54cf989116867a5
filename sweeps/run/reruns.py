"""Runs that have their outcome, carried out once more on named workers: replays, which show who computes wrongly.

Nothing is recorded here: whoever asks decides what an execution means. One that is lost with its worker is begun again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from proxies.core import canon
from proxies.core.checks import SpecError
from proxies.core.spec import RunSpec
from sweeps.run.backlog import Attempt
from sweeps.run.causes import WORDS, Cause
from sweeps.run.crew import Crew, Leases, Worker
from sweeps.run.losses import MOST_IN_A_ROW
from sweeps.run.pool import Advance, Finished, Pool, Replay, Report, decoded
from sweeps.run.rerun_verdict import Ran
from sweeps.store.sites import WHERE

POLL_SECONDS = 0.5
WHERE_SECONDS = 60.0
"""For workers to say where they are: a first call makes a host, no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One execution, and the worker that is to carry it out."""

    spec: RunSpec
    replay: Replay
    worker: int
    num_microbatches: int = 1
    """Passes that its batches are split into, at least, as at first: they did not fit in fewer."""


def where(pool: Pool, check: Callable[[], None]) -> dict[int, dict[str, str]]:
    """By worker, `sweeps.store.sites.site` of its process; without those that do not say it in time.

    Args:
        pool: idle.
        check: raises what ends the work.
    """
    busy, found = set(range(pool.num_workers)), dict[int, dict[str, str]]()
    for worker in busy:
        pool.start(worker, Advance(bank_key="", num_slots=1, admit=(), max_steps=0, probe=WHERE))
    until = time.monotonic() + WHERE_SECONDS
    while busy and time.monotonic() < until:
        for report in pool.wait(POLL_SECONDS):
            busy.discard(report.worker)
            if report.error is not None or report.answer is None:
                pool.restart(report.worker)
            else:
                found[report.worker] = {name: str(value) for name, value in report.answer.items()}
        check()
    for worker in busy:
        pool.restart(worker)
    return found


class Reruns:
    """Executions under way; those of one worker that may share a bank do."""

    def __init__(
        self, pool: Pool, tasks: Sequence[Task], *, num_slots_for: Callable[[RunSpec], int],
        bank_key_for: Callable[[RunSpec], str], steps_per_call: int, max_attempts: int, hang_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Arguments as in `sweeps.run.drive`; `tasks`: what is to be carried out."""
        self._crew = Crew(pool, num_slots_for, Leases(hang_seconds), clock)
        self._num_slots_for, self._steps_per_call, self._max_attempts = num_slots_for, steps_per_call, max_attempts
        self._queue: list[Attempt] = []
        self._tasks: dict[Attempt, Task] = {}
        for task in tasks:
            attempt = Attempt(
                spec=task.spec, run_id=task.spec.id, num_microbatches=task.num_microbatches, replay=task.replay,
                bank_key=f"{bank_key_for(task.spec)}/{task.num_microbatches}/{task.replay}",
            )  # fmt: skip
            self._queue.append(attempt)
            self._tasks[attempt] = task

    def ended(self, check: Callable[[], None]) -> Iterator[tuple[Task, Ran | str]]:
        """Every task with its execution, as they end; or why there is none, after `max_attempts`.

        `check`, called a few times a second, raises what ends the work; what is under way then is given up.
        """
        while self._queue or self._crew.specs():
            check()
            for index, worker in self._crew.idle():
                admitted = self._filled(index, worker)
                if worker.slots:
                    self._crew.start(index, admitted, self._steps_per_call)
            for report in self._crew.wait(POLL_SECONDS):
                yield from self._taken(report)

    def _filled(self, index: int, worker: Worker) -> dict[int, Attempt]:
        """Put what waits for this worker into its free slots; by slot."""
        admitted: dict[int, Attempt] = {}
        for attempt in [attempt for attempt in self._queue if self._tasks[attempt].worker == index]:
            if not worker.slots:
                worker.bank_key = attempt.bank_key
            free = next((i for i in range(self._num_slots_for(attempt.spec)) if i not in worker.slots), None)
            if attempt.bank_key == worker.bank_key and free is not None:
                worker.slots[free] = admitted[free] = attempt
                self._queue.remove(attempt)
        return admitted

    def _taken(self, report: Report) -> Iterator[tuple[Task, Ran | str]]:
        for finished in report.finished:
            held = self._crew.workers[report.worker].slots.pop(finished.slot, None)
            if held is not None:
                yield from self._told(held, finished)
        if report.error is not None:
            for held in self._crew.dismiss(report.worker, restart=True):
                yield from self._lost(held, f"{WORDS[report.cause]}: {report.error}", report.cause)

    def _told(self, held: Attempt, finished: Finished) -> Iterator[tuple[Task, Ran | str]]:
        try:
            result, curve = decoded(finished)
        except (canon.CanonError, SpecError) as error:
            yield from self._lost(held, f"its result is not valid: {error}")
            return
        if result.id != held.run_id or result.status not in ("finished", "diverged"):
            yield from self._lost(held, f"its result is not the run's: {result.id[:12]}, {result.status}")
            return
        yield self._tasks[held], Ran(result=result, curve=curve)

    def _lost(self, held: Attempt, why: str, cause: Cause = "error") -> Iterator[tuple[Task, Ran | str]]:
        """Begin it again, or say why not; a worker that is killed from outside is not the run's fault."""
        held.num_lost += cause != "lost_worker"
        held.num_in_a_row += 1
        if held.num_lost < self._max_attempts and held.num_in_a_row < max(MOST_IN_A_ROW, self._max_attempts):
            self._queue.append(held)
        else:
            yield self._tasks[held], f"lost {held.num_in_a_row} times, the last: {why}"
