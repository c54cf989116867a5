"""The backlog: runs that wait for a slot, by bank key, with the rules for which is next and which
must run alone.
"""

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
    """Key that it shares with the other runs of its bank; includes `standing.num_microbatches`."""
    standing: RetryStatus = NEVER_LOST
    """Retry status that follows from the run's lost executions."""
    rungs: tuple[int, ...] = ()
    """Optimizer steps, ascending, at which its source has yet to judge it."""
    queued: bool = False
    """Whether it is in a `Backlog`."""
    flops: float = 0.0
    """FLOPs of its training from the state at which it started."""
    again: bool = False
    """Whether it has its outcome and is executed again (`sweeps.run.reruns`)."""

    @property
    def pause_step(self) -> int | None:
        """Optimizer step at which it is judged next; None if there is none."""
        return self.rungs[0] if self.rungs else None


class Backlog:
    """Queues of runs, one per bank key, in the order in which the keys arrived."""

    def __init__(self, num_slots_for: Callable[[RunSpec], int]) -> None:
        """Create empty queues; `num_slots_for` returns K, the number of slots of a run's bank."""
        self._num_slots_for = num_slots_for
        self._queues: dict[str, deque[Attempt]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, attempt: Attempt) -> None:
        """Append a run to its queue."""
        attempt.queued = True
        self._queues.setdefault(attempt.bank_key, deque()).append(attempt)

    def put_back(self, attempt: Attempt) -> None:
        """Queue a lost run again: at the front, because a search may wait for it, or at the back if
        it must run alone and would block others.
        """
        attempt.queued = True
        queue = self._queues.setdefault(attempt.bank_key, deque())
        if attempt.standing.alone:
            queue.append(attempt)
        else:
            queue.appendleft(attempt)

    def discard(self, attempt: Attempt) -> None:
        """Remove a run, if it is queued."""
        if attempt.queued:
            self._remove(attempt)

    def _remove(self, attempt: Attempt) -> None:
        self._queues[attempt.bank_key].remove(attempt)
        attempt.queued = False

    def waits_for(
        self, bank_key: str, slots: Mapping[int, Attempt], ready: Callable[[Attempt], bool]
    ) -> bool:
        """Return whether a run that is ready waits for a free slot of that bank."""
        queue = self._queues.get(bank_key, deque())
        return (
            len(queue) > 0
            and len(slots) < self._num_slots_for(queue[0].spec)
            and any(map(ready, queue))
        )

    def choose_key(self, current: str, ready: Callable[[Attempt], bool]) -> str:
        """Return the key for an empty bank.

        This is `current` while that key has runs that are ready, since its model is built, or else
        the first key that has.
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
        """Move runs of the key into the free `slots` of a bank.

        A run that is not `ready` is skipped. The first run that may not start ends the search for
        runs.

        Returns:
            The runs that were moved, by slot.
        """
        queue = self._queues.get(bank_key, deque())
        moved: dict[int, Attempt] = {}
        while not any(attempt.standing.alone for attempt in slots.values()):
            candidate = next(filter(ready, queue), None)
            if candidate is None or (slots and candidate.standing.alone):
                break
            free = next(
                (slot for slot in range(self._num_slots_for(candidate.spec)) if slot not in slots),
                None,
            )
            if free is None or not may_start(candidate):
                break
            self._remove(candidate)
            moved[free] = slots[free] = candidate
        return moved
