"""Layers of the decoder: linear maps, embeddings, and norms, with or without a trial axis.

Shape suffixes: K trials, N = B * T tokens (B sequences of T), D width, F output features, V
vocabulary. For one model, no tensor has the K axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun._proxies.model.precision import widen

NORM_EPS = 1e-5

# ---- Operations ----


class _BatchedProduct(torch.autograd.Function):
    """`x W^T` of each trial, with the gradient of W in the layout of W.

    For a batched product torch computes this gradient transposed, and then copies it.
    """

    @staticmethod
    def forward(ctx: Any, x_KND: Tensor, weight_KFD: Tensor) -> Tensor:
        ctx.save_for_backward(x_KND, weight_KFD)
        return x_KND @ weight_KFD.mT

    @staticmethod
    def backward(ctx: Any, d_out_KNF: Tensor) -> tuple[Tensor, Tensor]:
        x_KND, weight_KFD = ctx.saved_tensors
        return d_out_KNF @ weight_KFD, d_out_KNF.mT @ x_KND


def linear(x_KND: Tensor, weight_KFD: Tensor) -> Tensor:
    """Return `x W^T` per trial: [K, N, D] and [K, F, D] to [K, N, F], or the same without K."""
    cast_KFD = weight_KFD.to(x_KND.dtype)
    if x_KND.dim() == 3 and torch.compiler.is_compiling():
        out_KNF: Tensor = _BatchedProduct.apply(x_KND, cast_KFD)  # type: ignore[no-untyped-call]
        return out_KNF
    return x_KND @ cast_KFD.mT


def scale(x_KND: Tensor, factor: float | Tensor) -> Tensor:
    """Return `x * factor` in the dtype of x, which a tensor of factors would widen."""
    return (x_KND * factor).to(x_KND.dtype)


def add_branch(x_KND: Tensor, branch_KND: Tensor, factor: float | Tensor) -> Tensor:
    """Return `x + factor * branch`, computed in one pass over the memory."""
    if isinstance(factor, Tensor):
        return torch.addcmul(x_KND, branch_KND, factor).to(x_KND.dtype)
    # When compiling, torch 2.13 merges `torch.add` with the matrix product before it, and wrongly
    # drops `alpha`
    if torch.compiler.is_compiling():
        return x_KND + branch_KND * factor
    return torch.add(x_KND, branch_KND, alpha=factor)


MAX_VECTOR_ELEMENTS = 64
"""Maximum number of elements that torch's CPU loops take at once: two vectors (of bfloat16 under
AVX-512)."""
MIN_THREAD_ELEMENTS = 32768
"""Minimum number of elements of a thread's share (at::internal::GRAIN_SIZE)."""


def apply_slotwise(function: Callable[[Tensor], Tensor], x_KNF: Tensor) -> Tensor:
    """Apply an elementwise function so that no trial's result depends on the other trials.

    On a CPU, torch divides the elements among its threads. Each thread computes whole vectors, and
    then the few elements that remain by scalar code, whose exponential may round differently. Which
    elements remain depends on the number of trials. So if a thread's elements are not a whole
    number of vectors, the function is applied to one trial after the other: then the same elements
    of every trial are computed by scalar code.

    Args:
        function: The elementwise function.
        x_KNF: Its input, [K, N, F]. Without K the function is applied as it is.
    """
    if x_KNF.dim() < 3 or x_KNF.device.type != "cpu" or torch.compiler.is_compiling():
        return function(x_KNF)  # compiled code masks its last vector
    # Number of shares into which torch divides the elements, one for each thread
    max_shares = math.ceil(x_KNF.numel() / MIN_THREAD_ELEMENTS)
    num_shares = max(1, min(torch.get_num_threads(), max_shares))
    if x_KNF.numel() % (MAX_VECTOR_ELEMENTS * num_shares) == 0:
        return function(x_KNF)
    return torch.stack([function(x_NF) for x_NF in x_KNF])


# ---- Modules ----


