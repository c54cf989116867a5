"""How a main run is laid out over ranks: what of its degrees does not divide it, and how its batch
is cut.

Weights, gradients and moments are sharded over the `data_parallel_shard` * `context` ranks (FSDP2).
`tensor` splits heads, FFN and vocabulary, and the tokens between them (sequence parallel, arXiv
2205.05198); `pipeline` cuts the layers into stages run one forward, one backward (arXiv
2104.04473); `context` cuts sequences.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from launcher.frozen.frozen import Parallelism
from proxies.core.errors import InputError
from proxies.core.notation import counted
from proxies.core.shape import Shape

if TYPE_CHECKING:
    from launcher.plan.sections import LaunchSection


class LayoutError(InputError):
    """Degrees that do not divide the shape or the batch; `problems` says all that do not."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("the layout does not divide the run: " + "; ".join(problems))


def planned_parallelism(launch: LaunchSection) -> Parallelism:
    """The degrees that a plan's `[launch]` freezes."""
    return Parallelism(
        **{field.name: getattr(launch, field.name) for field in dataclasses.fields(Parallelism)}
    )


def microbatches(degrees: Parallelism, shape: Shape, batch_tokens: int) -> tuple[int, int]:
    """Sequences of one pass of a rank, before the context axis cuts them, and its passes in one
    step.

    No passes where the batch does not divide.
    """
    share = batch_tokens // shape.seq_len // degrees.num_data_ranks
    sequences = degrees.microbatch_sequences or max(1, share)
    passes, rest = divmod(batch_tokens, shape.seq_len * degrees.num_data_ranks * sequences)
    return sequences, 0 if rest else passes


def layout_problems(degrees: Parallelism, shape: Shape, batch_tokens: int) -> list[str]:
    """Everything that does not divide: heads, FFN, vocabulary, layers, sequences, the batch."""
    tp, pipeline, context, data = (
        degrees.tensor,
        degrees.pipeline,
        degrees.context,
        degrees.num_data_ranks,
    )
    sequences, passes = microbatches(degrees, shape, batch_tokens)
    divisions = {
        f"tensor = {tp} does not divide num_kv_heads = {shape.num_kv_heads}": shape.num_kv_heads
        % tp,
        f"tensor = {tp} does not divide ffn_width = {shape.ffn_width}": shape.ffn_width % tp,
        f"tensor = {tp} does not divide vocab_size = {shape.vocab_size}": shape.vocab_size % tp,
        f"pipeline = {pipeline} does not divide num_layers = {shape.num_layers}": (
            shape.num_layers % pipeline
        ),
        # Each rank takes one piece from either end of a sequence, so that causal work is even
        # (arXiv 2407.21783).
        f"context = {context} * tensor = {tp} does not cut seq_len = {shape.seq_len} evenly": (
            shape.seq_len % (2 * context * tp if context > 1 else tp)
        ),
        f"batch_tokens = {batch_tokens}: must be a multiple of {shape.seq_len} tokens by {data} "
        "data-parallel ranks "
        f"by {counted(sequences, 'sequence')}": batch_tokens % (shape.seq_len * data * sequences),
    }
    found = [sentence for sentence, rest in divisions.items() if rest]
    if pipeline > 1 and not found and passes < pipeline:
        found.append(
            f"pipeline = {pipeline}: a step has {passes} micro-batches, must have at least as many "
            "as stages"
        )
    if pipeline > 1 and shape.tied:
        found.append(
            f"pipeline = {pipeline}: needs model.tied = false, for embedding and readout are on "
            "different stages"
        )
    return found
