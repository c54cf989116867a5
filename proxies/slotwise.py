"""Element-wise functions of all slots at once that give every slot the same bits, whichever slot it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_VECTOR = 64
"""Elements: torch's loops on a CPU take two vectors at a time, at most so many (of bfloat16 under AVX-512)."""
_GRAIN = 32768
"""Elements of a thread's share, at least (at::internal::GRAIN_SIZE)."""


def slotwise(function: Callable[[Tensor], Tensor], x_KNF: Tensor) -> Tensor:
    """`function` of every element, [K, N, F] to the same; without K as it stands.

    What is left of a thread's share beyond whole vectors, torch computes on a CPU by scalar code, whose exponential may
    round otherwise. Where a share ends amid vectors, slots are done one after the other: then each has the same ends.
    """
    if x_KNF.dim() < 3 or x_KNF.device.type != "cpu" or torch.compiler.is_compiling():
        return function(x_KNF)  # compiled code masks its last vector
    num_shares = max(1, min(torch.get_num_threads(), -(-x_KNF.numel() // _GRAIN)))
    if x_KNF.numel() % (_VECTOR * num_shares) == 0:
        return function(x_KNF)
    return torch.stack([function(x_NF) for x_NF in x_KNF])
