"""What the verbs of a study print, from report data: the report's tables as text."""

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


def shown_table(found: tables.TextTable) -> str:
    """A table of the report as text."""
    return table(found.head, found.rows)


def _bullets(said: Iterable[str]) -> list[str]:
    return [f"- {sentence}" for sentence in said]


def model_text(model: Any) -> str:
    """A factory's parameters as they are understood, one row each kind and factor."""
    rows: dict[tuple[str, float], list[str]] = {}
    for scale in model["parameters"]:
        rows.setdefault((words(scale["kind"]), scale["factor"]), []).append(scale["name"])
    shown = [
        (
            kind,
            str(len(names)),
            names[0],
            "as built" if factor == 1 else f"times {format_factor(factor)}",
        )
        for (kind, factor), names in rows.items()
    ]
    head = ("kind", "parameters", "the first", f"initial values at width {model['width']}")
    return table(head, shown)


def coordinate_text(found: dict[str, Any]) -> str:
    """The checks of a study as tables, one row a role."""
    parts = []
    for name, check in found.items():
        notes = [f"{name}: {words(check['outcome'])} over {check['axis']}s {points(check)}"]
        notes += [shown_table(tables.coordinates_table(check))] if check["layers"] else []
        notes += _bullets([*findings(check), *(f"note: {note}" for note in check["notes"])])
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def search_text(body: dict[str, Json]) -> str:
    """The best trials as a table, and the notes on the search."""
    search: Any = body
    finished = sum(trial["loss_nats"] is not None for trial in search["trials"])
    head = f"{counted(len(search['trials']), 'trial')}, {finished} finished; the best:"
    return "\n".join([head, shown_table(tables.trials_table(search)), *_bullets(sentences(search))])


def verdict_text(body: dict[str, Json]) -> str:
    """One verdict (`transfer.verdict.summary.verdict_summary`) in words and tables."""
    verdict: Any = body
    drift = verdict["drift_octaves_per_doubling"]
    notes = [f"verdict: {words(verdict['outcome'])} ({name_of(verdict)})"]
    if verdict["optima"]:  # else optima were given, and the reasons have the drift
        notes.append(shown_table(tables.optima_table(verdict)))
        notes += _bullets(tables.minimum_notes(verdict))
        if drift["value"] is not None:
            moved = (
                f"the optimum moves by {estimate(drift, '+.2f')} octaves per doubling of "
                f"{verdict['axis']}"
            )
            notes += _bullets([moved])
    notes += _why(verdict) + _bullets(f"note: {note}" for note in verdict.get("notes", ()))
    notes += _bullets(dropped_lines(verdict))
    return "\n".join(notes)


def _why(verdict: Any) -> list[str]:
    return _bullets(
        [*verdict["reasons"], *(f"to decide: {sentence}" for sentence in wanted(verdict))]
    )


def transfer_text(body: dict[str, Json]) -> str:
    """The transfer tests of a study (a report's `transfer`): outcomes, what does not hold and why,
    values.
    """
    transfer: Any = body
    parts = [shown_table(tables.tests_table(transfer))]
    parts += [
        "\n".join([f"{name}: {words(of['outcome'])}", *_why(of)])
        for name, of in judged(transfer, controls=False)
        if of["outcome"] != "holds"
    ]
    values = transfer["values"]
    return "\n\n".join(
        [
            *parts,
            "\n".join(
                [shown_table(tables.values_table(values)), *_bullets(tables.value_rules(values))]
            ),
        ]
    )


def ladder_text(body: dict[str, Json]) -> str:
    """The rungs as a table, and those that were run at other rates too."""
    parts = [shown_table(tables.rungs_table(body))]
    if body.get("checks"):
        checked = ["checked at other rates:", shown_table(tables.checks_table(body))]
        parts.append("\n".join(checked + _bullets(tables.check_sentences(body))))
    return "\n\n".join(parts)


def spend_text(body: dict[str, Json]) -> str:
    """What all runs of a study cost, beside the main run."""
    spend: Any = body["spend"]
    return f"{counted(spend['num_runs'], 'run')}, {share_text(spend['share_of_target'])}"


def share_text(share: float) -> str:
    """A share of the main run's FLOPs; before there is a choice, of the main run that `estimate`
    guesses.
    """
    return format_main_run_share(share)


def details_text(body: dict[str, Any]) -> str:
    """Everything a study has found so far, stage by stage."""
    parts = (
        ["calibration: " + tables.calibration_line(body["calibration"])]
        if body["calibration"]
        else []
    )
    shown = (("search", search_text), ("transfer", transfer_text), ("ladder", ladder_text))
    return "\n\n".join([*parts, *(text(body[key]) for key, text in shown if body[key])])
