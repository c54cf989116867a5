"""The main run before it runs: FLOPs, memory, hours, dollars, disk."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

from launcher.estimates.layout import layout_problems, microbatches
from launcher.estimates.machine import Given, Machine, machine_of
from launcher.estimates.memory import RESERVED, Memory, memory_per_rank
from launcher.estimates.spans import MFU_CONVENTION, Span, exactly, gpu_hours
from launcher.estimates.utilization import SMALLEST_PUBLISHED, paid_share
from launcher.frozen.frozen import Parallelism
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.flops import CONVENTIONS, Convention, count_params, flops_per_token, six_nd
from proxies.core.shape import Shape
from proxies.core.spec import Precision

GIGA = 1e9
CHECKPOINT_BYTES = 12
"""Bytes a parameter takes: its float32 weight and AdamW's two moments."""
KEPT_CHECKPOINTS = 3
"""Two that are complete, and one that is being written."""
WIDE = 10.0
"""High over low of an interval beyond which the measurement that would narrow it is named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MainRun:
    """What is to be trained."""

    shape: Shape
    num_tokens: int
    batch_tokens: int
    precision: Precision
    layout: Parallelism
    """From a frozen config, or a plan's `[launch]`."""

    @property
    def flops(self) -> dict[str, float]:
        """Training FLOPs by convention; of the model, so what is recomputed does not count."""
        found = {name: float(flops_per_token(self.shape, cast(Convention, name))) * self.num_tokens
                 for name in CONVENTIONS}  # fmt: skip
        return {"six_nd": six_nd(count_params(self.shape).total, self.num_tokens), **found}


@dataclass(frozen=True, kw_only=True, slots=True)
class MainEstimate:
    """What it takes."""

    run: MainRun
    machine: Machine
    memory: Memory | None
    """The fullest rank's; None where the layout does not divide the run."""
    utilization: Span
    """Share of the peak over all hours paid."""
    gpu_hours: Span
    """All that are paid: what is lost to interruptions, saving, evaluations and restarts too."""
    usd: Span | None
    days: Span
    step_seconds: Span
    """Duration of a step that makes progress."""


def estimate_main(run: MainRun, given: Given) -> MainEstimate:
    """What the main run takes on the machine.

    Raises:
        SpecError: the measured throughput is more than the peak.
    """
    machine, memory = machine_of(given, flops_per_token(run.shape, MFU_CONVENTION)), None
    if not layout_problems(run.layout, run.shape, run.batch_tokens):
        passes = microbatches(run.layout, run.shape, run.batch_tokens)
        memory = memory_per_rank(run.shape, run.layout, run.precision, *passes)
    flops = exactly(run.flops[MFU_CONVENTION])
    share = paid_share(machine, count_params(run.shape).total)
    steps, paid = (gpu_hours(flops, machine.peak_flops, each) for each in (machine.mfu, share))
    return MainEstimate(
        run=run, machine=machine, memory=memory, utilization=share,
        gpu_hours=paid, usd=None if machine.price_usd is None else paid.times(machine.price_usd),
        days=paid.scaled(1 / (24.0 * machine.num_gpus)),
        step_seconds=steps.scaled(3600.0 * run.batch_tokens / run.num_tokens / machine.num_gpus),
    )  # fmt: skip


def main_body(found: MainEstimate) -> dict[str, Json]:
    """What `estimate --json` prints of the main run."""
    run, machine, held = found.run, found.machine, found.memory
    params = count_params(run.shape).total
    num_sequences, num_microbatches = microbatches(run.layout, run.shape, run.batch_tokens)
    body = {
        "shape": run.shape,
        "params": params,
        "tokens": run.num_tokens,
        "batch_tokens": run.batch_tokens,
        "flops": run.flops,
        "machine": {
            "gpu": machine.name, "num_gpus": machine.num_gpus, "peak_flops": machine.peak_flops,
            "memory_gb": machine.memory_gb, "mfu": machine.mfu.told(), "mfu_convention": MFU_CONVENTION,
            "utilization": found.utilization.told(),
            "price_usd": None if machine.price_usd is None else machine.price_usd.told(),
        },
        "gpu_hours": found.gpu_hours.told(),
        "usd": None if found.usd is None else found.usd.told(),
        "days": found.days.told(),
        "step_seconds": found.step_seconds.told(),
        "parallelism": dataclasses.asdict(run.layout)
        | {"microbatch_sequences": num_sequences, "num_microbatches": num_microbatches},
        "memory": None if held is None else dataclasses.asdict(held) | {"total_bytes": held.total_bytes},
        "disk_bytes": KEPT_CHECKPOINTS * CHECKPOINT_BYTES * params,
        "warnings": _warnings(found),
    }  # fmt: skip
    return cast(dict[str, Json], canon.to_json(body))


def _warnings(found: MainEstimate) -> list[str]:
    run, machine, params = found.run, found.machine, count_params(found.run.shape).total
    undivided = layout_problems(run.layout, run.shape, run.batch_tokens)
    said = [f"the layout does not divide a run of this size: {problem}" for problem in undivided]
    room = machine.memory_gb * GIGA * (1 - RESERVED)
    if found.memory is not None and found.memory.total_bytes > room:
        said.append(
            f"the layout takes {found.memory.total_bytes / GIGA:.1f} GB a rank, {room / GIGA:.1f} GB are free: more "
            "sharding, activation_checkpointing, smaller microbatch_sequences or larger GPUs"
        )
    if run.layout.num_ranks != machine.num_gpus:
        said.append(f"hours are of {machine.num_gpus} GPUs, memory is of the layout's {run.layout.num_ranks} ranks")
    if params < SMALLEST_PUBLISHED and not machine.measured:
        said.append(f"{params:.3g} parameters: no run below {SMALLEST_PUBLISHED:.0e} is published with its hours")
    cost = found.usd or found.gpu_hours
    if cost.high > WIDE * cost.low:
        said.append(
            f"hours and dollars are known within a factor of {cost.high / cost.low:.3g}: one measurement narrows them, "
            f"the tokens a second of one {machine.name} over some steps of this shape: --tokens-per-second"
        )
    return said
