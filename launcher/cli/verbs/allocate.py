"""The verb that turns a budget into a model size and a number of tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun._launcher.cli.options import AMOUNT, WholeAmount, json_option, print_result
from forerun._launcher.cli.verbs.fits import format_interval_cell, format_number
from forerun._launcher.cli.verbs.predict import exit_if_inconclusive
from forerun._launcher.main_run.terminal_layout import format_table
from forerun._launcher.report.answers.allocation_request import (
    BUDGETS,
    AllocationRequest,
    Options,
    check_request,
)
from forerun._launcher.report.answers.law_fits import read_fit
from forerun._launcher.report.answers.option_problems import OptionProblems
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import (
    format_count,
    format_counted,
    format_factor,
    format_flops,
    format_percent,
    format_significant,
    format_usd,
)
from forerun._scaling_fits.forecast.conclusive import split_warnings

if TYPE_CHECKING:
    from forerun._scaling_fits.allocation.allocate import Allocation
    from forerun._scaling_fits.allocation.shapes import ShapeRequest, Template
    from forerun._scaling_fits.forecast.uncertainty import FittedRuns

_NO_BATCH = "null: give it with --batch-tokens; `forerun fit --form batch` fits a law for it"
"""Text in place of the source of the batch size if none is given."""
_MAX_REACH = 1e4
"""Maximum ratio of the budget to the largest fitted FLOPs. It is a hundred times the ratio that
back-tests reach. A larger one suggests that the table's columns are in another unit."""


@click.command()
@click.argument("fit_path", metavar="FIT", type=click.Path(path_type=Path))
@click.option(
    "--flops", type=AMOUNT, help="Budget in FLOPs: 6 * N * D, plus serving with --inference-tokens."
)
@click.option("--gpu-hours", type=float, help="Budget in hours of --gpu.")
@click.option("--usd", type=AMOUNT, help="Budget in dollars of --gpu at --price-usd.")
@click.option("--gpu", help="Accelerator, e.g. H100.")
@click.option(
    "--mfu",
    type=float,
    help="Share of the dense BF16 peak that training reaches, counted as 6 * N * D. Default: by "
    "published runs.",
)
@click.option(
    "--price-usd", type=AMOUNT, help="Price of one GPU-hour. Default: a published one, if any."
)
@click.option("--gpus", type=int, help="Number of GPUs that run at once.")
@click.option("--deadline-days", type=float, help="Days until the run must end, on --gpus.")
@click.option("--batch-tokens", type=WholeAmount(), help="Tokens per step.")
@click.option(
    "--inference-tokens",
    type=AMOUNT,
    help="Tokens to serve over the model's life; the budget pays for them too.",
)
@click.option(
    "--unique-tokens",
    type=AMOUNT,
    help="Unique tokens available; training beyond them repeats data.",
)
@click.option(
    "--tp",
    type=int,
    help="Tensor-parallel degree that must divide the shape. Default: the study's, else 1.",
)
@click.option(
    "--vocab",
    type=int,
    help="Vocabulary of the shape, padded to a multiple of 128 * --tp; for a shape other than the "
    "study's.",
)
@click.option(
    "--seq-len",
    type=int,
    help="Context of the shape, for a shape other than the study's. Default: 4096.",
)
@click.option(
    "--shape",
    is_flag=True,
    help="Also choose a shape in whole numbers: layers, width, heads, FFN, vocabulary.",
)
@click.option(
    "--beyond", is_flag=True, help="Answer even above 1e4 times the largest fitted FLOPs."
)
@json_option
def allocate(fit_path: Path, as_json: bool, **options: Any) -> None:
    """Find the best model size and number of tokens for a budget.

    FIT is a file that `forerun fit --out` wrote, or a study folder. The budget is one of --flops,
    --gpu-hours and --usd; --deadline-days limits it, or stands alone. For a study folder, the
    default budget is the plan's, and --shape gives the shape that `forerun freeze` takes. Exit 4:
    the forecast of the best run is inconclusive, for the reason shown, as in `forerun predict`.
    """
    request = check_request(add_planned_budget(fit_path, options))
    fitted, template = read_fit(fit_path)
    body = build_allocation_body(fitted, request, template)
    if fit_path.is_dir():
        body["noise_scale"] = _measure_critical_batch(fit_path, body)
    print_result(as_json, body, format_allocation(body))
    exit_if_inconclusive(body)


def add_planned_budget(fit_path: Path, options: Options) -> Options:
    """Return the options. If no budget is given and FIT is a study folder, the budget is that of
    its plan.
    """
    if not fit_path.is_dir() or any(options[name] is not None for name in BUDGETS):
        return options
    from forerun._launcher.study.stages.study_folder import open_recorded_study

    return {**options, "flops": open_recorded_study(fit_path)[0].plan.target.budget_flops}


