"""Fits of a law of any form, to a study's ladder or to a table of runs.

A new fit is returned twice: as the content of a fit file, and as the JSON that `--json` prints. The
module also reads the law back from a fit file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun._proxies.core.canon import CanonError, Json
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.tables.table_files import Source, TableError

if TYPE_CHECKING:
    from forerun._launcher.main_run.frozen.concluded_run import ConcludedRun
    from forerun._launcher.study.plan.study import Study
    from forerun._proxies.core.spec import RunSpec
    from forerun._scaling_fits.allocation.shapes import Template
    from forerun._scaling_fits.forecast.backtest import OnStep
    from forerun._scaling_fits.forecast.uncertainty import FittedRuns
    from forerun._scaling_fits.laws.table import RunTable
    from forerun._scaling_fits.optima.optima_fit import FlopsSource
    from forerun._sweeps.store.ledger import Ledger

HYPERPARAMETER_FORMS = ("learning_rate", "batch")
"""Forms of laws that give a hyperparameter's best value at each size, instead of the loss."""
SHAPE_COLUMNS = ("width", "depth")
"""Columns that describe the shape of a model."""

MAX_RUNS, MAX_RUNS_OF_OPTIMA = 100_000, 10_000
"""Maximum number of runs: the first for most forms, the second for isoflop and hyperparameter laws.
Published studies have up to a few thousand runs."""
MAX_DROPPED_SHOWN = 10
"""Maximum number of dropped rows in text; `--json` has all of them."""

Body = dict[str, Json]


def fit_runs_or_study(
    runs: Source,
    form: str,
    params_column: str,
    options: dict[str, Any],
    *,
    columns: Mapping[str, str] | None = None,
    compute_from: FlopsSource | None = None,
    on_step: OnStep | None = None,
) -> tuple[Body, Body]:
    """Fit a law, and return the content of the fit file and the JSON that is printed.

    Args:
        runs: A table, or a study folder.
        form: Form of the law.
        params_column: The table's column of parameter counts; empty to find it by its name.
        options: Options of the fit: `bootstrap` (number of refits to resampled runs), `level` (of
            the intervals) and `seed`.
        columns: The table's column names by forerun's names, where the user chose them.
        compute_from: Source of FLOPs for an isoFLOP fit; None for the best that the table has.
        on_step: Called at the start of each step of the fit, with the step's name and the fraction
            of all work that is done by then.

    Raises:
        click.UsageError: `compute_from` is given with another form.
        ValueError: `scaling_fits` cannot fit the runs; every problem is listed.
    """
    from forerun._scaling_fits.fit_file import to_json
    from forerun._scaling_fits.forecast.uncertainty import fit_runs
    from forerun._scaling_fits.optima import hyperparameter_laws, isoflop, optima_fit

    table, template, main_runs = _load_table(runs, form, params_column, columns)
    if compute_from is not None and form != "isoflop":
        raise click.UsageError("--compute-from: only with --form isoflop")
    if form == "isoflop":
        compute_fit = isoflop.fit_isoflop(table, **options, flops_from=compute_from)
        return to_json(compute_fit), optima_fit.summarize_fit(compute_fit)
    if form in HYPERPARAMETER_FORMS:
        size_fit = hyperparameter_laws.fit_runs_law(table, form, **options)  # type: ignore[arg-type]
        return to_json(size_fit), hyperparameter_laws.summarize_fit(size_fit)
    fit = fit_runs(table, form=form, **options, on_step=on_step)
    return _describe_loss_law(fit, table, template, main_runs)


def _load_table(
    runs: Source, form: str, params_column: str, columns: Mapping[str, str] | None
) -> tuple[RunTable, Template | None, list[ConcludedRun]]:
    """Return the runs to fit; for a study also its shape template and its concluded main runs."""
    from forerun._scaling_fits.laws.table import read_runs

    if isinstance(runs, Path) and runs.is_dir():
        from forerun._launcher.study.stages import main_run_choice
        from forerun._launcher.study.stages.concluded_runs import load_concluded_runs

        study, ledger, specs = _load_ladder(runs)
        main_runs = load_concluded_runs(ledger)
        table = main_run_choice.build_ladder_table(study, specs, ledger.get_results(), main_runs)
        return table, study.shape_template, main_runs
    extra_columns = HYPERPARAMETER_FORMS if form in HYPERPARAMETER_FORMS else SHAPE_COLUMNS
    table = read_runs(runs, params_column, extra_columns, columns)
    _check_num_runs(table, form)
    return table, None, []


def _describe_loss_law(
    fit: FittedRuns, table: RunTable, template: Template | None, main_runs: list[ConcludedRun]
) -> tuple[Body, Body]:
    """Return the fit file and the JSON of a loss law, with intervals scaled by the concluded runs.

    Raises:
        CannotTellError: The law's predictions overflow.
    """
    from forerun._launcher.study.stages.concluded_runs import scale_intervals
    from forerun._scaling_fits.fit_file import to_json
    from forerun._scaling_fits.laws.law import CannotTellError
    from forerun._scaling_fits.summary import summarize_fit

    fit = scale_intervals(fit, main_runs)
    try:
        return to_json(fit, template), {**summarize_fit(fit), **_fit_aspect_term(table, fit)}
    except CanonError as error:
        raise CannotTellError(
            (f"no law fits these runs: its predictions overflow ({error})",)
        ) from error