class Weight(nn.Module):
    """A parameter `weight` and, optionally, a parameter `bias` along its first dimension."""

    def __init__(
        self, *size: int, num_trials: int | None, device: torch.device | None, bias: bool = False
    ) -> None:
        super().__init__()
        leading = () if num_trials is None else (num_trials,)
        # The dtype is explicit, because the user may have set torch's default
        make = partial(torch.empty, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(make(*leading, *size))
        self.bias = nn.Parameter(make(*leading, size[0])) if bias else None

    def add_bias(self, x_KND: Tensor) -> Tensor:
        """Return x plus the bias, if there is one."""
        return x_KND if self.bias is None else x_KND + self.bias.unsqueeze(-2).to(x_KND.dtype)


class Linear(Weight):
    """A linear map with weight [K, out, in] and bias [K, out]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """Map [K, N, in] to [K, N, out]."""
        return self.add_bias(linear(x_KND, self.weight))


def apply_together(x_KND: Tensor, *maps: Linear) -> list[Tensor]:
    """Return the output of each linear map for the same x.

    A model that is compiled in bfloat16 computes them as one product, whose weight is concatenated
    while it is cast. Otherwise each map is called by itself: without a cast (float32, or weights
    that FSDP has cast) the concatenation would be an additional copy that lives until the backward
    pass, and an uncompiled model should call its modules' hooks.
    """
    has_cast = x_KND.dtype == torch.bfloat16 != maps[0].weight.dtype
    if not (has_cast and torch.compiler.is_compiling()):
        return [linear_map(x_KND) for linear_map in maps]
    joined_KFD = torch.cat([linear_map.weight.to(x_KND.dtype) for linear_map in maps], dim=-2)
    sizes = [linear_map.weight.shape[-2] for linear_map in maps]
    parts_KNF = torch.split(linear(x_KND, joined_KFD), sizes, dim=-1)
    return [
        linear_map.add_bias(part_KNF) for linear_map, part_KNF in zip(maps, parts_KNF, strict=True)
    ]


class Embedding(Weight):
    """A token table with weight [K, V, D]."""

    def forward(self, ids_KN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Map token ids [K, N] to [K, N, D] in `dtype`; None for that of the weight."""
        weight_KVD = self.weight.to(dtype or self.weight.dtype)
        if weight_KVD.dim() == 2:
            return functional.embedding(ids_KN, weight_KVD)
        # One look-up in the tables of all trials, one below the other
        num_trials, vocab_size, _ = weight_KVD.shape
        offsets_K1 = torch.arange(num_trials, device=ids_KN.device)[:, None] * vocab_size
        return functional.embedding(ids_KN + offsets_K1, weight_KVD.flatten(0, 1))


class Positions(Weight):
    """Learned positions with weight [K, T, D]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """Add each token's position, [K, B * T, D] to the same."""
        x_KBTD = x_KND.reshape(*x_KND.shape[:-2], -1, *self.weight.shape[-2:])
        return (x_KBTD + self.weight.unsqueeze(-3).to(x_KND.dtype)).flatten(-3, -2)


class RMSNorm(Weight):
    """Root-mean-square norm (arXiv 1910.07467) with gain [K, D]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """Normalize [K, N, D] to the same."""
        normed_KND = functional.rms_norm(widen(x_KND), (x_KND.shape[-1],), eps=NORM_EPS)
        return (normed_KND * self.weight.unsqueeze(-2).to(x_KND.dtype)).to(x_KND.dtype)


class LayerNorm(Weight):
    """Layer norm (arXiv 1607.06450) with gain and bias [K, D]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """Normalize [K, N, D] to the same."""
        normed_KND = functional.layer_norm(widen(x_KND), (x_KND.shape[-1],), eps=NORM_EPS)
        assert self.bias is not None
        gain_K1D = self.weight.unsqueeze(-2).to(x_KND.dtype)
        bias_K1D = self.bias.unsqueeze(-2).to(x_KND.dtype)
        return (normed_KND * gain_K1D + bias_K1D).to(x_KND.dtype)
