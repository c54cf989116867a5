"""The verb that turns a budget into a size and tokens."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.verbs.fits import number, read_fit, span_text
from launcher.verbs.options import answer, json_option, table


@click.command()
@click.argument("fit_path", metavar="FIT", type=click.Path(path_type=Path))
@click.option("--flops", type=float, required=True, help="Training FLOPs, counted as 6 * N * D.")
@json_option
def allocate(fit_path: Path, flops: float, as_json: bool) -> None:
    """The best size and tokens for a budget, from a FIT written by `forerun fit --out`."""
    from scaling_fits import summary
    from scaling_fits.allocate import allocate as allocate_budget

    body = summary.allocation_summary(allocate_budget(read_fit(fit_path), flops))
    flat, warnings = body["flat_range"], body["warnings"]
    assert isinstance(flat, dict) and isinstance(warnings, list)
    rows = [
        ("params", number(body["params"]), span_text(body["params_interval"])),
        ("tokens", number(body["tokens"]), span_text(body["tokens_interval"])),
        ("loss (nats)", number(body["loss"]), span_text(body["interval"])),
    ]
    lines = [
        table(("", "value", f"{body['level']:.0%} interval"), rows),
        f"within 0.3 % of the best loss: params {span_text(flat['params'])}",
        *(f"warning: {warning}" for warning in warnings),
    ]
    answer(as_json, body, "\n".join(lines))