def build_allocation_body(
    fitted: FittedRuns, request: AllocationRequest, template: Template | None = None
) -> dict[str, Json]:
    """Return what `allocate --json` prints.

    Args:
        fitted: Fit of the loss.
        request: Checked options.
        template: Shape template of the study whose ladder was fitted; None for a table.

    Raises:
        NoRunError: The budget pays for no run.
        ShapeError: No shape is that small.
        CannotTellError: The runs identify no law, or the budget is far beyond them.
    """
    from forerun._scaling_fits import summary
    from forerun._scaling_fits.allocation.allocate import allocate as allocate_budget
    from forerun._scaling_fits.allocation.budgets import compute_budget

    budget = compute_budget(request.budget, request.machine)
    if not request.options["beyond"]:
        _check_reach(fitted, budget.flops)
    best = allocate_budget(
        fitted,
        budget.flops,
        inference_tokens=request.options["inference_tokens"] or 0.0,
        unique_tokens=request.options["unique_tokens"],
    )
    batch = request.options["batch_tokens"]
    if batch is not None and batch > best.tokens:
        limit = f"at most the {format_count(best.tokens)} tokens of the whole run"
        raise OptionProblems([f"--batch-tokens {batch}: must be {limit}"])
    body: dict[str, Any] = summary.summarize_allocation(best) | {
        "batch_tokens": batch,
        "batch_tokens_from": _NO_BATCH if batch is None else "given",
        "num_steps": None if batch is None else max(1, round(best.tokens / batch)),
        "training_flops": best.training_flops,
        "budget": summary.summarize_budget(budget, request.machine),
    }
    if best.data_limit is not None:
        body["data_limit"] = summary.summarize_data_limit(best.data_limit)
    if request.shape is not None:
        body |= _build_shape_body(fitted, best, request.shape, template, body["warnings"])
    return body


def _measure_critical_batch(study_dir: Path, body: dict[str, Any]) -> Json:
    """Return the critical batch size, from the noise scale that a study's rungs measured; None if
    not measured.

    A larger batch saves few steps. If the given batch is larger, a warning is added to `body`.
    """
    from forerun._launcher.report.page.report_builder import build_report
    from forerun._launcher.report.views.noise_scale import (
        compare_batch,
        fit_noise_looks,
        format_batch_comparison,
    )
    from forerun._launcher.study.stages.study_folder import open_recorded_study

    measured = build_report(*open_recorded_study(study_dir)).noise_scale
    law = fit_noise_looks(measured.looks, measured.level) if measured else None
    if law is None:
        return None
    # Without a batch, 1 stands in for it, and its outcome is dropped.
    comparison = compare_batch(law, body["batch_tokens"] or 1, body["tokens"])
    if body["batch_tokens"] is None:
        return {**comparison.to_json(), "batch_tokens": None, "outcome": None}
    if comparison.outcome == "over":
        body["warnings"].append(format_batch_comparison(comparison))
    return comparison.to_json()


def _check_reach(fitted: FittedRuns, flops: float) -> None:
    """Refuse a budget that is far beyond every fitted run.

    Raises:
        CannotTellError: The budget is beyond `_MAX_REACH` times the largest fitted FLOPs.
    """
    from forerun._scaling_fits.laws.law import CannotTellError

    fitted.require()
    max_flops = fitted.span.six_nd[1]
    if flops > _MAX_REACH * max_flops:
        problem = (
            f"a budget of {format_flops(flops)} FLOPs is {format_factor(flops / max_flops)} times "
            f"the largest fitted run's ({format_flops(max_flops)}), and the limit is "
            f"{_MAX_REACH:g} times: fit larger runs, check the table's units (params and tokens "
            "are plain counts), or add --beyond"
        )
        raise CannotTellError((problem,))


def _build_shape_body(
    fitted: FittedRuns,
    best: Allocation,
    request: ShapeRequest,
    template: Template | None,
    warnings: list[Json],
) -> dict[str, Json]:
    """Return the JSON of the shape, and of its exact run. The study's template is used unless an
    option asks for another kind of shape.
    """
    from forerun._scaling_fits.allocation.allocate import compute_exact_run
    from forerun._scaling_fits.allocation.shapes import ShapeRequest, choose_shape
    from forerun._scaling_fits.summary import summarize_shape

    default = ShapeRequest(params=request.params, tensor_parallel=request.tensor_parallel)
    if template is not None and request != default:
        warnings.append(
            "`forerun freeze` keeps the study's own kind of shape: leave out the other shape "
            "options"
        )
        template = None
    chosen = choose_shape(dataclasses.replace(request, params=best.params, template=template))
    exact = compute_exact_run(fitted, best, chosen.option)
    if exact is None:
        warnings.append(
            "by the exact count, serving this shape uses up the budget: choose a shorter context"
        )
    return summarize_shape(chosen, exact, best) | {"warnings": warnings}


