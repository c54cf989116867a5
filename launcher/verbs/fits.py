"""The verb that fits scaling laws to a table of runs or to a study."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.answers.law_fits import HYPERPARAMETER_FORMS, dropped_lines, fit_of
from launcher.base.talk import Heartbeat
from launcher.cli.options import answer, column_option, json_option, table
from launcher.views.aspect import term_text
from proxies.core.canon import Json
from proxies.core.errors import ExitCode
from proxies.core.notation import NONE, counted, format_factor, format_percent, format_significant
from proxies.core.plain_files import refuse_pipe
from scaling_fits.forecast.conclusive import first_and_rest
from scaling_fits.laws.forms import SHAPES

if TYPE_CHECKING:
    from scaling_fits.compute.optima import FlopsSource

Body = Mapping[str, Any]
"""JSON of a fit, or of a prediction from it."""


@click.command()
@click.argument("runs", type=click.Path(path_type=Path))
@click.option(
    "--form",
    type=click.Choice(["auto", "compute", *SHAPES, "isoflop", *HYPERPARAMETER_FORMS]),
    default="auto",
    show_default=True,
    help="auto: the laws of loss against N and D that the runs and published studies leave "
    "possible; compute: the "
    "same for runs along one line; isoflop: the best N and D against compute; learning_rate and "
    "batch: the best one "
    "against N and D.",
)
@click.option(
    "--bootstrap",
    type=int,
    default=400,
    show_default=True,
    help="Draws for the intervals; 0: none.",
)
@click.option("--level", type=float, default=0.9, show_default=True, help="Level of the intervals.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the draws.")
@click.option(
    "--params-column", default="", metavar="THEIRS", help="The same as --column params=THEIRS."
)
@column_option
@click.option(
    "--compute-from",
    type=click.Choice(["flops", "budget", "6nd"]),
    help="FLOPs of a run, for isoflop: a column, or 6ND. Default: the first of the three that "
    "there is.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the fit here, for predict and allocate.",
)
@json_option
def fit(
    runs: Path,
    form: str,
    params_column: str,
    columns: dict[str, str],
    compute_from: FlopsSource | None,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Fit scaling laws to RUNS: a study folder, or a table of params, tokens, loss.

    A table is a .csv, .tsv, .txt, .md, .parquet, .jsonl or .ndjson file, or a pipe (- is standard
    input). The forms learning_rate and batch also read the columns learning_rate (or lr) and
    batch_tokens (or batch).
    """
    if out is not None:
        _check_out(out, runs)
    with Heartbeat(f"fit {runs}") as heartbeat:
        heartbeat.step("reading", 0.0)
        file, body = fit_of(
            runs,
            form,
            params_column,
            options,
            columns=columns,
            compute_from=compute_from,
            on_step=heartbeat.step,
        )
    if out is not None:
        from scaling_fits import fit_file

        fit_file.write(out, file)
    status = body["status"]
    is_doubtful = status in ("unidentified", "at_bound", "degenerate")
    next_step = (
        "run what the warnings ask for, then fit again"
        if is_doubtful
        else _suggest_command(form, out)
    )
    answer(as_json, body, f"{body_text(body)}\nnext: {next_step}")
    if status == "unidentified":
        raise SystemExit(ExitCode.CANNOT_TELL)


def _suggest_command(form: str, out: Path | None) -> str:
    """Return the command to use the fit with."""
    if out is None:
        return "the same command with --out fit.json, which predict and allocate read"
    sizes = "--flops C" if form == "isoflop" else "--params N --tokens D"
    alternative = (
        ""
        if form in ("isoflop", *HYPERPARAMETER_FORMS)
        else f", or forerun allocate {out} --flops C"
    )
    return f"forerun predict {out} {sizes}{alternative}"


