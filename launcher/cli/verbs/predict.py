"""The verb that evaluates a fit: the loss of a run, the best size for a budget, or the best value
of a hyperparameter.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from forerun._launcher.cli.options import AMOUNT, PATH, json_option, print_result
from forerun._launcher.main_run.progress_output import print_progress
from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import ExitCode
from forerun._scaling_fits.forecast.conclusive import (
    split_warnings,
)

if TYPE_CHECKING:
    from forerun._scaling_fits.fit_file import Fit


@click.command()
@click.argument("fit_path", metavar="FIT", type=PATH)
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
    from forerun._launcher.report.answers.law_fits import read_fit
    from forerun._launcher.report.answers.predictions import predict_from
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
