"""The verb that evaluates a fit: the loss of a run, the best size for a budget, or the best value
of a hyperparameter.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forerun._launcher.cli.options import AMOUNT, json_option, print_result
from forerun._launcher.cli.verbs.fits import format_endnotes, format_interval_cell, format_number
from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.main_run.terminal_layout import format_table
from forerun._launcher.report.answers.law_fits import read_fit
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import ExitCode
from forerun._proxies.core.notation import format_count, format_factor, format_loss, format_percent
from forerun._scaling_fits.forecast.conclusive import (
    format_doubts,
    list_distance_doubts,
    split_warnings,
)

if TYPE_CHECKING:
    from forerun._scaling_fits.fit_file import Fit
    from forerun._scaling_fits.forecast.uncertainty import FittedRuns
    from forerun._scaling_fits.optima.hyperparameter_laws import HyperparameterFit
    from forerun._scaling_fits.optima.optima_fit import ComputeFit

_MAX_REACH = 1e12
"""Maximum ratio of the given FLOPs to the largest fitted ones, and of the fitted ones to the given
ones. Even a table of runs of a few minutes may be asked about the largest run ever trained.
"""


@click.command()
@click.argument("fit_path", metavar="FIT", type=click.Path(path_type=Path))
@click.option("--params", type=AMOUNT, help="Number of parameters, N.")
@click.option("--tokens", type=AMOUNT, help="Number of training tokens, D.")
@click.option(
    "--flops",
    type=AMOUNT,
    help="Training FLOPs, for a fit of form isoflop, counted as in its table.",
)
@json_option
def predict(
    fit_path: Path, params: float | None, tokens: float | None, flops: float | None, as_json: bool
) -> None:
    """Predict the loss of one new run, with its interval.

    FIT is a file that `forerun fit --out` wrote, or a study folder. A fit of form isoflop takes
    --flops and gives the best size and tokens; one of form learning_rate or batch takes --params
    and --tokens and gives the best value. Exit 4: the forecast is inconclusive, for the reason
    shown.
    """
    from forerun._scaling_fits import fit_file
    from forerun._scaling_fits.forecast.uncertainty import FittedRuns

    fit: Fit
    if fit_path.is_dir():
        fit = read_fit(fit_path)[0]
    else:
        fit = fit_file.from_json(fit_file.read_fit(fit_path))
    body, text = predict_from(fit, {"params": params, "tokens": tokens, "flops": flops})
    if isinstance(fit, FittedRuns):
        for warning in split_warnings(body["warnings"])[1]:
            print_progress(f"warning: {warning}")
        text += f"\nnext: forerun allocate {fit_path} --flops C, the best size for a budget"
    print_result(as_json, body, text)
    exit_if_inconclusive(body)


def exit_if_inconclusive(body: dict[str, Json]) -> None:
    """End the verb with exit code 4 (cannot tell) if the warnings say that a forecast is
    inconclusive. Every verb follows this rule.

    Raises:
        SystemExit: The forecast is inconclusive.
    """
    if split_warnings(body["warnings"])[0]:
        raise SystemExit(ExitCode.CANNOT_TELL)


def predict_from(fit: Fit, sizes: dict[str, float | None]) -> tuple[dict[str, Json], str]:
    """Return what `predict --json` prints, and the text for people.

    Args:
        fit: Fit of any form.
        sizes: params, tokens, and flops; None for an option that was not given.

    Raises:
        click.UsageError: Sizes are missing, or do not apply to this form of fit.
        ValueError: The fit gives no number there.
    """
    from forerun._scaling_fits.optima.hyperparameter_laws import HyperparameterFit
    from forerun._scaling_fits.optima.optima_fit import ComputeFit

    if isinstance(fit, ComputeFit):
        return _predict_compute(fit, **_require_sizes("isoflop", sizes, ("flops",)))
    if isinstance(fit, HyperparameterFit):
        return _predict_hyperparameter(fit, **_require_sizes(fit.form, sizes, ("params", "tokens")))
    return _predict_law(fit, **_require_sizes(fit.form, sizes, ("params", "tokens")))


def _require_sizes(
    form: str, sizes: dict[str, float | None], wanted: tuple[str, ...]
) -> dict[str, float]:
    """Return the sizes that this form of fit needs.

    Raises:
        click.UsageError: Some sizes are missing, or do not apply; all are named.
    """
    missing = [f"--{name} is missing" for name in wanted if sizes[name] is None]
    extra = [
        f"--{name} does not apply"
        for name, size in sizes.items()
        if name not in wanted and size is not None
    ]
    if missing or extra:
        raise click.UsageError(
            f"a fit of form {form} needs {' and '.join(f'--{name}' for name in wanted)}: "
            f"{', '.join(missing + extra)}"
        )
    return {name: size for name, size in sizes.items() if size is not None}


def _predict_law(fit: FittedRuns, params: float, tokens: float) -> tuple[dict[str, Json], str]:
    import numpy as np

    from forerun._scaling_fits import summary
    from forerun._scaling_fits.allocation.allocate import build_no_number_error
    from forerun._scaling_fits.forecast.uncertainty import predict as predict_loss

    where = f"{format_count(params)} parameters on {format_count(tokens)} tokens"
    try:
        with np.errstate(all="ignore"):  # a result that is not finite is refused below
            prediction = predict_loss(fit, params, tokens)
    except OverflowError as error:
        raise build_no_number_error(fit, where) from error
    numbers = (prediction.loss_nats, prediction.low or 0.0, prediction.high or 0.0)
    if not all(map(math.isfinite, numbers)):
        raise build_no_number_error(fit, where)
    body = summary.summarize_prediction(prediction)
    sentence = (
        f"loss {format_loss(prediction.loss_nats)} nats {format_interval_cell(body['interval'])} "
        f"at {format_factor(prediction.extrapolation)}x the largest fitted FLOPs, level "
        f"{body['level']:g}"
    )
    return body, "\n".join([*split_warnings(body["warnings"])[0], sentence])


def _predict_compute(fit: ComputeFit, flops: float) -> tuple[dict[str, Json], str]:
    from forerun._scaling_fits.optima.optima_fit import predict_at

    ratio = flops / fit.largest_flops
    if flops > 0 and not 1 / _MAX_REACH <= ratio <= _MAX_REACH:
        raise click.UsageError(
            f"--flops {flops:g} is {format_factor(ratio)} times the largest FLOPs of any run: must "
            f"be {1 / _MAX_REACH:g} to {_MAX_REACH:g} times"
        )
    prediction = predict_at(fit, flops)
    body = {name: canon.to_json(value) for name, value in dataclasses.asdict(prediction).items()}
    body["warnings"] = [*format_doubts(list_distance_doubts(ratio)), *fit.warnings]
    rows = [
        (name, format_number(body[name]), format_interval_cell(body[f"{name}_interval"]))
        for name in ("params", "tokens")
    ]
    lines = [
        format_table(("", "value", f"{format_percent(prediction.level)} interval"), rows),
        f"at {format_factor(prediction.extrapolation)}x the largest FLOPs of any run",
    ]
    return body, "\n".join([*lines, *format_endnotes(body)])


def _predict_hyperparameter(
    fit: HyperparameterFit, params: float, tokens: float
) -> tuple[dict[str, Json], str]:
    from forerun._scaling_fits.optima.hyperparameter_laws import (
        predict_value,
        summarize_prediction,
    )

    body = summarize_prediction(fit, predict_value(fit, params, tokens))
    best = (
        f"best {fit.form} (column {fit.column}) {format_number(body['value'])} "
        f"{format_interval_cell(body['interval'])}"
    )
    return body, "\n".join([f"{best}, level {body['level']:g}", *format_endnotes(body)])
