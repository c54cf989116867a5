"""Memory of one rank: weights, gradients, moments, activations, logits, at the moment when most is held.

Counted tensor by tensor as autograd keeps them in `proxies.model.decoder` under FSDP2 (float32 weights, gradients and
AdamW moments in shards; passes in the compute precision), and split over tensor, context and pipeline ranks as in arXiv
2205.05198. Not counted: the allocator's fragments, the CUDA context, workspaces of kernels and of NCCL; `RESERVED`
stands for them when a plan must fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.base.policy import Recomputed
from launcher.frozen.frozen import Parallelism
from proxies.core.flops import count_params
from proxies.core.shape import Shape
from proxies.core.spec import Precision

MASTER_BYTES = 4
"""Bytes of a weight, of its gradient once reduced, and of each of AdamW's two moments."""
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
            self.weights_bytes + self.optimizer_bytes + self.gradients_bytes + self.gathered_bytes
            + self.activations_bytes + self.logits_bytes
        )  # fmt: skip


def kept_per_token(shape: Shape, checkpointing: Recomputed, compute_bytes: int) -> float:
    """Bytes that one block keeps of a token for its backward pass.

    Without recomputing, for a norm: its input and its normed rows in float32, its output; for attention: queries, keys,
    values, output and, per head, the logarithm of the softmax's sum; for the feed-forward: the input of each matrix
    and of each activation. These are what torch's saved-tensor hooks show.
    """
    width, kv, ffn, c = shape.width, shape.kv_width, shape.ffn_width, compute_bytes
    llama, stats = shape.family == "llama", 4 * shape.num_heads
    if checkpointing == "full":
        return c * width
    if checkpointing == "selective":
        # The block's input, and what each matrix product and the attention put out.
        return c * (width + width + 2 * kv + width + width + (2 if llama else 1) * ffn + width) + stats
    norms = 2 * ((8 + c) * width + 4 * (1 if llama else 2))
    heads = 8 * (width + kv) + 4 * (shape.num_heads + shape.num_kv_heads) if shape.qk_norm else 0
    return norms + heads + c * (2 * width + 2 * kv) + stats + c * (4 if llama else 2) * ffn


def memory_per_rank(
    shape: Shape, degrees: Parallelism, precision: Precision, num_sequences: int = 1, num_microbatches: int = 1
) -> Memory:
    """The fullest moment of the fullest rank, with passes of so many sequences.

    From the second of `num_microbatches` passes of a step on, the shards of the gradients are held throughout.
    """
    stages = [
        _moments(shape, degrees, precision, index, num_sequences, num_microbatches)
        for index in {0, degrees.pipeline - 1}
    ]
    return max((moment for stage in stages for moment in stage), key=lambda moment: moment.total_bytes)


def _moments(
    shape: Shape, degrees: Parallelism, precision: Precision, index: int, num_sequences: int, num_microbatches: int
) -> list[Memory]:
    """The loss, the first block's backward pass, the end of the backward pass, the optimizer's step of one

    The first stage holds the embedding and most micro-batches, the last one the readout and one.
    """
    tp, c = degrees.tensor, 2 if precision == "bfloat16" else 4
    params, first, last = count_params(shape), index == 0, index == degrees.pipeline - 1
    # Parameters of this tensor rank: of a block, of one vocabulary's matrix, and outside blocks, gathered together.
    block = (params.non_embedding - 2 * shape.width) / shape.num_layers / tp
    table = shape.vocab_size * shape.width / tp
    root = (params.embedding / tp if first else 0) + (table if last and not shape.tied else 0)
    mine = block * (shape.num_layers // degrees.pipeline) + root
    mine, root_shard = (each / (degrees.data_parallel_shard * degrees.context) * MASTER_BYTES for each in (mine, root))
    held = mine if num_microbatches > 1 else 0.0
    # Bytes of one micro-batch: kept by a block; recomputed, and of gradients, in its backward pass; kept by the end.
    tokens = num_sequences * shape.seq_len / degrees.context
    kept = kept_per_token(shape, degrees.activation_checkpointing, c)
    gradients = (3 if shape.family == "llama" else 2) * shape.ffn_width  # of the activations about the nonlinearity
    again = tokens / tp * (kept_per_token(shape, "none", c) - kept + c * (gradients + 2 * shape.width))
    end = tokens / tp * (8 + c) * shape.width if last else 0.0
    logits = tokens * shape.vocab_size / tp if last else 0.0  # elements
    in_flight = max(1, min(degrees.pipeline - index, num_microbatches))
    activations = in_flight * (shape.num_layers // degrees.pipeline * (tokens / tp * kept) + end)
    return [
        Memory(
            moment="the loss's backward pass", weights_bytes=mine, optimizer_bytes=2 * mine, gradients_bytes=held,
            gathered_bytes=c * root, activations_bytes=activations, logits_bytes=12.0 * logits,
        ),
        Memory(
            moment="the last block's backward pass", weights_bytes=mine, optimizer_bytes=2 * mine,
            gradients_bytes=held + c * (last * table + block), gathered_bytes=c * (root + 2 * block),
            activations_bytes=activations + again, logits_bytes=0.0,
        ),
        Memory(
            moment="the end of the backward pass", weights_bytes=mine, optimizer_bytes=2 * mine,
            gradients_bytes=max(held, mine - root_shard) + (c + MASTER_BYTES) * root + c * table,
            gathered_bytes=0.0, activations_bytes=0.0, logits_bytes=0.0,
        ),
        # torch's foreach AdamW holds one more copy of what it steps.
        Memory(
            moment="the optimizer's step", weights_bytes=mine, optimizer_bytes=3 * mine, gradients_bytes=mine,
            gathered_bytes=0.0, activations_bytes=0.0, logits_bytes=0.0,
        ),
    ]  # fmt: skip
