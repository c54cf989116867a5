"""Tensor parallelism (arXiv 1909.08053): each block's matrices split over the ranks of a mesh axis.

A rank holds some of the heads, of the feed-forward's columns, and of the vocabulary (embedding and readout); gains and
positions are whole on every rank. Parameters become DTensors of their full names and sizes, so that groups, initial
weights, the norm of the gradient and checkpoints are those of the whole model. Between the split maps a rank computes
on plain tensors: a block's two all-reduces, after attention's and the feed-forward's second matrix, make the residual
stream whole, and equal on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from proxies.core.shape import Shape
from proxies.model.decoder import Block, Decoder

COLUMNS, ROWS, WHOLE = Shard(0), Shard(1), Replicate()
"""How a weight [out, in] is split."""


def indivisible(shape: Shape, num_ranks: int) -> list[str]:
    """What of a shape `num_ranks` ranks cannot share evenly."""
    counts = {
        "num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads, "ffn_width": shape.ffn_width,
        "vocab_size": shape.vocab_size,
    }  # fmt: skip
    return [f"tensor = {num_ranks} does not divide {name} = {n}" for name, n in counts.items() if n % num_ranks]


def split(model: Decoder, mesh: DeviceMesh) -> None:
    """Split a model of the meta device over the one axis of `mesh`, in place."""
    shape, num_ranks = model.shape, mesh.size()
    for block in cast(Iterable[Block], model.layers):
        attention, feed_forward = block.attention, block.feed_forward
        attention.shape = dataclasses.replace(
            shape,
            width=shape.width // num_ranks,
            num_heads=shape.num_heads // num_ranks,
            num_kv_heads=shape.num_kv_heads // num_ranks,
        )
        for linear in (attention.wq, attention.wk, attention.wv, feed_forward.w1, feed_forward.w3):
            _lay(linear, mesh, weight=COLUMNS, enters=WHOLE, leaves=Shard(-1))
        for linear in (attention.wo, feed_forward.w2):
            _lay(linear, mesh, weight=ROWS, enters=Shard(-1), leaves=WHOLE)
        for norm in (attention.q_norm, attention.k_norm):  # each rank norms its own heads
            _lay(norm, mesh, weight=WHOLE, enters=Shard(0), leaves=Shard(0))
        for whole in (block.attention_norm, block.ffn_norm):
            _lay(whole, mesh, weight=WHOLE, enters=WHOLE, leaves=WHOLE)
    for module, weight in ((model.tok_embeddings, COLUMNS), (model.pos_embeddings, WHOLE), (model.norm, WHOLE)):
        _lay(module, mesh, weight=weight, enters=WHOLE, leaves=WHOLE)
    if shape.tied:
        model.lm_head.weight = model.tok_embeddings.weight
    _lay(model.lm_head, mesh, weight=COLUMNS, enters=WHOLE, leaves=WHOLE)


def _lay(
    module: nn.Module | None, mesh: DeviceMesh, *, weight: Placement, enters: Placement, leaves: Placement
) -> None:
    """Make a module's parameters DTensors, and its input and output plain tensors that stand for DTensors."""
    if module is None:
        return
    for name, parameter in module.named_parameters():
        placement = weight if name == "weight" or weight == COLUMNS else WHOLE  # a row-split map's bias is whole
        if not isinstance(parameter, DTensor):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))

    def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(DTensor.from_local(x, mesh, [enters], run_check=False) for x in inputs)

    def leave(_: nn.Module, __: Any, output: DTensor) -> Tensor:
        return output.redistribute(placements=[leaves]).to_local()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)
