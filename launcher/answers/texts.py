"""The text that the verbs of a study print, made from report data: tables and sentences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from launcher.answers.law_fits import dropped_lines
from launcher.cli.options import table
from launcher.study.gates import findings, points
from launcher.views import tables
from launcher.views.numbers import words
from launcher.views.search import sentences
from launcher.views.transfer import estimate, judged, name_of, wanted
from proxies.core.canon import Json
from proxies.core.notation import counted, format_factor, format_main_run_share


def shown_table(text_table: tables.TextTable) -> str:
    """Format a table of the report as text."""
    return table(text_table.head, text_table.rows)


def _format_bullets(sentences: Iterable[str]) -> list[str]:
    return [f"- {sentence}" for sentence in sentences]


def model_text(model: Any) -> str:
    """Format the parameters of a model factory, one row per kind and factor of initial values."""
    rows: dict[tuple[str, float], list[str]] = {}
    for scale in model["parameters"]:
        rows.setdefault((words(scale["kind"]), scale["factor"]), []).append(scale["name"])
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
    return table(head, rows_text)


def coordinate_text(checks: dict[str, Any]) -> str:
    """Format the coordinate checks of a study as tables, one row per role."""
    parts = []
    for name, check in checks.items():
        notes = [f"{name}: {words(check['outcome'])} over {check['axis']}s {points(check)}"]
        notes += [shown_table(tables.coordinates_table(check))] if check["layers"] else []
        notes += _format_bullets([*findings(check), *(f"note: {note}" for note in check["notes"])])
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def search_text(body: dict[str, Json]) -> str:
    """Format the best trials as a table, followed by notes on the search."""
    search: Any = body
    finished = sum(trial["loss_nats"] is not None for trial in search["trials"])
    head = f"{counted(len(search['trials']), 'trial')}, {finished} finished; the best:"
    return "\n".join(
        [head, shown_table(tables.trials_table(search)), *_format_bullets(sentences(search))]
    )


def verdict_text(body: dict[str, Json]) -> str:
    """Format one verdict (`transfer.verdict.summary.verdict_summary`) in words and tables."""
    verdict: Any = body
    drift = verdict["drift_octaves_per_doubling"]
    notes = [f"verdict: {words(verdict['outcome'])} ({name_of(verdict)})"]
    # A table of optima has none here: its reasons state the drift.
    if verdict["optima"]:
        notes.append(shown_table(tables.optima_table(verdict)))
        notes += _format_bullets(tables.minimum_notes(verdict))
        if drift["value"] is not None:
            moved = (
                f"the optimum moves by {estimate(drift, '+.2f')} octaves per doubling of "
                f"{verdict['axis']}"
            )
            notes += _format_bullets([moved])
    notes += _list_reasons(verdict) + _format_bullets(
        f"note: {note}" for note in verdict.get("notes", ())
    )
    notes += _format_bullets(dropped_lines(verdict))
    return "\n".join(notes)


def _list_reasons(verdict: Any) -> list[str]:
    return _format_bullets(
        [*verdict["reasons"], *(f"to decide: {sentence}" for sentence in wanted(verdict))]
    )


def transfer_text(body: dict[str, Json]) -> str:
    """Format the transfer tests of a study (section `transfer` of a report).

    The tables show outcomes and values; every test that does not hold gets its reasons.
    """
    transfer: Any = body
    parts = [shown_table(tables.tests_table(transfer))]
    parts += [
        "\n".join([f"{name}: {words(verdict['outcome'])}", *_list_reasons(verdict)])
        for name, verdict in judged(transfer, controls=False)
        if verdict["outcome"] != "holds"
    ]
    values = transfer["values"]
    return "\n\n".join(
        [
            *parts,
            "\n".join(
                [
                    shown_table(tables.values_table(values)),
                    *_format_bullets(tables.value_rules(values)),
                ]
            ),
        ]
    )


def ladder_text(body: dict[str, Json]) -> str:
    """Format the rungs as a table, and a second one of rungs that were run at other rates too."""
    parts = [shown_table(tables.rungs_table(body))]
    if body.get("checks"):
        checked = ["checked at other rates:", shown_table(tables.checks_table(body))]
        parts.append("\n".join(checked + _format_bullets(tables.check_sentences(body))))
    return "\n\n".join(parts)


def spend_text(body: dict[str, Json]) -> str:
    """Describe the cost of all runs of a study, as a share of the main run."""
    spend: Any = body["spend"]
    return f"{counted(spend['num_runs'], 'run')}, {share_text(spend['share_of_target'])}"


def share_text(share: float) -> str:
    """Format a share of the main run's FLOPs.

    Before there is a choice, the main run is the one that `estimate` assumes.
    """
    return format_main_run_share(share)


def details_text(body: dict[str, Any]) -> str:
    """Format everything a study has found so far, stage by stage."""
    parts = (
        ["calibration: " + tables.calibration_line(body["calibration"])]
        if body["calibration"]
        else []
    )
    sections = (("search", search_text), ("transfer", transfer_text), ("ladder", ladder_text))
    return "\n\n".join([*parts, *(text(body[key]) for key, text in sections if body[key])])
