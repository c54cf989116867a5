"""What a run's `dtype` means: one definition, for proxies and for the main run.

- Weights, gradients' sums and the optimizer are in `weights`, float32 under "bfloat16".
- A model computes in `compute`: each weight is cast to it before it is used (gains, biases and
  token tables too), and activations, the residual stream and logits are in it. So the gradient of a
  weight is in it as well, before it is added to those in `weights`.
- Statistics of norms, rotary positions, the softmax and the loss are in float32 at least
  (`widened`).

That is what FSDP2's `MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=weights)` makes of the
same model, to the bit on one device, but for a matrix that is token table and readout at once: its
two gradients are added in `weights` here and in `compute` there. It is not torch.autocast, which
leaves the residual stream in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from proxies.core.spec import Dtype


@dataclass(frozen=True, slots=True)
class Precision:
    """What weights are kept in, and what a model computes in."""

    weights: torch.dtype
    compute: torch.dtype


PRECISIONS: Mapping[Dtype, Precision] = MappingProxyType(
    {
        "float32": Precision(torch.float32, torch.float32),
        "float64": Precision(torch.float64, torch.float64),
        "bfloat16": Precision(torch.float32, torch.bfloat16),
    }
)


def widened(x: Tensor) -> Tensor:
    """In float32 where it has fewer bits."""
    return x.to(wide_of(x))


def wide_of(x: Tensor) -> torch.dtype:
    """The dtype that sums and statistics of `x` are computed in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)
