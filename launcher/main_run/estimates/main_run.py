"""Estimates of the main run before it runs: FLOPs, memory, hours, dollars, disk.

The estimated memory is the peak of the rank that holds most. Tensors are counted one by one, as
autograd keeps them in `forerun._proxies.model.decoder` under FSDP2: weights, gradients, and moments
in float32 shards, and activations in the compute precision. Tensor, context, and pipeline ranks
split them as in arXiv 2205.05198. Fragmentation of the allocator, the CUDA context, and the
workspaces of kernels and of NCCL are not counted; a plan must leave the share `RESERVED` for them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

from forerun._launcher.main_run.estimates.layout import count_microbatches, find_layout_problems
from forerun._launcher.main_run.estimates.machine import (
    MFU_CONVENTION,
    Machine,
    MachineOptions,
    Span,
    build_machine,
    compute_gpu_hours,
    make_exact,
)
from forerun._launcher.main_run.estimates.utilization import (
    MIN_PUBLISHED_PARAMS,
    estimate_paid_share,
    estimate_step_mfu,
)
from forerun._launcher.main_run.frozen.frozen import Parallelism
from forerun._launcher.main_run.frozen.run_policies import RecomputeMode
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.flops import (
    CONVENTIONS,
    Convention,
    compute_flops_per_token,
    compute_six_nd,
    count_params,
)
from forerun._proxies.core.notation import format_bytes, format_count, format_counted, format_factor
from forerun._proxies.core.optimizers import RECIPES, OptimizerSpec, compute_optimizer_flops
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import MainRunDtype

# ---- Memory ----

MASTER_BYTES = 4
"""Bytes of a weight, of its reduced gradient, and of each moment of the optimizer."""
RESERVED = 0.1
"""Share of a device's memory that is left for allocations which are not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The memory of one rank at one moment of a step."""

    moment: str
    weights_bytes: float
    """Bytes of the rank's shard."""
    optimizer_bytes: float
    gradients_bytes: float
    """Bytes of the rank's shard, and of whole gradients that are not yet reduced."""
    gathered_bytes: float = 0.0
    """Bytes of whole weights in the compute precision."""
    activations_bytes: float = 0.0
    """Bytes kept for the backward pass, and bytes that the backward pass itself holds."""
    logits_bytes: float = 0.0
    """Bytes of the logits, their softmax, and their gradients."""

    @property
    def total_bytes(self) -> float:
        """Sum of all parts, in bytes."""
        return (
            self.weights_bytes
            + self.optimizer_bytes
            + self.gradients_bytes
            + self.gathered_bytes
            + self.activations_bytes
            + self.logits_bytes
        )


def compute_kept_bytes(shape: Shape, checkpointing: RecomputeMode, compute_bytes: int) -> float:
    """Return the bytes per token that one block keeps for its backward pass.

    torch's saved-tensor hooks show what a block without recomputation keeps. A norm keeps its
    input, its normed rows in float32, and its output. Attention keeps queries, keys, values, its
    output, and, per head, the logarithm of the softmax's sum. The feed-forward keeps the input of
    each matrix and of each activation function.

    Args:
        shape: Shape of the model.
        checkpointing: Activations that the backward pass recomputes.
        compute_bytes: Bytes of a number in the compute precision.
    """
    width, kv, ffn, c = shape.width, shape.kv_width, shape.ffn_width, compute_bytes
    is_llama, stats = shape.family == "llama", 4 * shape.num_heads
    if checkpointing == "full":
        return c * width
    if checkpointing == "selective":
        # The input of the block, and the outputs of matrix products and attention
        return c * (5 * width + 2 * kv + (2 if is_llama else 1) * ffn) + stats
    # Each of two norms: input and normed rows in float32, output, and its statistics per token
    # (RMSNorm one, LayerNorm two)
    norms = 2 * ((8 + c) * width + 4 * (1 if is_llama else 2))
    heads = 8 * (width + kv) + 4 * (shape.num_heads + shape.num_kv_heads) if shape.qk_norm else 0
    attention = c * (2 * width + 2 * kv) + stats
    return norms + heads + attention + c * (4 if is_llama else 2) * ffn


