"""How often a run is interrupted, what that costs, and how often it should save. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.estimates.spans import Span, exactly
from proxies.core.flops import count_params
from proxies.core.shape import Shape

GPUS_PER_NODE = 8
SECONDS_PER_DAY = 86_400.0
CHECKPOINT_BYTES = 12
"""Of a parameter: its float32 weight and AdamW's two moments."""
NODE_WRITE = Span(
    value=1e9, low=0.25e9, high=4e9,
    source="assumed: bytes a second that storage takes from a node; Llama 3's took 2 TB/s from 2,048 nodes "
    "(arXiv 2407.21783, section 3.3.1, as recalled)",
)  # fmt: skip
RESTART_SECONDS = Span(
    value=600.0, low=300.0, high=1800.0, source="assumed: from a failure to the first new step"
)  # fmt: skip
ACCEPTED_LOSS_SECONDS = 3600.0
"""Work that one interruption may cost: small clusters fail so seldom that Young and Daly would save once a day."""

RATE = Span(
    value=419 / (2048 * 54) * 1000, low=2.34, high=53 / (124 * 56) * 1000,
    source="interruptions per 1,000 node-days: Llama 3's (419 in 54 days on 16,384 H100, arXiv 2407.21783, table 5), "
    "between Meta's RSC-2 (A100, arXiv 2410.21680, as recalled) and OPT-175B (53 restarts in 56 days on 992 A100)",
)  # fmt: skip
"""Of nodes of 8 GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence:
    """When a run saves, and what share of its time makes progress."""

    interval_seconds: float
    write_seconds: Span
    checkpoint_bytes: int
    mtbf_seconds: Span
    goodput: Span


def mtbf_seconds(num_gpus: int, per_1000_node_days: float) -> float:
    """Mean seconds between interruptions of a run; nodes fail independently."""
    nodes = math.ceil(num_gpus / GPUS_PER_NODE)
    return 1000 * SECONDS_PER_DAY / (nodes * per_1000_node_days)


def young(write_seconds: float, mtbf: float) -> float:
    """Seconds of work between saves: sqrt(2 d M) (Young, CACM 17(9), 1974)."""
    return math.sqrt(2 * write_seconds * mtbf)


def daly(write_seconds: float, mtbf: float) -> float:
    """Seconds of work between saves, to a higher order (Daly, FGCS 22(3), 2006, equation 37); M where d >= 2 M."""
    if write_seconds >= 2 * mtbf:
        return mtbf
    share = write_seconds / (2 * mtbf)
    return young(write_seconds, mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - write_seconds


def goodput_of(interval: float, write_seconds: float, mtbf: float, restart_seconds: float) -> float:
    """Share of the wall clock that makes progress, saving after every `interval` seconds of work.

    Wall time over work is M exp(R / M) (exp((tau + d) / M) - 1) / tau (Daly 2006, equation 20), R seconds to restart.
    """
    return interval / (mtbf * math.exp(restart_seconds / mtbf) * math.expm1((interval + write_seconds) / mtbf))


def cadence(shape: Shape, num_gpus: int) -> Cadence:
    """How often to save: by Daly's formula, but no more apart than the work that one accepts to lose.

    Training waits while it saves, as the embedded trainer's does.
    """
    size = CHECKPOINT_BYTES * count_params(shape).total
    nodes = math.ceil(num_gpus / GPUS_PER_NODE)
    write = exactly(float(size)).over(NODE_WRITE.scaled(nodes))
    between = Span(
        value=mtbf_seconds(num_gpus, RATE.value), low=mtbf_seconds(num_gpus, RATE.high),
        high=mtbf_seconds(num_gpus, RATE.low),
    )  # fmt: skip
    interval = min(daly(write.value, between.value), ACCEPTED_LOSS_SECONDS)
    return Cadence(
        interval_seconds=interval,
        write_seconds=write,
        checkpoint_bytes=size,
        mtbf_seconds=between,
        goodput=Span(
            value=goodput_of(interval, write.value, between.value, RESTART_SECONDS.value),
            low=goodput_of(interval, write.high, between.low, RESTART_SECONDS.high),
            high=goodput_of(interval, write.low, between.high, RESTART_SECONDS.low),
        ),
    )
