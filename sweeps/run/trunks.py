"""Trunks: runs that share a stable phase, which run waits for which, and whose state is saved for
others.

Runs of one trunk (`proxies.core.branches`) start by rising duration. Each starts once the shorter
run before it has reached its branch step, where the worker saves the state from which the longer
run continues, or has ended. So the trunk is trained once. A state that could not be saved, or does
not fit a worker, costs time and changes no result. The same holds for a longer run that its source
names only after the worker of a shorter one trains on by itself; a source with a list names it at
once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from proxies.core.branches import branch_step, flops_between, trunk_id, trunk_order
from proxies.core.spec import RunSpec
from sweeps.run.backlog import Attempt
from sweeps.store.checkpoints import drop_checkpoints, saved_step


class Trunks:
    """The open runs of every trunk."""

    def __init__(self, study_dir: Path) -> None:
        self._study_dir = study_dir
        self._open: dict[str, dict[str, RunSpec]] = {}
        self._ids: dict[str, str] = {}

    def add(self, attempt: Attempt) -> None:
        """Add a run without an outcome."""
        if trunk := trunk_id(attempt.spec):
            self._ids[attempt.run_id] = trunk
            self._open.setdefault(trunk, {})[attempt.run_id] = attempt.spec

    def drop(self, run_id: str) -> None:
        """Remove a run that has its outcome, and the states of its trunk if no open run
        needs them.
        """
        if trunk := self._ids.pop(run_id, ""):
            del self._open[trunk][run_id]
            if not self._open[trunk]:
                del self._open[trunk]
                drop_checkpoints(self._study_dir, trunk)

    def may_start(self, attempt: Attempt, steps: Callable[[str], int | None]) -> bool:
        """Return whether the run before this one in its trunk has reached its branch step.

        Args:
            attempt: the run.
            steps: returns the steps done by a run in a slot.
        """
        shorter = [
            spec
            for spec in self._list_others(attempt)
            if trunk_order(spec) < trunk_order(attempt.spec)
        ]
        last = max(shorter, key=trunk_order, default=None)
        return last is None or ((done := steps(last.id)) is not None and done >= branch_step(last))

    def kept(self, attempt: Attempt) -> tuple[int, str] | None:
        """Return the step and trunk id under which the run's state is saved, if longer runs will
        continue from it.
        """
        if any(
            trunk_order(spec) > trunk_order(attempt.spec) for spec in self._list_others(attempt)
        ):
            return branch_step(attempt.spec), self._ids[attempt.run_id]
        return None

    def flops(self, attempt: Attempt) -> int:
        """Return the training FLOPs of a run that may start, beyond the state from which it
        continues.
        """
        trunk = self._ids.get(attempt.run_id)
        done = min(saved_step(self._study_dir, trunk), branch_step(attempt.spec)) if trunk else 0
        return flops_between(attempt.spec, done, attempt.spec.schedule.num_steps)

    def _list_others(self, attempt: Attempt) -> list[RunSpec]:
        """Return the other open runs of a run's trunk."""
        members = self._open.get(self._ids.get(attempt.run_id, ""), {})
        return [spec for run_id, spec in members.items() if run_id != attempt.run_id]