def format_allocation(body: dict[str, Any]) -> str:
    """Format the answer as text and tables for people."""
    first, later_warnings = split_warnings(body["warnings"])
    flat, num_steps = body["flat_range"], body["num_steps"]
    # The runs may determine the loss and not the sizes.
    no_sizes = body["params_interval"] is None and body["interval"] is not None
    rows = [
        (
            name,
            format_number(body[name]),
            "not determined" if no_sizes else format_interval_cell(body[f"{name}_interval"]),
        )
        for name in ("params", "tokens")
    ]
    rows.append(
        ("loss (nats)", format_number(body["loss"]), format_interval_cell(body["interval"]))
    )
    batch = body["batch_tokens_from"]
    if num_steps is not None:
        batch = f"{body['batch_tokens']:,}, so {format_counted(num_steps, 'step')} ({batch})"
    lines = [
        *first,
        *_format_budget(body["budget"]),
        format_table(("", "value", f"{format_percent(body['level'])} interval"), rows),
        (
            f"within 0.3 % of the best loss: params {format_interval_cell(flat['params'])}, tokens "
            f"{format_interval_cell(flat['tokens'])}"
        ),
        f"tokens per parameter: {format_significant(body['tokens_per_param'])}",
        f"tokens per step: {batch}",
    ]
    if limit := body.get("data_limit"):
        lines.append(
            f"{format_significant(limit['epochs'])} epochs of "
            f"{format_count(limit['unique_tokens'])} unique tokens are worth "
            f"{format_count(limit['effective_tokens'])} fresh ones"
        )
    if noise := body.get("noise_scale"):
        lines.append(
            f"gradient noise scale: {format_number(round(noise['scale_tokens']))} tokens a step "
            f"{format_interval_cell(noise['interval'])}; a larger batch saves few steps. At this "
            "batch a run takes twice the tokens of small batches, and twice the steps of large ones"
        )
    if "shape" in body:
        lines += _format_shape(body)
    return "\n".join([*lines, *(f"warning: {warning}" for warning in later_warnings)])


def _format_budget(budget: dict[str, Any]) -> list[str]:
    parts = [f"budget: {format_number(budget['flops'])} FLOPs"]
    units = (("gpu_hours", "GPU-hours"), ("usd", "USD"), ("days", "days"))
    parts += [
        f"{format_number(budget[name])} {unit}" for name, unit in units if budget[name] is not None
    ]
    lines = [", ".join(parts)]
    if budget["binds"] == "deadline":
        lines.append("the deadline is the limit")
    if gpu := budget["gpu"]:
        mfu, price = gpu["mfu"], gpu["price_usd"]
        lines.append(
            f"{gpu['name']} at {format_flops(gpu['peak_flops'])} FLOP/s; MFU "
            f"{format_percent(mfu['value'])} ({mfu['source']}), counted here as 6 * N * D, without "
            "attention, which `forerun estimate` counts"
        )
        if price:
            lines.append(f"{format_usd(price['value'])} a GPU-hour ({price['source']})")
    return lines


def _format_shape(body: dict[str, Any]) -> list[str]:
    shape, exact = body["shape"], body["shape_exact"]
    cells = {
        "layers": str(shape["num_layers"]),
        "width": str(shape["width"]),
        "heads": str(shape["num_heads"]),
        "kv heads": str(shape["num_kv_heads"]),
        "ffn": str(shape["ffn_width"]),
        "vocabulary": str(shape["vocab_size"]),
        "params": format_number(exact["params"]),
        "of target": f"{exact['params_ratio']:.4f}",
        "FLOPs / 6ND": f"{exact['flops_over_six_nd']:.3f}",
    }
    sentence = (
        f"at a context of {shape['seq_len']}: {format_flops(exact['flops_per_token'])} FLOPs per "
        f"token by the exact count, so the budget pays for {format_number(exact['tokens'])} "
        f"tokens; loss {format_number(exact['loss'])} {format_interval_cell(exact['interval'])}"
    )
    assumptions = [f"assumed: {text}" for text in body["shape_assumed"]]
    return [format_table(tuple(cells), [tuple(cells.values())]), sentence, *assumptions]
