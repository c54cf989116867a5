"""Degrees of parallelism for a shape, a number of GPUs and their memory: which fit, which is fastest, and why.

Layouts that divide everything and fit are ranked by an estimate of the time of a step over that of arithmetic alone. It
ranks; it prices nothing (MFU does). Its terms are upper ends: communication that hides behind arithmetic is free.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

from launcher.base.policy import Recomputed
from launcher.estimates.failures import GPUS_PER_NODE
from launcher.estimates.layout import Layout
from launcher.estimates.memory import RESERVED, Memory, memory_per_rank
from proxies.core.flops import count_params, flops_per_token
from proxies.core.shape import Shape
from proxies.core.spec import Precision

GIGA = 1e9
REACHED_FLOPS = 400e12
"""A second, of one GPU of the H100's kind (Llama 3 at 16,384: arXiv 2407.21783, table 4)."""
NODE_BYTES, NETWORK_BYTES = 450e9, 50e9
"""A second and direction, of one GPU: NVLink 4, and a 400 Gbit/s port."""
RECOMPUTED: dict[Recomputed, float] = {"none": 0.0, "selective": 0.04, "full": 1 / 3}
"""Of a step's arithmetic: a forward pass of three; the norms and activations alone, arXiv 2205.05198, section 6."""
LONG_SEQUENCE = 32_768
"""Shorter ones are cut by the tensor axis well enough; Llama 3 used context parallelism at 131,072 only."""
TIE = 0.05
"""Overheads nearer than this are not told apart: the simpler layout is taken."""
MOST_MICROBATCH, MOST_STAGES, MOST_CONTEXT = 8, 64, 64
TENSORS = (1, 2, 4, 8)
"""Inside a node."""
MOST_SAID = 4
"""Problems of layouts that lack one thing only."""


class NoParallelismError(ValueError):
    """No layout of the ranks divides the shape and the batch, and fits; `problems` says what each kind lacks."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("no parallelism fits: " + "; ".join(problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPlan:
    """The layout chosen, what it holds, and why."""

    layout: Layout
    num_microbatches: int
    memory: Memory
    overhead: float
    """Of a step's time over that of its arithmetic alone, as ranked by."""
    reasons: tuple[str, ...]


