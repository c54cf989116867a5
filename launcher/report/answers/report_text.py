"""The parts of a study's report as text for the terminal: the user's model, coordinate checks,
search, transfer tests and verdicts, ladder, and spend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forerun._launcher.main_run.terminal_layout import format_table
from forerun._launcher.report.answers.fit_text import list_dropped_rows
from forerun._launcher.report.views import tables
from forerun._launcher.report.views.fit_findings import Ladder
from forerun._launcher.report.views.report_model import Report, Spend
from forerun._launcher.report.views.search import describe_search
from forerun._launcher.report.views.search_findings import Search
from forerun._launcher.report.views.transfer import (
    describe_deciding_runs,
    format_estimate,
    format_test,
    list_verdicts,
)
from forerun._launcher.report.views.transfer_findings import BaseVerdict, Transfer, Verdict
from forerun._launcher.report.views.wording import to_words
from forerun._launcher.study.experiments.coordinate_record import RecordedCheck
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_counted, format_factor, format_main_run_share


def format_text_table(text_table: tables.TextTable) -> str:
    """Format a table of the report as text."""
    return format_table(text_table.head, text_table.rows)


def _format_bullets(sentences: Iterable[str]) -> list[str]:
    return [f"- {sentence}" for sentence in sentences]


def format_model(model: Any) -> str:
    """Format the parameters of the user's model, one row per kind and factor of initial values.

    Args:
        model: The model as JSON: `width`, and `parameters` with `name`, `kind`, and `factor` (the
            standard deviation of the initial values, divided by that of the model as built).
    """
    rows: dict[tuple[str, float], list[str]] = {}
    for parameter in model["parameters"]:
        key = (to_words(parameter["kind"]), parameter["factor"])
        rows.setdefault(key, []).append(parameter["name"])
    rows_text = [
        (
            kind,
            str(len(names)),
            names[0],
            "as built" if factor == 1 else f"times {format_factor(factor)}",
        )
        for (kind, factor), names in rows.items()
    ]
    head = ("kind", "parameters", "the first", f"initial values at width {model['width']}")
    return format_table(head, rows_text)


def format_coordinate_checks(checks: Mapping[str, RecordedCheck]) -> str:
    """Format the coordinate checks of a study as tables, one row per role."""
    parts = []
    for name, check in checks.items():
        notes = [
            f"{name}: {to_words(check.outcome)} over {check.axis}s {list(check.sizes)}",
            *([format_text_table(tables.build_coordinates_table(check))] if check.layers else []),
            *_format_bullets(check.describe_problems()),
            *_format_bullets(f"note: {note}" for note in check.notes),
        ]
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def format_search(search: Search) -> str:
    """Format the best trials as a table, followed by notes on the search."""
    finished = sum(trial.loss_nats is not None for trial in search.trials)
    head = f"{format_counted(len(search.trials), 'trial')}, {finished} finished; the best:"
    trials = format_text_table(tables.build_trials_table(search))
    return "\n".join([head, trials, *_format_bullets(describe_search(search))])


def format_verdict(body: dict[str, Json]) -> str:
    """Format one verdict in words and tables.

    Args:
        body: Result of `forerun._transfer.verdict.summary.summarize_verdict`.
    """
    verdict = Verdict.model_validate(body)
    drift = verdict.drift_octaves_per_doubling
    notes = [f"verdict: {to_words(verdict.outcome)} ({format_test(verdict)})"]
    # The verdict on a table of optima (instead of runs) has no fitted optima. There the reasons
    # state the drift.
    if verdict.optima:
        notes.append(format_text_table(tables.build_optima_table(verdict)))
        notes += _format_bullets(tables.describe_low_minima(verdict))
        if drift.value is not None:
            moved = (
                f"the optimum moves by {format_estimate(drift, '+.2f')} octaves per doubling of "
                f"{verdict.axis}"
            )
            notes += _format_bullets([moved])
    notes += _list_reasons(verdict) + _format_bullets(f"note: {note}" for note in verdict.notes)
    notes += _format_bullets(list_dropped_rows(verdict.dropped))
    return "\n".join(notes)


def _list_reasons(verdict: BaseVerdict) -> list[str]:
    """Return a verdict's reasons, and the runs that would decide it, as bullets."""
    return _format_bullets(
        [
            *verdict.reasons,
            *(f"to decide: {sentence}" for sentence in describe_deciding_runs(verdict)),
        ]
    )


def format_transfer_tests(transfer: Transfer) -> str:
    """Format the transfer tests of a study.

    The tables show outcomes and values; every test that does not hold gets its reasons.
    """
    parts = [format_text_table(tables.build_tests_table(transfer))]
    parts += [
        "\n".join([f"{name}: {to_words(verdict.outcome)}", *_list_reasons(verdict)])
        for name, verdict in list_verdicts(transfer, controls=False)
        if verdict.outcome != "holds"
    ]
    rules = _format_bullets(tables.describe_value_rules(transfer.values))
    values = format_text_table(tables.build_values_table(transfer.values))
    parts.append("\n".join([values, *rules]))
    return "\n\n".join(parts)


def format_ladder(ladder: Ladder) -> str:
    """Format the rungs as a table, followed by a table of those that were run at other rates."""
    parts = [format_text_table(tables.build_rungs_table(ladder))]
    if ladder.checks:
        checked = ["checked at other rates:", format_text_table(tables.build_checks_table(ladder))]
        parts.append("\n".join(checked + _format_bullets(tables.describe_failed_checks(ladder))))
    return "\n\n".join(parts)


def format_spend(spend: Spend) -> str:
    """Describe the cost of all runs of a study, as a share of the main run."""
    runs = format_counted(spend.num_runs, "run")
    return f"{runs}, {format_main_run_share(spend.share_of_target)}"


def format_details(report: Report) -> str:
    """Format everything a study has found so far, stage by stage."""
    parts = [
        "calibration: " + tables.format_calibration(report.calibration)
        if report.calibration
        else "",
        format_search(report.search) if report.search else "",
        format_transfer_tests(report.transfer) if report.transfer else "",
        format_ladder(report.ladder) if report.ladder else "",
    ]
    return "\n\n".join(filter(None, parts))
