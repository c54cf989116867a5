"""Resumable runs: an engine of proxies whose slots are saved from time to time and resume from the
saved states. It runs behind the host, in the worker.
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
"""Seconds between two saves of a long run: the most that a run loses when its worker dies."""
SAVES_PER_RUN, LEAST_SAVE_SECONDS = 10, 1.0
"""A run that lasts less than ten times `SAVE_SECONDS` is saved at each tenth, and at most once in
`LEAST_SAVE_SECONDS`: it then ends even if workers live only for seconds.
"""
LOOKED_AT = "looked at"
"""Reason in the outcome of a paused run; a pruner replaces it with its own."""
SAVE_SHARE, SHORT_SAVE_SHARE = 0.01, 0.05
"""Maximum share of the time that saving may take, in long and in short runs; if a save takes long,
the next one is delayed. Four slots of a tiny model take 45 ms to save, and a step of them 40 ms.
"""


class ResumableRuns:
    """An engine that admits runs from their checkpoints, and saves checkpoints."""

    def __init__(
        self, engine: Solo | Bank, study_dir: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Wrap an engine.

        Args:
            engine: the engine.
            study_dir: folder of the study, for the checkpoints.
            clock: returns monotonic seconds.
        """
        self._engine, self._study_dir, self._clock = engine, study_dir, clock
        self._saved_steps: dict[int, int] = {}
        self._num_steps: dict[int, int] = {}
        self._step_seconds = 0.0
        self._saved_at, self._save_duration_seconds = clock(), 0.0
        self._pauses: dict[int, int] = {}
        # slot -> branch step and trunk id, for runs from which others continue
        self._trunks: dict[int, tuple[int, str]] = {}
        self._notes: list[str] = []
        self._noise = NoiseLooks()

    @property
    def steps(self) -> dict[int, int]:
        """Slot -> optimizer steps done, for the occupied slots."""
        return self._engine.steps

    def admit(self, index: int, spec: RunSpec) -> None:
        """Start a run in a free slot.

        It continues from its newest valid checkpoint, or else from its trunk's saved state, if
        there is one.
        """
        self._num_steps[index] = spec.schedule.num_steps
        folder = checkpoint_dir(self._study_dir, spec.id)
        while state := newest(folder, spec.id, self._engine.environment, self._notes):
            if self._try_admit(index, spec, state, folder):
                self._notes.append(f"run {spec.id[:12]} resumes from step {state.header.step}")
                return
        if trunk := trunk_id(spec):
            folder = checkpoint_dir(self._study_dir, trunk)
            while state := newest(
                folder, trunk, self._engine.environment, self._notes, branch_step(spec)
            ):
                if self._try_admit(index, spec, of_branch(state, spec.id), folder):
                    return
        self._engine.admit(index, spec)
        self._saved_steps[index] = 0

    def _try_admit(self, index: int, spec: RunSpec, state: SlotState, folder: Path) -> bool:
        """Return whether a run could continue from a state; set the state aside if not."""
        try:
            self._engine.admit(index, spec, state)
        except StateError as error:
            put_newest_aside(folder, str(error), self._notes)
            return False
        self._saved_steps[index] = state.header.step
        return True

    def keep(self, indices: AbstractSet[int]) -> None:
        """Free every slot except `indices`."""
        for index in self._engine.steps.keys() - indices:
            self._engine.evict(index)

    def pause(self, hold: Mapping[int, int | None], trunks: Mapping[int, tuple[int, str]]) -> None:
        """Set the steps at which runs pause.

        Args:
            hold: slot -> step at which its run pauses; None: it continues.
            trunks: slot -> (step, trunk id) of states to save for runs that continue from that
                trunk.
        """
        self._pauses = {index: step for index, step in hold.items() if step is not None}
        self._trunks = {
            index: trunks[index]
            for index, step in self._engine.steps.items()
            if index in trunks and step < trunks[index][0]
        }
        for index in self._engine.steps:
            # The engine pauses at the trunk's step too, where its state is saved
            stops = [self._pauses.get(index), self._trunks.get(index, (None, ""))[0]]
            self._engine.pause_at(
                index, min((step for step in stops if step is not None), default=None)
            )

    def _write_trunks(self) -> None:
        """Save the state of every run that has reached the end of its trunk; the run then
        continues.
        """
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
        """Switch the measurement of the runs' gradient noise on or off."""
        self._engine.noise = self._noise if on else None

    def paused(self) -> list[tuple[int, RunResult, Curve]]:
        """Return (slot, result, curve) of the paused runs, as if they were pruned at their rung.

        A run may already be beyond it.
        """
        steps = self._engine.steps
        reached = [
            (index, step)
            for index, step in self._pauses.items()
            if index in steps and steps[index] >= step
        ]
        return [(index, *self._engine.pruned(index, step, LOOKED_AT)) for index, step in reached]

    def advance(
        self, num_steps: int, seconds: float = math.inf
    ) -> list[tuple[int, RunResult, Curve]]:
        """Train at most `num_steps` steps for at most `seconds`; return sooner if a save is due.

        Returns:
            (slot, result, curve) of the runs that ended.
        """
        began, before = self._clock(), self._engine.steps
        due_seconds = self._saved_at + self._compute_save_interval() - began
        # Train for a minimum time even if a save is overdue: a call that made no step would be
        # followed by others without steps.
        ended = self._engine.advance(
            num_steps, min(seconds, max(due_seconds, LEAST_SAVE_SECONDS / 2))
        )
        self._write_trunks()
        self._write_noise()
        steps_done = [
            step - before[index] for index, step in self._engine.steps.items() if index in before
        ]
        if any(steps_done):
            self._step_seconds = (self._clock() - began) / max(steps_done)
        if self._clock() - self._saved_at >= self._compute_save_interval():
            self.save()
        return ended

    def _write_noise(self) -> None:
        """Write the gradient noise that was measured. A failure is only a note, because the run
        does not depend on it.
        """
        looks, self._noise.taken = self._noise.taken, []
        try:
            for run_id, look in looks:
                append_noise(self._study_dir, run_id, look)
        except OSError as error:
            self._notes.append(
                f"gradient noise could not be written ({error}); the run continues without it"
            )

    def _compute_save_interval(self) -> float:
        """Return the seconds between two saves, which depend on the duration of the shortest
        current run; a run of unknown duration counts as short.
        """
        shortest = (
            min((self._num_steps[index] for index in self._engine.steps), default=0)
            * self._step_seconds
        )
        if shortest >= SAVES_PER_RUN * SAVE_SECONDS:
            return max(SAVE_SECONDS, self._save_duration_seconds / SAVE_SHARE)
        return max(
            shortest / SAVES_PER_RUN,
            LEAST_SAVE_SECONDS,
            self._save_duration_seconds / SHORT_SAVE_SHARE,
        )

    def save(self) -> None:
        """Save the state of every slot that has advanced since its last save. A failure is a note,
        not an error.
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
        self._save_duration_seconds = self._saved_at - began

    def take_notes(self) -> tuple[str, ...]:
        """Return the notes for the user, each once."""
        notes, self._notes = tuple(self._notes), []
        return notes
