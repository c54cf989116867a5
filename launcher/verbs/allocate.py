"""The verb that turns a budget into a model size and a number of tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.answers.allocation_request import BUDGETS, Checked, Typed, asked_options, checked
from launcher.answers.law_fits import read_fit
from launcher.cli.options import OptionProblems, answer, json_option, table
from launcher.verbs.fits import number, span_text
from launcher.verbs.predict import exit_if_inconclusive
from proxies.core.canon import Json
from proxies.core.notation import (
    counted,
    format_count,
    format_factor,
    format_flops,
    format_percent,
    format_significant,
    format_usd,
)

if TYPE_CHECKING:
    from scaling_fits.allocation.allocate import Allocation
    from scaling_fits.allocation.shapes import ShapeRequest, Template
    from scaling_fits.forecast.uncertainty import FittedRuns

_NO_BATCH = "null: give it with --batch-tokens; `forerun fit --form batch` fits a law for it"
_MAX_REACH = 1e4
"""Maximum ratio of the budget to the largest fitted FLOPs: a hundred times what back-tests reach. A
larger ratio suggests that the table's columns are in another unit."""


@click.command()
@click.argument("fit_path", metavar="FIT", type=click.Path(path_type=Path))
@asked_options
@json_option
def allocate(fit_path: Path, as_json: bool, **typed: Any) -> None:
    """Find the best size and tokens for a budget, from a FIT written by `forerun fit --out`, or
    from a study folder.

    The budget is one of --flops, --gpu-hours and --usd; --deadline-days limits it, or is one alone.
    Of a study folder it is the plan's where none is given. With a study's fit, --shape gives the
    shape that `forerun freeze` takes. Exit 4: the forecast of the best run is inconclusive, for the
    reason shown, as in `forerun predict`.
    """
    ask = checked(with_planned_budget(fit_path, typed))
    fitted, template = read_fit(fit_path)
    body = allocation_body(fitted, ask, template)
    if fit_path.is_dir():
        body["noise_scale"] = _measure_critical_batch(fit_path, body)
    answer(as_json, body, allocation_text(body))
    exit_if_inconclusive(body)


def with_planned_budget(fit_path: Path, typed: Typed) -> Typed:
    """Return the options. If no budget is given and FIT is a study folder, the budget is that of
    its plan.
    """
    if not fit_path.is_dir() or any(typed[name] is not None for name in BUDGETS):
        return typed
    from launcher.study.study_folder import recorded

    return {**typed, "flops": recorded(fit_path)[0].plan.target.budget_flops}


def allocation_body(
    fitted: FittedRuns, ask: Checked, template: Template | None = None
) -> dict[str, Json]:
    """Return what `allocate --json` prints.

    Args:
        fitted: Fit of the loss.
        ask: Checked options.
        template: Shape template of the study whose ladder was fitted; None for a table.

    Raises:
        NoRunError: The budget pays for no run.
        ShapeError: No shape is that small.
        CannotTellError: The runs identify no law, or the budget is far beyond them.
    """
    from scaling_fits import summary
    from scaling_fits.allocation.allocate import allocate as allocate_budget
    from scaling_fits.allocation.budgets import budget_of

    budget = budget_of(ask.wish, ask.machine)
    if not ask.typed["beyond"]:
        _check_reach(fitted, budget.flops)
    best = allocate_budget(
        fitted,
        budget.flops,
        inference_tokens=ask.typed["inference_tokens"] or 0.0,
        unique_tokens=ask.typed["unique_tokens"],
    )
    body: dict[str, Any] = summary.allocation_summary(best)
    body |= _build_batch_body(best, ask.typed["batch_tokens"])
    body |= {
        "training_flops": best.training_flops,
        "budget": summary.budget_summary(budget, ask.machine),
    }
    if best.data_limit is not None:
        body["data_limit"] = summary.data_summary(best.data_limit)
    if ask.shape is not None:
        body |= _build_shape_body(fitted, best, ask.shape, template, body["warnings"])
    return body


def _measure_critical_batch(study_dir: Path, body: dict[str, Any]) -> Json:
    """Return the critical batch size, from the noise scale that a study's rungs measured; None if
    not measured.

    A larger batch saves few steps. If the given batch is larger, a warning is added to `body`.
    """
    from launcher.report.body import body_of
    from launcher.study.study_folder import recorded
    from launcher.views.batch import judged, judged_text, law_of

    measured: Any = body_of(*recorded(study_dir))["noise_scale"]
    law = law_of(measured) if measured else None
    if law is None:
        return None
    judgement: dict[str, Any] = judged(law, body["batch_tokens"] or 1, body["tokens"])
    if body["batch_tokens"] is None:
        return {**judgement, "batch_tokens": None, "outcome": None}
    if judgement["outcome"] == "over":
        body["warnings"].append(judged_text(judgement))
    return judgement


def _check_reach(fitted: FittedRuns, flops: float) -> None:
    """Refuse a budget that is far beyond every fitted run.

    Raises:
        CannotTellError: The budget is beyond `_MAX_REACH` times the largest fitted FLOPs.
    """
    from scaling_fits.laws.law import CannotTellError

    fitted.require()
    largest = fitted.span.six_nd[1]
    if flops > _MAX_REACH * largest:
        sentence = (
            f"a budget of {format_flops(flops)} FLOPs is {format_factor(flops / largest)} times "
            f"the largest fitted run's ({format_flops(largest)}), and the limit is {_MAX_REACH:g} "
            "times: fit larger runs, check the table's units (params and tokens are plain counts), "
            "or add --beyond"
        )
        raise CannotTellError((sentence,))


