"""The registry of optimizers: what each needs to know of a parameter, and its state. Standard
library only.

`proxies.model` has their rules; groups in a frozen config, proofs and explanations read the names
from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from proxies.core import canon

OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupNumbers:
    """An optimizer's settings for parameters that share them all. Absolute numbers: nothing is left
    to multiply.
    """

    learning_rate: float
    """At the schedule's peak."""
    weight_decay: float
    """A step multiplies the weight by 1 - lr * weight_decay."""
    eps: float
    """AdamW's, added to the root of the second moment; Muon's least norm of what it makes
    orthogonal."""
    beta1: float
    """Of AdamW's first moment; 0 under Muon."""
    beta2: float
    """Of AdamW's second moment; 0 under Muon."""
    momentum: float = field(default=0.0, metadata=canon.UNLESS_DEFAULT)
    """Of Muon's moving average of gradients, which is above 0; 0: AdamW steps these parameters."""

    @property
    def by_muon(self) -> bool:
        """Whether Muon steps these parameters; if not, AdamW does."""
        return self.momentum > 0

    @property
    def decay_share(self) -> float:
        """The share of a weight that a step takes at the schedule's peak."""
        return self.learning_rate * self.weight_decay


GROUP_NUMBERS: tuple[str, ...] = tuple(one.name for one in dataclasses.fields(GroupNumbers))


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """One optimizer, as everything but its rule knows it."""

    name: OptimizerName
    label: str
    source: str
    num_moments: int
    """Numbers of a weight's own size that it keeps, of the matrices of a model's blocks."""
    rates_by_shape: bool = False
    """Whether the rate of a hidden matrix follows its shape, by a rule of its own
    (`proxies.core.muon.MuonRate`)."""


OPTIMIZERS: Mapping[OptimizerName, Optimizer] = MappingProxyType(
    {
        "adamw": Optimizer(name="adamw", label="AdamW", source="arXiv 1711.05101", num_moments=2),
        "muon": Optimizer(
            name="muon",
            label="Muon, and AdamW for all but hidden matrices",
            num_moments=1,
            rates_by_shape=True,
            source="Jordan 2024, kellerjordan.github.io/posts/muon; torch.optim.Muon",
        ),
    }
)
DEFAULT: OptimizerName = "adamw"