def _check_num_runs(table: RunTable, form: str) -> None:
    """Refuse a table whose fit would take hours.

    Raises:
        TableError: The table has more runs than the form's limit.
    """
    max_runs = MAX_RUNS_OF_OPTIMA if form in ("isoflop", *HYPERPARAMETER_FORMS) else MAX_RUNS
    if table.num_runs > max_runs:
        problem = (
            f"{format_counted(table.num_runs, 'run')}: a fit of form {form} takes at most "
            f"{max_runs:,}; leave out points along curves, or average the seeds of each run"
        )
        raise TableError([problem])


def list_dropped_rows(body: Mapping[str, Any]) -> list[str]:
    """Return a line for each of the first `MAX_DROPPED_SHOWN` dropped rows of a table, and a line
    that counts the remaining dropped rows.
    """
    dropped = body.get("dropped", ())
    lines = [f"dropped row {row['row']}: {row['reason']}" for row in dropped[:MAX_DROPPED_SHOWN]]
    if num_hidden := len(dropped) - len(lines):
        lines.append(f"dropped {format_counted(num_hidden, 'more row')}: --json lists every one")
    return lines


def _fit_aspect_term(table: RunTable, fit: FittedRuns) -> Body:
    """Return key `aspect`: how the loss depends on the width per layer, as JSON.

    The result is empty if a run of the table has no width or no depth, or if the dependence cannot
    be fitted.
    """
    from forerun._launcher.report.views.aspect import describe_aspect_term
    from forerun._scaling_fits.allocation.aspect import build_shaped_run, fit_aspect_term
    from forerun._scaling_fits.laws.law import CannotTellError

    width, depth = (table.extra.get(table.column_names.get(name, name)) for name in SHAPE_COLUMNS)
    # An empty cell is NaN, and NaN > 0 is false.
    if width is None or depth is None or not (width > 0).all() or not (depth > 0).all():
        return {}
    try:
        runs = [
            build_shaped_run(fit, params=n, tokens=d, loss_nats=loss, width_per_layer=w / layers)
            for n, d, loss, w, layers in zip(
                *(
                    column.tolist()
                    for column in (table.params, table.tokens, table.loss, width, depth)
                ),
                strict=True,
            )
        ]
        return {"aspect": describe_aspect_term(fit_aspect_term(runs, fit.level)).to_json()}
    except (SpecError, CannotTellError):
        return {}


def _load_ladder(study_dir: Path) -> tuple[Study, Ledger, list[RunSpec]]:
    """Load a study, its ledger, and the specs of its ladder."""
    from forerun._launcher.study.experiments.transfer_results import load_transfer_result
    from forerun._launcher.study.stages import main_run_choice
    from forerun._launcher.study.stages.study_folder import open_recorded_study

    study, ledger = open_recorded_study(study_dir)
    return (
        study,
        ledger,
        main_run_choice.build_ladder_runs(study, load_transfer_result(study, ledger)),
    )


def read_fit(path: Path) -> tuple[FittedRuns, Template | None]:
    """Read the law in a file that `fit --out` wrote, and the shape template if a study was fitted.

    A study folder is accepted too: its ladder is fitted as `freeze` does.

    Raises:
        FitFileError: The file cannot be read, or holds no fit of a law.
        FitTamperedError: The file was changed.
    """
    if path.is_dir():
        from forerun._launcher.study.stages import main_run_choice

        study, ledger, specs = _load_ladder(path)
        return main_run_choice.load_or_fit_ladder(study, ledger, specs), study.shape_template
    from forerun._scaling_fits.fit_file import read_fit

    return parse_fit(read_fit(path), str(path))


def parse_fit(file: Json, name: str = "FIT") -> tuple[FittedRuns, Template | None]:
    """Return the law and the shape template in the content of a fit file.

    Args:
        file: Content of the fit file.
        name: Name of the file, for messages.

    Raises:
        FitFileError: The content is not a fit of a law.
    """
    from forerun._scaling_fits.fit_file import FitFileError, from_json_with_template
    from forerun._scaling_fits.optima.hyperparameter_laws import HyperparameterFit
    from forerun._scaling_fits.optima.optima_fit import ComputeFit

    fit, template = from_json_with_template(file)
    if isinstance(fit, ComputeFit):
        raise FitFileError(
            f"{name} holds optima against compute: `forerun predict {name} --flops C` gives the "
            "best size"
        )
    if isinstance(fit, HyperparameterFit):
        raise FitFileError(
            f"{name} holds a law of {fit.form}: `forerun predict {name} --params N --tokens D` "
            "reads it"
        )
    return fit, template
