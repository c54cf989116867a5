"""The share of the peak that a run reaches over all the hours that are paid, by the runs that were
published.

Its log is a line in the logs of the parameters and of the number of accelerators, and lower on
accelerators of H100's class, with errors of Student's t at 4 degrees of freedom, so that one run
which took six times as long does not set everybody's interval. Fitted by maximum likelihood to the
runs of `benchmarks/statistics/published_runs.py`; evaluations, restarts, stragglers and repeated
steps are in it as far as they are in the hours that its authors gave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from launcher.estimates.machine import Span
from proxies.core.notation import counted, format_percent

if TYPE_CHECKING:
    from launcher.estimates.machine import Machine

LEVEL = 0.9
PROGRESS = Span(value=0.95, low=0.9, high=1.0)
"""Share of the hours paid in which a run steps; Llama 3.1 405B on 16,384 H100 had more than 0.9
(arXiv 2407.21783)."""
_QUANTILE = 2.1318  # of Student's t with 4 degrees of freedom, at 0.95
FAST = (
    # peak FLOP/s from which an accelerator is of H100's class: A100 and TPUv4 lie below, H100 and
    # all later above
    5e14
)
MIDDLE = 1e10  # parameters at which the line is centred
MIDDLE_GPUS = 128
"""Number of accelerators at which the line is centered."""
MIN_PUBLISHED_GPUS = 8
MAX_PUBLISHED_GPUS = 16_384
"""Ends of the published numbers of accelerators: beyond them the middle stays, and the interval
widens."""
MAX_PUBLISHED_SHARE = 0.75
"""Highest share that a published run reached: no estimate is above it."""
SMALLEST_PUBLISHED = 5e7
"""Parameters: below, no run's hours are published, and the share is what is assumed of proxies."""
PROXY_MFU = Span(
    value=0.1,
    low=0.01,
    high=0.4,
    source="assumed of a proxy on a GPU: small ones wait for launches; on an H100 compiled ones of "
    "2M to 40M "
    "parameters made 0.03 to 0.33 of the published peak",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class UtilizationLine:
    """Log of the share, as a line."""

    middle: float
    """At `MIDDLE` parameters, below `FAST`."""
    fast: float
    """What is added from `FAST` on."""
    slope: float
    """In the log of the parameters."""
    gpus_slope: float
    """In the log of the number of accelerators."""
    scale: float
    """Scale of the errors."""
    num_runs: int

    def share(self, params: float, peak_flops: float, num_gpus: float) -> Span:
        """Return the share that a run reaches.

        Args:
            params: Parameters of the model.
            peak_flops: Peak of one accelerator, in FLOP/s.
            num_gpus: Number of accelerators that train it.
        """
        if params < SMALLEST_PUBLISHED:
            return PROXY_MFU
        nearest = min(max(num_gpus, MIN_PUBLISHED_GPUS), MAX_PUBLISHED_GPUS)
        middle = self.middle + self.fast * (peak_flops >= FAST)
        middle += self.slope * math.log(params / MIDDLE)
        middle += self.gpus_slope * math.log(nearest / MIDDLE_GPUS)
        middle = min(middle, math.log(MAX_PUBLISHED_SHARE))
        # Beyond the published numbers, the trend may go on or reverse.
        half = _QUANTILE * self.scale + abs(self.gpus_slope * math.log(num_gpus / nearest))
        source = (
            "over all hours paid, attention's whole square counted: "
            f"{counted(self.num_runs, 'published run')}, {format_percent(LEVEL)} of them in this "
            "interval (docs/estimates.md)"
        )
        if num_gpus != nearest:
            source += (
                f"; widened, because none is published below {MIN_PUBLISHED_GPUS} or above "
                f"{MAX_PUBLISHED_GPUS:,} GPUs"
            )
        return Span(
            value=math.exp(middle),
            low=math.exp(middle - half),
            high=min(MAX_PUBLISHED_SHARE, math.exp(middle + half)),
            source=source,
        )


PUBLISHED = UtilizationLine(
    middle=-0.7993180678849168,
    fast=-0.2336955266791633,
    slope=0.11850987689527342,
    gpus_slope=-0.16205434772251695,
    scale=0.33371017953081095,
    num_runs=56,
)
"""As `benchmarks/statistics/published_runs.py` fits it; a test holds both together."""


def paid_share(machine: Machine, params: float) -> Span:
    """The share over all hours paid on a machine: by its measured throughput, else as published."""
    if machine.mfu is not None:
        source = f"MFU {machine.mfu.source}, and steps in 0.9 to 1 of the hours paid"
        return replace(machine.mfu.times(PROGRESS), source=source)
    return PUBLISHED.share(params, machine.peak_flops, machine.num_gpus)


def estimate_step_mfu(machine: Machine, share: Span) -> Span:
    """Return the share of the peak while a run steps: measured, or from its share over all hours
    paid.
    """
    if machine.mfu is not None:
        return machine.mfu
    return Span(
        value=min(1.0, share.value / PROGRESS.value),
        low=share.low / PROGRESS.value,
        high=min(1.0, share.high / PROGRESS.value),
        source=f"the share of all hours paid, over {PROGRESS.value:g} of them in which a run steps",
    )
