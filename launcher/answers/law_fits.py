"""A fit of any form, of a study's ladder or of a table of runs: as it is printed, and as it lies in
a file.
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
    """Return the file and the JSON of a fit.

    Args:
        runs: A table, or a study folder.
        form: Form of the law.
        params_column: The table's column of N; empty: the one that its name tells.
        options: `bootstrap`, `level` and `seed`.
        columns: The table's own names of columns by ours, where a user chose.
        compute_from: FLOPs of an isoFLOP fit; None: the best that the table has.
        on_step: Called with the name of each step, and the share of all work before it.

    Raises:
        click.UsageError: `compute_from` with another form.
        ValueError: of `scaling_fits`, each with all that is wrong.
    """
    from launcher.study.history import ConcludedRun, concluded, scaled
    from scaling_fits.compute import hyperparameter_laws, isoflop, optima
    from scaling_fits.fit_file import to_file
    from scaling_fits.forecast.refits import skip_step
    from scaling_fits.forecast.uncertainty import fit_runs
    from scaling_fits.laws.law import CannotTellError
    from scaling_fits.laws.table import read_runs
    from scaling_fits.summary import fit_summary

    template, main_runs = None, list[ConcludedRun]()
    # the ladder of a study, and the main runs concluded since
    if isinstance(runs, Path) and runs.is_dir():
        from launcher.study import decide

        study, ledger, specs = _ladder(runs)
        template, main_runs = study.shape_template, concluded(ledger)
        table = decide.ladder_table(study, specs, ledger.results(), main_runs)
    else:
        extra = HYPERPARAMETER_FORMS if form in HYPERPARAMETER_FORMS else SHAPE_COLUMNS
        table = read_runs(runs, params_column, extra, columns)
        _check_num_runs(table, form)
    if compute_from is not None and form != "isoflop":
        raise click.UsageError("--compute-from: only with --form isoflop")
    if form == "isoflop":
        by_compute = isoflop.fit_isoflop(table, **options, flops_from=compute_from)
        return to_file(by_compute), optima.fit_body(by_compute)
    if form in HYPERPARAMETER_FORMS:
        by_size = hyperparameter_laws.fit_runs_law(table, form, **options)  # type: ignore[arg-type]
        return to_file(by_size), hyperparameter_laws.fit_body(by_size)
    found = scaled(fit_runs(table, form=form, **options, on_step=on_step or skip_step), main_runs)
    try:
        return to_file(found, template), {**fit_summary(found), **_by_shape(table, found)}
    except CanonError as error:
        raise CannotTellError(
            (f"no law fits these runs: its predictions overflow ({error})",)
        ) from error


def _check_num_runs(table: RunTable, form: str) -> None:
    """Refuse a table whose fit would take hours.

    Raises:
        TableError: It has more runs than the form's limit.
    """
    most = MAX_RUNS_OF_OPTIMA if form in ("isoflop", *HYPERPARAMETER_FORMS) else MAX_RUNS
    if table.num_runs > most:
        problem = (
            f"{counted(table.num_runs, 'run')}: a fit of form {form} takes at most {most:,}; leave "
            "out points along "
            "curves, or average the seeds of each run"
        )
        raise TableError([problem])


def dropped_lines(body: Mapping[str, Any]) -> list[str]:
    """Return a line for each of the first rows that a table's reader dropped, and the number of the
    others.
    """
    dropped = body.get("dropped", ())
    lines = [f"dropped row {row['row']}: {row['reason']}" for row in dropped[:MAX_DROPPED_SHOWN]]
    more = len(dropped) - len(lines)
    return lines + (
        [f"dropped {counted(more, 'more row')}: --json lists every one"] if more > 0 else []
    )


def _by_shape(table: RunTable, found: FittedRuns) -> Body:
    """What the width per layer adds to the loss, where the table has a width and a depth for every
    run.
    """
    from launcher.views.aspect import term_body
    from scaling_fits.allocation.aspect import aspect_term, shaped_run
    from scaling_fits.laws.law import CannotTellError

    width, depth = (table.extra.get(table.column_names.get(name, name)) for name in SHAPE_COLUMNS)
    # an empty cell is NaN
    if width is None or depth is None or not (width > 0).all() or not (depth > 0).all():
        return {}
    try:
        runs = [
            shaped_run(found, params=n, tokens=d, loss_nats=loss, width_per_layer=w / layers)
            for n, d, loss, w, layers in zip(
                *(
                    column.tolist()
                    for column in (table.params, table.tokens, table.loss, width, depth)
                ),
                strict=True,
            )
        ]
        return {"aspect": term_body(aspect_term(runs, found.level))}
    except (SpecError, CannotTellError):
        return {}


def _ladder(study_dir: Path) -> tuple[Study, Ledger, list[RunSpec]]:
    """A study, its ledger, and the runs of its ladder."""
    from launcher.experiments.transferred_values import transferred
    from launcher.study import decide
    from launcher.study.study_folder import recorded

    study, ledger = recorded(study_dir)
    return study, ledger, decide.ladder_specs(study, transferred(study, ledger))


def read_fit(path: Path) -> tuple[FittedRuns, Template | None]:
    """The law fit in a file that `fit --out` wrote, and the shape its study fixes, if it is one's.

    The ladder of a study folder is as good: its fit is the one that `freeze` decides by.

    Raises:
        FitFileError: it cannot be read, or is no fit of a law.
        FitTamperedError: it was changed.
    """
    if path.is_dir():
        from launcher.study import decide

        study, ledger, specs = _ladder(path)
        return decide.fitted(study, ledger, specs), study.shape_template
    from scaling_fits.fit_file import read

    return law_in(read(path), str(path))


def law_in(file: Json, name: str = "FIT") -> tuple[FittedRuns, Template | None]:
    """The law and the shape in what a fit file holds; `name` of the file, for messages.

    Raises:
        FitFileError: it is no fit of a law.
    """
    from scaling_fits.compute.hyperparameter_laws import HyperparameterFit
    from scaling_fits.compute.optima import ComputeFit
    from scaling_fits.fit_file import FitFileError, with_template

    found, template = with_template(file)
    if isinstance(found, ComputeFit):
        raise FitFileError(
            f"{name} holds optima against compute: `forerun predict {name} --flops C` gives the "
            "best size"
        )
    if isinstance(found, HyperparameterFit):
        raise FitFileError(
            f"{name} holds a law of {found.form}: `forerun predict {name} --params N --tokens D` "
            "reads it"
        )
    return found, template
