"""Trunks: runs that share the stable phase of their schedule, the order in which they start, and
the states that are saved for them.

Runs of one trunk (`forerun._proxies.core.branches`) start in the order of their durations. The
decay of a run begins at its branch step: there its worker saves the state from which the next
longer run continues. The longer run starts once that step is reached, or once the shorter run has
ended, so the stable phase is trained only once. If a state could not be saved, or does not fit a
worker, the longer run trains the stable phase itself, which costs time and changes no result. The
same happens if a source names the longer run only after the shorter one has passed its branch step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forerun._proxies.core.branches import (
    compute_branch_step,
    compute_flops_between,
    compute_trunk_id,
    make_trunk_sort_key,
)
from forerun._proxies.core.spec import RunSpec
from forerun._sweeps.run.backlog import OpenRun
from forerun._sweeps.store.checkpoints import drop_checkpoints, find_saved_step


class TrunkRuns:
    """The open runs of every trunk."""

    def __init__(self, study_dir: Path) -> None:
        self._study_dir = study_dir
        self._open: dict[str, dict[str, RunSpec]] = {}  # trunk id -> run id -> run
        self._ids: dict[str, str] = {}  # run id -> trunk id

    def add(self, open_run: OpenRun) -> None:
        """Add a run without an outcome."""
        if trunk := compute_trunk_id(open_run.spec):
            self._ids[open_run.run_id] = trunk
            self._open.setdefault(trunk, {})[open_run.run_id] = open_run.spec

    def drop(self, run_id: str) -> None:
        """Remove a run that has its outcome, and the states of its trunk if no open run
        needs them.
        """
        if trunk := self._ids.pop(run_id, ""):
            del self._open[trunk][run_id]
            if not self._open[trunk]:
                del self._open[trunk]
                drop_checkpoints(self._study_dir, trunk)

    def may_start(self, open_run: OpenRun, get_steps: Callable[[str], int | None]) -> bool:
        """Return whether the next shorter run of the trunk has reached its branch step, or ended.

        Args:
            open_run: the run.
            get_steps: returns the steps done by a run in a slot, None if it is in no slot.
        """
        shorter = [
            spec
            for spec in self._list_others(open_run)
            if make_trunk_sort_key(spec) < make_trunk_sort_key(open_run.spec)
        ]
        next_shorter = max(shorter, key=make_trunk_sort_key, default=None)
        return next_shorter is None or (
            (num_steps := get_steps(next_shorter.id)) is not None
            and num_steps >= compute_branch_step(next_shorter)
        )

    def plan_saved_state(self, open_run: OpenRun) -> tuple[int, str] | None:
        """Return the step at which the worker must save the run's state, and the trunk id to save
        it under; None if no longer run continues from this run.
        """
        if any(
            make_trunk_sort_key(spec) > make_trunk_sort_key(open_run.spec)
            for spec in self._list_others(open_run)
        ):
            return compute_branch_step(open_run.spec), self._ids[open_run.run_id]
        return None

    def count_flops(self, open_run: OpenRun) -> int:
        """Return the training FLOPs of a run that may start, without the steps that a saved state
        of its trunk spares.
        """
        trunk = self._ids.get(open_run.run_id)
        first_step = (
            min(find_saved_step(self._study_dir, trunk), compute_branch_step(open_run.spec))
            if trunk
            else 0
        )
        return compute_flops_between(open_run.spec, first_step, open_run.spec.schedule.num_steps)

    def _list_others(self, open_run: OpenRun) -> list[RunSpec]:
        """Return the other open runs of a run's trunk."""
        members = self._open.get(self._ids.get(open_run.run_id, ""), {})
        return [spec for run_id, spec in members.items() if run_id != open_run.run_id]
