"""The verb that turns a budget into a model size and a number of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from forerun._launcher.cli.options import AMOUNT, PATH, WholeAmount, json_option, print_result
from forerun._launcher.cli.verbs.predict import exit_if_inconclusive


@click.command()
@click.argument("fit_path", metavar="FIT", type=PATH)
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
    from forerun._launcher.report.answers.allocation import (
        build_allocation_body,
        format_allocation,
        judge_study_batch,
    )
    from forerun._launcher.report.answers.allocation_request import (
        add_planned_budget,
        check_request,
    )
    from forerun._launcher.report.answers.law_fits import read_fit

    request = check_request(add_planned_budget(fit_path, options))
    body = build_allocation_body(*read_fit(fit_path), request)
    if fit_path.is_dir():
        body["noise_scale"], warnings = judge_study_batch(fit_path, body)
        body["warnings"] += warnings
    print_result(as_json, body, format_allocation(body))
    exit_if_inconclusive(body)
