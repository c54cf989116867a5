"""What a study tells W&B: settings, numbers, tables and pictures, all from the report's body. Pure; knows no wandb."""

from __future__ import annotations

import html
import re
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from launcher.plan import Plan
from launcher.report_html import Body
from launcher.svg import INK, LIGHT_VARIABLES
from launcher.transfer_view import Test, verdicts_by_arm
from proxies import canon
from proxies.canon import Json

_ID_DIGITS = 16
_HASHES = ("data_id", "factory_sha256", "semantics")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under named columns, one type to a column, null where there is no value."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Json, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One W&B run that stands for a study."""

    run_id: str
    """Of the study's question: the same study is the same run, however often it is logged."""
    name: str
    config: dict[str, Json]
    """The plan's question without anything that a person wrote freely."""
    summary: dict[str, Json]
    """Numbers, outcomes and ids; units in the keys; no key where there is no value."""
    tables: dict[str, Table]
    pictures: dict[str, str]
    """Whole HTML pages by name, each holding one drawing and nothing from elsewhere."""


def record_of(body: Body, page: str) -> Record:
    """What to log of a study, finished or not: a part that has not run is absent.

    Args:
        body: of the report, as `launcher.report_body.recorded_body` gives it.
        page: the report drawn from it, whose drawings are the pictures.
    """
    question = body["question"]
    run_id = canon.content_id(question)[:_ID_DIGITS]
    return Record(
        run_id=run_id, name=f"study {run_id[:8]}", config=_config(question), summary=_summary(body),
        tables=_tables(body), pictures=pictures(page),
    )  # fmt: skip


def _config(question: Any) -> dict[str, Json]:
    """Numbers and choices from fixed lists alone: a command line, a path or a name may hold a secret."""
    kept = _choices(Plan, question)
    return {**kept, **{key: question[key] for key in _HASHES if key in question}}


def _choices(model: type[BaseModel], values: Any) -> dict[str, Json]:
    kept: dict[str, Json] = {}
    for key, field in model.model_fields.items():
        if key not in values:
            continue
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kept[key] = _choices(kind, values[key])
        elif not _is_free(kind):
            kept[key] = values[key]
    return kept


def _is_free(kind: Any) -> bool:
    """Whether a value of this type can hold a text that is on no list."""
    if typing.get_origin(kind) is typing.Literal:
        return False
    return kind in (str, Any) or any(_is_free(part) for part in typing.get_args(kind))


def _summary(body: Body) -> dict[str, Json]:
    found: dict[str, Json] = {f"gates/{gate['name']}": gate["outcome"] for gate in body["gates"]}
    found |= {"digest": body["digest"], "ledger_head": body["ledger_head"]}
    found |= {f"spend/{key}": body["spend"][key] for key in ("num_runs", "flops_causal", "share_of_target")}
    if search := body["search"]:
        losses = [trial["loss_nats"] for trial in search["trials"] if trial["loss_nats"] is not None]
        found |= {f"search/best_{key}": value for key, value in search["best"].items()}
        found |= {"search/num_trials": len(search["trials"]), "search/best_loss_nats": min(losses, default=None)}
    if body["transfer"]:
        found |= _transfer_summary(body)
    if fit := body["fit"]:
        found |= {"fit/status": fit["status"], "fit/residual_sd": fit["residual_sd"]}
        found |= {f"fit/{name}": value for name, value in fit["parameters"].items()}
    if choice := body["choice"]:
        predicted = choice["prediction"]
        found |= {f"choice/{key}": choice[key] for key in ("params", "tokens", "num_steps", "budget_flops")}
        found |= _estimate("choice/loss_nats", {"value": predicted["loss"], "interval": predicted["interval"]})
    return {key: value for key, value in found.items() if value is not None}


def _transfer_summary(body: Body) -> dict[str, Json]:
    found: dict[str, Json] = {}
    transfer = body["transfer"]
    for test, arm, verdict in _verdicts(body):
        at = f"transfer/{test['axis']}/{test['hyperparameter']}" + ("" if arm == _main_arm(body) else "/control")
        found |= {f"{at}/{key}": verdict[key] for key in ("outcome", "transferred_value", "cost_of_2x_off_nats")}
        found |= _estimate(f"{at}/drift_octaves_per_doubling", verdict["drift_octaves_per_doubling"])
        found |= _estimate(f"{at}/regret_nats", verdict["regret_nats"])
    if together := transfer["together"]:
        found |= {f"transfer/together/{key}": together[key] for key in ("outcome", "transferred_value", "margin_nats")}
        found |= _estimate("transfer/together/regret_nats", together["regret_nats"])
    for value in transfer["values"]:
        at = f"values/{value['hyperparameter']}"
        found |= {at: value["target_value"], f"{at}/outcome": value["outcome"]}
    return found


