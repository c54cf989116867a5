"""An early warning: the gradient norm grows out of line, against its own past."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from launcher.watch.alerts import Finding, Run, alert
from launcher.watch.logs.columns import Floats
from proxies.core.schedule import Schedule

GRAD_NORM_FACTOR = 2.0
"""The median gradient norm over that of half the steps ago."""
_GRAD_LINES = 32


@alert(
    "gradients_grow", "notice", next_command="look",
    when="the gradient norm doubled against half the steps before, in the same part of the schedule",
)  # fmt: skip
def gradients_grow(run: Run) -> Iterator[Finding]:
    """The norm of the whole gradient."""
    found = gradient_growth(run.columns.steps, run.columns.grad_norm, run.schedule)
    if found is not None:
        yield found


def part_starts(schedule: Schedule) -> list[int]:
    """Steps at which a part of the schedule begins: 0, the end of the warmup, the start of a final decay."""
    starts = {0, schedule.warmup_steps}
    if schedule.kind == "wsd":
        starts.add(schedule.num_steps - schedule.decay_steps)
    return sorted(starts)


def gradient_growth(steps: Floats, grad_norm: Floats, schedule: Schedule) -> Finding | None:
    """Where the gradient norm first was `GRAD_NORM_FACTOR` times its own past."""
    there = np.isfinite(grad_norm) & (grad_norm > 0)
    at, norms = steps[there], grad_norm[there]
    for end in _ends(len(at)):
        recent = slice(end - _GRAD_LINES, end)
        past = _past(at, end, schedule)
        if past is None:
            continue
        before, now = float(np.median(norms[past])), float(np.median(norms[recent]))
        if now > GRAD_NORM_FACTOR * before:
            return Finding(
                first_step=int(at[end - 1]),
                seen=f"gradient norm is {now / before:.2f} times what it was half the steps before",
                evidence={"before": before, "now": now},
            )
    return None


def _ends(num_lines: int) -> Iterator[int]:
    """Numbers of lines to look back from: by a part in 200 later on, so that a long log is soon done."""
    end = 2 * _GRAD_LINES
    while end <= num_lines:
        yield end
        end += max(_GRAD_LINES // 4, end // 200)


def _past(steps: Floats, end: int, schedule: Schedule) -> slice | None:
    """As many lines, about half the steps of those before `end`; None where they reach out of the part."""
    first_step = max(start for start in part_starts(schedule) if start <= steps[end - 1])
    middle = float(np.median(steps[end - _GRAD_LINES : end])) / 2
    start = int(np.searchsorted(steps, middle)) - _GRAD_LINES // 2
    if start < 0 or steps[start] <= first_step or start + _GRAD_LINES > end - _GRAD_LINES:
        return None
    return slice(start, start + _GRAD_LINES)
