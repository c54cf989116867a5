"""The verb that evaluates a fit: the loss of a run, the best size for a budget, or the best value
of a hyperparameter.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.answers.law_fits import read_fit
from launcher.base.talk import say
from launcher.cli.options import AMOUNT, answer, json_option, table
from launcher.verbs.fits import endnotes, number, span_text
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.errors import ExitCode
from proxies.core.notation import format_count, format_factor, format_loss, format_percent

if TYPE_CHECKING:
    from scaling_fits.compute.hyperparameter_laws import HyperparameterFit
    from scaling_fits.compute.optima import ComputeFit
    from scaling_fits.fit_file import Fit
    from scaling_fits.forecast.uncertainty import FittedRuns

_MAX_REACH = 1e12
"""Maximum ratio to the largest FLOPs: from a run of minutes to more than the largest run ever."""


@click.command()
@click.argument("fit_path", metavar="FIT", type=click.Path(path_type=Path))
@click.option("--params", type=AMOUNT, help="N.")
@click.option("--tokens", type=AMOUNT, help="D.")
@click.option(
    "--flops",
    type=AMOUNT,
    help="Training FLOPs, for a fit of form isoflop, counted as in its table.",
)
@json_option
def predict(
    fit_path: Path, params: float | None, tokens: float | None, flops: float | None, as_json: bool
) -> None:
    """Predict the loss of one new run, with its interval, from a FIT written by `forerun fit
    --out`.

    FIT may also be a study folder. A fit of form isoflop takes --flops and gives the best size and
    tokens; one of form learning_rate or batch takes --params and --tokens and gives the best value.
    Exit 4: the forecast is inconclusive, for the reason shown.
    """
    from scaling_fits import fit_file
    from scaling_fits.forecast.conclusive import first_and_rest
    from scaling_fits.forecast.uncertainty import FittedRuns

    fit: Fit
    if fit_path.is_dir():
        fit = read_fit(fit_path)[0]
    else:
        fit = fit_file.from_file(fit_file.read(fit_path))
    body, text = predicted(fit, {"params": params, "tokens": tokens, "flops": flops})
    if isinstance(fit, FittedRuns):
        for warning in first_and_rest(body["warnings"])[1]:
            say(f"warning: {warning}")
        text += f"\nnext: forerun allocate {fit_path} --flops C, the best size for a budget"
    answer(as_json, body, text)
    exit_if_inconclusive(body)


def exit_if_inconclusive(body: dict[str, Json]) -> None:
    """End the verb with exit code 4 (cannot tell) if the warnings say that a forecast is
    inconclusive. Every verb follows this rule.

    Raises:
        SystemExit: The forecast is inconclusive.
    """
    from scaling_fits.forecast.conclusive import first_and_rest

    if first_and_rest(body["warnings"])[0]:
        raise SystemExit(ExitCode.CANNOT_TELL)


def predicted(fit: Fit, sizes: dict[str, float | None]) -> tuple[dict[str, Json], str]:
    """Return what `predict --json` prints, and the text for people.

    Args:
        fit: Fit of any form.
        sizes: params, tokens, and flops; None for an option that was not given.

    Raises:
        click.UsageError: Sizes are missing, or do not apply to this form of fit.
        ValueError: The fit gives no number there.
    """
    from scaling_fits.compute.hyperparameter_laws import HyperparameterFit
    from scaling_fits.compute.optima import ComputeFit

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

    from scaling_fits import summary
    from scaling_fits.allocation.allocate import no_number
    from scaling_fits.forecast.conclusive import first_and_rest
    from scaling_fits.forecast.uncertainty import predict as predict_loss

    where = f"{format_count(params)} parameters on {format_count(tokens)} tokens"
    try:
        with np.errstate(all="ignore"):  # a result that is not finite is refused below
            predicted = predict_loss(fit, params, tokens)
    except OverflowError as error:
        raise no_number(fit, where) from error
    if not all(
        map(math.isfinite, (predicted.loss_nats, predicted.low or 0.0, predicted.high or 0.0))
    ):
        raise no_number(fit, where)
    body = summary.prediction_summary(predicted)
    first, _ = first_and_rest(body["warnings"])
    sentence = (
        f"loss {format_loss(predicted.loss_nats)} nats {span_text(body['interval'])} at "
        f"{format_factor(predicted.extrapolation)}x the largest fitted FLOPs, level "
        f"{body['level']:g}"
    )
    return body, "\n".join([*first, sentence])


def _predict_compute(fit: ComputeFit, flops: float) -> tuple[dict[str, Json], str]:
    from scaling_fits.compute.optima import predict_at
    from scaling_fits.forecast.conclusive import distance_doubts, inconclusive

    ratio = flops / fit.largest_flops
    if flops > 0 and not 1 / _MAX_REACH <= ratio <= _MAX_REACH:
        raise click.UsageError(
            f"--flops {flops:g} is {format_factor(ratio)} times the largest FLOPs of any run: must "
            f"be {1 / _MAX_REACH:g} to {_MAX_REACH:g} times"
        )
    predicted = predict_at(fit, flops)
    body = {name: canon.to_json(value) for name, value in dataclasses.asdict(predicted).items()}
    doubts = inconclusive(distance_doubts(ratio))
    body["warnings"] = [*doubts, *fit.warnings]
    rows = [
        ("params", number(body["params"]), span_text(body["params_interval"])),
        ("tokens", number(body["tokens"]), span_text(body["tokens_interval"])),
    ]
    lines = [
        table(("", "value", f"{format_percent(predicted.level)} interval"), rows),
        f"at {format_factor(predicted.extrapolation)}x the largest FLOPs of any run",
    ]
    return body, "\n".join([*lines, *endnotes(body)])


def _predict_hyperparameter(
    fit: HyperparameterFit, params: float, tokens: float
) -> tuple[dict[str, Json], str]:
    from scaling_fits.compute.hyperparameter_laws import predict_value, prediction_body

    body = prediction_body(fit, predict_value(fit, params, tokens))
    best = (
        f"best {fit.form} (column {fit.column}) {number(body['value'])} "
        f"{span_text(body['interval'])}"
    )
    return body, "\n".join([f"{best}, level {body['level']:g}", *endnotes(body)])
