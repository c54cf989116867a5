"""Runs that share a stable phase, as the driver sees them: who waits for whom, and whose state is
kept for others.

Within a trunk (`proxies.core.branches`) runs start by rising duration: each once the one before it
has come to its branch step, where the worker writes the state that the next goes on from, or has
ended. So the trunk is trained once. A state that could not be written, or does not fit a worker,
costs time and changes no result. So does a longer run that its source gives once the worker of a
shorter one trains on by itself: whoever has a list gives it at once.
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
        """A run without an outcome."""
        if trunk := trunk_id(attempt.spec):
            self._ids[attempt.run_id] = trunk
            self._open.setdefault(trunk, {})[attempt.run_id] = attempt.spec

    def drop(self, run_id: str) -> None:
        """It has its outcome; the states of a trunk that nobody goes on from any more are
        removed.
        """
        if trunk := self._ids.pop(run_id, ""):
            del self._open[trunk][run_id]
            if not self._open[trunk]:
                del self._open[trunk]
                drop_checkpoints(self._study_dir, trunk)

    def may_start(self, attempt: Attempt, steps: Callable[[str], int | None]) -> bool:
        """Whether the run before it in its trunk has come to its branch step; `steps`: done by a
        run in a slot.
        """
        before = [
            spec for spec in self._others(attempt) if trunk_order(spec) < trunk_order(attempt.spec)
        ]
        last = max(before, key=trunk_order, default=None)
        return last is None or ((done := steps(last.id)) is not None and done >= branch_step(last))

    def kept(self, attempt: Attempt) -> tuple[int, str] | None:
        """The step and trunk under which its state is written, where longer runs will go on from
        it.
        """
        if any(trunk_order(spec) > trunk_order(attempt.spec) for spec in self._others(attempt)):
            return branch_step(attempt.spec), self._ids[attempt.run_id]
        return None

    def flops(self, attempt: Attempt) -> int:
        """Training FLOPs of a run that may start, beyond the state that it goes on from."""
        trunk = self._ids.get(attempt.run_id)
        done = min(saved_step(self._study_dir, trunk), branch_step(attempt.spec)) if trunk else 0
        return flops_between(attempt.spec, done, attempt.spec.schedule.num_steps)

    def _others(self, attempt: Attempt) -> list[RunSpec]:
        members = self._open.get(self._ids.get(attempt.run_id, ""), {})
        return [spec for run_id, spec in members.items() if run_id != attempt.run_id]
