"""Rotary position embedding (arXiv 2104.09864), halves paired as in Llama's code."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

ROPE_BASE = 10_000.0  # arXiv 2104.09864


@lru_cache(maxsize=8)
def _rotary_tables(seq_len: int, num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cosines and signed sines, [2, T, H, E]: no buffer, which `to_empty` would leave unset."""
    with torch.inference_mode(False):  # the cache outlives the mode, and its tensors could not enter a backward pass
        frequencies_E = ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
        angles_TE = torch.arange(seq_len, device=device, dtype=torch.float64)[:, None] * frequencies_E
        cos_TE, sin_TE = angles_TE.cos().to(dtype), angles_TE.sin().to(dtype)
        tables_TE = torch.stack((torch.cat((cos_TE, cos_TE), dim=-1), torch.cat((-sin_TE, sin_TE), dim=-1)))
        return tables_TE[:, :, None].repeat(1, 1, num_heads, 1)


def _constant_tables(seq_len: int, num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Compiled, the tables are a constant of the graph: no float64 cosines at every step.
    return _rotary_tables(seq_len, num_heads, head_dim, device, dtype)


# As `torch.compiler.assume_constant_result` marks it, which loads the compiler: two seconds of every verb with torch.
_constant_tables._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rotate(x_BTHE: Tensor, most_heads: int | None = None) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves paired: [B, T, H, E] to the same, in float32 at least.

    Whole rows at a time, halves swapped by a roll: half rows of a few floats cost a CPU ten times as much. And on a CPU
    the tables are written out for every head, `most_heads` where keys have fewer than queries, so that a model has one
    pair of them: a loop over one head's few floats costs it twice as much.
    """
    x_BTHE = x_BTHE.to(torch.promote_types(x_BTHE.dtype, torch.float32))
    _, seq_len, num_heads, head_dim = x_BTHE.shape
    table_heads = (most_heads or num_heads) if x_BTHE.device.type == "cpu" else 1
    tables_2THE = _constant_tables(seq_len, table_heads, head_dim, x_BTHE.device, x_BTHE.dtype)
    cos_THE, sin_THE = tables_2THE[:, :, :num_heads].unbind()
    return torch.addcmul(x_BTHE * cos_THE, x_BTHE.roll(head_dim // 2, -1), sin_THE)
