"""The main run before it runs: FLOPs, memory, hours, dollars, disk."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

from launcher.base.policy import Recomputed
from launcher.estimates.layout import layout_problems, microbatches
from launcher.estimates.machine import (
    MFU_CONVENTION,
    Machine,
    MachineOptions,
    Span,
    exactly,
    gpu_hours,
    machine_of,
)
from launcher.estimates.utilization import SMALLEST_PUBLISHED, estimate_step_mfu, paid_share
from launcher.frozen.frozen import Parallelism
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.flops import CONVENTIONS, Convention, count_params, flops_per_token, six_nd
from proxies.core.notation import counted, format_bytes, format_count, format_factor
from proxies.core.optimizers import RECIPES, optimizer_flops
from proxies.core.shape import Shape
from proxies.core.spec import Precision

# Memory of one rank: weights, gradients, moments, activations, logits, at the moment when most is
# held.
#
# Counted tensor by tensor as autograd keeps them in `proxies.model.decoder` under FSDP2 (float32
# weights, gradients and AdamW moments in shards; passes in the compute precision), and split over
# tensor, context and pipeline ranks as in arXiv 2205.05198. Not counted: the allocator's fragments,
# the CUDA context, workspaces of kernels and of NCCL; `RESERVED` stands for them when a plan must
# fit.

MASTER_BYTES = 4
"""Bytes of a weight, of its gradient once reduced, and of each moment of the optimizer."""
RESERVED = 0.1
"""Share of a device's memory left to what is not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank at one moment of a step."""

    moment: str
    weights_bytes: float
    """Its shard."""
    optimizer_bytes: float
    gradients_bytes: float
    """Its shard, and whole ones not yet reduced."""
    gathered_bytes: float
    """Whole weights, in the compute precision."""
    activations_bytes: float
    """Kept for the backward pass, and what the pass itself holds."""
    logits_bytes: float
    """With their softmax and gradients."""

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return (
            self.weights_bytes
            + self.optimizer_bytes
            + self.gradients_bytes
            + self.gathered_bytes
            + self.activations_bytes
            + self.logits_bytes
        )


def kept_per_token(shape: Shape, checkpointing: Recomputed, compute_bytes: int) -> float:
    """Bytes that one block keeps of a token for its backward pass.

    Without recomputing, for a norm: its input and its normed rows in float32, its output; for
    attention: queries, keys, values, output and, per head, the logarithm of the softmax's sum; for
    the feed-forward: the input of each matrix and of each activation. These are what torch's
    saved-tensor hooks show.
    """
    width, kv, ffn, c = shape.width, shape.kv_width, shape.ffn_width, compute_bytes
    llama, stats = shape.family == "llama", 4 * shape.num_heads
    if checkpointing == "full":
        return c * width
    if checkpointing == "selective":
        # The block's input, and what each matrix product and the attention put out.
        return (
            c * (width + width + 2 * kv + width + width + (2 if llama else 1) * ffn + width) + stats
        )
    norms = 2 * ((8 + c) * width + 4 * (1 if llama else 2))
    heads = 8 * (width + kv) + 4 * (shape.num_heads + shape.num_kv_heads) if shape.qk_norm else 0
    return norms + heads + c * (2 * width + 2 * kv) + stats + c * (4 if llama else 2) * ffn


def memory_per_rank(
    shape: Shape,
    degrees: Parallelism,
    precision: Precision,
    num_sequences: int = 1,
    num_microbatches: int = 1,
    *,
    optimizer: str,
) -> Memory:
    """Return the fullest moment of the fullest rank, with passes of so many sequences.

    `optimizer` is the name of a recipe (`proxies.core.optimizers.RECIPES`). From the second of
    `num_microbatches` passes of a step on, the shards of the gradients are held throughout.
    """
    stages = [
        _moments(shape, degrees, precision, index, num_sequences, num_microbatches, optimizer)
        for index in {0, degrees.pipeline - 1}
    ]
    return max(
        (moment for stage in stages for moment in stage), key=lambda moment: moment.total_bytes
    )


