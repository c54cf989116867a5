"""Verbs on tables of runs and on shapes: fit, predict, allocate, flops."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from launcher.verbs.options import answer, json_option, table
from proxies import canon
from proxies.canon import Json
from proxies.flops import CONVENTIONS
from proxies.shape import Family, Shape

if TYPE_CHECKING:
    from scaling_fits.table import RunTable
    from scaling_fits.uncertainty import FittedRuns


def _runs(path: Path, params_column: str) -> RunTable:
    """The table of a study folder's ladder, or of a file."""
    if path.is_dir():
        from launcher import decide
        from launcher.opening import recorded
        from launcher.transferred import transferred

        study, ledger = recorded(path)
        specs = decide.ladder_specs(study, transferred(study, ledger))
        return decide.ladder_table(specs, ledger.results())
    from scaling_fits.table import read_runs

    return read_runs(path, params_column)


@click.command()
@click.argument("runs", type=click.Path(path_type=Path))
@click.option("--form", type=click.Choice(["auto", "chinchilla", "coupled"]), default="auto", show_default=True,
              help="Law; auto pools the forms, weighed by back-test.")  # fmt: skip
@click.option("--bootstrap", type=int, default=400, show_default=True, help="Refits behind the intervals; 0: none.")
@click.option("--level", type=float, default=0.9, show_default=True, help="Of the intervals.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the bootstrap.")
@click.option("--params-column", default="params", show_default=True, help="Column that holds N.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False),
              help="Write the fit here, for predict and allocate.")  # fmt: skip
@json_option
def fit(
    runs: Path, form: str, bootstrap: int, level: float, seed: int, params_column: str, out: Path | None, as_json: bool
) -> None:
    """Scaling fit of RUNS: a study folder, or a .csv, .parquet or .jsonl of params, tokens, loss."""
    from scaling_fits import summary
    from scaling_fits.uncertainty import fit_runs

    found = fit_runs(_runs(runs, params_column), form=form, bootstrap=bootstrap, level=level, seed=seed)  # type: ignore[arg-type]
    if out is not None:
        canon.write_atomic(out, canon.canonical(summary.to_file(found)).encode())
    body = summary.fit_summary(found)
    answer(as_json, body, fit_text(body))
    if found.status == "unidentified":
        raise SystemExit(4)


def fit_text(body: dict[str, Json]) -> str:
    """A fit in words and a table."""
    parameters, intervals, exponents = body["parameters"], body["intervals"], body["exponents"]
    dropped, warnings = body["dropped"], body["warnings"]
    assert isinstance(parameters, dict) and isinstance(intervals, dict) and isinstance(exponents, dict)
    assert isinstance(dropped, list) and isinstance(warnings, list)
    rows = [(name, _number(value), _span(intervals.get(name))) for name, value in parameters.items()]
    for name, value in exponents.items():
        assert isinstance(value, dict)
        rows.append((name, _number(value["value"]), _span(value["interval"])))
    parts = [f"{body['num_runs']} runs, form {body['form']}: {body['status']}"]
    parts += [table(("parameter", "value", f"{body['level']:.0%} interval"), rows)]
    backtest = body["backtest"]
    if isinstance(backtest, dict):
        parts.append(
            f"back-test: {backtest['num_held_out']} runs held out at {backtest['extrapolation']:.3g}x, "
            f"largest error {backtest['largest_error']:.2%}, covered {backtest['num_covered']}"
        )
    parts += [f"dropped row {row['row']}: {row['reason']}" for row in dropped if isinstance(row, dict)]
    return "\n".join([*parts, *(f"warning: {warning}" for warning in warnings)])


def _number(value: Json) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else "-"


def _span(ends: Json) -> str:
    return f"[{ends[0]:.4g}, {ends[1]:.4g}]" if isinstance(ends, list) else "-"


def _read_fit(path: Path) -> FittedRuns:
    from scaling_fits import summary

    try:
        return summary.from_file(canon.parse(path.read_bytes()))
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read: {error.strerror}") from error
    except canon.CanonError as error:
        raise click.BadParameter(f"{path} is no fit ({error}): `forerun fit RUNS --out {path}` writes one") from error


@click.command()
@click.argument("fit_path", metavar="FIT", type=click.Path(path_type=Path))
@click.option("--params", type=float, required=True, help="N.")
@click.option("--tokens", type=float, required=True, help="D.")
@json_option
def predict(fit_path: Path, params: float, tokens: float, as_json: bool) -> None:
    """Loss of one new run, with its interval, from a FIT written by `forerun fit --out`."""
    from scaling_fits import summary
    from scaling_fits.uncertainty import predict as predict_loss

    body = summary.prediction_summary(predict_loss(_read_fit(fit_path), params, tokens))
    answer(
        as_json, body, f"loss {body['loss']:.4f} nats {_span(body['interval'])} at {body['extrapolation']:.3g}x the "
        f"largest fitted FLOPs, level {body['level']:g}"
    )  # fmt: skip


@click.command()
@click.argument("fit_path", metavar="FIT", type=click.Path(path_type=Path))
@click.option("--flops", type=float, required=True, help="Training FLOPs, counted as 6 * N * D.")
@json_option
def allocate(fit_path: Path, flops: float, as_json: bool) -> None:
    """The best size and tokens for a budget, from a FIT written by `forerun fit --out`."""
    from scaling_fits import summary
    from scaling_fits.allocate import allocate as allocate_budget

    body = summary.allocation_summary(allocate_budget(_read_fit(fit_path), flops))
    flat, warnings = body["flat_range"], body["warnings"]
    assert isinstance(flat, dict) and isinstance(warnings, list)
    rows = [
        ("params", _number(body["params"]), _span(body["params_interval"])),
        ("tokens", _number(body["tokens"]), _span(body["tokens_interval"])),
        ("loss (nats)", _number(body["loss"]), _span(body["interval"])),
    ]
    lines = [
        table(("", "value", f"{body['level']:.0%} interval"), rows),
        f"within 0.3 % of the best loss: params {_span(flat['params'])}",
        *(f"warning: {warning}" for warning in warnings),
    ]
    answer(as_json, body, "\n".join(lines))


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