def estimate_memory(
    shape: Shape,
    degrees: Parallelism,
    precision: MainRunDtype,
    num_sequences: int = 1,
    num_microbatches: int = 1,
    *,
    optimizer: str,
) -> Memory:
    """Return the memory of the rank that holds most, at the moment when it holds most.

    Args:
        shape: Shape of the model.
        degrees: Degrees of parallelism.
        precision: Compute precision.
        num_sequences: Number of sequences in one pass.
        num_microbatches: Number of passes in one step. From the second pass on, the shards of the
            gradients are held all the time.
        optimizer: Name of a recipe (`forerun._proxies.core.optimizers.RECIPES`).
    """
    # Only two pipeline stages can hold most: the first one has the embedding and most microbatches
    # in flight, the last one the readout and the loss.
    moments = [
        moment
        for index in {0, degrees.pipeline - 1}
        for moment in _list_moments(
            shape,
            degrees,
            _count_stage_weights(shape, degrees, index),
            _count_pass(shape, degrees, precision, index, num_sequences, num_microbatches),
            has_several_passes=num_microbatches > 1,
            optimizer=optimizer,
        )
    ]
    return max(moments, key=lambda moment: moment.total_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StageWeights:
    """The weights of one rank of a pipeline stage: elements of its tensor-parallel parts."""

    block: float
    """Elements of one block."""
    num_blocks: int
    table: float
    """Elements of one matrix over the vocabulary."""
    root: float
    """Elements outside of blocks, which are gathered together."""
    has_readout: bool


def _count_stage_weights(shape: Shape, degrees: Parallelism, index: int) -> _StageWeights:
    """Count the weights of the pipeline stage of this index."""
    params, has_readout = count_params(shape), index == degrees.pipeline - 1
    table = shape.vocab_size * shape.width / degrees.tensor
    embedding = params.embedding / degrees.tensor if index == 0 else 0
    return _StageWeights(
        block=(params.non_embedding - 2 * shape.width) / shape.num_layers / degrees.tensor,
        num_blocks=shape.num_layers // degrees.pipeline,
        table=table,
        root=embedding + (table if has_readout and not shape.tied else 0),
        has_readout=has_readout,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """The activations and logits that the passes of a pipeline stage hold."""

    compute_bytes: int
    """Bytes of a number in the compute precision."""
    kept_bytes: float
    """Bytes kept for the backward passes of all microbatches in flight."""
    block_bytes: float
    """Bytes that the backward pass of one block recomputes and holds."""
    num_logits: float


def _count_pass(
    shape: Shape,
    degrees: Parallelism,
    precision: MainRunDtype,
    index: int,
    num_sequences: int,
    num_microbatches: int,
) -> _Pass:
    """Count what the passes of the pipeline stage of this index hold."""
    c, is_last = 2 if precision == "bfloat16" else 4, index == degrees.pipeline - 1
    tokens = num_sequences * shape.seq_len / degrees.context
    tokens_of_rank = tokens / degrees.tensor
    kept = compute_kept_bytes(shape, degrees.activation_checkpointing, c)
    recomputed = compute_kept_bytes(shape, "none", c) - kept
    # Gradients of the activations around the nonlinearity, and of the residual stream
    gradients = (3 if shape.family == "llama" else 2) * shape.ffn_width + 2 * shape.width
    num_blocks = shape.num_layers // degrees.pipeline
    final_norm = tokens_of_rank * (8 + c) * shape.width if is_last else 0.0
    num_in_flight = max(1, min(degrees.pipeline - index, num_microbatches))
    return _Pass(
        compute_bytes=c,
        kept_bytes=num_in_flight * (num_blocks * (tokens_of_rank * kept) + final_norm),
        block_bytes=tokens_of_rank * (recomputed + c * gradients),
        num_logits=tokens * shape.vocab_size / degrees.tensor if is_last else 0.0,
    )


def _get_optimizers(recipe: str) -> tuple[OptimizerSpec, OptimizerSpec]:
    """Return a recipe's optimizer of matrices in blocks, and its optimizer of all other weights."""
    return RECIPES[recipe].get_optimizer("hidden"), RECIPES[recipe].get_optimizer("embedding")


def _count_optimizer_bytes(
    optimizer: str, matrix_bytes: float, other_bytes: float, max_elements: int
) -> tuple[float, float, float]:
    """Return the bytes of the optimizer's moments, of copies in its step, and of gathered matrices.

    Args:
        optimizer: Name of a recipe.
        matrix_bytes: Bytes of the rank's weights in blocks.
        other_bytes: Bytes of its other weights.
        max_elements: Elements of the largest matrix in a block.
    """
    for_matrices, for_others = _get_optimizers(optimizer)
    return (
        for_matrices.num_moments * matrix_bytes + for_others.num_moments * other_bytes,
        for_matrices.step_copies * matrix_bytes + for_others.step_copies * other_bytes,
        for_matrices.gathered_bytes * max_elements,
    )


_BACKWARD_MOMENTS = (
    "the loss's backward pass",
    "the last block's backward pass",
    "the end of the backward pass",
)


def _list_moments(
    shape: Shape,
    degrees: Parallelism,
    weights: _StageWeights,
    passes: _Pass,
    *,
    has_several_passes: bool,
    optimizer: str,
) -> list[Memory]:
    """Return the memory at the four moments of a step at which a rank of a stage may hold most."""
    c, root, block, table = passes.compute_bytes, weights.root, weights.block, weights.table
    # Shards of weights in blocks and outside of them, in bytes; gradients have the same size.
    element_bytes = MASTER_BYTES / (degrees.data_parallel_shard * degrees.context)
    root_shard_bytes = root * element_bytes
    shard_bytes = (block * weights.num_blocks + root) * element_bytes
    largest = shape.width * max(shape.width, shape.ffn_width)
    state, copies, step_gathered = _count_optimizer_bytes(
        optimizer, shard_bytes - root_shard_bytes, root_shard_bytes, largest
    )
    # Gradients of earlier passes, whole weights, and gradients that are not reduced yet: at the
    # loss, in the last block, and at the end of the backward pass
    held_bytes = shard_bytes if has_several_passes else 0.0
    gathered = [c * root, c * (root + 2 * block), 0.0]
    gradients = [
        held_bytes,
        held_bytes + c * (weights.has_readout * table + block),
        max(held_bytes, shard_bytes - root_shard_bytes) + (c + MASTER_BYTES) * root + c * table,
    ]
    if degrees.num_ranks == 1:
        # Nothing is sharded. A compute precision other than float32 needs casts of the weights. The
        # casts are kept unless blocks are recomputed.
        cast_bytes = c if c < MASTER_BYTES else 0
        keeps_casts = degrees.activation_checkpointing == "none"
        casts = cast_bytes * block * shape.num_layers if keeps_casts else 0
        gathered = [casts + cast_bytes * table, casts + cast_bytes * block, 0.0]
        gradients = [
            held_bytes,
            max(held_bytes, MASTER_BYTES * table) + c * block,
            shard_bytes + cast_bytes * table,
        ]
    resident = Memory(
        moment="the optimizer's step",
        weights_bytes=shard_bytes,
        optimizer_bytes=state,
        gradients_bytes=shard_bytes,
    )
    in_backward = [
        dataclasses.replace(resident, moment=name, gradients_bytes=gradient, gathered_bytes=full)
        for name, gradient, full in zip(_BACKWARD_MOMENTS, gradients, gathered, strict=True)
    ]
    # Logits, softmax, and gradient, in float32 each
    kept, logits = passes.kept_bytes, 3 * 4.0 * passes.num_logits
    return [
        dataclasses.replace(in_backward[0], activations_bytes=kept, logits_bytes=logits),
        dataclasses.replace(in_backward[1], activations_bytes=kept + passes.block_bytes),
        in_backward[2],
        dataclasses.replace(resident, optimizer_bytes=state + copies, gathered_bytes=step_gathered),
    ]


# ---- Hours and dollars ----

GIGA = 1e9
KEPT_CHECKPOINTS = 3
"""Number of checkpoints on disk: two complete ones, and one that is being written."""
WIDE_RATIO = 10.0
"""Ratio of an interval's ends above which a warning names a measurement that would narrow it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MainRun:
    """A run to be trained."""

    shape: Shape
    num_tokens: int
    batch_tokens: int
    precision: MainRunDtype
    layout: Parallelism
    """Layout of a frozen config, or of a plan's `[launch]`."""
    optimizer: str
    """Name of a recipe (`forerun._proxies.core.optimizers.RECIPES`)."""

    @property
    def optimizer_flops(self) -> float:
        """FLOPs of the optimizer's own matrix products over the run, which `flops` leaves out."""
        return (
            compute_optimizer_flops(self.optimizer, self.shape)
            * self.num_tokens
            / self.batch_tokens
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: weights and moments in float32."""
        params = count_params(self.shape)
        for_matrices, for_others = _get_optimizers(self.optimizer)
        moments = for_matrices.num_moments * params.non_embedding
        moments += for_others.num_moments * (params.total - params.non_embedding)
        return MASTER_BYTES * (params.total + moments)

    @property
    def flops(self) -> dict[str, float]:
        """Training FLOPs of the model by convention, without recomputed ones."""
        by_convention = {
            name: float(compute_flops_per_token(self.shape, cast(Convention, name)))
            * self.num_tokens
            for name in CONVENTIONS
        }
        return {
            "six_nd": compute_six_nd(count_params(self.shape).total, self.num_tokens),
            **by_convention,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class MainEstimate:
    """An estimate of what a run takes on a machine."""

    run: MainRun
    machine: Machine
    memory: Memory | None
    """Memory of the fullest rank; None if the layout does not divide the run."""
    mfu: Span
    """Share of the peak while the run steps."""
    utilization: Span
    """Share of the peak over all hours that are paid."""
    gpu_hours: Span
    """All hours that are paid, including those lost to interruptions, saving, evaluations, and
    restarts."""
    usd: Span | None
    days: Span
    step_seconds: Span
    """Seconds of a step, without the time that is lost between steps."""


def estimate_main(run: MainRun, given: MachineOptions) -> MainEstimate:
    """Estimate what a run takes on a machine.

    Raises:
        SpecError: The measured throughput is above the peak.
    """
    machine, memory = build_machine(given, compute_flops_per_token(run.shape, MFU_CONVENTION)), None
    if not find_layout_problems(run.layout, run.shape, run.batch_tokens):
        passes = count_microbatches(run.layout, run.shape, run.batch_tokens)
        memory = estimate_memory(
            run.shape, run.layout, run.precision, *passes, optimizer=run.optimizer
        )
    # A measured throughput includes the optimizer.
    flops = make_exact(run.flops[MFU_CONVENTION] + (0.0 if machine.mfu else run.optimizer_flops))
    utilization = estimate_paid_share(machine, count_params(run.shape).total)
    mfu = estimate_step_mfu(machine, utilization)
    step_hours, paid_hours = (
        compute_gpu_hours(flops, machine.peak_flops, share) for share in (mfu, utilization)
    )
    step_share = run.batch_tokens / run.num_tokens / machine.num_gpus
    return MainEstimate(
        run=run,
        machine=machine,
        memory=memory,
        mfu=mfu,
        utilization=utilization,
        gpu_hours=paid_hours,
        usd=None if machine.price_usd is None else paid_hours.multiply(machine.price_usd),
        days=paid_hours.scale(1 / (24.0 * machine.num_gpus)),
        step_seconds=step_hours.scale(3600.0 * step_share),
    )


def build_main_body(estimate: MainEstimate) -> dict[str, Json]:
    """Return the part of `estimate --json` about the main run."""
    run, machine, memory = estimate.run, estimate.machine, estimate.memory
    num_sequences, num_microbatches = count_microbatches(run.layout, run.shape, run.batch_tokens)
    body = {
        "shape": run.shape,
        "params": count_params(run.shape).total,
        "tokens": run.num_tokens,
        "batch_tokens": run.batch_tokens,
        "flops": run.flops,
        "optimizer_flops": run.optimizer_flops,
        "machine": {
            "gpu": machine.name,
            "num_gpus": machine.num_gpus,
            "peak_flops": machine.peak_flops,
            "memory_gb": machine.memory_gb,
            "mfu": estimate.mfu.to_json(),
            "mfu_convention": MFU_CONVENTION,
            "utilization": estimate.utilization.to_json(),
            "price_usd": machine.price_usd and machine.price_usd.to_json(),
        },
        "gpu_hours": estimate.gpu_hours.to_json(),
        "usd": estimate.usd and estimate.usd.to_json(),
        "days": estimate.days.to_json(),
        "step_seconds": estimate.step_seconds.to_json(),
        "parallelism": dataclasses.asdict(run.layout)
        | {"microbatch_sequences": num_sequences, "num_microbatches": num_microbatches},
        "memory": memory and dataclasses.asdict(memory) | {"total_bytes": memory.total_bytes},
        "disk_bytes": KEPT_CHECKPOINTS * run.checkpoint_bytes,
        "warnings": _list_warnings(estimate),
    }
    return cast(dict[str, Json], canon.to_json(body))


def _list_warnings(estimate: MainEstimate) -> list[str]:
    run, machine = estimate.run, estimate.machine
    params, memory = count_params(run.shape).total, estimate.memory
    room = machine.memory_gb * GIGA * (1 - RESERVED)
    warnings = [
        f"the layout does not divide a run of this size: {problem}"
        for problem in find_layout_problems(run.layout, run.shape, run.batch_tokens)
    ]
    if memory is not None and memory.total_bytes > room:
        warnings.append(
            f"the layout needs {format_bytes(memory.total_bytes)} a rank, {format_bytes(room)} are "
            "free: use more sharding, activation_checkpointing, smaller microbatch_sequences or "
            "larger GPUs"
        )
    if run.layout.num_ranks != machine.num_gpus:
        warnings.append(
            f"hours are for {format_counted(machine.num_gpus, 'GPU')}, memory is for the layout's "
            f"{format_counted(run.layout.num_ranks, 'rank')}"
        )
    if params < MIN_PUBLISHED_PARAMS and machine.mfu is None:
        warnings.append(
            f"{format_count(params)} parameters: no run below {format_count(MIN_PUBLISHED_PARAMS)} "
            "is published with its hours"
        )
    cost = estimate.usd or estimate.gpu_hours
    if cost.high > WIDE_RATIO * cost.low:
        warnings.append(
            "hours and dollars are known only within a factor of "
            f"{format_factor(cost.high / cost.low)}: measure the tokens a second of one "
            f"{machine.name} over some steps of this shape, and give --tokens-per-second"
        )
    return warnings
