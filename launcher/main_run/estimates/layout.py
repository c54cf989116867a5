"""The layout of a main run over ranks: whether it divides model and batch, and how it cuts a batch.

Weights, gradients, and moments are sharded over the `data_parallel_shard` * `context` ranks
(FSDP2). `tensor` splits heads, FFN, and vocabulary; between these, it splits the tokens (sequence
parallel, arXiv 2205.05198). `pipeline` cuts the layers into stages that run one forward, one
backward (arXiv 2104.04473). `context` cuts sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from forerun._launcher.main_run.frozen.frozen import Parallelism
from forerun._proxies.core.errors import ProblemsError
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.shape import Shape


class LayoutError(ProblemsError):
    """The degrees do not divide the shape or the batch."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("the layout does not divide the run", problems)


def read_parallelism(settings: Mapping[str, Any]) -> Parallelism:
    """Return the layout that a plan's `[launch]` freezes.

    Args:
        settings: Settings of the section by key; keys that are no field of a layout are ignored.
    """
    names = [field.name for field in dataclasses.fields(Parallelism)]
    return Parallelism(**{name: settings[name] for name in names})


def count_microbatches(degrees: Parallelism, shape: Shape, batch_tokens: int) -> tuple[int, int]:
    """Return the number of sequences in one pass, and the number of passes in one step.

    Both are those of one rank. With context parallelism, several ranks share the sequences. The
    number of passes is 0 if the layout does not divide the batch.
    """
    share = batch_tokens // shape.seq_len // degrees.num_data_ranks
    sequences = degrees.microbatch_sequences or max(1, share)
    passes, remainder = divmod(batch_tokens, shape.seq_len * degrees.num_data_ranks * sequences)
    return sequences, 0 if remainder else passes


def find_layout_problems(degrees: Parallelism, shape: Shape, batch_tokens: int) -> list[str]:
    """Return the reasons why the degrees do not fit a model and its batch."""
    tensor, pipeline, context = degrees.tensor, degrees.pipeline, degrees.context
    sequences, passes = count_microbatches(degrees, shape, batch_tokens)
    # With context parallelism, each rank takes one piece from either end of a sequence, so that
    # causal work is even (arXiv 2407.21783).
    num_pieces = 2 * context * tensor if context > 1 else tensor
    problems = [
        f"tensor = {tensor} does not divide {name} = {getattr(shape, name)}"
        for name in ("num_kv_heads", "ffn_width", "vocab_size")
        if getattr(shape, name) % tensor
    ]
    if shape.num_layers % pipeline:
        problems.append(f"pipeline = {pipeline} does not divide num_layers = {shape.num_layers}")
    if shape.seq_len % num_pieces:
        problems.append(
            f"context = {context} * tensor = {tensor} does not cut seq_len = {shape.seq_len} evenly"
        )
    if not passes:
        problems.append(
            f"batch_tokens = {batch_tokens}: must be a multiple of {shape.seq_len} tokens by "
            f"{degrees.num_data_ranks} data-parallel ranks by "
            f"{format_counted(sequences, 'sequence')}"
        )
    if pipeline > 1 and not problems and passes < pipeline:
        problems.append(
            f"pipeline = {pipeline}: a step has {passes} micro-batches, must have at least as many "
            "as stages"
        )
    if pipeline > 1 and shape.tied:
        problems.append(
            f"pipeline = {pipeline}: needs model.tied = false, for embedding and readout are on "
            "different stages"
        )
    return problems
