"""The verb that counts parameters and FLOPs of a shape."""

from __future__ import annotations

from typing import get_args

import click

from launcher.verbs.options import answer, json_option, table
from proxies.canon import Json
from proxies.flops import CONVENTIONS
from proxies.shape import Family, Shape


@click.command()
@click.option("--layers", type=int, required=True, help="Transformer blocks.")
@click.option("--width", type=int, required=True, help="Model width, d_model.")
@click.option("--heads", type=int, required=True, help="Query heads of a block.")
@click.option("--kv-heads", type=int, help="Default: as many as heads.")
@click.option("--ffn", type=int, required=True, help="Feed-forward width.")
@click.option("--vocab", type=int, required=True, help="Vocabulary size.")
@click.option("--seq-len", type=int, required=True, help="Tokens per sequence.")
@click.option("--tokens", type=float, default=0, help="Tokens trained on, for the totals.")
@click.option("--family", type=click.Choice(get_args(Family)), default="llama", show_default=True,
              help="llama: RMSNorm, SwiGLU, rotary positions; gpt2: LayerNorm, GELU, positions, biases.")  # fmt: skip
@click.option("--tied", is_flag=True, help="Embedding and readout share one matrix.")
@click.option("--qk-norm", is_flag=True, help="RMSNorm over each head's queries and keys.")
@click.option("--convention", type=click.Choice(CONVENTIONS), default="causal", show_default=True,
              help="How FLOPs are counted.")  # fmt: skip
@json_option
def flops(
    layers: int, width: int, heads: int, kv_heads: int | None, ffn: int, vocab: int, seq_len: int, tokens: float,
    family: Family, tied: bool, qk_norm: bool, convention: str, as_json: bool,
) -> None:  # fmt: skip
    """Parameters and training FLOPs of a decoder's shape, by named convention."""
    from proxies import flops as count

    shape = Shape(
        num_layers=layers, width=width, num_heads=heads, num_kv_heads=heads if kv_heads is None else kv_heads,
        ffn_width=ffn, vocab_size=vocab, seq_len=seq_len, family=family, tied=tied, qk_norm=qk_norm,
    )  # fmt: skip
    if not 0 <= tokens < float("inf"):
        raise click.BadParameter(f"--tokens {tokens}: a finite number >= 0 is wanted")
    params = count.count_params(shape)
    per_token = count.flops_per_token(shape, convention)  # type: ignore[arg-type]
    body: dict[str, Json] = {
        "params": params.total,
        "params_non_embedding": params.non_embedding,
        "params_active": params.total,
        "flops_per_token": per_token,
        "flops_total": float(per_token) * tokens,
        "six_nd": count.six_nd(params.total, tokens),
        "convention": convention,
    }
    rows = [(name, f"{value:.6g}" if isinstance(value, float) else str(value)) for name, value in body.items()]
    answer(as_json, body, table(("", "value"), rows))