def _of_passes(
    shape: Shape,
    degrees: Parallelism,
    compute_bytes: int,
    index: int,
    num_sequences: int,
    num_microbatches: int,
) -> tuple[float, float, float]:
    """Of a stage, bytes kept for backward passes and of one block's insides in its own, and
    elements of the logits.
    """
    tp, c, last = degrees.tensor, compute_bytes, index == degrees.pipeline - 1
    tokens = num_sequences * shape.seq_len / degrees.context
    kept = kept_per_token(shape, degrees.activation_checkpointing, c)
    # of the activations about the nonlinearity
    gradients = (3 if shape.family == "llama" else 2) * shape.ffn_width
    again = (
        tokens / tp * (kept_per_token(shape, "none", c) - kept + c * (gradients + 2 * shape.width))
    )
    end = tokens / tp * (8 + c) * shape.width if last else 0.0
    in_flight = max(1, min(degrees.pipeline - index, num_microbatches))
    activations = in_flight * (shape.num_layers // degrees.pipeline * (tokens / tp * kept) + end)
    return activations, again, tokens * shape.vocab_size / tp if last else 0.0


def _moments(
    shape: Shape,
    degrees: Parallelism,
    precision: Precision,
    index: int,
    num_sequences: int,
    num_microbatches: int,
    optimizer: str,
) -> list[Memory]:
    """The four fullest moments of a rank: the loss, the last block's backward pass, its end, the
    optimizer's step.

    The first stage holds the embedding and most micro-batches, the last one the readout and one.
    """
    tp, c = degrees.tensor, 2 if precision == "bfloat16" else 4
    params, first, last = count_params(shape), index == 0, index == degrees.pipeline - 1
    # Parameters of this tensor rank: of a block, of one vocabulary's matrix, and outside blocks,
    # gathered together.
    block = (params.non_embedding - 2 * shape.width) / shape.num_layers / tp
    table = shape.vocab_size * shape.width / tp
    root = (params.embedding / tp if first else 0) + (table if last and not shape.tied else 0)
    mine = block * (shape.num_layers // degrees.pipeline) + root
    mine, root_shard = (
        each / (degrees.data_parallel_shard * degrees.context) * MASTER_BYTES
        for each in (mine, root)
    )
    held = mine if num_microbatches > 1 else 0.0
    matrices, others = (RECIPES[optimizer].optimizer_for(kind) for kind in ("hidden", "embedding"))
    in_blocks = mine - root_shard
    kept_moments = matrices.num_moments * in_blocks + others.num_moments * root_shard
    copies = matrices.step_copies * in_blocks + others.step_copies * root_shard
    whole = matrices.gathered_bytes * shape.width * max(shape.width, shape.ffn_width)
    activations, again, logits = _of_passes(
        shape, degrees, c, index, num_sequences, num_microbatches
    )
    # Whole weights beside the shards; gradients, whole ones not yet reduced too. At the loss, in a
    # block, at the end.
    gathered = [c * root, c * (root + 2 * block), 0.0]
    unreduced = [
        held,
        held + c * (last * table + block),
        max(held, mine - root_shard) + (c + MASTER_BYTES) * root + c * table,
    ]
    # nothing is sharded: there are casts of weights, kept unless they are made again
    if degrees.num_ranks == 1:
        cast = c * (precision == "bfloat16")
        casts = cast * block * shape.num_layers * (degrees.activation_checkpointing == "none")
        gathered = [casts + cast * table, casts + cast * block, 0.0]
        unreduced = [held, max(held, MASTER_BYTES * table) + c * block, mine + cast * table]
    return [
        Memory(
            moment="the loss's backward pass",
            weights_bytes=mine,
            optimizer_bytes=kept_moments,
            gradients_bytes=unreduced[0],
            gathered_bytes=gathered[0],
            activations_bytes=activations,
            logits_bytes=12.0 * logits,
        ),
        Memory(
            moment="the last block's backward pass",
            weights_bytes=mine,
            optimizer_bytes=kept_moments,
            gradients_bytes=unreduced[1],
            gathered_bytes=gathered[1],
            activations_bytes=activations + again,
            logits_bytes=0.0,
        ),
        Memory(
            moment="the end of the backward pass",
            weights_bytes=mine,
            optimizer_bytes=kept_moments,
            gradients_bytes=unreduced[2],
            gathered_bytes=gathered[2],
            activations_bytes=0.0,
            logits_bytes=0.0,
        ),
        Memory(
            moment="the optimizer's step",
            weights_bytes=mine,
            optimizer_bytes=kept_moments + copies,
            gradients_bytes=mine,
            gathered_bytes=whole,
            activations_bytes=0.0,
            logits_bytes=0.0,
        ),
    ]


GIGA = 1e9
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
    optimizer: str
    """Name of a recipe (`proxies.core.optimizers.RECIPES`)."""

    @property
    def optimizer_flops(self) -> float:
        """What the optimizer's own products add over the run: hours count them, `flops` does
        not.
        """
        return optimizer_flops(self.optimizer, self.shape) * self.num_tokens / self.batch_tokens

    @property
    def checkpoint_bytes(self) -> int:
        """Of float32 weights and moments."""
        params = count_params(self.shape)
        matrices, others = (
            RECIPES[self.optimizer].optimizer_for(kind) for kind in ("hidden", "embedding")
        )
        moments = matrices.num_moments * params.non_embedding
        moments += others.num_moments * (params.total - params.non_embedding)
        return MASTER_BYTES * (params.total + moments)

    @property
    def flops(self) -> dict[str, float]:
        """Training FLOPs by convention; of the model, so what is recomputed does not count."""
        found = {
            name: float(flops_per_token(self.shape, cast(Convention, name))) * self.num_tokens
            for name in CONVENTIONS
        }
        return {"six_nd": six_nd(count_params(self.shape).total, self.num_tokens), **found}


@dataclass(frozen=True, kw_only=True, slots=True)
class MainEstimate:
    """What it takes."""

    run: MainRun
    machine: Machine
    memory: Memory | None
    """The fullest rank's; None where the layout does not divide the run."""
    mfu: Span
    """Share of the peak while it steps."""
    utilization: Span
    """Share of the peak over all hours paid."""
    gpu_hours: Span
    """All that are paid: what is lost to interruptions, saving, evaluations and restarts too."""
    usd: Span | None
    days: Span
    step_seconds: Span
    """Duration of a step that makes progress."""


def estimate_main(run: MainRun, given: MachineOptions) -> MainEstimate:
    """What the main run takes on the machine.

    Raises:
        SpecError: the measured throughput is more than the peak.
    """
    machine, memory = machine_of(given, flops_per_token(run.shape, MFU_CONVENTION)), None
    if not layout_problems(run.layout, run.shape, run.batch_tokens):
        passes = microbatches(run.layout, run.shape, run.batch_tokens)
        memory = memory_per_rank(
            run.shape, run.layout, run.precision, *passes, optimizer=run.optimizer
        )
    # A measured throughput has the optimizer's share in it.
    flops = exactly(run.flops[MFU_CONVENTION] + (0.0 if machine.mfu else run.optimizer_flops))
    share = paid_share(machine, count_params(run.shape).total)
    mfu = estimate_step_mfu(machine, share)
    steps, paid = (gpu_hours(flops, machine.peak_flops, each) for each in (mfu, share))
    return MainEstimate(
        run=run,
        machine=machine,
        memory=memory,
        mfu=mfu,
        utilization=share,
        gpu_hours=paid,
        usd=None if machine.price_usd is None else paid.times(machine.price_usd),
        days=paid.scaled(1 / (24.0 * machine.num_gpus)),
        step_seconds=steps.scaled(3600.0 * run.batch_tokens / run.num_tokens / machine.num_gpus),
    )


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
        "optimizer_flops": run.optimizer_flops,
        "machine": {
            "gpu": machine.name,
            "num_gpus": machine.num_gpus,
            "peak_flops": machine.peak_flops,
            "memory_gb": machine.memory_gb,
            "mfu": found.mfu.told(),
            "mfu_convention": MFU_CONVENTION,
            "utilization": found.utilization.told(),
            "price_usd": None if machine.price_usd is None else machine.price_usd.told(),
        },
        "gpu_hours": found.gpu_hours.told(),
        "usd": None if found.usd is None else found.usd.told(),
        "days": found.days.told(),
        "step_seconds": found.step_seconds.told(),
        "parallelism": dataclasses.asdict(run.layout)
        | {"microbatch_sequences": num_sequences, "num_microbatches": num_microbatches},
        "memory": None
        if held is None
        else dataclasses.asdict(held) | {"total_bytes": held.total_bytes},
        "disk_bytes": KEPT_CHECKPOINTS * run.checkpoint_bytes,
        "warnings": _warnings(found),
    }
    return cast(dict[str, Json], canon.to_json(body))


def _warnings(found: MainEstimate) -> list[str]:
    run, machine, params = found.run, found.machine, count_params(found.run.shape).total
    undivided = layout_problems(run.layout, run.shape, run.batch_tokens)
    notes = [f"the layout does not divide a run of this size: {problem}" for problem in undivided]
    room = machine.memory_gb * GIGA * (1 - RESERVED)
    if found.memory is not None and found.memory.total_bytes > room:
        notes.append(
            f"the layout needs {format_bytes(found.memory.total_bytes)} a rank, "
            f"{format_bytes(room)} are free: use "
            "more sharding, activation_checkpointing, smaller microbatch_sequences or larger GPUs"
        )
    if run.layout.num_ranks != machine.num_gpus:
        notes.append(
            f"hours are for {counted(machine.num_gpus, 'GPU')}, memory is for the layout's "
            f"{counted(run.layout.num_ranks, 'rank')}"
        )
    if params < SMALLEST_PUBLISHED and machine.mfu is None:
        notes.append(
            f"{format_count(params)} parameters: no run below {format_count(SMALLEST_PUBLISHED)} "
            "is published with "
            "its hours"
        )
    cost = found.usd or found.gpu_hours
    if cost.high > WIDE * cost.low:
        notes.append(
            "hours and dollars are known only within a factor of "
            f"{format_factor(cost.high / cost.low)}: measure the "
            f"tokens a second of one {machine.name} over some steps of this shape, and give "
            "--tokens-per-second"
        )
    return notes
