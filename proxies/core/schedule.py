"""Schedules of learning rate and batch, exact per step. Standard library only.

Convention, frozen with every config because trainers differ: step t = 0 ... N-1 is the t-th update;
warmup gives step t the share (t + 1) / W, so the first update is not wasted at zero and step W - 1
is at the peak. Decays run over the rest and would reach `final_fraction` at step N, one past the
last.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, get_args

from proxies.core.canon import UNLESS_DEFAULT
from proxies.core.checks import Checks
from proxies.core.notation import counted

ScheduleKind = Literal["cosine", "linear", "wsd", "constant"]
DecayShape = Literal["linear", "sqrt"]
"""Of `wsd`: 1 - x or 1 - sqrt(x), x the share of the decay that is done (arXiv 2405.18392)."""

STEP_CONVENTION = (
    "step 0 is the first update; warmup share (t + 1) / warmup_steps; final_fraction "
    "at t = num_steps"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Learning rate over steps, as a share of the peak (`proxies.core.schedule.lr_multiplier`)."""

    kind: ScheduleKind
    num_steps: int
    warmup_steps: int = 0
    decay_steps: int = 0
    """Length of the final decay; only `wsd` has one."""
    final_fraction: float = 0.0
    """Where the decay would end, as a share of the peak, one step after the last."""
    batch_warmup_steps: int = 0
    """Steps before the batch has its full size, in equal stages; 0: full from the start."""
    batch_warmup_stages: int = 1
    """The first batches are one part in so many of the full one."""
    decay_shape: DecayShape = field(default="linear", metadata=UNLESS_DEFAULT)
    """Of the final decay; only `wsd` has a choice."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.one_of("kind", get_args(ScheduleKind))
        checks.one_of("decay_shape", get_args(DecayShape))
        checks.whole("num_steps")
        checks.whole("warmup_steps", "decay_steps", "batch_warmup_steps", least=0)
        checks.whole("batch_warmup_stages")
        checks.number("final_fraction", least=0, most=1)
        if checks.fine:
            checks.that(
                self.warmup_steps + self.decay_steps <= self.num_steps,
                f"warmup_steps = {self.warmup_steps} and decay_steps = {self.decay_steps} "
                f"exceed num_steps = {self.num_steps}",
            )
            needed = "at least 1" if self.kind == "wsd" else "0"
            checks.that(
                (self.kind == "wsd") == (self.decay_steps > 0),
                f"decay_steps = {self.decay_steps}: must be {needed} for `{self.kind}`",
            )
            other = f"decay_shape = {self.decay_shape!r}: must be 'linear' for {self.kind!r}"
            checks.that(self.kind == "wsd" or self.decay_shape == "linear", other)
            steps, stages = self.batch_warmup_steps, self.batch_warmup_stages
            checks.that(
                (steps == 0) == (stages == 1) and stages <= steps + 1 and steps <= self.num_steps,
                f"batch_warmup_steps = {steps} with batch_warmup_stages = {stages}: must be 0 "
                "steps and 1 stage, or "
                "at least 2 stages and from stages - 1 to num_steps = "
                f"{counted(self.num_steps, 'step')}",
            )
        checks.done()

    @property
    def num_full_batches(self) -> Fraction:
        """The run's tokens in full batches: fewer than its steps where the batch warms up."""
        return _shares_before(self)[-1] + self.num_steps - self.batch_warmup_steps

    def batch_share(self, step: int) -> Fraction:
        """The batch of update `step`, as a share of the full one."""
        if step >= self.batch_warmup_steps:
            return Fraction(1)
        stages = self.batch_warmup_stages
        return Fraction(1 + step * (stages - 1) // self.batch_warmup_steps, stages)

    def sequences(self, step: int, batch_sequences: int) -> tuple[int, int]:
        """Where update `step` stands in the data: the number of sequences before it, and its
        own.
        """
        # every step asks; fractions would take longer than the rest of a batch
        if not self.batch_warmup_steps:
            return step * batch_sequences, batch_sequences
        before = _shares_before(self)[min(step, self.batch_warmup_steps)] + max(
            0, step - self.batch_warmup_steps
        )
        return int(before * batch_sequences), int(self.batch_share(step) * batch_sequences)


@functools.lru_cache(maxsize=64)
def _shares_before(schedule: Schedule) -> tuple[Fraction, ...]:
    """Full batches trained on before each step of the batch warmup, and before the first step after
    it.
    """
    shares = (schedule.batch_share(step) for step in range(schedule.batch_warmup_steps))
    return tuple(itertools.accumulate(shares, initial=Fraction(0)))


def whole_warmup(fraction: float, num_steps: int, decay_steps: int) -> int:
    """Steps of a warmup over a share of a run: at least one, unless the final decay takes
    them all.
    """
    return min(max(1, round(fraction * num_steps)), num_steps - decay_steps)


def lr_multiplier(schedule: Schedule, step: int) -> float:
    """Share of the peak learning rate at update `step` (0 <= step < num_steps).

    Raises:
        ValueError: the step is outside the schedule.
    """
    if not 0 <= step < schedule.num_steps:
        raise ValueError(
            f"step {step} is outside a schedule of {counted(schedule.num_steps, 'step')}"
        )
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    decay_steps = (
        schedule.decay_steps
        if schedule.kind == "wsd"
        else schedule.num_steps - schedule.warmup_steps
    )
    start = schedule.num_steps - decay_steps
    if schedule.kind == "constant" or step < start:
        return 1.0
    done = (step - start) / decay_steps
    if schedule.kind == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * done))
    else:
        share = 1 - (math.sqrt(done) if schedule.decay_shape == "sqrt" else done)
    return schedule.final_fraction + (1 - schedule.final_fraction) * share


def lr_table(schedule: Schedule) -> tuple[float, ...]:
    """`lr_multiplier` at every step of the schedule."""
    return tuple(lr_multiplier(schedule, step) for step in range(schedule.num_steps))
