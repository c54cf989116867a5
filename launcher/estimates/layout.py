"""How a main run is laid out over ranks: degrees of the mesh, micro-batch, recomputing. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.base.policy import Recomputed
from proxies.core.checks import Checks
from proxies.core.shape import Shape

if TYPE_CHECKING:
    from launcher.frozen.frozen import Decision, Parallelism
    from launcher.plan.sections import LaunchSection


class LayoutError(ValueError):
    """A layout that does not divide the shape or the batch; `problems` says all that does not."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("the layout does not divide the run: " + "; ".join(problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of parallelism; their product is the number of ranks.

    Weights, gradients and moments are sharded over `shard` * `context` ranks (FSDP2), replicated over `replicate`.
    `tensor` splits heads, FFN and vocabulary, and the tokens between them (sequence parallel, arXiv 2205.05198);
    `pipeline` cuts the layers into stages run one forward, one backward (arXiv 2104.04473); `context` cuts sequences.
    """

    shard: int = 1
    replicate: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    microbatch_sequences: int = 1
    """Sequences of one pass, before the context axis cuts them."""
    checkpointing: Recomputed = "none"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("shard", "replicate", "tensor", "pipeline", "context", "microbatch_sequences")
        checks.one_of("checkpointing", ("none", "selective", "full"))
        checks.done()

    @property
    def data(self) -> int:
        """Ranks that see different sequences."""
        return self.shard * self.replicate

    @property
    def num_ranks(self) -> int:
        """Ranks of the run."""
        return self.data * self.tensor * self.pipeline * self.context

    def num_microbatches(self, shape: Shape, batch_tokens: int) -> int:
        """Passes of a rank in one step; 0 where the batch does not divide."""
        passes, rest = divmod(batch_tokens, shape.seq_len * self.data * self.microbatch_sequences)
        return 0 if rest else passes

    def problems(self, shape: Shape, batch_tokens: int) -> list[str]:
        """Everything that does not divide: heads, FFN, vocabulary, layers, sequences, the batch."""
        tp, wanted = self.tensor, self.shard * self.replicate * self.microbatch_sequences
        divisions = {
            f"tensor = {tp} does not divide num_kv_heads = {shape.num_kv_heads}": shape.num_kv_heads % tp,
            f"tensor = {tp} does not divide ffn_width = {shape.ffn_width}": shape.ffn_width % tp,
            f"tensor = {tp} does not divide vocab_size = {shape.vocab_size}": shape.vocab_size % tp,
            f"pipeline = {self.pipeline} does not divide num_layers = {shape.num_layers}": (
                shape.num_layers % self.pipeline
            ),
            # Each rank takes one piece from either end of a sequence, so that causal work is even (arXiv 2407.21783).
            f"context = {self.context} * tensor = {tp} does not cut seq_len = {shape.seq_len} evenly": (
                shape.seq_len % (2 * self.context * tp if self.context > 1 else tp)
            ),
            f"batch_tokens = {batch_tokens}: no whole sequences of {shape.seq_len} for {self.data} data-parallel ranks "
            f"by {self.microbatch_sequences}": batch_tokens % (shape.seq_len * wanted),
        }
        found = [said for said, rest in divisions.items() if rest]
        passes = self.num_microbatches(shape, batch_tokens)
        if self.pipeline > 1 and not found and passes < self.pipeline:
            found.append(
                f"pipeline = {self.pipeline}: a step has {passes} micro-batches; at least as many as stages are wanted"
            )
        if self.pipeline > 1 and shape.tied:
            found.append(f"pipeline = {self.pipeline}: embedding and readout are one matrix, on different stages")
        return found


def layout_of(decision: Decision) -> Layout:
    """The layout that a decision has frozen."""
    return _layout(decision.parallelism, decision.batch_tokens // decision.shape.seq_len)


def planned_layout(launch: LaunchSection, batch_sequences: int) -> Layout:
    """The layout that a plan's `[launch]` would freeze, of a main run with batches of so many sequences."""
    return _layout(launch, batch_sequences)


def _layout(degrees: Parallelism | LaunchSection, batch_sequences: int) -> Layout:
    shard, replicate = degrees.data_parallel_shard, degrees.data_parallel_replicate
    return Layout(
        shard=shard,
        replicate=replicate,
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        context=degrees.context,
        # A share of no sequence is left to `problems` to tell of.
        microbatch_sequences=degrees.microbatch_sequences or max(1, batch_sequences // (shard * replicate)),
        checkpointing=degrees.activation_checkpointing,
    )
