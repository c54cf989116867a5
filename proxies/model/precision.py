"""The meaning of a run's `dtype`: one definition for proxies and for the main run.

- Weights, sums of gradients, and the optimizer use the dtype `weights`, float32 under "bfloat16".
- A model computes in the dtype `compute`: every weight is cast to it before use (gains, biases, and
  token tables too), and activations, the residual stream, and logits have it. So the gradient of a
  weight has it as well, before it is added to those in `weights`.
- Statistics of norms, rotary positions, the softmax, and the loss use float32 at least (`widen`).

On one device this equals, to the bit, FSDP2's `MixedPrecisionPolicy(param_dtype=compute,
reduce_dtype=weights)` of the same model. The only exception is a matrix that is both token table
and readout: its two gradients are added in `weights` here, and in `compute` there. It differs from
torch.autocast, which leaves the residual stream in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from forerun._proxies.core.spec import Dtype


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a run."""

    weights: torch.dtype
    """Dtype of weights, sums of gradients, and the optimizer."""
    compute: torch.dtype
    """Dtype of the model's computation."""


PRECISIONS: Mapping[Dtype, Precision] = MappingProxyType(
    {
        "float32": Precision(torch.float32, torch.float32),
        "float64": Precision(torch.float64, torch.float64),
        "bfloat16": Precision(torch.float32, torch.bfloat16),
    }
)


def widen(x: Tensor) -> Tensor:
    """Return a tensor in float32 if it has fewer bits."""
    return x.to(get_wide_dtype(x))


def get_wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums and statistics of a tensor are computed: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)
