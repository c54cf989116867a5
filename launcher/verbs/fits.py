"""Verbs on tables of runs: fit and predict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.verbs.fitted import COMPUTE_FORMS, HYPERPARAMETER_FORMS, fit_of
from launcher.verbs.options import answer, json_option, table
from proxies import canon
from proxies.canon import Json
from scaling_fits.law import ALL_FORMS

if TYPE_CHECKING:
    from scaling_fits.optima.compute_fit import ComputeFit
    from scaling_fits.optima.hyperparameter_laws import HyperparameterFit
    from scaling_fits.uncertainty import FittedRuns


@click.command()
@click.argument("runs", type=click.Path(path_type=Path))
@click.option(
    "--form",
    type=click.Choice(["auto", *ALL_FORMS, *COMPUTE_FORMS, *HYPERPARAMETER_FORMS]),
    default="auto",
    show_default=True,
    help="auto pools the laws of loss against N and D, weighed by back-test; isoflop and "
    "frontier: the best N and D against compute; learning_rate and batch: the best one against N and D.",
)
@click.option(
    "--method",
    type=click.Choice(["window", "cubic", "parabola"]),
    help="Of an IsoFLOP valley's bottom; window unless given.",
)
@click.option("--bootstrap", type=int, default=400, show_default=True, help="Refits behind the intervals; 0: none.")
@click.option("--level", type=float, default=0.9, show_default=True, help="Of the intervals.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the bootstrap.")
@click.option("--params-column", default="params", show_default=True, help="Column that holds N.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False),
              help="Write the fit here, for predict and allocate.")  # fmt: skip
@json_option
def fit(
    runs: Path, form: str, method: str | None, params_column: str, out: Path | None, as_json: bool, **options: Any
) -> None:
    """Scaling fit of RUNS: a study folder, or a .csv, .parquet or .jsonl of params, tokens, loss.

    learning_rate and batch read the columns learning_rate (or lr) and batch_tokens (or batch) too, or a table of
    optima: params, tokens, and lr_optimum or batch_optimum.
    """
    if method is not None and form != "isoflop":
        raise click.UsageError(f"--method is of an IsoFLOP valley: it goes with --form isoflop, not {form}")
    if out is not None and out.exists() and runs.exists() and out.samefile(runs):
        raise click.UsageError(f"--out {out} is the table itself: the fit would take its place")
    file, body = fit_of(runs, form, method or "window", params_column, options)
    if out is not None:
        canon.write_atomic(out, canon.canonical(file).encode())
    told = compute_text if form in COMPUTE_FORMS else hyperparameter_text if form in HYPERPARAMETER_FORMS else fit_text
    answer(as_json, body, told(body))
    if body["status"] == "unidentified":
        raise SystemExit(4)


def fit_text(body: dict[str, Json]) -> str:
    """A fit in words and a table."""
    parts = [f"{body['num_runs']} runs, form {body['form']}: {body['status']}", _parameter_table(body)]
    rows = [(str(m["form"]), f"{float(str(m['weight'])):.0%}", str(m["status"])) for m in _records(body["members"])]
    if len(rows) > 1:
        parts.append(table(("law", "weight", "status"), rows))
    if body["weighting"] == "near_frontier":
        parts.append("no law fits all runs: each counts by its nearness to the best of its budget")
    if body["misfit_sd"] is not None:
        parts.append(
            f"error that the laws share: sd {float(str(body['misfit_sd'])):.2g} of log loss about two times beyond the "
            "largest FLOPs, growing from there; in every interval of a loss"
        )
    backtest = body["backtest"]
    if isinstance(backtest, dict):
        parts.append(
            f"back-test: {backtest['num_held_out']} runs held out at {backtest['extrapolation']:.3g}x, "
            f"largest error {backtest['largest_error']:.2%}, covered {backtest['num_covered']}"
        )
    return "\n".join([*parts, *_endnotes(body)])


def compute_text(body: dict[str, Json]) -> str:
    """Optima against compute in words and tables."""
    rows = [
        (number(at["flops"]), number(at["params"]), span_text(at["params_interval"]), number(at["tokens"]),
         span_text(at["tokens_interval"]), number(at["loss"]), span_text(at["loss_interval"]), str(at["status"]))
        for at in _records(body["budgets"])
    ]  # fmt: skip
    method = f", method {body['method']}" if body["method"] else ""
    head = ("FLOPs", "best params", "interval", "tokens", "interval", "loss", "interval", "status")
    parts = [f"{body['num_runs']} runs, form {body['form']}{method}: {body['status']}", table(head, rows)]
    return "\n".join([*parts, _parameter_table(body), *_endnotes(body)])


def hyperparameter_text(body: dict[str, Json]) -> str:
    """The best learning rate or batch in words and tables."""
    form = str(body["form"])
    rows = [
        (number(cell["params"]), number(cell["tokens"]), number(cell.get(form)),
         span_text(cell.get(f"{form}_interval")), str(cell["status"]))
        for cell in _records(body["cells"])
    ]  # fmt: skip
    parts = [f"{body['num_runs']} runs, form {form} (column {body['column']}): {body['status']}"]
    parts += [table(("params", "tokens", f"best {form}", "interval", "status"), rows), _parameter_table(body)]
    return "\n".join([*parts, *_endnotes(body)])


def _records(value: Json) -> list[dict[str, Json]]:
    assert isinstance(value, list)
    return [each for each in value if isinstance(each, dict)]


def _parameter_table(body: dict[str, Json]) -> str:
    parameters, intervals, exponents = body["parameters"], body["intervals"], body["exponents"]
    assert isinstance(parameters, dict) and isinstance(intervals, dict) and isinstance(exponents, dict)
    rows = [(name, number(value), span_text(intervals.get(name))) for name, value in parameters.items()]
    for name, value in exponents.items():
        assert isinstance(value, dict)
        if body["members"]:  # the other kinds have them among their parameters, or have none
            rows.append((name, number(value["value"]), span_text(value["interval"])))
    return table(("parameter", "value", f"{body['level']:.0%} interval"), rows)


def _endnotes(body: dict[str, Json]) -> list[str]:
    warnings = body["warnings"]
    assert isinstance(warnings, list)
    dropped = [f"dropped row {row['row']}: {row['reason']}" for row in _records(body["dropped"])]
    return [*dropped, *(f"warning: {warning}" for warning in warnings)]


def number(value: Json) -> str:
    """A number for a table; a dash for none."""
    return f"{value:.6g}" if isinstance(value, int | float) else "-"


def span_text(ends: Json) -> str:
    """An interval for a table; a dash for none."""
    return f"[{ends[0]:.4g}, {ends[1]:.4g}]" if isinstance(ends, list) else "-"


def read_fit(path: Path) -> FittedRuns:
    """The law fit in a file that `fit --out` wrote; click.BadParameter says what is wrong with it."""
    from scaling_fits.optima.compute_fit import ComputeFit
    from scaling_fits.optima.hyperparameter_laws import HyperparameterFit
    from scaling_fits.summary import FitFileError

    found = read_any(path)
    if isinstance(found, ComputeFit):
        raise FitFileError(
            f"{path} holds optima against compute: `forerun predict {path} --flops C` gives the best size"
        )
    if isinstance(found, HyperparameterFit):
        raise FitFileError(
            f"{path} holds a law of {found.form}: `forerun predict {path} --params N --tokens D` reads it"
        )
    return found


def read_any(path: Path) -> FittedRuns | ComputeFit | HyperparameterFit:
    """The fit of any kind in a file that `fit --out` wrote; click.BadParameter says what is wrong with it."""
    from scaling_fits import summary
    from scaling_fits.optima import compute_file, compute_fit, hyperparameter_file, hyperparameter_laws

    try:
        data = canon.parse(path.read_bytes())
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read: {error.strerror}") from error
    except canon.CanonError as error:
        raise click.BadParameter(f"{path} is no fit ({error}): `forerun fit RUNS --out {path}` writes one") from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == compute_fit.FILE_KIND:
        return compute_file.from_file(data)
    if kind == hyperparameter_laws.FILE_KIND:
        return hyperparameter_file.from_file(data)
    return summary.from_file(data)


@click.command()
@click.argument("fit_path", metavar="FIT", type=click.Path(path_type=Path))
@click.option("--params", type=float, help="N.")
@click.option("--tokens", type=float, help="D.")
@click.option("--flops", type=float, help="Of a fit of form isoflop or frontier, in the table's own count.")
@json_option
def predict(fit_path: Path, params: float | None, tokens: float | None, flops: float | None, as_json: bool) -> None:
    """Loss of one new run with its interval, from a FIT written by `forerun fit --out`.

    A fit of form isoflop or frontier takes --flops and gives the best size, tokens and loss; one of form learning_rate
    or batch takes --params and --tokens and gives the best value.
    """
    from scaling_fits.optima.compute_fit import ComputeFit
    from scaling_fits.optima.hyperparameter_laws import HyperparameterFit

    found = read_any(fit_path)
    sizes = {"params": params, "tokens": tokens, "flops": flops}
    if isinstance(found, ComputeFit):
        body, text = _predict_compute(found, **_asked(found.form, sizes, ("flops",)))
    elif isinstance(found, HyperparameterFit):
        body, text = _predict_hyperparameter(found, **_asked(found.form, sizes, ("params", "tokens")))
    else:
        body, text = _predict_law(found, **_asked(found.form, sizes, ("params", "tokens")))
    answer(as_json, body, text)


def _asked(form: str, sizes: dict[str, float | None], wanted: tuple[str, ...]) -> dict[str, float]:
    """The options that this kind of fit is asked by; click.UsageError names all that are missing or too many."""
    missing = [f"--{name} is missing" for name in wanted if sizes[name] is None]
    extra = [f"--{name} says nothing to it" for name, size in sizes.items() if name not in wanted and size is not None]
    if missing or extra:
        raise click.UsageError(f"a fit of form {form} is asked by {' and '.join(f'--{name}' for name in wanted)}: "
                               f"{', '.join(missing + extra)}")  # fmt: skip
    return {name: size for name, size in sizes.items() if size is not None}


def _predict_law(found: FittedRuns, params: float, tokens: float) -> tuple[dict[str, Json], str]:
    from scaling_fits import summary
    from scaling_fits.uncertainty import predict as predict_loss

    predicted = predict_loss(found, params, tokens)
    for warning in predicted.warnings:
        click.echo(f"warning: {warning}", err=True)
    body = summary.prediction_summary(predicted)
    return body, (
        f"loss {body['loss']:.4f} nats {span_text(body['interval'])} at "
        f"{body['extrapolation']:.3g}x the largest fitted FLOPs, level {body['level']:g}"
    )


def _predict_compute(found: ComputeFit, flops: float) -> tuple[dict[str, Json], str]:
    from scaling_fits.optima.compute_file import prediction_body
    from scaling_fits.optima.compute_fit import predict_at

    body = prediction_body(predict_at(found, flops))
    rows = [
        ("params", number(body["params"]), span_text(body["params_interval"])),
        ("tokens", number(body["tokens"]), span_text(body["tokens_interval"])),
        ("loss (nats)", number(body["loss"]), span_text(body["interval"])),
    ]
    lines = [table(("", "value", f"{body['level']:.0%} interval"), rows),
             f"at {body['extrapolation']:.3g}x the largest FLOPs of any run"]  # fmt: skip
    return body, "\n".join([*lines, *_endnotes(body | {"dropped": []})])


def _predict_hyperparameter(found: HyperparameterFit, params: float, tokens: float) -> tuple[dict[str, Json], str]:
    from scaling_fits.optima.hyperparameter_file import prediction_body
    from scaling_fits.optima.hyperparameter_laws import predict_value

    body = prediction_body(found, predict_value(found, params, tokens))
    best = f"best {found.form} (column {found.column}) {number(body['value'])} {span_text(body['interval'])}"
    lines = [f"{best}, level {body['level']:g}"]
    unit = " tokens" if found.form == "batch" else ""
    lines += [f"{law['name']} ({law['source']}) says {number(law['value'])}{unit} there; {law['note']}"
              for law in _records(body["published"])]  # fmt: skip
    return body, "\n".join([*lines, *_endnotes(body | {"dropped": []})])
