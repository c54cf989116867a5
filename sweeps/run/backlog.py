"""Runs that wait for a slot, by bank key: who is next, and who must run alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from proxies.core.spec import RunSpec
from sweeps.run.lost_runs import NEVER_LOST, RetryStatus


@dataclass(kw_only=True, slots=True, eq=False)
class Attempt:
    """A run that has no outcome yet."""

    spec: RunSpec
    run_id: str
    bank_key: str
    """What it shares with the others of its bank: among them `standing.num_microbatches`."""
    standing: RetryStatus = NEVER_LOST
    """What the executions that were begun and never reported mean for this one."""
    rungs: tuple[int, ...] = ()
    """Optimizer steps, ascending, at which its source has still to look at it."""
    again: bool = False
    """Whether it has its outcome, and is run once more: see `sweeps.run.reruns`."""

    @property
    def pause_step(self) -> int | None:
        """Where it is looked at next, if anywhere."""
        return self.rungs[0] if self.rungs else None


class Backlog:
    """Queues of runs, one per bank key, in the order the keys came."""

    def __init__(self, num_slots_for: Callable[[RunSpec], int]) -> None:
        """`num_slots_for`: K of a run's bank."""
        self._num_slots_for = num_slots_for
        self._queues: dict[str, deque[Attempt]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, attempt: Attempt) -> None:
        """Put a run at the end of its queue."""
        self._queues.setdefault(attempt.bank_key, deque()).append(attempt)

    def put_back(self, attempt: Attempt) -> None:
        """Queue a lost run again: first, for a search may wait for it; last if it runs alone and would block."""
        queue = self._queues.setdefault(attempt.bank_key, deque())
        if attempt.standing.alone:
            queue.append(attempt)
        else:
            queue.appendleft(attempt)

    def discard(self, attempt: Attempt) -> None:
        """Forget a run, if it is queued."""
        queue = self._queues.get(attempt.bank_key, deque())
        if attempt in queue:
            queue.remove(attempt)

    def choose_key(self, current: str) -> str:
        """The key for an empty bank: `current` while it lasts (its model is built), else the first with runs."""
        self._queues = {key: queue for key, queue in self._queues.items() if queue}
        return current if current in self._queues else next(iter(self._queues), current)

    def fill(
        self, bank_key: str, slots: dict[int, Attempt], may_start: Callable[[Attempt], bool] = lambda _: True
    ) -> dict[int, Attempt]:
        """Move runs of the key into the free `slots` of a bank while they may start; returns those moved, by slot."""
        queue = self._queues.get(bank_key, deque())
        moved: dict[int, Attempt] = {}
        while queue and not any(held.standing.alone for held in slots.values()):
            free = next((i for i in range(self._num_slots_for(queue[0].spec)) if i not in slots), None)
            if free is None or (slots and queue[0].standing.alone) or not may_start(queue[0]):
                break
            moved[free] = slots[free] = queue.popleft()
        return moved
