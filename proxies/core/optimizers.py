"""The registry of optimizers: what each needs to know of a parameter, and its state. Standard library only.

`proxies.model.optimizer` has their rules; groups in a frozen config, proofs and explanations read the names from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

OptimizerName = Literal["adamw"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupNumbers:
    """An optimizer's settings for parameters that share them all. Absolute numbers: nothing is left to multiply."""

    learning_rate: float
    """At the schedule's peak."""
    weight_decay: float
    """AdamW's: a step multiplies the weight by 1 - lr * weight_decay."""
    eps: float
    """Added to the root of the second moment."""
    beta1: float
    """Of the first moment."""
    beta2: float
    """Of the second moment."""

    @property
    def decay_share(self) -> float:
        """The share of a weight that a step takes at the schedule's peak."""
        return self.learning_rate * self.weight_decay


GROUP_NUMBERS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(GroupNumbers))


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """One optimizer, as everything but its rule knows it."""

    name: OptimizerName
    label: str
    source: str
    num_moments: int
    """Numbers of a weight's own size that it keeps."""


OPTIMIZERS: Mapping[OptimizerName, Optimizer] = MappingProxyType(
    {
        "adamw": Optimizer(
            name="adamw", label="AdamW", source="arXiv 1711.05101", num_moments=2
        )
    }
)  # fmt: skip
DEFAULT: OptimizerName = "adamw"
