"""The backlog: runs that wait for a slot, and the rules for which run is next and which must run
alone.

A bank is K runs that a worker trains as one batched model, and a slot is one run's place in it.
Runs with the same bank key fit into one bank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forerun._proxies.core.spec import RunSpec
from forerun._sweeps.run.retries import NO_FAILURES, RetryPlan


@dataclass(kw_only=True, slots=True, eq=False)
class OpenRun:
    """The driver's state of one run that has no outcome yet.

    A run that is queued again after a failure keeps its `OpenRun`.
    """

    spec: RunSpec
    run_id: str
    bank_key: str
    """Key that all runs of one bank share. The key includes the minimum number of microbatches in
    `retry_plan`.
    """
    retry_plan: RetryPlan = NO_FAILURES
    """Plan for the next attempt, which follows from the run's failures so far."""
    rungs: tuple[int, ...] = ()
    """Optimizer steps, ascending, at which the pruner has yet to decide whether the run goes on."""
    is_queued: bool = False
    """Whether the run waits in a `Backlog`."""
    flops: float = 0.0
    """Training FLOPs of the run, without the steps that a saved state of its trunk spares."""
    is_rerun: bool = False
    """Whether the run already had an outcome and is executed again for comparison
    (`forerun._sweeps.run.reruns`)."""

    @property
    def pause_step(self) -> int | None:
        """Optimizer step of the next pruning decision; None if there is none."""
        return self.rungs[0] if self.rungs else None


class Backlog:
    """Queues of runs, one per bank key, in the order in which the keys arrived."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[OpenRun]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, open_run: OpenRun) -> None:
        """Append a run to its queue."""
        open_run.is_queued = True
        self._queues.setdefault(open_run.bank_key, deque()).append(open_run)

    def put_back(self, open_run: OpenRun) -> None:
        """Queue a run again after a failure.

        The run goes to the front, because a search may wait for its result. A run that must run
        alone goes to the back, because at the front it would block the others.
        """
        open_run.is_queued = True
        queue = self._queues.setdefault(open_run.bank_key, deque())
        if open_run.retry_plan.needs_own_worker:
            queue.append(open_run)
        else:
            queue.appendleft(open_run)

    def discard(self, open_run: OpenRun) -> None:
        """Remove a run, if it is queued."""
        if open_run.is_queued:
            self._remove(open_run)

    def _remove(self, open_run: OpenRun) -> None:
        """Remove a run from its queue."""
        self._queues[open_run.bank_key].remove(open_run)
        open_run.is_queued = False

    def has_waiting(
        self, bank_key: str, slots: Mapping[int, OpenRun], is_ready: Callable[[OpenRun], bool]
    ) -> bool:
        """Return whether the bank has a free slot and a run that is ready waits for it.

        Args:
            bank_key: key of the bank.
            slots: the bank's occupied slots.
            is_ready: returns whether a run may start now.
        """
        queue = self._queues.get(bank_key, deque())
        return (
            len(queue) > 0
            and len(slots) < queue[0].spec.numerics.num_slots
            and any(map(is_ready, queue))
        )

    def choose_key(self, current: str, is_ready: Callable[[OpenRun], bool]) -> str:
        """Return the key for an empty bank: the first key with a run that is ready.

        The key `current` comes first, because the worker has built its model. It is also the
        answer if no run is ready.
        """
        self._queues = {key: queue for key, queue in self._queues.items() if queue}
        keys = (
            key for key in (current, *self._queues) if any(map(is_ready, self._queues.get(key, ())))
        )
        return next(keys, current)

    def fill(
        self,
        bank_key: str,
        slots: dict[int, OpenRun],
        is_ready: Callable[[OpenRun], bool],
        may_start: Callable[[OpenRun], bool],
    ) -> dict[int, OpenRun]:
        """Move waiting runs into the free slots of a bank.

        Args:
            bank_key: key of the bank.
            slots: the bank's occupied slots; the moved runs are added.
            is_ready: returns whether a run may start now; a run that is not ready is skipped.
            may_start: asked before each move; the first run that may not start ends the filling.

        Returns:
            The runs that were moved, by slot.
        """
        queue = self._queues.get(bank_key, deque())
        moved: dict[int, OpenRun] = {}
        while not any(open_run.retry_plan.needs_own_worker for open_run in slots.values()):
            candidate = next(filter(is_ready, queue), None)
            if candidate is None or (slots and candidate.retry_plan.needs_own_worker):
                break
            num_slots = candidate.spec.numerics.num_slots
            free = next((slot for slot in range(num_slots) if slot not in slots), None)
            if free is None or not may_start(candidate):
                break
            self._remove(candidate)
            moved[free] = slots[free] = candidate
        return moved
