"""Schedules of learning rate and batch, exact per step.

Trainers differ in their conventions, so every frozen config names the convention of forerun: steps
t = 0 ... N-1 are the updates; at step t of the warmup the learning rate is (t + 1) / W of the peak,
so that the first update is not wasted at zero, and step W - 1 is at the peak. A decay takes all
remaining steps, or the last `decay_steps` of `wsd`. It would reach `final_fraction` at step N, one
after the last.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, get_args

from forerun._proxies.core.canon import UNLESS_DEFAULT
from forerun._proxies.core.checks import Checks
from forerun._proxies.core.notation import format_counted

ScheduleKind = Literal["cosine", "linear", "wsd", "constant"]
DecayShape = Literal["linear", "sqrt"]
"""Shape of the decay of `wsd`: 1 - x, or 1 - sqrt(x), with x the completed share of the decay
(arXiv 2405.18392)."""

STEP_CONVENTION = (
    "step 0 is the first update; warmup share (t + 1) / warmup_steps; final_fraction "
    "at t = num_steps"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Learning rate over the steps of a run, as a share of the peak, and the warmup of its batch.

    `compute_lr_multiplier` evaluates it.
    """

    kind: ScheduleKind
    num_steps: int
    warmup_steps: int = 0
    decay_steps: int = 0
    """Length of the final decay in steps; 0 unless the kind is `wsd`."""
    final_fraction: float = 0.0
    """Share of the peak that the decay would reach one step after the last."""
    batch_warmup_steps: int = 0
    """Steps before the batch has its full size, in equal stages; 0 for a full batch from the
    start."""
    batch_warmup_stages: int = 1
    """Number of stages; the first batches have 1 / `batch_warmup_stages` of the full size."""
    decay_shape: DecayShape = field(default="linear", metadata=UNLESS_DEFAULT)
    """Shape of the final decay; always linear unless the kind is `wsd`."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_one_of("kind", get_args(ScheduleKind))
        checks.require_one_of("decay_shape", get_args(DecayShape))
        checks.require_whole("num_steps")
        checks.require_whole("warmup_steps", "decay_steps", "batch_warmup_steps", least=0)
        checks.require_whole("batch_warmup_stages")
        checks.require_number("final_fraction", least=0, most=1)
        if checks.has_no_problem:
            self._check_steps(checks)
        checks.raise_problems()

    def _check_steps(self, checks: Checks) -> None:
        is_wsd = self.kind == "wsd"
        checks.require(
            self.warmup_steps + self.decay_steps <= self.num_steps,
            f"warmup_steps = {self.warmup_steps} and decay_steps = {self.decay_steps} "
            f"exceed num_steps = {self.num_steps}",
        )
        checks.require(
            is_wsd == (self.decay_steps > 0),
            f"decay_steps = {self.decay_steps}: must be {'at least 1' if is_wsd else '0'} for "
            f"`{self.kind}`",
        )
        checks.require(
            is_wsd or self.decay_shape == "linear",
            f"decay_shape = {self.decay_shape!r}: must be 'linear' for {self.kind!r}",
        )
        steps, stages = self.batch_warmup_steps, self.batch_warmup_stages
        checks.require(
            (steps == 0) == (stages == 1) and stages <= steps + 1 and steps <= self.num_steps,
            f"batch_warmup_steps = {steps} with batch_warmup_stages = {stages}: must be 0 steps "
            "and 1 stage, or at least 2 stages and from stages - 1 to num_steps = "
            f"{format_counted(self.num_steps, 'step')}",
        )

    @property
    def num_full_batches(self) -> Fraction:
        """Training data of the run in full batches, fewer than its steps if the batch warms up."""
        return _count_full_batches(self)[-1] + self.num_steps - self.batch_warmup_steps

    def compute_batch_share(self, step: int) -> Fraction:
        """Return the size of the batch of update `step`, as a share of the full batch."""
        if step >= self.batch_warmup_steps:
            return Fraction(1)
        stages = self.batch_warmup_stages
        return Fraction(1 + step * (stages - 1) // self.batch_warmup_steps, stages)

    def count_sequences(self, step: int, batch_sequences: int) -> tuple[int, int]:
        """Return the number of sequences before update `step`, and the number in its batch.

        Args:
            step: The update.
            batch_sequences: Sequences of a full batch.
        """
        # Called at every step; fractions would take longer than the rest of batching
        if not self.batch_warmup_steps:
            return step * batch_sequences, batch_sequences
        full_batches = _count_full_batches(self)[min(step, self.batch_warmup_steps)]
        full_batches += max(0, step - self.batch_warmup_steps)
        return int(full_batches * batch_sequences), int(
            self.compute_batch_share(step) * batch_sequences
        )


@functools.lru_cache(maxsize=64)
def _count_full_batches(schedule: Schedule) -> tuple[Fraction, ...]:
    """Return the data in full batches before each step of the batch warmup, and after the last."""
    shares = (schedule.compute_batch_share(step) for step in range(schedule.batch_warmup_steps))
    return tuple(itertools.accumulate(shares, initial=Fraction(0)))


def compute_warmup_steps(fraction: float, num_steps: int, decay_steps: int) -> int:
    """Return the warmup steps for a share of a run: at least 1, unless the decay takes all."""
    return min(max(1, round(fraction * num_steps)), num_steps - decay_steps)


def compute_lr_multiplier(schedule: Schedule, step: int) -> float:
    """Return the learning rate of update `step` as a share of the peak.

    Raises:
        ValueError: The step is not in 0 <= step < num_steps.
    """
    if not 0 <= step < schedule.num_steps:
        raise ValueError(
            f"step {step} is outside a schedule of {format_counted(schedule.num_steps, 'step')}"
        )
    # Warmup
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    # Stable phase
    is_wsd = schedule.kind == "wsd"
    decay_steps = schedule.decay_steps if is_wsd else schedule.num_steps - schedule.warmup_steps
    start = schedule.num_steps - decay_steps
    if schedule.kind == "constant" or step < start:
        return 1.0
    # Decay
    done = (step - start) / decay_steps
    if schedule.kind == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * done))
    elif schedule.decay_shape == "sqrt":
        share = 1 - math.sqrt(done)
    else:
        share = 1 - done
    return schedule.final_fraction + (1 - schedule.final_fraction) * share


def compute_lr_table(schedule: Schedule) -> tuple[float, ...]:
    """Return `compute_lr_multiplier` at every step of the schedule."""
    return tuple(compute_lr_multiplier(schedule, step) for step in range(schedule.num_steps))
