"""Weights and moments as a checkpoint on disk has them, and how far two checkpoints are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """Two checkpoints."""

    num_tensors: int
    num_differing: int
    """That are not the same bit by bit."""
    weights_share: float
    """Norm of the difference of all weights over the norm of the weights; infinite where not the same tensors are
    there, or one is not finite."""

    @property
    def bitwise(self) -> bool:
        """Whether they are the same."""
        return self.num_tensors > 0 and self.num_differing == 0

    @property
    def told(self) -> str:
        """In words."""
        if not self.num_tensors:
            return "there is no checkpoint to compare"
        if self.bitwise:
            return f"all {self.num_tensors} tensors of weights and moments bitwise equal"
        return (
            f"{self.num_differing} of {self.num_tensors} tensors differ, weights by {self.weights_share:.2g} of their "
            "norm"
        )


NOTHING = Apart(num_tensors=0, num_differing=0, weights_share=math.inf)
"""One of them is not there."""


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> Apart:
    """How far two checkpoints' tensors are apart."""
    names = sorted(set(one) | set(other))
    shared = [name for name in names if name in one and name in other and one[name].shape == other[name].shape]
    differing = len(names) - sum(torch.equal(one[name], other[name]) for name in shared)
    weights = [name for name in shared if name.startswith("model.")]
    share = math.inf
    if len(shared) == len(names) and weights:
        gap = sum(float((one[n].double() - other[n].double()).square().sum()) for n in weights)
        size = sum(float(one[n].double().square().sum()) for n in weights)
        share = math.sqrt(gap / size) if math.isfinite(gap) and size > 0 else math.inf
    return Apart(num_tensors=len(names), num_differing=differing, weights_share=share)
