"""The verb that counts parameters and FLOPs of a shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import get_args

import click

from launcher.cli.options import AMOUNT, OptionProblems, answer, json_option, table
from proxies.core.canon import Json
from proxies.core.flops import CONVENTIONS
from proxies.core.shape import Family, Shape

MOST_TOKENS = 1e30
"""Maximum number of training tokens."""


@click.command()
@click.option(
    "--model",
    "model_name",
    help="A published model, e.g. llama-3-8b or gpt-3-175b; instead of a shape.",
)
@click.option("--layers", type=int, help="Transformer blocks.")
@click.option("--width", type=int, help="Model width, d_model.")
@click.option("--heads", type=int, help="Query heads of a block.")
@click.option("--kv-heads", type=int, help="Default: as many as heads.")
@click.option("--ffn", type=int, help="Feed-forward width.")
@click.option("--vocab", type=int, help="Vocabulary size.")
@click.option("--seq-len", type=int, help="Tokens per sequence.")
@click.option(
    "--tokens",
    type=AMOUNT,
    help="Tokens trained on, for the totals. Default: 0, or the model's own.",
)
@click.option(
    "--family",
    type=click.Choice(get_args(Family)),
    help="llama (default): RMSNorm, SwiGLU, rotary positions; "
    "gpt2: LayerNorm, GELU, positions, biases.",
)
@click.option("--tied", is_flag=True, help="Embedding and readout share one matrix.")
@click.option("--qk-norm", is_flag=True, help="RMSNorm over each head's queries and keys.")
@click.option(
    "--convention",
    type=click.Choice(CONVENTIONS),
    default="causal",
    show_default=True,
    help="How FLOPs are counted.",
)
@json_option
def flops(
    model_name: str | None,
    layers: int | None,
    width: int | None,
    heads: int | None,
    kv_heads: int | None,
    ffn: int | None,
    vocab: int | None,
    seq_len: int | None,
    tokens: float | None,
    family: Family | None,
    tied: bool,
    qk_norm: bool,
    convention: str,
    as_json: bool,
) -> None:
    """Count parameters and training FLOPs of a decoder's shape, or of a published model, by named
    convention.
    """
    sizes = {"layers": layers, "width": width, "heads": heads, "ffn": ffn, "vocab": vocab}
    flags = {"family": family, "tied": tied, "qk-norm": qk_norm}
    if problems := _find_problems(model_name, sizes, seq_len, kv_heads, flags, tokens):
        raise OptionProblems(problems)
    if model_name is not None:
        body = _count_model(model_name, seq_len, tokens, convention)
    else:
        assert layers and width and heads and ffn and vocab and seq_len  # `problems` is empty
        shape = Shape(
            num_layers=layers,
            width=width,
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            ffn_width=ffn,
            vocab_size=vocab,
            seq_len=seq_len,
            family=family or "llama",
            tied=tied,
            qk_norm=qk_norm,
        )
        body = _count_shape(shape, tokens or 0.0, convention)
    answer(
        as_json,
        body,
        table(("", "value"), [(name, _format_value(value)) for name, value in body.items()]),
    )


def _find_problems(
    model_name: str | None,
    sizes: dict[str, int | None],
    seq_len: int | None,
    kv_heads: int | None,
    flags: Mapping[str, object],
    tokens: float | None,
) -> list[str]:
    """Return the problems with the options: missing sizes, or sizes added to a published model."""
    problems = []
    if tokens is not None and not 0 <= tokens <= MOST_TOKENS:
        problems.append(f"--tokens {tokens}: must be a finite number from 0 to {MOST_TOKENS:g}")
    if model_name is None:
        problems += [
            f"Missing option '--{name}'"
            for name, size in (sizes | {"seq-len": seq_len}).items()
            if size is None
        ]
    else:
        given = [
            f"--{name}"
            for name, size in (sizes | {"kv-heads": kv_heads}).items()
            if size is not None
        ]
        given += [f"--{name}" for name, is_given in flags.items() if is_given]
        if given:
            problems.append(f"--model gives the shape: {', '.join(given)} cannot be added")
    if problems and model_name is None and not any(sizes.values()):
        problems.append("or --model NAME for a published one")
    return problems


def _format_value(value: Json) -> str:
    if value is None:
        return "not published"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _count_shape(shape: Shape, tokens: float, convention: str) -> dict[str, Json]:
    from proxies.core import flops as count

    params = count.count_params(shape)
    per_token = count.flops_per_token(shape, convention)  # type: ignore[arg-type]
    return {
        "params": params.total,
        "params_non_embedding": params.non_embedding,
        "params_active": params.total,
        "flops_per_token": per_token,
        "flops_total": float(per_token) * tokens,
        "six_nd": count.six_nd(params.total, tokens),
        "convention": convention,
    }


def _count_model(
    name: str, seq_len: int | None, tokens: float | None, convention: str
) -> dict[str, Json]:
    """Return the counts of a published model, with its published values."""
    from launcher.base import reference

    known_name, model = reference.model(name)
    trained = (model.tokens or 0.0) if tokens is None else tokens
    shape = model.shape if seq_len is None else dataclasses.replace(model.shape, seq_len=seq_len)
    facts: dict[str, Json] = {
        "model": known_name,
        "tokens": trained,
        "params_published": model.params,
        "flops_published": model.flops_published,
        "source": model.source,
    }
    return _count_shape(shape, trained, convention) | facts
