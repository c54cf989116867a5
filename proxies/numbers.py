"""What a parametrization comes down to: plain numbers per parameter, and forward multipliers. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["embedding", "hidden", "readout", "norm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterNumbers:
    """What one parameter is trained with. Absolute numbers: nothing is left to multiply."""

    name: str
    size: tuple[int, ...]
    kind: Kind
    width_multiplier: float
    """Against the base shape, from mup's infinite dimensions."""
    init_std: float
    """0 for norm gains, which start at 1."""
    learning_rate: float
    """At the schedule's peak."""
    weight_decay: float
    """AdamW's: a step multiplies the weight by 1 - lr * weight_decay."""
    eps: float
    beta1: float
    beta2: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardNumbers:
    """The three forward multipliers of a model."""

    embedding: float
    """Of the token embedding's output."""
    attention: float
    """Of q . k."""
    output: float
    """Of the readout's input."""