def _check_out(out: Path, runs: Path) -> None:
    """Refuse an output file that the fit must not or cannot be written to, before minutes of
    fitting.
    """
    if not out.parent.is_dir():
        raise click.UsageError(f"--out {out}: there is no such folder")
    refuse_pipe(out)
    if out.exists() and runs.exists() and out.samefile(runs):
        raise click.UsageError(f"--out {out} is the table itself: the fit would overwrite it")
    from scaling_fits import fit_file

    if not fit_file.can_write_to(out):
        raise click.UsageError(
            f"--out {out} exists and is not a fit: name another file, such as fit.json, or remove "
            "it"
        )


def body_text(body: Body) -> str:
    """Format a fit of any form as text and tables."""
    form = body["form"]
    write_text = (
        isoflop_text
        if form == "isoflop"
        else hyperparameter_text
        if form in HYPERPARAMETER_FORMS
        else fit_text
    )
    return write_text(body)


def fit_text(body: Body) -> str:
    """Format a fit of the loss as text and a table."""
    head = f"{counted(body['num_runs'], 'run')}, form {body['form']}: {body['status']}"
    first, later_warnings = first_and_rest(body["warnings"])
    parts = [head, *first, _build_parameter_table(body)]
    for backtest in body["backtests"]:
        num_covered = backtest["num_covered"]
        covered = (
            "coverage unknown without draws" if num_covered is None else f"covered {num_covered}"
        )
        parts.append(
            f"back-test: {counted(backtest['num_held_out'], 'run')} held out at "
            f"{format_factor(backtest['extrapolation'])}x, mean error "
            f"{format_percent(backtest['mean_error'], is_signed=True)}, largest "
            f"{format_percent(backtest['largest_error'])}, {covered}"
        )
    if "aspect" in body:
        parts.append(term_text(body["aspect"]))
    return "\n".join([*parts, *endnotes({**body, "warnings": later_warnings})])


def isoflop_text(body: Body) -> str:
    """Format the optima against compute as text and tables."""
    rows = [
        (
            number(at["flops"]),
            number(at["params"]),
            span_text(at["params_interval"]),
            number(at["tokens"]),
            span_text(at["tokens_interval"]),
            number(at["loss"]),
            span_text(at["loss_interval"]),
            at["status"],
        )
        for at in body["budgets"]
    ]
    head = ("FLOPs", "best params", "interval", "tokens", "interval", "loss", "interval", "status")
    parts = [
        f"{counted(body['num_runs'], 'run')}, form {body['form']}: {body['status']}",
        table(head, rows),
    ]
    return "\n".join([*parts, _build_parameter_table(body), *endnotes(body)])


def hyperparameter_text(body: Body) -> str:
    """Format the best learning rates or batches as text and tables."""
    form = body["form"]
    rows = [
        (
            number(cell["params"]),
            number(cell["tokens"]),
            number(cell.get(form)),
            span_text(cell.get(f"{form}_interval")),
            cell["status"],
        )
        for cell in body["cells"]
    ]
    parts = [
        (
            f"{counted(body['num_runs'], 'run')}, form {form} (column {body['column']}): "
            f"{body['status']}"
        )
    ]
    parts += [
        table(("params", "tokens", f"best {form}", "interval", "status"), rows),
        _build_parameter_table(body),
    ]
    return "\n".join([*parts, *endnotes(body)])


def _build_parameter_table(body: Body) -> str:
    rows = [
        (name, number(value), span_text(body["intervals"].get(name)))
        for name, value in body["parameters"].items()
    ]
    if body["members"]:  # other forms list exponents among their parameters, or have none
        rows += [
            (name, number(of["value"]), span_text(of["interval"]))
            for name, of in body["exponents"].items()
        ]
    return table(("parameter", "value", f"{format_percent(body['level'])} interval"), rows)


def endnotes(body: Body) -> list[str]:
    """Return lines about dropped rows and warnings."""
    return [*dropped_lines(body), *(f"warning: {warning}" for warning in body["warnings"])]


def number(value: Json) -> str:
    """Format a number for a table; a dash for None."""
    return format_significant(value, 4) if isinstance(value, int | float) else NONE


def span_text(ends: Json) -> str:
    """Format an interval for a table; a dash for None."""
    return f"[{number(ends[0])}, {number(ends[1])}]" if isinstance(ends, list) else NONE
