"""Kinds of parameters, the numbers that each parameter is trained with, and forward multipliers.

`forerun._proxies.parametrization.parametrization` computes these numbers for a run.
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
"""Kind of a parameter. `embedding`: token and position tables (one infinite dimension, the output).
`hidden`: matrices between infinite dimensions. Gains are initialized to one, biases to zero:
`block_` inside the residual blocks, `qk_gain` in the norms of queries and keys, `final_` outside
the blocks."""
KINDS: tuple[Kind, ...] = get_args(Kind)


def get_kind(name: str) -> Kind:
    """Return the kind of a parameter of `forerun._proxies.model.decoder.Decoder` by its name."""
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
    """An optimizer and its settings for some parameters. Values are absolute, not multipliers."""

    optimizer: str
    """Name of the optimizer (`forerun._proxies.core.optimizers.OPTIMIZERS`)."""
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
    """The optimizer, settings, and initialization of one parameter."""

    name: str
    size: tuple[int, ...]
    kind: Kind
    width_multiplier: float
    """Ratio to the base shape's width, from mup's infinite dimensions."""
    init_std: float
    """Standard deviation of the initial values, Normal(0, init_std); 0 for gains (initialized to
    one) and biases (initialized to zero)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardNumbers:
    """Forward multipliers of a model."""

    embedding: float
    """Multiplier of the sum of token and position embeddings."""
    attention: float
    """Scale of the attention logits q . k."""
    residual: float
    """Multiplier of each branch (attention, feed-forward) before it joins the residual stream."""
    output: float
    """Multiplier of the readout's input."""
