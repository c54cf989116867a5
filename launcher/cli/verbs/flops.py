"""The verb that counts parameters and FLOPs of a shape."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import click

from forerun._launcher.cli.options import AMOUNT, json_option, print_result
from forerun._launcher.main_run.estimates.reference_tables import look_up_model
from forerun._launcher.main_run.terminal_layout import format_table
from forerun._launcher.report.answers.option_problems import OptionProblems
from forerun._proxies.core.canon import Json
from forerun._proxies.core.flops import (
    CONVENTIONS,
    compute_flops_per_token,
    compute_six_nd,
    count_params,
)
from forerun._proxies.core.shape import Family, Shape

MAX_TOKENS = 1e30
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
    model_name: str | None, tokens: float | None, convention: str, as_json: bool, **typed: Any
) -> None:
    """Count parameters and training FLOPs of a decoder's shape, or of a published model, by named
    convention.
    """
    if problems := _find_problems(model_name, tokens, typed):
        raise OptionProblems(problems)
    if model_name is not None:
        body = _count_model(model_name, typed["seq_len"], tokens, convention)
    else:
        shape = Shape(
            num_layers=typed["layers"],
            width=typed["width"],
            num_heads=typed["heads"],
            num_kv_heads=typed["heads"] if typed["kv_heads"] is None else typed["kv_heads"],
            ffn_width=typed["ffn"],
            vocab_size=typed["vocab"],
            seq_len=typed["seq_len"],
            family=typed["family"] or "llama",
            tied=typed["tied"],
            qk_norm=typed["qk_norm"],
        )
        body = _count_shape(shape, tokens or 0.0, convention)
    rows = [(name, _format_value(value)) for name, value in body.items()]
    print_result(as_json, body, format_table(("", "value"), rows))


_SIZES = ("layers", "width", "heads", "ffn", "vocab", "seq_len")
"""Parameter names of the options that a shape needs."""


def _find_problems(
    model_name: str | None, tokens: float | None, typed: dict[str, Any]
) -> list[str]:
    """Return the problems with the options: missing sizes, or sizes added to a published model."""
    problems = []
    if tokens is not None and not 0 <= tokens <= MAX_TOKENS:
        problems.append(f"--tokens {tokens}: must be a finite number from 0 to {MAX_TOKENS:g}")
    if model_name is None:
        missing = [name for name in _SIZES if typed[name] is None]
        problems += [f"Missing option '{_spell(name)}'" for name in missing]
        if len(missing) == len(_SIZES):
            problems.append("or --model NAME for a published one")
        return problems
    given = [
        _spell(name)
        for name, value in typed.items()
        if name != "seq_len" and value not in (None, False)
    ]
    if given:
        problems.append(f"--model gives the shape: {', '.join(given)} cannot be added")
    return problems


def _spell(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _format_value(value: Json) -> str:
    if value is None:
        return "not published"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _count_shape(shape: Shape, tokens: float, convention: str) -> dict[str, Json]:
    params = count_params(shape)
    per_token = compute_flops_per_token(shape, convention)  # type: ignore[arg-type]
    return {
        "params": params.total,
        "params_non_embedding": params.non_embedding,
        "params_active": params.total,
        "flops_per_token": per_token,
        "flops_total": float(per_token) * tokens,
        "six_nd": compute_six_nd(params.total, tokens),
        "convention": convention,
    }


def _count_model(
    name: str, seq_len: int | None, tokens: float | None, convention: str
) -> dict[str, Json]:
    """Return the counts of a published model, with its published values."""
    known_name, model = look_up_model(name)
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
