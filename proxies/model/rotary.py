"""Rotary position embedding (arXiv 2104.09864), with the halves of a head paired as in Llama.

Shape suffixes: B sequences, T tokens of a sequence, H heads, E head dim.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from forerun._proxies.model.precision import widen

ROPE_BASE = 10_000.0  # arXiv 2104.09864


@lru_cache(maxsize=8)
def _compute_tables(
    seq_len: int, num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return cosines and signed sines, [2, T, H, E].

    The tables are cached here and are not buffers of the model, because `to_empty` would leave a
    buffer uninitialized.
    """
    # The cache outlives inference mode, and tensors made in it cannot enter a backward pass
    with torch.inference_mode(False):
        make_range = partial(torch.arange, device=device, dtype=torch.float64)
        frequencies_E = ROPE_BASE ** (-make_range(0, head_dim, 2) / head_dim)
        angles_TE = make_range(seq_len)[:, None] * frequencies_E
        cos_TE, sin_TE = angles_TE.cos().to(dtype), angles_TE.sin().to(dtype)
        cosines_TE = torch.cat((cos_TE, cos_TE), dim=-1)
        signed_sines_TE = torch.cat((-sin_TE, sin_TE), dim=-1)
        tables_2TE = torch.stack((cosines_TE, signed_sines_TE))
        return tables_2TE[:, :, None].repeat(1, 1, num_heads, 1)


def _get_constant_tables(
    seq_len: int, num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return the tables; in a compiled model they are a constant of the graph."""
    return _compute_tables(seq_len, num_heads, head_dim, device, dtype)


# The mark of `torch.compiler.assume_constant_result`, set by hand because importing the compiler
# would take two seconds of every command that uses torch.
_get_constant_tables._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rotate(x_BTHE: Tensor, seq_len: int, num_heads: int, head_dim: int) -> Tensor:
    """Rotate queries or keys by their positions, [B, T, H, E] to the same, in float32 at least.

    The halves are swapped by a roll of whole rows: on a CPU, half rows of a few floats take ten
    times as long. The CPU also gets tables for every head, because a loop over the few floats of
    one head takes twice as long.

    Args:
        x_BTHE: Queries or keys.
        seq_len: Length of the sequences. It and the following sizes are arguments rather than read
            from x: torch 2.11 would not treat them as constants in a model that is compiled for
            batches of any size.
        num_heads: Number of query heads, also for keys, so that a model has one pair of tables.
        head_dim: Width of a head.
    """
    x_BTHE = widen(x_BTHE)
    table_heads = num_heads if x_BTHE.device.type == "cpu" else 1
    tables_2THE = _get_constant_tables(seq_len, table_heads, head_dim, x_BTHE.device, x_BTHE.dtype)
    cos_THE, sin_THE = tables_2THE[:, :, : x_BTHE.shape[2]].unbind()
    return torch.addcmul(x_BTHE * cos_THE, x_BTHE.roll(head_dim // 2, -1), sin_THE)