def plan_parallelism(
    shape: Shape, batch_tokens: int, num_gpus: int, memory_gb: float, precision: Precision
) -> ParallelPlan:
    """The layout of `num_gpus` ranks that fits with `RESERVED` to spare and loses least time.

    Raises:
        NoParallelismError: none divides, or none fits; with the nearest.
    """
    room = memory_gb * GIGA * (1 - RESERVED)
    fitting: list[ParallelPlan] = []
    smallest: tuple[float, Layout] | None = None
    nearest: list[str] = []
    for layout in _layouts(shape, num_gpus):
        if problems := layout.problems(shape, batch_tokens):
            new = len(problems) == 1 and layout.microbatch_sequences == 1 and problems[0] not in nearest
            if new and len(nearest) < MOST_SAID:
                nearest += problems
            continue
        passes = layout.num_microbatches(shape, batch_tokens)
        for shard in _shards(layout):
            sharded = replace(layout, shard=shard, replicate=layout.data // shard)
            memory = memory_per_rank(shape, sharded, precision, passes)
            if smallest is None or memory.total_bytes < smallest[0]:
                smallest = memory.total_bytes, sharded
            if memory.total_bytes <= room:
                fitting.append(_planned(shape, sharded, memory, batch_tokens, room))
    if smallest is None:
        said = f"num_gpus = {num_gpus}: no product of degrees divides the shape and the batch of"
        sequences = batch_tokens // shape.seq_len
        raise NoParallelismError([f"{said} {sequences} sequences: choose another number or batch", *nearest])
    if not fitting:
        raise NoParallelismError([_too_large(num_gpus, room, smallest)])
    return min(fitting, key=_rank)


def hold_layout(
    shape: Shape, batch_tokens: int, layout: Layout, memory_gb: float, precision: Precision
) -> ParallelPlan:
    """A layout that is settled already, held against the same conditions.

    Raises:
        NoParallelismError: it does not divide, or does not fit.
    """
    if problems := layout.problems(shape, batch_tokens):
        raise NoParallelismError(problems)
    passes, room = layout.num_microbatches(shape, batch_tokens), memory_gb * GIGA * (1 - RESERVED)
    memory = memory_per_rank(shape, layout, precision, passes)
    if memory.total_bytes > room:
        over = f"{memory.total_bytes / GIGA:.1f} GB a rank, {room / GIGA:.1f} GB are free"
        raise NoParallelismError([f"the layout's {over}: more sharding, recomputing or larger GPUs are wanted"])
    return _planned(shape, layout, memory, batch_tokens, room)


def _layouts(shape: Shape, num_gpus: int) -> Iterator[Layout]:
    """Every layout, all its data ranks sharding, whose degrees multiply to the number of GPUs."""
    micros = [2**k for k in range(MOST_MICROBATCH.bit_length())]
    axes = (TENSORS, _stages(shape), _contexts(shape), micros, get_args(Recomputed))
    for t, p, c, micro, kept in itertools.product(*axes):
        data, rest = divmod(num_gpus, t * p * c)
        if data and not rest:
            yield Layout(
                shard=data, tensor=t, pipeline=p, context=c, microbatch_sequences=micro, checkpointing=kept
            )  # fmt: skip


def _stages(shape: Shape) -> list[int]:
    return [p for p in range(1, min(shape.num_layers, MOST_STAGES) + 1) if shape.num_layers % p == 0]


def _contexts(shape: Shape) -> list[int]:
    return [2**k for k in range(MOST_CONTEXT.bit_length())] if shape.seq_len > LONG_SEQUENCE else [1]


def _shards(layout: Layout) -> list[int]:
    """All data ranks sharding, or groups of whole nodes with replicas of them (HSDP)."""
    per_node = max(1, GPUS_PER_NODE // layout.tensor)
    return [
        shard for shard in (per_node * 2**k for k in range(20)) if shard < layout.data and layout.data % shard == 0
    ] + [layout.data]


def _planned(shape: Shape, layout: Layout, memory: Memory, batch_tokens: int, room: float) -> ParallelPlan:
    passes = layout.num_microbatches(shape, batch_tokens)
    overhead, sequences = _overhead(shape, layout, passes), batch_tokens // shape.seq_len
    reasons = (
        f"{memory.total_bytes / GIGA:.1f} of {room / GIGA:.1f} GB at the fullest moment, {memory.moment}",
        f"{sequences} sequences a step are {passes} x {layout.microbatch_sequences} x {layout.data}",
        f"about {overhead:.0%} beyond arithmetic, if none of it hides (an estimate that only ranks)",
    )
    return ParallelPlan(layout=layout, num_microbatches=passes, memory=memory, overhead=overhead, reasons=reasons)


def _overhead(shape: Shape, layout: Layout, passes: int) -> float:
    """Time beyond arithmetic: recomputing, waiting of stages, bytes between tensor, context and data ranks."""
    tokens = layout.microbatch_sequences * shape.seq_len / layout.context
    params = count_params(shape).total / layout.tensor / layout.pipeline
    compute = flops_per_token(shape, "full") / layout.tensor / layout.pipeline * tokens / REACHED_FLOPS
    layers = shape.num_layers / layout.pipeline
    moved = (layout.tensor - 1) / layout.tensor
    # Four gathers or scatters of the residual stream a layer and pass, forward and backward (arXiv 2205.05198).
    tensor = layers * 8 * tokens * shape.width * 2 * moved / NODE_BYTES
    # Keys and values of the other ranks, and their gradients (arXiv 2407.21783, section 3.3.2).
    context = layers * 6 * tokens * (layout.context - 1) * shape.kv_width * 2 / NETWORK_BYTES
    # Two gathers in 16 bits and a scatter in 32 (arXiv 2304.11277), behind arithmetic as far as it lasts.
    one_node = layout.num_ranks <= GPUS_PER_NODE
    group = layout.shard * layout.context
    gathers = params * (2 + 2 + 4) * (group - 1) / group
    replicas = params / group * 8 * (layout.replicate > 1) / passes
    data = max(0.0, (gathers / (NODE_BYTES if one_node or group * layout.tensor <= GPUS_PER_NODE else NETWORK_BYTES)
                     + replicas / NETWORK_BYTES) - compute)  # fmt: skip
    bubble = (layout.pipeline - 1) / passes  # arXiv 2104.04473, section 2.2
    return (1 + RECOMPUTED[layout.checkpointing] + (tensor + context + data) / compute) * (1 + bubble) - 1


def _rank(plan: ParallelPlan) -> tuple[float, ...]:
    """Time to some percent, then the number of axes, then time, then the smaller groups."""
    layout = plan.layout
    axes = sum(degree > 1 for degree in (layout.tensor, layout.pipeline, layout.context, layout.replicate))
    return round(plan.overhead / TIE), axes, round(plan.overhead, 3), layout.microbatch_sequences, layout.shard


def _too_large(num_gpus: int, room: float, smallest: tuple[float, Layout]) -> str:
    needed, layout = smallest
    degrees = ", ".join(f"{name} = {getattr(layout, name)}" for name in ("shard", "tensor", "pipeline", "context"))
    least = (
        f"the least that a rank can hold is {needed / GIGA:.1f} GB ({degrees}, checkpointing {layout.checkpointing})"
    )
    return f"num_gpus = {num_gpus}: {least}, {room / GIGA:.1f} GB are free: more GPUs, or larger ones, are wanted"
