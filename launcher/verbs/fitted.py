"""A fit of any form, of a study's ladder or of a table of runs: as it is written to a file, and as it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxies.canon import Json

if TYPE_CHECKING:
    from scaling_fits.table import RunTable

COMPUTE_FORMS = ("isoflop", "frontier")
"""Optima against compute."""
HYPERPARAMETER_FORMS = ("learning_rate", "batch")

Body = dict[str, Json]


def fit_of(runs: Path, form: str, method: str, params_column: str, options: dict[str, Any]) -> tuple[Body, Body]:
    """The file and the JSON of a fit; `options` are bootstrap, level and seed.

    Raises:
        ValueError: of the room `scaling_fits`, each saying all that is wrong.
    """
    if form in COMPUTE_FORMS:
        return _fit_compute(runs, form, method, params_column, options)
    if form in HYPERPARAMETER_FORMS:
        return _fit_hyperparameter(runs, form, params_column, options)
    return _fit_law(runs, form, params_column, options)


def _fit_law(runs: Path, form: str, params_column: str, options: dict[str, Any]) -> tuple[Body, Body]:
    from scaling_fits import summary
    from scaling_fits.uncertainty import fit_runs

    found = fit_runs(_runs(runs, params_column), form=form, **options)  # type: ignore[arg-type]
    return summary.to_file(found), summary.fit_summary(found)


def _fit_compute(runs: Path, form: str, method: str, params_column: str, options: dict[str, Any]) -> tuple[Body, Body]:
    from scaling_fits.optima import compute_file
    from scaling_fits.optima.frontier import RUN_COLUMNS, fit_frontier
    from scaling_fits.optima.isoflop import fit_isoflop

    if form == "isoflop":
        found = fit_isoflop(_runs(runs, params_column), method, **options)  # type: ignore[arg-type]
    else:
        found = fit_frontier(_runs(runs, params_column, RUN_COLUMNS), **options)
    return compute_file.to_file(found), compute_file.fit_body(found)


def _fit_hyperparameter(runs: Path, form: str, params_column: str, options: dict[str, Any]) -> tuple[Body, Body]:
    from scaling_fits.optima import hyperparameter_file as file
    from scaling_fits.optima.hyperparameter_laws import COLUMNS, fit_runs_law

    optima = None if runs.is_dir() else file.optimum_column(runs, form)  # type: ignore[arg-type]
    if optima is not None:
        found = file.fit_optima_file(runs, form, optima, params_column=params_column, level=options["level"])  # type: ignore[arg-type]
    else:
        table_of_runs = _runs(runs, params_column, [name for names in COLUMNS.values() for name in names])
        found = fit_runs_law(table_of_runs, form, **options)  # type: ignore[arg-type]
    return file.to_file(found), file.fit_body(found)


def _runs(path: Path, params_column: str, extra: Sequence[str] = ()) -> RunTable:
    """The table of a study folder's ladder, or of a file."""
    if path.is_dir():
        from launcher import decide
        from launcher.opening import recorded
        from launcher.transferred import transferred

        study, ledger = recorded(path)
        specs = decide.ladder_specs(study, transferred(study, ledger))
        return decide.ladder_table(specs, ledger.results())
    from scaling_fits.table import read_runs

    return read_runs(path, params_column, extra)
