"""The utilization of a main run: the share of the accelerators' peak that it reaches.

The share is counted over all paid hours. It includes evaluations, restarts, stragglers, and
repeated steps as far as the published hours include them.

The estimate is a line that is fitted to published runs by maximum likelihood
(`benchmarks/statistics/published_runs.py`). The log of the share is linear in the log of the number
of parameters and in the log of the number of accelerators, and it is lower on fast accelerators
(H100 and faster). The errors follow Student's t with 4 degrees of freedom. Its tails are heavy, so
that outliers hardly widen the intervals: a few published runs took more than four times as many
hours as the line predicts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from forerun._launcher.main_run.estimates.machine import Machine, Span
from forerun._proxies.core.notation import format_counted, format_percent

LEVEL = 0.9
"""Level of the intervals."""
STEPPING_SHARE = Span(value=0.95, low=0.9, high=1.0)
"""Share of the paid hours in which a run trains. It was above 0.9 for Llama 3.1 405B on 16,384 H100
(arXiv 2407.21783)."""
_QUANTILE = 2.1318  # 0.95 quantile of Student's t with 4 degrees of freedom
FAST_FLOPS = 5e14
"""Peak in FLOP/s from which an accelerator counts as fast: that of an H100 is above, those of an
A100 and a TPUv4 are below."""
CENTER_PARAMS = 1e10
"""Number of parameters at which the line is centered."""
CENTER_GPUS = 128
"""Number of accelerators at which the line is centered."""
MIN_PUBLISHED_GPUS = 8
MAX_PUBLISHED_GPUS = 16_384
"""Smallest and largest number of accelerators of the published runs. Beyond them, the estimate is
constant and its interval widens."""
MAX_PUBLISHED_SHARE = 0.75
"""Highest share that a published run reached: no estimate is above it."""
MIN_PUBLISHED_PARAMS = 5e7
"""Smallest number of parameters of the published runs. For smaller models, the estimate is
`PROXY_MFU`."""
PROXY_MFU = Span(
    value=0.1,
    low=0.01,
    high=0.4,
    source="assumed: a small model on a GPU waits for kernel launches; compiled proxies of 2M to "
    "40M parameters reached 0.03 to 0.33 of an H100's peak",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class UtilizationLine:
    """The line of the log of the share (see the module's docstring)."""

    middle: float
    """Value at `CENTER_PARAMS` parameters and `CENTER_GPUS` accelerators slower than `FAST_FLOPS`.
    """
    fast: float
    """Difference for fast accelerators: those with a peak of at least `FAST_FLOPS`."""
    slope: float
    """Slope in the log of the parameters."""
    gpus_slope: float
    """Slope in the log of the number of accelerators."""
    scale: float
    """Scale of the errors' t distribution."""
    num_runs: int

    def estimate_share(self, params: float, peak_flops: float, num_gpus: float) -> Span:
        """Return the share that a run reaches.

        Args:
            params: Parameters of the model.
            peak_flops: Peak of one accelerator, in FLOP/s.
            num_gpus: Number of accelerators that train it.
        """
        if params < MIN_PUBLISHED_PARAMS:
            return PROXY_MFU
        nearest = min(max(num_gpus, MIN_PUBLISHED_GPUS), MAX_PUBLISHED_GPUS)
        middle = self.middle + self.fast * (peak_flops >= FAST_FLOPS)
        middle += self.slope * math.log(params / CENTER_PARAMS)
        middle += self.gpus_slope * math.log(nearest / CENTER_GPUS)
        middle = min(middle, math.log(MAX_PUBLISHED_SHARE))
        # Beyond the published numbers of accelerators, the trend may continue or reverse.
        half_width = _QUANTILE * self.scale + abs(self.gpus_slope * math.log(num_gpus / nearest))
        source = (
            "over all hours paid, with attention counted in full: "
            f"{format_counted(self.num_runs, 'published run')}, {format_percent(LEVEL)} of them "
            "in this interval (docs/estimates.md)"
        )
        if num_gpus != nearest:
            source += (
                f"; the interval is widened, because no run on fewer than {MIN_PUBLISHED_GPUS} or "
                f"more than {MAX_PUBLISHED_GPUS:,} GPUs is published"
            )
        return Span(
            value=math.exp(middle),
            low=math.exp(middle - half_width),
            high=min(MAX_PUBLISHED_SHARE, math.exp(middle + half_width)),
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
"""The line that `benchmarks/statistics/published_runs.py` fits; a test compares both."""


def estimate_paid_share(machine: Machine, params: float) -> Span:
    """Return the share over all paid hours, from the measured throughput if the user gave one, or
    else from the published runs.
    """
    if machine.mfu is not None:
        source = f"MFU {machine.mfu.source}; the run trains in 0.9 to 1 of the hours paid"
        return replace(machine.mfu.multiply(STEPPING_SHARE), source=source)
    return PUBLISHED.estimate_share(params, machine.peak_flops, machine.num_gpus)


def estimate_step_mfu(machine: Machine, share: Span) -> Span:
    """Return the share of the peak while the run trains.

    Args:
        machine: The machine, with the share that the user measured, if any.
        share: Share over all paid hours, from which an unmeasured share is derived.
    """
    if machine.mfu is not None:
        return machine.mfu
    return Span(
        value=min(1.0, share.value / STEPPING_SHARE.value),
        low=share.low / STEPPING_SHARE.value,
        high=min(1.0, share.high / STEPPING_SHARE.value),
        source=f"the share over all hours paid, divided by {STEPPING_SHARE.value:g}, the share of "
        "these hours in which a run trains",
    )
