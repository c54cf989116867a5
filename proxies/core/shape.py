"""A decoder transformer's shape, and how it grows. Standard library only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from proxies.core.checks import Checks
from proxies.core.notation import counted

Family = Literal["llama", "gpt2"]
# names of parameters are counted out layer by layer; a number beyond is a slip of the hand
MAX_LAYERS = 10_000
MAX_SIZE = 2**31  # of a matrix's side: the number of its elements is one that torch can hold


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A decoder transformer's shape.

    `llama`: RMSNorm, SwiGLU, rotary positions, no biases. `gpt2`: LayerNorm, GELU, learned
    positions, biases.
    """

    num_layers: int
    width: int
    """Residual stream, d_model."""
    num_heads: int
    num_kv_heads: int
    ffn_width: int
    vocab_size: int
    seq_len: int
    """Tokens per training sequence."""
    family: Family = "llama"
    tied: bool = False
    """Embedding and readout share one matrix."""
    qk_norm: bool = False
    """RMSNorm over each head's queries and keys, before the positions (as Qwen 3 and OLMo 2)."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("num_layers", "width", "num_heads", "num_kv_heads", "ffn_width", "seq_len")
        checks.whole("vocab_size", least=2)
        checks.one_of("family", ("llama", "gpt2"))
        for name in ("tied", "qk_norm"):
            value = getattr(self, name)
            checks.that(type(value) is bool, f"{name} = {value!r}: must be true or false")
        if checks.fine:
            deepest = f"num_layers = {self.num_layers}: must be at most {MAX_LAYERS}"
            checks.that(self.num_layers <= MAX_LAYERS, deepest)
            for name in ("width", "ffn_width", "vocab_size", "seq_len"):
                size = getattr(self, name)
                checks.that(size <= MAX_SIZE, f"{name} = {size}: must be at most {MAX_SIZE}")
            heads, kv_heads = self.num_heads, self.num_kv_heads
            checks.that(
                self.width % heads == 0, f"num_heads = {heads} does not divide width = {self.width}"
            )
            checks.that(
                heads % kv_heads == 0,
                f"num_kv_heads = {kv_heads} does not divide num_heads = {heads}",
            )
        if checks.fine and self.family == "llama":
            odd = (
                f"head_dim = {self.head_dim} is odd: must be even, because rotary positions "
                "rotate pairs"
            )
            checks.that(self.head_dim % 2 == 0, odd)
        checks.done()

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.width // self.num_heads

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    def at_width(self, width: int) -> Shape:
        """This shape at another width: same depth, head dim, GQA ratio and FFN ratio.

        Raises:
            SpecError: the width does not hold whole heads, or the FFN would not be a whole number.
        """
        checks = Checks(self)
        whole = width > 0 and width % self.head_dim == 0
        checks.that(whole, f"width = {width} is not a multiple of the head dim {self.head_dim}")
        checks.that(
            self.ffn_width * width % self.width == 0,
            f"width = {width} gives the FFN width {self.ffn_width * width / self.width:g}: "
            "choose a ratio that stays whole",
        )
        checks.done()
        num_heads, ratio = width // self.head_dim, self.num_heads // self.num_kv_heads
        uneven = (
            f"width = {width} has {counted(num_heads, 'head')}, not a multiple of {ratio} per "
            "kv head"
        )
        checks.that(num_heads % ratio == 0, uneven)
        checks.done()
        return dataclasses.replace(
            self,
            width=width,
            num_heads=num_heads,
            num_kv_heads=num_heads // ratio,
            ffn_width=self.ffn_width * width // self.width,
        )

    def at_depth(self, num_layers: int) -> Shape:
        """This shape with another number of layers."""
        return dataclasses.replace(self, num_layers=num_layers)


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and dimensions, as `proxies.model.decoder.Decoder` has them and in its
    order (tested).
    """
    llama, width = shape.family == "llama", shape.width

    def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (rows, columns)} | ({} if llama else {f"{name}.bias": (rows,)})

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        gain: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,)}
        return gain if llama else gain | {f"{name}.bias": (width,)}

    block = norm("attention_norm")
    for name, rows in (
        ("wq", width),
        ("wk", shape.kv_width),
        ("wv", shape.kv_width),
        ("wo", width),
    ):
        block |= linear(f"attention.{name}", rows, width)
    if shape.qk_norm:
        block |= {f"attention.{name}_norm.weight": (shape.head_dim,) for name in "qk"}
    block |= norm("ffn_norm")
    block |= linear("feed_forward.w1", shape.ffn_width, width) | linear(
        "feed_forward.w2", width, shape.ffn_width
    )
    if llama:
        block |= linear("feed_forward.w3", shape.ffn_width, width)
    table = (shape.vocab_size, width)
    return {
        "tok_embeddings.weight": table,
        **({} if llama else {"pos_embeddings.weight": (shape.seq_len, width)}),
        **{
            f"layers.{layer}.{name}": size
            for layer in range(shape.num_layers)
            for name, size in block.items()
        },
        **norm("norm"),
        **({} if shape.tied else {"lm_head.weight": table}),
    }