def _build_batch_body(best: Allocation, batch: int | None) -> dict[str, Json]:
    """Return the tokens per step as given; without them, None and the reason."""
    if batch is not None and batch > best.tokens:
        raise OptionProblems(
            [
                (
                    f"--batch-tokens {batch}: must be at most the {format_count(best.tokens)} "
                    "tokens of the whole run"
                )
            ]
        )
    return {
        "batch_tokens": batch,
        "batch_tokens_from": _NO_BATCH if batch is None else "given",
        "num_steps": None if batch is None else max(1, round(best.tokens / batch)),
    }


def _build_shape_body(
    fitted: FittedRuns,
    best: Allocation,
    ask: ShapeRequest,
    template: Template | None,
    warnings: list[Json],
) -> dict[str, Json]:
    """Return the shape. The study's template is kept unless an option asks for another kind of
    shape.
    """
    from scaling_fits.allocation.allocate import exact_run
    from scaling_fits.allocation.shapes import ShapeRequest, choose_shape
    from scaling_fits.summary import shape_summary

    own = ShapeRequest(params=ask.params, tensor_parallel=ask.tensor_parallel)
    if template is not None and ask != own:
        warnings.append(
            "`forerun freeze` keeps the study's own kind of shape: leave out the other shape "
            "options"
        )
        template = None
    chosen = choose_shape(dataclasses.replace(ask, params=best.params, template=template))
    exact = exact_run(fitted, best, chosen.option)
    if exact is None:
        warnings.append(
            "by the exact count, serving this shape uses up the budget: choose a shorter context"
        )
    return shape_summary(chosen, exact, best) | {"warnings": warnings}


def allocation_text(body: dict[str, Any]) -> str:
    """Format the answer as text and tables for people."""
    from scaling_fits.forecast.conclusive import first_and_rest

    flat, (first, later_warnings) = body["flat_range"], first_and_rest(body["warnings"])
    sizes = (
        "not determined" if body["params_interval"] is None and body["interval"] is not None else ""
    )
    rows = [
        ("params", number(body["params"]), sizes or span_text(body["params_interval"])),
        ("tokens", number(body["tokens"]), sizes or span_text(body["tokens_interval"])),
        ("loss (nats)", number(body["loss"]), span_text(body["interval"])),
    ]
    lines = [
        *first,
        *_format_budget(body["budget"]),
        table(("", "value", f"{format_percent(body['level'])} interval"), rows),
        (
            f"within 0.3 % of the best loss: params {span_text(flat['params'])}, tokens "
            f"{span_text(flat['tokens'])}"
        ),
        f"tokens per parameter: {format_significant(body['tokens_per_param'])}",
        f"tokens per step: {body['batch_tokens_from']}"
        if body["batch_tokens"] is None
        else f"tokens per step: {body['batch_tokens']:,}, so {counted(body['num_steps'], 'step')} "
        f"({body['batch_tokens_from']})",
    ]
    if limit := body.get("data_limit"):
        lines.append(
            f"{format_significant(limit['epochs'])} epochs of "
            f"{format_count(limit['unique_tokens'])} unique tokens are worth "
            f"{format_count(limit['effective_tokens'])} fresh ones"
        )
    if noise := body.get("noise_scale"):
        scale = number(round(noise["scale_tokens"]))
        lines.append(
            f"more batch buys little from some {scale} tokens a step on "
            f"{span_text(noise['interval'])}, the gradient noise scale: there a run takes twice "
            "the tokens of small batches and twice the steps of large"
        )
    if "shape" in body:
        lines.append(_format_shape(body))
    return "\n".join([*lines, *(f"warning: {warning}" for warning in later_warnings)])


def _format_budget(budget: dict[str, Any]) -> list[str]:
    parts = [f"budget: {number(budget['flops'])} FLOPs"]
    units = (("gpu_hours", "GPU-hours"), ("usd", "USD"), ("days", "days"))
    parts += [f"{number(budget[name])} {unit}" for name, unit in units if budget[name] is not None]
    lines = [", ".join(parts)]
    if budget["binds"] == "deadline":
        lines.append("the deadline is the limit")
    gpu = budget["gpu"]
    if gpu is not None:
        mfu, price = gpu["mfu"], gpu["price_usd"]
        lines.append(
            f"{gpu['name']} at {format_flops(gpu['peak_flops'])} FLOP/s; MFU "
            f"{format_percent(mfu['value'])} ({mfu['source']}), counted here as 6 * N * D, without "
            "attention, which `forerun estimate` counts"
        )
        lines += (
            []
            if price is None
            else [f"{format_usd(price['value'])} a GPU-hour ({price['source']})"]
        )
    return lines


def _format_shape(body: dict[str, Any]) -> str:
    heads = (
        "layers",
        "width",
        "heads",
        "kv heads",
        "ffn",
        "vocabulary",
        "params",
        "of target",
        "FLOPs / 6ND",
    )
    names = ("num_layers", "width", "num_heads", "num_kv_heads", "ffn_width", "vocab_size")
    shape, exact = body["shape"], body["shape_exact"]
    row = (
        *(str(shape[name]) for name in names),
        number(exact["params"]),
        f"{exact['params_ratio']:.4f}",
        f"{exact['flops_over_six_nd']:.3f}",
    )
    sentence = (
        f"at a context of {shape['seq_len']}: {format_flops(exact['flops_per_token'])} FLOPs per "
        f"token by the exact count, so the budget pays for {number(exact['tokens'])} tokens; loss "
        f"{number(exact['loss'])} {span_text(exact['interval'])}"
    )
    return "\n".join(
        [table(heads, [row]), sentence, *(f"assumed: {text}" for text in body["shape_assumed"])]
    )
