"""Parameters and FLOPs of a shape, counted exactly, by named convention. Standard library only.

A multiply-add is two FLOPs; a training step costs three forward passes. Conventions (per token),
the same for every family: what is done to single elements (norms, QK-norm, biases, positions,
activations) is counted where it says so.

- `causal`: 6 per matmul parameter (an untied input embedding is a look-up, so not counted) plus
  6 * layers * heads * head_dim * seq: only the lower triangle of the attention (Megatron-LM).
- `full`: the same with the whole square of the attention, 12 * ... (torchtitan).
- `palm`: 6 * all parameters (gains, biases and positions too) plus the whole square (arXiv
  2204.02311, appendix B).
- `chinchilla`: embedding look-up as a matmul, and softmax, counted too (arXiv 2203.15556, appendix
  F; its own models have two feed-forward matrices and no grouped heads, as `gpt2` does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from proxies.core.shape import Shape

Convention = Literal["causal", "full", "palm", "chinchilla"]
CONVENTIONS: tuple[str, ...] = get_args(Convention)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamCount:
    """Parameters of a shape by kind; `total` counts a tied matrix once."""

    embedding: int
    """Tokens, and learned positions."""
    readout: int
    """0 when tied: the matrix is the embedding's."""
    hidden: int
    """Attention and feed-forward matrices."""
    gain: int
    """Of norms, QK-norm included."""
    bias: int
    """Of norms and linear maps."""

    @property
    def total(self) -> int:
        """Every parameter, once."""
        return self.embedding + self.readout + self.non_embedding

    @property
    def non_embedding(self) -> int:
        """All but the input embeddings (tokens, positions) and the readout."""
        return self.hidden + self.gain + self.bias


def count_params(shape: Shape) -> ParamCount:
    """Parameters of `shape`, equal to its module's own tensors."""
    llama = shape.family == "llama"
    attention = 2 * shape.width * (shape.width + shape.kv_width)
    feed_forward = (3 if llama else 2) * shape.width * shape.ffn_width
    table = shape.vocab_size * shape.width
    norms = (2 * shape.num_layers + 1) * shape.width
    # Those of wq, wk, wv, wo, then of w1, w2.
    block_bias = 2 * (shape.width + shape.kv_width) + shape.ffn_width + shape.width
    return ParamCount(
        embedding=table + (0 if llama else shape.seq_len * shape.width),
        readout=0 if shape.tied else table,
        hidden=shape.num_layers * (attention + feed_forward),
        gain=norms + (2 * shape.num_layers * shape.head_dim if shape.qk_norm else 0),
        bias=0 if llama else norms + shape.num_layers * block_bias,
    )


def flops_per_token(shape: Shape, convention: Convention = "causal") -> int:
    """Training FLOPs (forward and backward) per token of a full sequence."""
    params = count_params(shape)
    table = shape.vocab_size * shape.width  # the readout's matmul, tied or not
    square = 12 * shape.num_layers * shape.width * shape.seq_len
    if convention == "causal":
        return 6 * (params.hidden + table) + square // 2
    if convention == "full":
        return 6 * (params.hidden + table) + square
    if convention == "palm":
        return 6 * params.total + square
    if convention == "chinchilla":
        softmax = 3 * shape.num_heads * shape.seq_len
        return 6 * (params.hidden + table + table) + square + 3 * shape.num_layers * softmax
    raise ValueError(f"convention = {convention!r}: must be one of {', '.join(CONVENTIONS)}")


def six_nd(params: float, tokens: float) -> float:
    """The rule of thumb 6 * N * D, as a float: in 64-bit integers it overflows."""
    return 6.0 * params * tokens
