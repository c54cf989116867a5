"""Early warnings: gradient norms and layers that grow out of line, each against its own past."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from launcher.watch.alerts import Finding, Run, alert
from launcher.watch.logs.columns import Floats
from proxies.core.canon import Json
from proxies.core.schedule import Schedule

GRAD_NORM_FACTOR = 2.0
"""Of the median gradient norm over that half the steps ago."""
LAYER_FACTORS = {"weight_rms": 1.5, "grad_norm": 3.0, "update_ratio": 3.0}
"""By how much a layer's growth over an octave may be beyond its own before and the others'; gradients scatter more.

A layer's `param_norm` is its `weight_rms` times a constant: one fact, told once.
"""
_GRAD_LINES, _LAYER_LINES = 32, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Something grew out of line."""

    first_step: int
    """At which it had."""
    layer: str | None
    """None: of the whole model."""
    column: str
    before: float
    """Median about half the steps ago."""
    now: float
    others: float | None = None
    """Median growth of the other layers over the same steps, as a factor."""

    def finding(self) -> Finding:
        """In words."""
        of = f"{self.column} of {self.layer}" if self.layer else "gradient norm"
        others = "" if self.others is None else f", where the other layers' went by {self.others:.2f}"
        evidence: dict[str, Json] = {
            "layer": self.layer, "column": self.column, "before": self.before, "now": self.now,
            "others_factor": self.others,
        }  # fmt: skip
        seen = f"{of} is {self.now / self.before:.2f} times what it was half the steps before{others}"
        return Finding(first_step=self.first_step, seen=seen, evidence=evidence)


@alert(
    "gradients_grow", "notice", next_command="look",
    when="the gradient norm doubled against half the steps before, in the same part of the schedule",
)  # fmt: skip
def gradients_grow(run: Run) -> Iterator[Finding]:
    """The norm of the whole gradient."""
    found = gradient_growth(run.columns.steps, run.columns.grad_norm, run.schedule)
    if found is not None:
        yield found.finding()


@alert(
    "layer_grows", "notice", next_command="look",
    when="a layer's weight RMS grew by half more over an octave than it did before and than the other layers did "
    "(gradient norm, update ratio: three times more)",
)  # fmt: skip
def layer_grows(run: Run) -> Iterator[Finding]:
    """Each layer that is out of line."""
    for growth in layer_growths(run.columns.layer_steps, run.columns.layers, run.schedule):
        yield growth.finding()


def part_starts(schedule: Schedule) -> list[int]:
    """Steps at which a part of the schedule begins: 0, the end of the warmup, the start of a final decay."""
    starts = {0, schedule.warmup_steps}
    if schedule.kind == "wsd":
        starts.add(schedule.num_steps - schedule.decay_steps)
    return sorted(starts)


def gradient_growth(steps: Floats, grad_norm: Floats, schedule: Schedule) -> Growth | None:
    """Where the gradient norm first was `GRAD_NORM_FACTOR` times its own past."""
    there = np.isfinite(grad_norm) & (grad_norm > 0)
    at, norms = steps[there], grad_norm[there]
    for end in _ends(2 * _GRAD_LINES, len(at), _GRAD_LINES // 4):
        recent = slice(end - _GRAD_LINES, end)
        past = _past(at, end, _GRAD_LINES, _start_of(at[end - 1], schedule))
        if past is None:
            continue
        before, now = float(np.median(norms[past])), float(np.median(norms[recent]))
        if now > GRAD_NORM_FACTOR * before:
            return Growth(first_step=int(at[end - 1]), layer=None, column="grad_norm", before=before, now=now)
    return None


def layer_growths(steps: Floats, layers: Mapping[str, Mapping[str, Floats]], schedule: Schedule) -> list[Growth]:
    """For each layer and column where it first grew out of line; the earliest first."""
    found: dict[tuple[str, str], Growth] = {}
    for column, factor in LAYER_FACTORS.items():
        names = [
            name for name in layers if np.isfinite(layers[name][column]).all() and (layers[name][column] > 0).all()
        ]
        if len(names) < 2 or len(steps) < _LAYER_LINES:
            continue
        logs_NL = np.log([layers[name][column] for name in names])
        medians_NL = np.median(np.lib.stride_tricks.sliding_window_view(logs_NL, _LAYER_LINES, axis=1), axis=2)
        for end in _ends(_LAYER_LINES, len(steps), 1):
            first = _start_of(steps[end - 1], schedule)
            past = _past(steps, end, _LAYER_LINES, first)
            older = None if past is None else _past(steps, past.stop, _LAYER_LINES, first)
            if past is None or older is None:
                continue
            now_N, before_N, older_N = (medians_NL[:, at] for at in (end - _LAYER_LINES, past.start, older.start))
            grown_N, earlier_N = now_N - before_N, before_N - older_N
            for i in np.flatnonzero(grown_N - np.maximum(earlier_N, 0.0) > np.log(factor)):
                name, others = names[i], float(np.median(np.delete(grown_N, i)))
                if (name, column) not in found and grown_N[i] - max(earlier_N[i], others, 0.0) > np.log(factor):
                    found[name, column] = Growth(
                        first_step=int(steps[end - 1]), layer=name, column=column, before=float(np.exp(before_N[i])),
                        now=float(np.exp(now_N[i])), others=float(np.exp(others)),
                    )  # fmt: skip
    return sorted(found.values(), key=lambda growth: growth.first_step)


def _ends(first: int, last: int, least: int) -> Iterator[int]:
    """Numbers of lines to look back from: by `least`, later by a part in 200, so that a long log is soon done."""
    end = first
    while end <= last:
        yield end
        end += max(least, end // 200)


def _start_of(step: float, schedule: Schedule) -> int:
    return max(start for start in part_starts(schedule) if start <= step)


def _past(steps: Floats, end: int, num_lines: int, first_step: int) -> slice | None:
    """As many lines, about half the steps of those before `end`; None where they reach out of the part."""
    middle = float(steps[end - num_lines // 2 - 1] + steps[end - (num_lines + 1) // 2]) / 4  # half their median
    start = int(np.searchsorted(steps, middle)) - num_lines // 2
    if start < 0 or steps[start] <= first_step or start + num_lines > end - num_lines:
        return None
    return slice(start, start + num_lines)
