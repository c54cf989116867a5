"""Runs that wait for a slot, by bank key: who is next, and who must run alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
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
    queued: bool = False
    """Whether it is in a `Backlog`."""
    flops: float = 0.0
    """Of its training from the state that it goes on from, as it was started."""
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
        attempt.queued = True
        self._queues.setdefault(attempt.bank_key, deque()).append(attempt)

    def put_back(self, attempt: Attempt) -> None:
        """Queue a lost run again: first, for a search may wait for it; last if it runs alone and
        would block.
        """
        attempt.queued = True
        queue = self._queues.setdefault(attempt.bank_key, deque())
        if attempt.standing.alone:
            queue.append(attempt)
        else:
            queue.appendleft(attempt)

    def discard(self, attempt: Attempt) -> None:
        """Forget a run, if it is queued."""
        if attempt.queued:
            self._take(attempt)

    def _take(self, attempt: Attempt) -> None:
        self._queues[attempt.bank_key].remove(attempt)
        attempt.queued = False

    def waits_for(
        self, bank_key: str, slots: Mapping[int, Attempt], ready: Callable[[Attempt], bool]
    ) -> bool:
        """Whether a run that is ready waits for a free slot of that bank."""
        queue = self._queues.get(bank_key, deque())
        return (
            len(queue) > 0
            and len(slots) < self._num_slots_for(queue[0].spec)
            and any(map(ready, queue))
        )

    def choose_key(self, current: str, ready: Callable[[Attempt], bool]) -> str:
        """The key for an empty bank: `current` while it has runs that are ready (its model is
        built), else the first that has.
        """
        self._queues = {key: queue for key, queue in self._queues.items() if queue}
        keys = (
            key for key in (current, *self._queues) if any(map(ready, self._queues.get(key, ())))
        )
        return next(keys, current)

    def fill(
        self,
        bank_key: str,
        slots: dict[int, Attempt],
        ready: Callable[[Attempt], bool],
        may_start: Callable[[Attempt], bool],
    ) -> dict[int, Attempt]:
        """Move runs of the key into the free `slots` of a bank; returns those moved, by slot.

        A run that is not `ready` is passed over; one that may not start ends it.
        """
        queue = self._queues.get(bank_key, deque())
        moved: dict[int, Attempt] = {}
        while not any(held.standing.alone for held in slots.values()):
            following = next(filter(ready, queue), None)
            if following is None or (slots and following.standing.alone):
                break
            free = next(
                (i for i in range(self._num_slots_for(following.spec)) if i not in slots), None
            )
            if free is None or not may_start(following):
                break
            self._take(following)
            moved[free] = slots[free] = following
        return moved
