"""What a parametrization comes down to: plain numbers per parameter, and forward multipliers.
Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "embedding",
    "hidden",
    "readout",
    "block_gain",
    "block_bias",
    "qk_gain",
    "final_gain",
    "final_bias",
]
"""What a parameter is. `embedding`: token and position tables (one infinite dimension, the output).
`hidden`: matrices between infinite dimensions. Gains start at one, biases at zero; `block_` inside
the residual blocks, `qk_gain` those of the norm over a head's queries and keys, `final_` outside
the blocks."""
KINDS: tuple[Kind, ...] = get_args(Kind)


def kind_of(name: str) -> Kind:
    """What a parameter is, by its name in `proxies.model.decoder.Decoder`."""
    if name.startswith(("tok_embeddings", "pos_embeddings")):
        return "embedding"
    if name.startswith("lm_head"):
        return "readout"
    if "q_norm" in name or "k_norm" in name:
        return "qk_gain"
    if not name.startswith("layers"):
        return "final_bias" if name.endswith("bias") else "final_gain"
    if name.endswith("bias"):
        return "block_bias"
    return "block_gain" if "norm" in name else "hidden"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """An optimizer and its settings for some parameters. Values are absolute: nothing is left to
    multiply.
    """

    optimizer: str
    """Name of the optimizer (`proxies.core.optimizers.OPTIMIZERS`)."""
    settings: dict[str, float]
    """All settings that this optimizer has, by name, and no others."""

    @property
    def learning_rate(self) -> float:
        """Learning rate at the schedule's peak."""
        return self.settings["learning_rate"]

    @property
    def weight_decay(self) -> float:
        """Decoupled weight decay: a step multiplies a weight by 1 - lr * weight_decay."""
        return self.settings["weight_decay"]

    @property
    def decay_share(self) -> float:
        """Share of a weight that a step removes at the schedule's peak."""
        return self.learning_rate * self.weight_decay


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterNumbers(GroupSettings):
    """What one parameter is trained with."""

    name: str
    size: tuple[int, ...]
    kind: Kind
    width_multiplier: float
    """Against the base shape, from mup's infinite dimensions."""
    init_std: float
    """Normal(0, init_std); 0 for gains, which start at one, and biases, which start at zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardNumbers:
    """The forward multipliers of a model."""

    embedding: float
    """Of the embeddings' output (tokens and positions together)."""
    attention: float
    """Of q . k."""
    residual: float
    """Of each branch (attention, feed-forward) before it joins the residual stream."""
    output: float
    """Of the readout's input."""
