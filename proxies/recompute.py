"""What a block computes again in the backward pass, rather than keep: all of it, or all but its dear parts.

Products of matrices and attention are nearly all of a block's arithmetic, and less than half of the memory that its
insides take: keeping just them saves the rest at hardly any time (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Checkpointing = bool | Literal["selective"]
"""Compute again nothing, all (True), or all but products of matrices and attention."""
_ATEN = torch.ops.aten
_KEPT = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
]


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_KEPT)  # type: ignore[no-untyped-call]


def recomputed(how: Checkpointing, branches: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`branches(*inputs)`, whose insides the backward pass computes again; the gradients are the same bits."""
    out: Tensor
    if how == "selective":
        out = checkpoint(
            branches, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=_keep_products
        )  # fmt: skip
    else:  # no context at all: torch.compile takes no neutral one
        out = checkpoint(branches, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out
