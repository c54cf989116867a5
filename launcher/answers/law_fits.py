"""Fits of a law of any form, to a study's ladder or to a table of runs.

Each fit is returned twice: as the content of a fit file, and as the JSON that `--json` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from proxies.core.canon import CanonError, Json
from proxies.core.checks import SpecError
from proxies.core.notation import counted
from proxies.core.tables.table_files import Source, TableError

if TYPE_CHECKING:
    from launcher.plan.study import Study
    from launcher.study.history import ConcludedRun
    from proxies.core.spec import RunSpec
    from scaling_fits.allocation.shapes import Template
    from scaling_fits.compute.optima import FlopsSource
    from scaling_fits.forecast.refits import OnStep
    from scaling_fits.forecast.uncertainty import FittedRuns
    from scaling_fits.laws.table import RunTable
    from sweeps.store.ledger import Ledger

HYPERPARAMETER_FORMS = ("learning_rate", "batch")
SHAPE_COLUMNS = ("width", "depth")
"""Columns that describe the shape of a model."""

MAX_RUNS, MAX_RUNS_OF_OPTIMA = 100_000, 10_000
"""Maximum number of runs for most forms, and for isoflop and hyperparameter laws. Published studies
have up to some thousand runs."""
MAX_DROPPED_SHOWN = 10
"""Maximum number of dropped rows in text; `--json` has all of them."""

Body = dict[str, Json]


def fit_of(
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
        options: `bootstrap`, `level` and `seed`.
        columns: The table's column names by forerun's names, where the user chose them.
        compute_from: Source of FLOPs for an isoFLOP fit; None for the best that the table has.
        on_step: Called at the start of each step with its name and the share of all work before it.

    Raises:
        click.UsageError: `compute_from` is given with another form.
        ValueError: `scaling_fits` cannot fit the runs; every problem is listed.
    """
    from scaling_fits.compute import hyperparameter_laws, isoflop, optima
    from scaling_fits.fit_file import to_file
    from scaling_fits.forecast.refits import skip_step
    from scaling_fits.forecast.uncertainty import fit_runs

    table, template, main_runs = _load_table(runs, form, params_column, columns)
    if compute_from is not None and form != "isoflop":
        raise click.UsageError("--compute-from: only with --form isoflop")
    if form == "isoflop":
        by_compute = isoflop.fit_isoflop(table, **options, flops_from=compute_from)
        return to_file(by_compute), optima.fit_body(by_compute)
    if form in HYPERPARAMETER_FORMS:
        by_size = hyperparameter_laws.fit_runs_law(table, form, **options)  # type: ignore[arg-type]
        return to_file(by_size), hyperparameter_laws.fit_body(by_size)
    fit = fit_runs(table, form=form, **options, on_step=on_step or skip_step)
    return _describe_loss_law(fit, table, template, main_runs)


def _load_table(
    runs: Source, form: str, params_column: str, columns: Mapping[str, str] | None
) -> tuple[RunTable, Template | None, list[ConcludedRun]]:
    """Return the runs to fit; for a study also its shape template and its concluded main runs."""
    from scaling_fits.laws.table import read_runs

    if isinstance(runs, Path) and runs.is_dir():
        from launcher.study import decide
        from launcher.study.history import concluded

        study, ledger, specs = _load_ladder(runs)
        main_runs = concluded(ledger)
        table = decide.ladder_table(study, specs, ledger.results(), main_runs)
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
    from launcher.study.history import scaled
    from scaling_fits.fit_file import to_file
    from scaling_fits.laws.law import CannotTellError
    from scaling_fits.summary import fit_summary

    fit = scaled(fit, main_runs)
    try:
        return to_file(fit, template), {**fit_summary(fit), **_fit_aspect_term(table, fit)}
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
            f"{counted(table.num_runs, 'run')}: a fit of form {form} takes at most {max_runs:,}; "
            "leave out points along curves, or average the seeds of each run"
        )
        raise TableError([problem])


def dropped_lines(body: Mapping[str, Any]) -> list[str]:
    """Return a line for each of the first dropped rows of a table, and one that counts the rest."""
    dropped = body.get("dropped", ())
    lines = [f"dropped row {row['row']}: {row['reason']}" for row in dropped[:MAX_DROPPED_SHOWN]]
    more = len(dropped) - len(lines)
    return lines + (
        [f"dropped {counted(more, 'more row')}: --json lists every one"] if more > 0 else []
    )


def _fit_aspect_term(table: RunTable, fit: FittedRuns) -> Body:
    """Return how the loss depends on the width per layer, as JSON.

    The result is empty unless the table has a width and a depth for every run.
    """
    from launcher.views.aspect import term_body
    from scaling_fits.allocation.aspect import aspect_term, shaped_run
    from scaling_fits.laws.law import CannotTellError

    width, depth = (table.extra.get(table.column_names.get(name, name)) for name in SHAPE_COLUMNS)
    # An empty cell is NaN, and NaN > 0 is false.
    if width is None or depth is None or not (width > 0).all() or not (depth > 0).all():
        return {}
    try:
        runs = [
            shaped_run(fit, params=n, tokens=d, loss_nats=loss, width_per_layer=w / layers)
            for n, d, loss, w, layers in zip(
                *(
                    column.tolist()
                    for column in (table.params, table.tokens, table.loss, width, depth)
                ),
                strict=True,
            )
        ]
        return {"aspect": term_body(aspect_term(runs, fit.level))}
    except (SpecError, CannotTellError):
        return {}


def _load_ladder(study_dir: Path) -> tuple[Study, Ledger, list[RunSpec]]:
    """Load a study, its ledger, and the specs of its ladder."""
    from launcher.experiments.transferred_values import transferred
    from launcher.study import decide
    from launcher.study.study_folder import recorded

    study, ledger = recorded(study_dir)
    return study, ledger, decide.ladder_specs(study, transferred(study, ledger))


def read_fit(path: Path) -> tuple[FittedRuns, Template | None]:
    """Read the law in a file that `fit --out` wrote, and the shape template if a study was fitted.

    A study folder is accepted too: its ladder is fitted as `freeze` does.

    Raises:
        FitFileError: The file cannot be read, or holds no fit of a law.
        FitTamperedError: The file was changed.
    """
    if path.is_dir():
        from launcher.study import decide

        study, ledger, specs = _load_ladder(path)
        return decide.fitted(study, ledger, specs), study.shape_template
    from scaling_fits.fit_file import read

    return law_in(read(path), str(path))


def law_in(file: Json, name: str = "FIT") -> tuple[FittedRuns, Template | None]:
    """Return the law and the shape template in the content of a fit file.

    Args:
        file: Content of the fit file.
        name: Name of the file, for messages.

    Raises:
        FitFileError: The content is not a fit of a law.
    """
    from scaling_fits.compute.hyperparameter_laws import HyperparameterFit
    from scaling_fits.compute.optima import ComputeFit
    from scaling_fits.fit_file import FitFileError, with_template

    fit, template = with_template(file)
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
