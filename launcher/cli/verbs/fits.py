"""The verb that fits scaling laws to a table of runs or to a study."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun._launcher.cli.options import column_option, json_option, print_result
from forerun._launcher.main_run.progress_output import StepProgress
from forerun._launcher.main_run.terminal_layout import format_table
from forerun._launcher.report.answers.law_fits import (
    HYPERPARAMETER_FORMS,
    fit_runs_or_study,
    list_dropped_rows,
)
from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import ExitCode
from forerun._proxies.core.notation import (
    NONE,
    format_counted,
    format_factor,
    format_percent,
    format_significant,
)
from forerun._proxies.core.plain_files import refuse_pipe
from forerun._scaling_fits.forecast.conclusive import split_warnings
from forerun._scaling_fits.laws.forms import FORMS

if TYPE_CHECKING:
    from forerun._scaling_fits.optima.optima_fit import FlopsSource

Body = Mapping[str, Any]
"""JSON body of a fit, or of a prediction from a fit."""


@click.command()
@click.argument("runs", type=click.Path(path_type=Path))
@click.option(
    "--form",
    type=click.Choice(["auto", "compute", *FORMS, "isoflop", *HYPERPARAMETER_FORMS]),
    default="auto",
    show_default=True,
    help="auto: the laws of loss against N and D that the runs and published studies leave "
    "possible; compute: the same for runs along one line; isoflop: the best N and D against "
    "compute; learning_rate, batch: its best value against N and D.",
)
@click.option(
    "--bootstrap",
    type=int,
    default=400,
    show_default=True,
    help="Number of draws for the intervals; 0: no intervals.",
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
    help="Source of each run's FLOPs, for isoflop: the table's column flops, its column budget, or "
    "the product 6ND. Default: flops if the table has that column, else budget if it has that, "
    "else 6nd.",
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
    with StepProgress(f"fit {runs}") as heartbeat:
        heartbeat.step("reading", 0.0)
        file, body = fit_runs_or_study(
            runs,
            form,
            params_column,
            options,
            columns=columns,
            compute_from=compute_from,
            on_step=heartbeat.step,
        )
    if out is not None:
        from forerun._scaling_fits import fit_file

        fit_file.write_fit(out, file)
    next_step = _suggest_command(form, out)
    if body["status"] in ("unidentified", "at_bound", "degenerate"):
        next_step = "run what the warnings ask for, then fit again"
    print_result(as_json, body, f"{format_fit_body(body)}\nnext: {next_step}")
    if body["status"] == "unidentified":
        raise SystemExit(ExitCode.CANNOT_TELL)


def _suggest_command(form: str, out: Path | None) -> str:
    """Return the command to use the fit with."""
    if out is None:
        return "the same command with --out fit.json, which predict and allocate read"
    if form == "isoflop":
        return f"forerun predict {out} --flops C"
    command = f"forerun predict {out} --params N --tokens D"
    if form in HYPERPARAMETER_FORMS:
        return command
    return f"{command}, or forerun allocate {out} --flops C"


def _check_out(out: Path, runs: Path) -> None:
    """Refuse an output file that cannot be written, or that would overwrite something other than a
    fit. This is checked before the fit, which may take minutes.
    """
    if not out.parent.is_dir():
        raise click.UsageError(f"--out {out}: there is no such folder")
    refuse_pipe(out)
    if out.exists() and runs.exists() and out.samefile(runs):
        raise click.UsageError(f"--out {out} is the table itself: the fit would overwrite it")
    from forerun._scaling_fits import fit_file

    if not fit_file.is_harmless_to_replace(out):
        raise click.UsageError(
            f"--out {out} exists and is not a fit: name another file, such as fit.json, or remove "
            "it"
        )


def format_fit_body(body: Body) -> str:
    """Format a fit of any form as text and tables."""
    if body["form"] in ("isoflop", *HYPERPARAMETER_FORMS):
        format_lines = _format_optima if body["form"] == "isoflop" else _format_best_values
        return "\n".join([*format_lines(body), *format_endnotes(body)])
    # The warnings that make a fit inconclusive stand above the table, the others below.
    later_warnings = split_warnings(body["warnings"])[1]
    return "\n".join([*_format_law(body), *format_endnotes({**body, "warnings": later_warnings})])


def _format_law(body: Body) -> list[str]:
    """Format a fit of the loss as lines of text and a table."""
    head = f"{format_counted(body['num_runs'], 'run')}, form {body['form']}: {body['status']}"
    lines = [head, *split_warnings(body["warnings"])[0], _format_parameters(body)]
    for backtest in body["backtests"]:
        num_covered = backtest["num_covered"]
        covered = "coverage unknown without draws"
        if num_covered is not None:
            covered = f"covered {num_covered}"
        lines.append(
            f"back-test: {format_counted(backtest['num_held_out'], 'run')} held out at "
            f"{format_factor(backtest['extrapolation'])}x, mean error "
            f"{format_percent(backtest['mean_error'], is_signed=True)}, largest "
            f"{format_percent(backtest['largest_error'])}, {covered}"
        )
    if "aspect" in body:
        from forerun._launcher.report.views.aspect import format_aspect_term
        from forerun._launcher.report.views.fit_findings import AspectTerm

        lines.append(format_aspect_term(AspectTerm.model_validate(body["aspect"])))
    return lines


def _format_optima(body: Body) -> list[str]:
    """Format the optima against compute as text and tables."""
    quantities = ("params", "tokens", "loss")
    rows = [
        (
            format_number(optimum["flops"]),
            *(
                cell
                for name in quantities
                for cell in (
                    format_number(optimum[name]),
                    format_interval_cell(optimum[f"{name}_interval"]),
                )
            ),
            optimum["status"],
        )
        for optimum in body["budgets"]
    ]
    head = ("FLOPs", "best params", "interval", "tokens", "interval", "loss", "interval", "status")
    return [
        f"{format_counted(body['num_runs'], 'run')}, form {body['form']}: {body['status']}",
        format_table(head, rows),
        _format_parameters(body),
    ]


def _format_best_values(body: Body) -> list[str]:
    """Format the best learning rates or batches as text and tables."""
    form = body["form"]
    rows = [
        (
            format_number(cell["params"]),
            format_number(cell["tokens"]),
            format_number(cell.get(form)),
            format_interval_cell(cell.get(f"{form}_interval")),
            cell["status"],
        )
        for cell in body["cells"]
    ]
    runs = format_counted(body["num_runs"], "run")
    return [
        f"{runs}, form {form} (column {body['column']}): {body['status']}",
        format_table(("params", "tokens", f"best {form}", "interval", "status"), rows),
        _format_parameters(body),
    ]


def _format_parameters(body: Body) -> str:
    """Format the parameters of a fit, and the exponents that follow from them, as a table."""
    rows = [
        (name, format_number(value), format_interval_cell(body["intervals"].get(name)))
        for name, value in body["parameters"].items()
    ]
    if body["members"]:  # other forms list exponents among their parameters, or have none
        rows += [
            (name, format_number(exponent["value"]), format_interval_cell(exponent["interval"]))
            for name, exponent in body["exponents"].items()
        ]
    return format_table(("parameter", "value", f"{format_percent(body['level'])} interval"), rows)


def format_endnotes(body: Body) -> list[str]:
    """Return lines about dropped rows and warnings."""
    return [*list_dropped_rows(body), *(f"warning: {warning}" for warning in body["warnings"])]


def format_number(value: Json) -> str:
    """Format a number for a table; a dash for None."""
    return format_significant(value, 4) if isinstance(value, int | float) else NONE


def format_interval_cell(ends: Json) -> str:
    """Format an interval for a table; a dash for None."""
    return (
        f"[{format_number(ends[0])}, {format_number(ends[1])}]" if isinstance(ends, list) else NONE
    )
