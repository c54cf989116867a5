"""Learning-rate schedules, exact per step. Standard library only.

Convention, frozen with every config because trainers differ: step t = 0 ... N-1 is the t-th update; warmup
gives step t the share (t + 1) / W, so the first update is not wasted at zero and step W - 1 is at the peak.
Decays run over the rest and would reach `final_fraction` at step N, one past the last.
"""

from __future__ import annotations

import math

from proxies.spec import Schedule

STEP_CONVENTION = "step 0 is the first update; warmup share (t + 1) / warmup_steps; final_fraction at t = num_steps"


def lr_multiplier(schedule: Schedule, step: int) -> float:
    """Share of the peak learning rate at update `step` (0 <= step < num_steps).

    Raises:
        ValueError: the step is outside the schedule.
    """
    if not 0 <= step < schedule.num_steps:
        raise ValueError(f"step {step} is outside a schedule of {schedule.num_steps} steps")
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    decay_steps = schedule.num_steps - schedule.warmup_steps
    start = schedule.warmup_steps
    if schedule.kind == "wsd":
        decay_steps = schedule.decay_steps
        start = schedule.num_steps - decay_steps
        if step < start:
            return 1.0
    done = (step - start) / decay_steps
    share = 0.5 * (1 + math.cos(math.pi * done)) if schedule.kind == "cosine" else 1 - done
    return schedule.final_fraction + (1 - schedule.final_fraction) * share


def lr_table(schedule: Schedule) -> tuple[float, ...]:
    """`lr_multiplier` at every step of the schedule."""
    return tuple(lr_multiplier(schedule, step) for step in range(schedule.num_steps))