def _main_arm(body: Body) -> str:
    return str(body["question"]["proxy"]["parametrization"])


def _verdicts(body: Body) -> Iterable[tuple[Test, str, Any]]:
    """(test, arm, verdict) of every test, the control's last."""
    for test in body["transfer"]["tests"]:
        for arm, verdict in verdicts_by_arm(test, _main_arm(body)).items():
            yield test, arm, verdict


def _estimate(key: str, found: Any) -> dict[str, Json]:
    low, high = found["interval"] or (None, None)
    return {key: found["value"], f"{key}/low": low, f"{key}/high": high}


_RUN = ("axis", "hyperparameter", "arm", "size", "log2_value", "seed", "loss_nats", "status")
_OPTIMUM = (
    "axis", "hyperparameter", "arm", "size", "value", "log2_value", "low_log2", "high_log2", "status", "loss_nats",
    "num_runs", "num_diverged", "cliff_octaves",
)  # fmt: skip
_VALUE = (
    "hyperparameter", "base_value", "target_value", "rule", "outcome", "tested", "untested", "regret_nats",
    "regret_low", "regret_high", "cost_of_2x_off_nats",
)  # fmt: skip


def _tables(body: Body) -> dict[str, Table]:
    found: dict[str, Table] = {}
    if transfer := body["transfer"]:
        runs = [{**run, **_asked(test)} for test in transfer["tests"] for run in test["runs"]]
        optima = [
            {**optimum, **_asked(test), "arm": arm, **_ends("log2", optimum["interval_log2"])}
            for test, arm, verdict in _verdicts(body)
            for optimum in verdict["optima"]
        ]
        found["transfer_runs"] = _table(runs, _RUN)
        found["optima"] = _table(optima, _OPTIMUM)
        found["values"] = _table([_value_row(value) for value in transfer["values"]], _VALUE)
    if search := body["search"]:
        found["search_trials"] = _table(search["trials"], tuple(search["trials"][0]))
    if ladder := body["ladder"]:
        found["ladder_rungs"] = _table(ladder["rungs"], tuple(ladder["rungs"][0]))
    if body["gates"]:
        found["gates"] = _table(body["gates"], ("name", "outcome", "reason"))
    return found


def _table(rows: Sequence[Any], columns: tuple[str, ...]) -> Table:
    return Table(columns=columns, rows=tuple(tuple(row[column] for column in columns) for row in rows))


def _asked(test: Test) -> dict[str, Json]:
    return {"axis": test["axis"], "hyperparameter": test["hyperparameter"]}


def _ends(unit: str, interval: Any) -> dict[str, Json]:
    low, high = interval or (None, None)
    return {f"low_{unit}": low, f"high_{unit}": high}


def _value_row(value: Any) -> dict[str, Json]:
    regret = value["regret_nats"]
    low, high = (regret and regret["interval"]) or (None, None)
    listed = {key: ", ".join(value[key]) for key in ("tested", "untested")}
    return {**value, **listed, "regret_nats": regret and regret["value"], "regret_low": low, "regret_high": high}


_DRAWING = re.compile(r'<svg [^>]*aria-labelledby="(?P<name>[^"]+)-title".*?</svg>', re.DOTALL)
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.DOTALL)


def pictures(page: str) -> dict[str, str]:
    """The drawings of a report, by name, each as a page of its own on white: W&B shows it in a frame, in its own theme.

    Args:
        page: HTML as `launcher.report.page` writes it, its drawings as `launcher.svg.finish` does.
    """
    return {found["name"]: _standing_alone(found.group()) for found in _DRAWING.finditer(page)}


def _standing_alone(svg: str) -> str:
    said = _TITLE.search(svg)
    title = html.unescape(said.group(1)) if said else ""
    style = (
        f":root{{color-scheme:light;{LIGHT_VARIABLES}}}"
        f"body{{margin:1rem;background:#fff;color:{INK};font:15px/1.45 system-ui,sans-serif}}"
        "p{margin:0 0 .6rem}svg{display:block;width:100%;max-width:46rem;height:auto;font-family:inherit}"
    )
    shown = html.escape(title)
    head = f'<head><meta charset="utf-8"><title>{shown}</title><style>{style}</style></head>'
    return f'<!doctype html><html lang="en">{head}<body><p>{shown}</p>{svg}</body></html>\n'
