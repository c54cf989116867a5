"""What no longer moves: a loss that is the same number line after line, and losses that stop while steps go on.

Equal losses in a row are no fault by themselves: a log that is rounded has them. How many are too many follows from
the noise before them. A line stays within the rounding q of the one before with probability at most

    p = P(|e| < q / 2) = erf(q / (2 sqrt(2) sd)),

with sd^2 half the mean square of the differences from line to line (less than the innovation's where the noise is
autocorrelated), without the q^2 / 4 that rounding alone can make of them. So r equal ones in a row come about
somewhere in the N lines of a run with probability N p^(r - 1) at most, and r is too many where that is below
`FALSE_ALARMS`. Where the noise is small against the rounding p is 1, and no number is too many.
"""

from __future__ import annotations

import math

import numpy as np

from launcher.watch.alerts import Finding
from launcher.watch.course import FALSE_ALARMS
from launcher.watch.logs.columns import Columns, Floats, spacing
from launcher.watch.noise import noise_of_differences, resolution

LEAST_EQUAL = 16
NEVER_CHANGED = 64
"""Lines past the warmup of a loss that was one number from the start: there is no noise to go by."""
_RECENT, _LEAST_BEFORE = (64, 256, 1024), 8  # the quietest counts: a loss that still falls fast has large differences
_COARSE_NATS = 0.01  # a number that never changed and is rounded more coarsely may have been rounded into one
GAPS_MISSED, LEAST_MISSED = 3, 16


def frozen_loss(columns: Columns, warmup_steps: int, num_steps: int) -> Finding | None:
    """Whether the training loss stands still; lines that are no number are left out."""
    there = np.isfinite(columns.train_loss_nats)
    steps, losses = columns.steps[there], columns.train_loss_nats[there]
    start = _start(losses)
    before = losses[max(0, start - _RECENT[-1]) : start]
    if len(before) >= _LEAST_BEFORE:
        rounding = resolution(np.append(before, losses[-1]))
        variance = min(noise_of_differences(before[-num:]) for num in _RECENT) ** 2 - rounding**2 / 4
        chance = math.erf(rounding / math.sqrt(8 * variance)) if variance > 0 else 1.0
        allowed = max(LEAST_EQUAL, _too_many(chance, num_steps / spacing(steps))) - 1
        num_equal = len(losses) - start
    else:
        allowed, num_equal = NEVER_CHANGED, int((steps[start:] > warmup_steps).sum())
        if len(losses) and resolution(losses[-1:]) > _COARSE_NATS:
            return None
    if num_equal <= allowed:
        return None
    first, nats = int(steps[start]), float(losses[-1])
    return Finding(
        first_step=first,
        seen=f"training loss is {nats:.10g} nats {num_equal} times in a row, since step {first}: given the noise and "
        f"the rounding before, {int(allowed)} may come about",
        evidence={"nats": nats, "num_equal": num_equal, "num_allowed": int(allowed)},
    )


def stopped(columns: Columns) -> list[Finding]:
    """Losses without a value for three of their longest gaps before and 16 lines, while steps go on."""
    found = []
    for name, at in (("training", columns.steps), ("validation", columns.validation_steps)):
        if len(at) < 3:
            continue
        lines = columns.line_steps[columns.line_steps > at[-1]]
        missed = len(lines) and lines[-1] - at[-1] > GAPS_MISSED * np.diff(at).max()
        if missed and len(lines) >= LEAST_MISSED:
            found.append(Finding(
                first_step=int(at[-1]),
                seen=f"steps go on, {len(lines)} lines of them, without a {name} loss (last at step {int(at[-1])})",
                evidence={"loss": name, "num_lines": len(lines)},
            ))  # fmt: skip
    return found


def _start(values: Floats) -> int:
    """Where the newest run of equal values begins."""
    other = np.flatnonzero(values != values[-1]) if len(values) else np.empty(0)
    return int(other[-1]) + 1 if len(other) else 0


def _too_many(chance: float, num: float) -> float:
    """Equal ones in a row, of so many values; `chance`: of one that equals the one before."""
    if chance >= 1:
        return math.inf
    return 1 + math.ceil(math.log(FALSE_ALARMS / max(num, 1.0)) / math.log(max(chance, 1e-300)))
