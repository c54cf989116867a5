"""Parameters and training FLOPs of a shape, counted exactly, by named conventions.

A multiply-add is two FLOPs; a training step costs three forward passes. The conventions count, per
token and for both families:

- `causal`: 6 per matmul parameter (an untied input embedding is a look-up, so it is not counted)
  plus 6 * layers * heads * head_dim * seq: only the lower triangle of the attention (Megatron-LM).
- `full`: the same with the full square of the attention, 12 * layers * heads * head_dim * seq
  (torchtitan).
- `palm`: 6 * all parameters (gains, biases, and positions too) plus the full square (arXiv
  2204.02311, appendix B).
- `chinchilla`: also the embedding look-up as a matmul, and the softmax (arXiv 2203.15556, appendix
  F; its own models have two feed-forward matrices and no grouped heads, like `gpt2`).

Operations on single elements (norms, QK-norm, biases, positions, activations) count only where a
convention says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from forerun._proxies.core.shape import Shape

Convention = Literal["causal", "full", "palm", "chinchilla"]
CONVENTIONS: tuple[str, ...] = get_args(Convention)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamCount:
    """Numbers of parameters of a shape by kind."""

    embedding: int
    """Parameters of the token table, and of learned positions."""
    readout: int
    """Parameters of the readout; 0 if it is tied to the embedding."""
    hidden: int
    """Parameters of the attention and feed-forward matrices."""
    gain: int
    """Gains of norms, QK-norm included."""
    bias: int
    """Biases of norms and linear maps."""

    @property
    def total(self) -> int:
        """All parameters; a tied matrix counts once."""
        return self.embedding + self.readout + self.non_embedding

    @property
    def non_embedding(self) -> int:
        """All parameters without the input embeddings (tokens, positions) and the readout."""
        return self.hidden + self.gain + self.bias


def count_params(shape: Shape) -> ParamCount:
    """Count the parameters of a shape; the counts equal those of the model's tensors."""
    is_llama = shape.family == "llama"
    attention = 2 * shape.width * (shape.width + shape.kv_width)  # queries, output; keys, values
    feed_forward = (3 if is_llama else 2) * shape.width * shape.ffn_width
    table = shape.vocab_size * shape.width
    norms = (2 * shape.num_layers + 1) * shape.width
    attention_bias = 2 * (shape.width + shape.kv_width)
    feed_forward_bias = shape.ffn_width + shape.width
    return ParamCount(
        embedding=table + (0 if is_llama else shape.seq_len * shape.width),
        readout=0 if shape.tied else table,
        hidden=shape.num_layers * (attention + feed_forward),
        gain=norms + (2 * shape.num_layers * shape.head_dim if shape.qk_norm else 0),
        bias=0 if is_llama else norms + shape.num_layers * (attention_bias + feed_forward_bias),
    )


def compute_flops_per_token(shape: Shape, convention: Convention = "causal") -> int:
    """Return the training FLOPs (forward and backward) per token of a full sequence.

    Raises:
        ValueError: The convention is unknown.
    """
    params = count_params(shape)
    table = shape.vocab_size * shape.width  # the readout is a matmul, tied or not
    square = 12 * shape.num_layers * shape.width * shape.seq_len
    if convention == "causal":
        return 6 * (params.hidden + table) + square // 2
    if convention == "full":
        return 6 * (params.hidden + table) + square
    if convention == "palm":
        return 6 * params.total + square
    if convention == "chinchilla":
        # Three FLOPs for each logit, and three forward passes for a training step
        softmax = 3 * shape.num_heads * shape.seq_len
        return 6 * (params.hidden + table + table) + square + 3 * shape.num_layers * softmax
    raise ValueError(f"convention = {convention!r}: must be one of {', '.join(CONVENTIONS)}")


def compute_six_nd(params: float, tokens: float) -> float:
    """Return the rule of thumb 6 * N * D, as a float: 64-bit integers would overflow."""
    return 6.0 * params * tokens
