"""The best size and tokens for a budget, as data and as text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from forerun._launcher.main_run.terminal_layout import format_table
from forerun._launcher.report.answers.allocation_request import AllocationRequest
from forerun._launcher.report.answers.fit_text import format_interval_cell, format_number
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
from forerun._scaling_fits import summary
from forerun._scaling_fits.allocation.allocate import Allocation, allocate, compute_exact_run
from forerun._scaling_fits.allocation.budgets import compute_budget
from forerun._scaling_fits.allocation.shapes import ShapeRequest, Template, choose_shape
from forerun._scaling_fits.forecast.conclusive import split_warnings
from forerun._scaling_fits.forecast.uncertainty import FittedRuns
from forerun._scaling_fits.laws.law import CannotTellError

_NO_BATCH = "null: give it with --batch-tokens; `forerun fit --form batch` fits a law for it"
"""Text in place of the source of the batch size if none is given."""
_MAX_REACH = 1e4
"""Maximum ratio of the budget to the largest fitted FLOPs. It is a hundred times the largest ratio
in the back-tests. A larger ratio suggests that the table's columns are in another unit."""


def build_allocation_body(
    fitted: FittedRuns, template: Template | None, request: AllocationRequest
) -> dict[str, Any]:
    """Return what `allocate --json` prints.

    Args:
        fitted: Fit of the loss.
        template: Shape template of the study whose ladder was fitted; None for a table.
        request: Checked options.

    Raises:
        NoRunError: The budget pays for no run.
        ShapeError: No shape is that small.
        CannotTellError: The runs identify no law, or the budget is far beyond them.
    """
    budget = compute_budget(request.budget, request.machine)
    if not request.options["beyond"]:
        _check_reach(fitted, budget.flops)
    best = allocate(
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


def _check_reach(fitted: FittedRuns, flops: float) -> None:
    """Refuse a budget that is far beyond every fitted run.

    Raises:
        CannotTellError: The budget is beyond `_MAX_REACH` times the largest fitted FLOPs.
    """
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
    """Return the JSON of the shape, of its exact run, and of the warnings with new ones at the end.
    The study's template is used unless an option asks for another kind of shape.
    """
    plain_request = ShapeRequest(params=request.params, tensor_parallel=request.tensor_parallel)
    warnings = [*warnings]
    if template is not None and request != plain_request:
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
    return summary.summarize_shape(chosen, exact, best) | {"warnings": warnings}


def judge_study_batch(study_dir: Path, body: dict[str, Any]) -> tuple[Json, list[str]]:
    """Compare the batch with the critical one, from the noise scale that a study's rungs measured.

    Returns:
        The critical batch size and the comparison, as JSON; None if the study did not measure the
        noise scale. And a warning if the given batch is larger than the critical one, because a
        larger batch saves few steps.
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
        return None, []
    # Without a batch, 1 stands in for it, and its outcome is dropped.
    comparison = compare_batch(law, body["batch_tokens"] or 1, body["tokens"])
    if body["batch_tokens"] is None:
        return {**comparison.to_json(), "batch_tokens": None, "outcome": None}, []
    warnings = [format_batch_comparison(comparison)] if comparison.outcome == "over" else []
    return comparison.to_json(), warnings


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
