"""The verb that fits scaling laws to a table of runs or to a study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun._launcher.cli.options import PATH, column_option, json_option, print_result
from forerun._launcher.main_run.progress_output import StepProgress
from forerun._launcher.report.answers.fit_text import HYPERPARAMETER_FORMS, format_fit_body
from forerun._proxies.core.errors import ExitCode
from forerun._proxies.core.plain_files import refuse_pipe
from forerun._scaling_fits.laws.forms import FORMS

if TYPE_CHECKING:
    from forerun._scaling_fits.optima.optima_fit import FlopsSource


@click.command()
@click.argument("runs", type=PATH)
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
@click.option("--params-column", metavar="THEIRS", help="The same as --column params=THEIRS.")
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
    params_column: str | None,
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
    if params_column:
        columns = {**columns, "params": params_column}
    from forerun._launcher.report.answers.law_fits import fit_runs_or_study
    from forerun._scaling_fits import fit_file

    with StepProgress(f"fit {runs}") as heartbeat:
        heartbeat.step("reading", 0.0)
        file, body = fit_runs_or_study(
            runs,
            form,
            options,
            columns=columns,
            compute_from=compute_from,
            on_step=heartbeat.step,
        )
    if out is not None:
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
    """Refuse an output file that cannot be written, or that exists and is not a fit. The file is
    checked before the fit, which may take minutes.
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
