"""The text of a fit, and the formats of its numbers, which `predict` and `allocate` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun._launcher.main_run.terminal_layout import format_table
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import (
    NONE,
    format_counted,
    format_factor,
    format_percent,
    format_significant,
)
from forerun._scaling_fits.forecast.conclusive import split_warnings

HYPERPARAMETER_FORMS = ("learning_rate", "batch")
"""Forms of laws that give a hyperparameter's best value at each size, instead of the loss."""
MAX_DROPPED_SHOWN = 10
"""Maximum number of dropped rows in text; `--json` has all of them."""

Body = Mapping[str, Any]
"""JSON body of a fit, or of a prediction from a fit."""


def format_fit_body(body: Body) -> str:
    """Format a fit of any form as text and tables."""
    if body["form"] in ("isoflop", *HYPERPARAMETER_FORMS):
        format_lines = _format_optima if body["form"] == "isoflop" else _format_best_values
        return "\n".join([*format_lines(body), *format_endnotes(body)])
    # The warnings that make a fit inconclusive stand above the table, the others below.
    later_warnings = split_warnings(body["warnings"])[1]
    return "\n".join([*_format_law(body), *format_endnotes({**body, "warnings": later_warnings})])


def _format_law(body: Body) -> list[str]:
    """Format a fit of the loss as lines of text and a table."""
    head = f"{format_counted(body['num_runs'], 'run')}, form {body['form']}: {body['status']}"
    lines = [head, *split_warnings(body["warnings"])[0], _format_parameters(body)]
    for backtest in body["backtests"]:
        num_covered = backtest["num_covered"]
        covered = "coverage unknown without draws"
        if num_covered is not None:
            covered = f"covered {num_covered}"
        lines.append(
            f"back-test: {format_counted(backtest['num_held_out'], 'run')} held out at "
            f"{format_factor(backtest['extrapolation'])}x, mean error "
            f"{format_percent(backtest['mean_error'], is_signed=True)}, largest "
            f"{format_percent(backtest['largest_error'])}, {covered}"
        )
    if "aspect" in body:
        from forerun._launcher.report.views.aspect import format_aspect_term
        from forerun._launcher.report.views.fit_findings import AspectTerm

        lines.append(format_aspect_term(AspectTerm.model_validate(body["aspect"])))
    return lines


def _format_optima(body: Body) -> list[str]:
    """Format a fit of the best size for each compute budget as text and tables."""
    quantities = ("params", "tokens", "loss")
    rows = [
        (
            format_number(optimum["flops"]),
            *(
                cell
                for name in quantities
                for cell in (
                    format_number(optimum[name]),
                    format_interval_cell(optimum[f"{name}_interval"]),
                )
            ),
            optimum["status"],
        )
        for optimum in body["budgets"]
    ]
    head = ("FLOPs", "best params", "interval", "tokens", "interval", "loss", "interval", "status")
    return [
        f"{format_counted(body['num_runs'], 'run')}, form {body['form']}: {body['status']}",
        format_table(head, rows),
        _format_parameters(body),
    ]


def _format_best_values(body: Body) -> list[str]:
    """Format a fit of the best learning rate or batch at each size as text and tables."""
    form = body["form"]
    rows = [
        (
            format_number(cell["params"]),
            format_number(cell["tokens"]),
            format_number(cell.get(form)),
            format_interval_cell(cell.get(f"{form}_interval")),
            cell["status"],
        )
        for cell in body["cells"]
    ]
    runs = format_counted(body["num_runs"], "run")
    return [
        f"{runs}, form {form} (column {body['column']}): {body['status']}",
        format_table(("params", "tokens", f"best {form}", "interval", "status"), rows),
        _format_parameters(body),
    ]


def _format_parameters(body: Body) -> str:
    """Format the parameters of a fit, and the exponents that follow from them, as a table."""
    rows = [
        (name, format_number(value), format_interval_cell(body["intervals"].get(name)))
        for name, value in body["parameters"].items()
    ]
    if body["members"]:  # other forms list exponents among their parameters, or have none
        rows += [
            (name, format_number(exponent["value"]), format_interval_cell(exponent["interval"]))
            for name, exponent in body["exponents"].items()
        ]
    return format_table(("parameter", "value", f"{format_percent(body['level'])} interval"), rows)


def format_endnotes(body: Body) -> list[str]:
    """Return lines about dropped rows and warnings."""
    return [
        *list_dropped_rows(body.get("dropped", ())),
        *(f"warning: {warning}" for warning in body["warnings"]),
    ]


def list_dropped_rows(dropped: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each of the first `MAX_DROPPED_SHOWN` dropped rows of a table, and a line
    that counts the remaining dropped rows.
    """
    lines = [f"dropped row {row['row']}: {row['reason']}" for row in dropped[:MAX_DROPPED_SHOWN]]
    if num_hidden := len(dropped) - len(lines):
        lines.append(f"dropped {format_counted(num_hidden, 'more row')}: --json lists every one")
    return lines


def format_number(value: Json) -> str:
    """Format a number for a table; a dash for None."""
    return format_significant(value, 4) if isinstance(value, int | float) else NONE


def format_interval_cell(ends: Json) -> str:
    """Format an interval for a table; a dash for None."""
    return (
        f"[{format_number(ends[0])}, {format_number(ends[1])}]" if isinstance(ends, list) else NONE
    )
