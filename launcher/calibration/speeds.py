"""What workers make of proxies: as measured by a calibration, or as assumed of any core."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from launcher.estimates.spans import Span
from launcher.plan.calibration_records import Asked, Calibration, Part
from launcher.plan.study import Study
from proxies.core.flops import flops_per_token
from proxies.core.spec import RunSpec

WORKER_FLOPS = Span(
    value=30e9, low=10e9, high=75e9,
    source="a second, of a worker on one server core in float32; measured on proxies of widths 32 to 256",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """FLOPs a second of one worker, by shape and batch; of what was not measured, those of the nearest that was."""

    measured: tuple[tuple[Asked, Span], ...] = ()
    source: str = ""
    num_workers: int = 0
    """Workers of the study that was calibrated, measuring at once; 0: not known."""
    assumed: Span = WORKER_FLOPS
    """Where nothing was measured."""

    def of(self, spec: RunSpec, part: Part = "proxy") -> Span:
        """For runs like this one, of the ladder or of any other stage: what was chosen for each may differ."""
        if not self.measured:
            return self.assumed

        def far(asked: Asked) -> tuple[float, bool, bool]:
            ratio = _step_flops(asked) / (flops_per_token(spec.shape) * spec.batch_tokens)
            unlike = (asked.shape, asked.batch_tokens) != (spec.shape, spec.batch_tokens)
            return abs(math.log(ratio)), unlike, asked.part != part

        return min(self.measured, key=lambda each: far(each[0]))[1]

    @property
    def over_all(self) -> Span:
        """The lowest, the middle, the highest, with where they are from."""
        if not self.measured:
            return self.assumed
        spans = sorted((span for _, span in self.measured), key=lambda span: span.value)
        low, high = min(span.low for span in spans), max(span.high for span in spans)
        return Span(value=spans[len(spans) // 2].value, low=low, high=high, source=self.source)


def speeds_of(found: Iterable[Calibration], study: Study, source: str, num_workers: int = 0) -> Speeds:
    """Those that calibrations measured of what they chose, and that this study asks for; none: as assumed."""
    measured = []
    for one in found:
        figure, asked = one.figure, one.asked
        if figure is None or figure.refused or study.asked(asked.part, asked.shape, asked.batch_tokens) != asked:
            continue
        flops = _step_flops(asked)
        low, high = figure.interval
        rate = figure.trial_steps_per_second
        measured.append((asked, Span(value=rate * flops, low=low * flops, high=high * flops)))
    source = f"a second, of a worker: {source}"
    return Speeds(measured=tuple(measured), source=source, num_workers=num_workers if measured else 0)


def _step_flops(asked: Asked) -> float:
    return float(flops_per_token(asked.shape)) * asked.batch_tokens
