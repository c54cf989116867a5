"""A fit of any form, of a study's ladder or of a table of runs: as it is printed, and as it lies in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxies.core.canon import CanonError, Json

if TYPE_CHECKING:
    from scaling_fits.allocation.shapes import Template
    from scaling_fits.compute.hyperparameter_laws import HyperparameterFit
    from scaling_fits.compute.optima import ComputeFit
    from scaling_fits.forecast.uncertainty import FittedRuns
    from scaling_fits.laws.table import RunTable

HYPERPARAMETER_FORMS = ("learning_rate", "batch")

Body = dict[str, Json]


def fit_of(runs: Path, form: str, params_column: str, options: dict[str, Any]) -> tuple[Body, Body]:
    """The file and the JSON of a fit; `options` are bootstrap, level and seed.

    Raises:
        ValueError: of the room `scaling_fits`, each saying all that is wrong.
    """
    if form == "isoflop":
        return _fit_isoflop(runs, params_column, options)
    if form in HYPERPARAMETER_FORMS:
        return _fit_hyperparameter(runs, form, params_column, options)
    return _fit_law(runs, form, params_column, options)


def _fit_law(runs: Path, form: str, params_column: str, options: dict[str, Any]) -> tuple[Body, Body]:
    from scaling_fits.fit_file import to_file
    from scaling_fits.forecast.uncertainty import fit_runs
    from scaling_fits.laws.law import CannotTellError
    from scaling_fits.summary import fit_summary

    table_of_runs = _runs(runs, params_column)
    found = fit_runs(table_of_runs, form=form, **options)
    template = None
    if runs.is_dir():
        from launcher.study.history import concluded, scaled
        from launcher.study.opening import recorded

        study, ledger = recorded(runs)
        found, template = scaled(found, concluded(ledger)), study.shape_template
    try:
        return to_file(found, template), fit_summary(found)
    except CanonError as error:
        raise CannotTellError((f"no law fits these runs: what it predicts leaves all numbers ({error})",)) from error


def _fit_isoflop(runs: Path, params_column: str, options: dict[str, Any]) -> tuple[Body, Body]:
    from scaling_fits.compute.isoflop import fit_isoflop
    from scaling_fits.compute.optima import fit_body
    from scaling_fits.fit_file import to_file

    found = fit_isoflop(_runs(runs, params_column), **options)
    return to_file(found), fit_body(found)


def _fit_hyperparameter(runs: Path, form: str, params_column: str, options: dict[str, Any]) -> tuple[Body, Body]:
    from scaling_fits.compute import hyperparameter_laws as laws
    from scaling_fits.fit_file import to_file

    table_of_runs = _runs(runs, params_column, [name for names in laws.COLUMNS.values() for name in names])
    found = laws.fit_runs_law(table_of_runs, form, **options)  # type: ignore[arg-type]
    return to_file(found), laws.fit_body(found)


def _runs(path: Path, params_column: str, extra: Sequence[str] = ()) -> RunTable:
    """The table of a study folder's ladder and of the main runs concluded since, or of a file."""
    if path.is_dir():
        from launcher.experiments.transferred import transferred
        from launcher.study import decide
        from launcher.study.history import concluded
        from launcher.study.opening import recorded

        study, ledger = recorded(path)
        specs = decide.ladder_specs(study, transferred(study, ledger))
        return decide.ladder_table(specs, ledger.results(), concluded(ledger))
    from scaling_fits.laws.table import read_runs

    return read_runs(path, params_column, extra)


def read_fit(path: Path) -> tuple[FittedRuns, Template | None]:
    """The law fit in a file that `fit --out` wrote, and the shape its study fixes, if it is one's; errors: `read_any`.

    The ladder of a study folder is as good: its fit is the one that `freeze` decides by.
    """
    from scaling_fits.compute.hyperparameter_laws import HyperparameterFit
    from scaling_fits.compute.optima import ComputeFit
    from scaling_fits.fit_file import FitFileError, read, with_template

    if path.is_dir():
        from launcher.experiments.transferred import transferred
        from launcher.study import decide
        from launcher.study.opening import recorded

        study, ledger = recorded(path)
        specs = decide.ladder_specs(study, transferred(study, ledger))
        return decide.fitted(study, ledger, specs), study.shape_template
    found, template = with_template(read(path))
    if isinstance(found, ComputeFit):
        raise FitFileError(
            f"{path} holds optima against compute: `forerun predict {path} --flops C` gives the best size"
        )
    if isinstance(found, HyperparameterFit):
        raise FitFileError(
            f"{path} holds a law of {found.form}: `forerun predict {path} --params N --tokens D` reads it"
        )
    return found, template


def read_any(path: Path) -> FittedRuns | ComputeFit | HyperparameterFit:
    """The fit of any kind in a file that `fit --out` wrote.

    Raises:
        FitFileError: it cannot be read, or is no fit.
        FitTamperedError: it was changed.
    """
    from scaling_fits import fit_file

    return fit_file.from_file(fit_file.read(path))
