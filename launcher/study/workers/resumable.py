"""Resumable runs: an engine of proxies whose slots are saved from time to time, and resume from the
saved states. The host (`host`) uses it in the process of a worker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

from forerun._proxies.core.branches import compute_branch_step, compute_trunk_id
from forerun._proxies.core.spec import EndedRun, RunSpec
from forerun._proxies.training.gradient_noise import GradientNoiseProbe
from forerun._proxies.training.slot_state import (
    SlotState,
    StateError,
    discard_newest_state,
    load_newest_state,
    save_state,
    to_branch_state,
    to_trunk_state,
)
from forerun._sweeps.store.checkpoints import get_checkpoint_dir
from forerun._sweeps.store.curves import append_noise

if TYPE_CHECKING:
    from forerun._proxies.training.bank import Bank
    from forerun._proxies.training.single_trial import SingleTrialEngine

SAVE_SECONDS = 30.0
"""Seconds between two saves of a long run: the maximum work that is lost when its worker dies."""
SAVES_PER_RUN, MIN_SAVE_SECONDS = 10, 1.0
"""Number of saves of a run that is too short for that many at every `SAVE_SECONDS`, and the minimum
seconds between two of its saves. Such a run makes progress even if workers live only for seconds.
"""
PAUSE_REASON = "looked at"
"""Reason in the outcome of a run that pauses so that a pruner can judge it. A pruner that stops the
run replaces the reason with its own."""
SAVE_SHARE, SHORT_SAVE_SHARE = 0.01, 0.05
"""Maximum share of the time that saving may take, in long and in short runs. If a save takes long,
the next one is delayed. To save four slots of a tiny model takes 45 ms, and one of their steps
takes 40 ms.
"""


class ResumableRuns:
    """An engine that admits runs from their checkpoints, and saves checkpoints."""

    def __init__(
        self,
        engine: SingleTrialEngine | Bank,
        study_dir: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
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
        self._noise = GradientNoiseProbe()

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
        folder = get_checkpoint_dir(self._study_dir, spec.id)
        while state := load_newest_state(folder, spec.id, self._engine.environment, self._notes):
            if self._try_admit(index, spec, state, folder):
                self._notes.append(f"run {spec.id[:12]} resumes from step {state.header.step}")
                return
        if trunk := compute_trunk_id(spec):
            folder = get_checkpoint_dir(self._study_dir, trunk)
            while state := load_newest_state(
                folder, trunk, self._engine.environment, self._notes, compute_branch_step(spec)
            ):
                if self._try_admit(index, spec, to_branch_state(state, spec.id), folder):
                    return
        self._engine.admit(index, spec)
        self._saved_steps[index] = 0

    def _try_admit(self, index: int, spec: RunSpec, state: SlotState, folder: Path) -> bool:
        """Return whether a run could continue from a state; set the state aside if not."""
        try:
            self._engine.admit(index, spec, state)
        except StateError as error:
            discard_newest_state(folder, str(error), self._notes)
            return False
        self._saved_steps[index] = state.header.step
        return True

    def free_other_slots(self, indices: AbstractSet[int]) -> None:
        """Free every slot except `indices`."""
        for index in self._engine.steps.keys() - indices:
            self._engine.evict(index)

    def set_pauses(
        self, hold: Mapping[int, int | None], trunks: Mapping[int, tuple[int, str]]
    ) -> None:
        """Set the steps at which runs pause, and the steps at which the state of a trunk is saved.

        Args:
            hold: slot -> step at which its run pauses; None: it continues.
            trunks: slot -> (step, trunk id). At that step the state of the slot is saved, and runs
                of other durations continue from it.
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
                    save_state(
                        get_checkpoint_dir(self._study_dir, trunk),
                        to_trunk_state(self._engine.get_state(index), trunk),
                    )
                except StateError as error:
                    self._notes.append(
                        f"{error}; longer runs that would go on from it train more of their steps"
                    )
                del self._trunks[index]
                self._engine.pause_at(index, self._pauses.get(index))

    def set_noise_measurement(self, on: bool) -> None:
        """Switch the measurement of the runs' gradient noise on or off."""
        self._engine.noise = self._noise if on else None

    def collect_paused(self) -> list[EndedRun]:
        """Return the paused runs, each with the outcome that it has if the pruner stops it at the
        step of its pause.

        A run may already be beyond that step.
        """
        steps = self._engine.steps
        return [
            EndedRun(index, *self._engine.make_pruned_result(index, step, PAUSE_REASON))
            for index, step in self._pauses.items()
            if index in steps and steps[index] >= step
        ]

    def advance(self, num_steps: int, seconds: float = math.inf) -> list[EndedRun]:
        """Train at most `num_steps` steps for at most `seconds`. Return sooner if a save is due.

        Returns:
            The runs that ended.
        """
        began, before = self._clock(), self._engine.steps
        due_seconds = self._saved_at + self._compute_save_interval() - began
        # Train for a minimum time even if a save is overdue: a call that made no step would be
        # followed by others without steps.
        ended = self._engine.advance(
            num_steps, min(seconds, max(due_seconds, MIN_SAVE_SECONDS / 2))
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
        looks, self._noise.measurements = self._noise.measurements, []
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
            MIN_SAVE_SECONDS,
            self._save_duration_seconds / SHORT_SAVE_SHARE,
        )

    def save(self) -> None:
        """Save the state of every slot that has advanced since its last save. A failure is a note,
        not an error.
        """
        began = self._clock()
        for index, step in self._engine.steps.items():
            if step > self._saved_steps[index]:
                state = self._engine.get_state(index)
                try:
                    save_state(get_checkpoint_dir(self._study_dir, state.header.run_id), state)
                except StateError as error:
                    self._notes.append(f"{error}; the run continues without this checkpoint")
                self._saved_steps[index] = step
        self._saved_at = self._clock()
        self._save_duration_seconds = self._saved_at - began

    def take_notes(self) -> tuple[str, ...]:
        """Return the notes for the user, each once."""
        notes, self._notes = tuple(self._notes), []
        return notes
