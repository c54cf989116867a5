"""Verbs on tables of runs: fit and predict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.verbs.options import answer, json_option, table
from proxies import canon
from proxies.canon import Json

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
    rows = [(name, number(value), span_text(intervals.get(name))) for name, value in parameters.items()]
    for name, value in exponents.items():
        assert isinstance(value, dict)
        rows.append((name, number(value["value"]), span_text(value["interval"])))
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


def number(value: Json) -> str:
    """A number for a table; a dash for none."""
    return f"{value:.6g}" if isinstance(value, int | float) else "-"


def span_text(ends: Json) -> str:
    """An interval for a table; a dash for none."""
    return f"[{ends[0]:.4g}, {ends[1]:.4g}]" if isinstance(ends, list) else "-"


def read_fit(path: Path) -> FittedRuns:
    """The fit in a file that `fit --out` wrote; click.BadParameter says what is wrong with it."""
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

    body = summary.prediction_summary(predict_loss(read_fit(fit_path), params, tokens))
    answer(
        as_json, body, f"loss {body['loss']:.4f} nats {span_text(body['interval'])} at "
        f"{body['extrapolation']:.3g}x the largest fitted FLOPs, level {body['level']:g}"
    )  # fmt: skip
