"""Shapes of decoder transformers, and the names and sizes of their parameters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from forerun._proxies.core.checks import Checks
from forerun._proxies.core.notation import format_counted

Family = Literal["llama", "gpt2"]
MAX_LAYERS = 10_000
"""Maximum number of layers. A larger number is a typing error, and slow to check: the parameters of
every layer are listed by name."""
MAX_SIZE = 2**31
"""Maximum size of a matrix dimension. A matrix of this size in both dimensions has 2^62 elements,
which torch can still count in 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The shape of a decoder transformer.

    `llama`: RMSNorm, SwiGLU, rotary positions, no biases. `gpt2`: LayerNorm, GELU, learned
    positions, biases.
    """

    num_layers: int
    width: int
    """Width of the residual stream, d_model."""
    num_heads: int
    num_kv_heads: int
    ffn_width: int
    vocab_size: int
    seq_len: int
    """Tokens per training sequence."""
    family: Family = "llama"
    tied: bool = False
    """Whether embedding and readout share one matrix."""
    qk_norm: bool = False
    """Whether queries and keys of each head pass an RMSNorm before the positions (as in Qwen 3 and
    OLMo 2)."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole(
            "num_layers", "width", "num_heads", "num_kv_heads", "ffn_width", "seq_len"
        )
        checks.require_whole("vocab_size", least=2)
        checks.require_one_of("family", get_args(Family))
        for name in ("tied", "qk_norm"):
            value = getattr(self, name)
            checks.require(type(value) is bool, f"{name} = {value!r}: must be true or false")
        if checks.has_no_problem:
            self._check_sizes(checks)
        if checks.has_no_problem and self.family == "llama":
            checks.require(
                self.head_dim % 2 == 0,
                f"head_dim = {self.head_dim} is odd: must be even, because rotary positions "
                "rotate pairs",
            )
        checks.raise_problems()

    def _check_sizes(self, checks: Checks) -> None:
        limits = {
            "num_layers": MAX_LAYERS,
            **dict.fromkeys(("width", "ffn_width", "vocab_size", "seq_len"), MAX_SIZE),
        }
        for name, limit in limits.items():
            size = getattr(self, name)
            checks.require(size <= limit, f"{name} = {size}: must be at most {limit}")
        heads, kv_heads = self.num_heads, self.num_kv_heads
        checks.require(
            self.width % heads == 0, f"num_heads = {heads} does not divide width = {self.width}"
        )
        checks.require(
            heads % kv_heads == 0, f"num_kv_heads = {kv_heads} does not divide num_heads = {heads}"
        )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.width // self.num_heads

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, which is also that of all value heads."""
        return self.num_kv_heads * self.head_dim

    def at_width(self, width: int) -> Shape:
        """Return this shape at another width, with the same depth, head dim, GQA and FFN ratios.

        Raises:
            SpecError: The width is not a multiple of the head dim, or the number of key/value heads
                or the FFN width would not be a whole number.
        """
        checks = Checks(self)
        checks.require(
            width > 0 and width % self.head_dim == 0,
            f"width = {width} is not a multiple of the head dim {self.head_dim}",
        )
        checks.require(
            self.ffn_width * width % self.width == 0,
            f"width = {width} gives the FFN width {self.ffn_width * width / self.width:g}: "
            "choose a ratio that stays whole",
        )
        checks.raise_problems()
        num_heads, heads_per_kv_head = width // self.head_dim, self.num_heads // self.num_kv_heads
        checks.require(
            num_heads % heads_per_kv_head == 0,
            f"width = {width} has {format_counted(num_heads, 'head')}, not a multiple of "
            f"{heads_per_kv_head} per kv head",
        )
        checks.raise_problems()
        return dataclasses.replace(
            self,
            width=width,
            num_heads=num_heads,
            num_kv_heads=num_heads // heads_per_kv_head,
            ffn_width=self.ffn_width * width // self.width,
        )

    def at_depth(self, num_layers: int) -> Shape:
        """Return this shape with another number of layers."""
        return dataclasses.replace(self, num_layers=num_layers)


def list_parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the size of every parameter of `forerun._proxies.model.decoder.Decoder`, in the
    model's order.

    A test compares them with the model.
    """
    width, is_llama = shape.width, shape.family == "llama"

    def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        bias: dict[str, tuple[int, ...]] = {} if is_llama else {f"{name}.bias": (rows,)}
        return {f"{name}.weight": (rows, columns), **bias}

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        gain: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,)}
        return gain if is_llama else {**gain, f"{name}.bias": (width,)}

    # One block
    block = {
        **norm("attention_norm"),
        **linear("attention.wq", width, width),
        **linear("attention.wk", shape.kv_width, width),
        **linear("attention.wv", shape.kv_width, width),
        **linear("attention.wo", width, width),
    }
    if shape.qk_norm:
        block |= {f"attention.{name}_norm.weight": (shape.head_dim,) for name in "qk"}
    block |= norm("ffn_norm")
    block |= linear("feed_forward.w1", shape.ffn_width, width)
    block |= linear("feed_forward.w2", width, shape.ffn_width)
    if is_llama:
        block |= linear("feed_forward.w3", shape.ffn_width, width)

    # The model
    sizes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (shape.vocab_size, width)}
    if not is_llama:
        sizes["pos_embeddings.weight"] = (shape.seq_len, width)
    for layer in range(shape.num_layers):
        sizes |= {f"layers.{layer}.{name}": size for name, size in block.items()}
    sizes |= norm("norm")
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab_size, width)
    return sizes
