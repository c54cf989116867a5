"""An engine of ours whose slots are saved now and then, and resume from there: behind the host, in
the worker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

from proxies.core.branches import branch_step, trunk_id
from proxies.core.spec import Curve, RunResult, RunSpec
from proxies.training.gradient_noise import NoiseLooks
from proxies.training.slot_state import (
    SlotState,
    StateError,
    newest,
    of_branch,
    of_trunk,
    put_newest_aside,
    store,
)
from sweeps.store.checkpoints import checkpoint_dir
from sweeps.store.curves import append_noise

if TYPE_CHECKING:
    from proxies.training.bank import Bank
    from proxies.training.solo import Solo

SAVE_SECONDS = 30.0
"""Between two saves, so that a run loses no more when its worker dies."""
SAVES_PER_RUN, LEAST_SAVE_SECONDS = 10, 1.0
"""A run of less than ten times that is saved at each tenth: where workers live for seconds, it ends
all the same."""
LOOKED_AT = "looked at"
"""Reason in the outcome of a run that waits; whoever prunes it has a better one."""
SAVE_SHARE, SHORT_SAVE_SHARE = 0.01, 0.05
"""The largest share of the time that saving may take, in long and in short runs: where a save takes
long, the next one waits longer. Four slots of a tiny model take 45 ms, and their steps 40.
"""


class ResumableRuns:
    """Admits runs from their checkpoints, and writes some."""

    def __init__(
        self, engine: Solo | Bank, study_dir: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: monotonic seconds."""
        self._engine, self._study_dir, self._clock = engine, study_dir, clock
        self._saved_steps: dict[int, int] = {}
        self._num_steps: dict[int, int] = {}
        self._step_seconds = 0.0
        self._saved_at, self._save_took = clock(), 0.0
        self._pauses: dict[int, int] = {}
        # slot -> branch step and trunk of a run that others go on from
        self._trunks: dict[int, tuple[int, str]] = {}
        self._notes: list[str] = []
        self._noise = NoiseLooks()

    @property
    def steps(self) -> dict[int, int]:
        """Slot -> optimizer steps done, of the occupied slots."""
        return self._engine.steps

    def admit(self, index: int, spec: RunSpec) -> None:
        """Start a run in a free slot from its newest good checkpoint, else from the trunk that it
        shares, if any.
        """
        self._num_steps[index] = spec.schedule.num_steps
        folder = checkpoint_dir(self._study_dir, spec.id)
        while state := newest(folder, spec.id, self._engine.environment, self._notes):
            if self._admitted(index, spec, state, folder):
                self._notes.append(f"run {spec.id[:12]} resumes from step {state.header.step}")
                return
        if trunk := trunk_id(spec):
            folder = checkpoint_dir(self._study_dir, trunk)
            while state := newest(
                folder, trunk, self._engine.environment, self._notes, branch_step(spec)
            ):
                if self._admitted(index, spec, of_branch(state, spec.id), folder):
                    return
        self._engine.admit(index, spec)
        self._saved_steps[index] = 0

    def _admitted(self, index: int, spec: RunSpec, state: SlotState, folder: Path) -> bool:
        """Whether a run could go on from a state; one that it could not is put aside."""
        try:
            self._engine.admit(index, spec, state)
        except StateError as error:
            put_newest_aside(folder, str(error), self._notes)
            return False
        self._saved_steps[index] = state.header.step
        return True

    def keep(self, indices: AbstractSet[int]) -> None:
        """Free every slot but those."""
        for index in self._engine.steps.keys() - indices:
            self._engine.evict(index)

    def pause(self, hold: Mapping[int, int | None], trunks: Mapping[int, tuple[int, str]]) -> None:
        """Have every run wait at its step to be looked at; one without continues.

        `trunks`: slots whose state at a step is written for the runs that go on from that trunk.
        """
        self._pauses = {index: step for index, step in hold.items() if step is not None}
        self._trunks = {
            i: trunks[i]
            for i, step in self._engine.steps.items()
            if i in trunks and step < trunks[i][0]
        }
        for index in self._engine.steps:
            stops = [self._pauses.get(index), self._trunks.get(index, (None, ""))[0]]
            self._engine.pause_at(
                index, min((step for step in stops if step is not None), default=None)
            )

    def _write_trunks(self) -> None:
        """Write the state of every run that has come to the end of its trunk; it then continues."""
        for index, (step, trunk) in tuple(self._trunks.items()):
            if self._engine.steps.get(index) == step:
                try:
                    store(
                        checkpoint_dir(self._study_dir, trunk),
                        of_trunk(self._engine.state(index), trunk),
                    )
                except StateError as error:
                    self._notes.append(
                        f"{error}; longer runs that would go on from it train more of their steps"
                    )
                del self._trunks[index]
                self._engine.pause_at(index, self._pauses.get(index))

    def measure_noise(self, on: bool) -> None:
        """Measure the runs' gradient noise from now on, or no longer."""
        self._engine.noise = self._noise if on else None

    def paused(self) -> list[tuple[int, RunResult, Curve]]:
        """(slot, result, curve) of the runs that wait, as if they were pruned there; they may be
        further already.
        """
        steps = self._engine.steps
        there = [
            (index, step)
            for index, step in self._pauses.items()
            if index in steps and steps[index] >= step
        ]
        return [(index, *self._engine.pruned(index, step, LOOKED_AT)) for index, step in there]

    def advance(
        self, num_steps: int, seconds: float = math.inf
    ) -> list[tuple[int, RunResult, Curve]]:
        """Up to so many steps, for so long; (slot, result, curve) of those that end. Returns sooner
        to save.
        """
        began, before = self._clock(), self._engine.steps
        due_seconds = self._saved_at + self._save_every_seconds() - began
        # However late the call comes: one that made no step would be followed by others like it.
        ended = self._engine.advance(
            num_steps, min(seconds, max(due_seconds, LEAST_SAVE_SECONDS / 2))
        )
        self._write_trunks()
        self._keep_noise()
        done = [
            step - before[index] for index, step in self._engine.steps.items() if index in before
        ]
        if any(done):
            self._step_seconds = (self._clock() - began) / max(done)
        if self._clock() - self._saved_at >= self._save_every_seconds():
            self.save()
        return ended

    def _keep_noise(self) -> None:
        """Write what was measured. A run without it is as good a run: what fails is a note."""
        looks, self._noise.taken = self._noise.taken, []
        try:
            for run_id, look in looks:
                append_noise(self._study_dir, run_id, look)
        except OSError as error:
            self._notes.append(
                f"gradient noise could not be written ({error}); the run continues without it"
            )

    def _save_every_seconds(self) -> float:
        """Between two saves, by the shortest run at hand; of no known length, it is short."""
        shortest = (
            min((self._num_steps[index] for index in self._engine.steps), default=0)
            * self._step_seconds
        )
        if shortest >= SAVES_PER_RUN * SAVE_SECONDS:
            return max(SAVE_SECONDS, self._save_took / SAVE_SHARE)
        return max(shortest / SAVES_PER_RUN, LEAST_SAVE_SECONDS, self._save_took / SHORT_SAVE_SHARE)

    def save(self) -> None:
        """Write the state of every slot that has moved since it was last written. What fails is a
        note, no error.
        """
        began = self._clock()
        for index, step in self._engine.steps.items():
            if step > self._saved_steps[index]:
                state = self._engine.state(index)
                try:
                    store(checkpoint_dir(self._study_dir, state.header.run_id), state)
                except StateError as error:
                    self._notes.append(f"{error}; the run continues without this checkpoint")
                self._saved_steps[index] = step
        self._saved_at = self._clock()
        self._save_took = self._saved_at - began

    def take_notes(self) -> tuple[str, ...]:
        """Notes for the user, each once."""
        notes, self._notes = tuple(self._notes), []
        return notes
