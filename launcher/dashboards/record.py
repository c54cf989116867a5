"""What is told of a run, and of a study as one: settings, numbers, tables, pictures. Pure; knows no wandb."""

from __future__ import annotations

import html
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import BaseModel

from launcher.dashboards.charts import Table, charts, run_rows
from launcher.figures.svg import INK, LIGHT_VARIABLES
from launcher.plan.plan import Plan
from launcher.report.page import rules_of
from launcher.views.html import Body
from launcher.views.transfer import Test, verdicts_by_arm
from proxies.core import canon
from proxies.core.canon import Json

_DRAWING = re.compile(r'<svg [^>]*aria-labelledby="(?P<name>[^"]+)-title".*?</svg>', re.DOTALL)
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.DOTALL)


def pictures(page: str) -> dict[str, str]:
    """The drawings of a report, by name, each as a page of its own on white: W&B shows it in a frame, in its own theme.

    Args:
        page: HTML as `launcher.report.report.page` writes it, its drawings as `launcher.figures.svg.finish` does.
    """
    return {
        found["name"]: _standing_alone(found.group(), rules_of(page, found.group()))
        for found in _DRAWING.finditer(page)
    }


def _standing_alone(svg: str, rules: str) -> str:
    said = _TITLE.search(svg)
    title = html.unescape(said.group(1)) if said else ""
    style = (
        f":root{{color-scheme:light;{LIGHT_VARIABLES}}}"
        f"body{{margin:1rem;background:#fff;color:{INK};font:15px/1.45 system-ui,sans-serif}}"
        "p{margin:0 0 .6rem}svg{display:block;width:100%;max-width:46rem;height:auto;font-family:inherit}"
        f"{rules}"
    )
    shown = html.escape(title)
    head = f'<head><meta charset="utf-8"><title>{shown}</title><style>{style}</style></head>'
    return f'<!doctype html><html lang="en">{head}<body><p>{shown}</p>{svg}</body></html>\n'


_ID_DIGITS = 16
_HASHES = ("data_id", "factory_sha256", "semantics")


VERSION = 1
"""Of what is told of a run: raised, all are logged anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """Files that belong together, under a name and with what they are known by."""

    kind: str
    files: dict[str, str]
    metadata: dict[str, Json]
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One W&B run, but for what it logged step by step."""

    run_id: str
    """Of what it is about: the same is the same run, however often it is logged."""
    name: str
    config: dict[str, Json]
    """Settings: nothing that a person wrote freely."""
    summary: dict[str, Json]
    """Numbers, outcomes and ids; units in the keys; no key where there is no value."""
    tables: dict[str, Table] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)
    """Whole HTML pages by name, each holding one drawing and nothing from elsewhere."""
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    group: str = "study"
    """The stage."""
    job_type: str = "study"
    tags: tuple[str, ...] = ()
    over: str = ""
    """What its curves are drawn over; empty: it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A run that W&B should have."""

    record: Record
    rows: Callable[[], Iterable[Mapping[str, float]]] = tuple
    """What it logged, step by step; made when it is needed."""
    rows_id: str = ""
    """Names the content of `rows`."""

    @property
    def content(self) -> str:
        """Content id of all that is told: the same is not told twice."""
        return canon.content_id([VERSION, asdict(self.record), self.rows_id])


def study_id(question: Any) -> str:
    """The id of the run that stands for a study, and the value of `study` in the config of all its runs."""
    return canon.content_id(question)[:_ID_DIGITS]


def tags_of(study: str) -> tuple[str, ...]:
    """What all runs of a study are tagged with."""
    return (f"study-{study[:8]}",)


def record_of(body: Body, page: str, frozen: Sequence[Any] = ()) -> Record:
    """What to log of a study, finished or not: a part that has not run is absent.

    Args:
        body: of the report, as `launcher.report.body.recorded_body` gives it.
        page: the report drawn from it, whose drawings are the pictures.
        frozen: decisions that were frozen, as plain JSON.
    """
    question = body["question"]
    run_id = study_id(question)
    return Record(
        run_id=run_id, name=f"study {run_id[:8]}", config={**_config(question), "study": run_id},
        summary=_summary(body), tables={**_tables(body), **charts(body), **_frozen_tables(body, frozen)},
        pictures=pictures(page), artifacts=_artifacts(body, run_id, frozen), tags=tags_of(run_id),
    )  # fmt: skip


def _artifacts(body: Body, run_id: str, frozen: Sequence[Any]) -> dict[str, Artifact]:
    """Verdicts and fits as files that name the config's digest; every frozen config as one whose sha256 it is.

    Metadata follow from the files alone: W&B keeps those of the first artifact with the same files.
    """
    digest = body["digest"]
    known: dict[str, Json] = {"study": run_id, "digest": digest}
    parts = {name: body[name] for name in ("transfer", "fit", "gates", "choice") if body[name]}
    found = {
        f"{name}-{run_id}": Artifact(
            kind=name, files={f"{name}.json": canon.pretty({**known, name: part}).decode()}, metadata=known,
            aliases=(f"config-{digest[:_ID_DIGITS]}",) if digest else (),
        )
        for name, part in parts.items()
    }  # fmt: skip
    for decision in frozen:
        text = canon.canonical(decision)
        digest = canon.content_id(decision)
        found[f"launch-config-{digest[:_ID_DIGITS]}"] = Artifact(
            kind="launch-config", files={"decision.json": text}, aliases=(digest[:_ID_DIGITS],),
            metadata={"digest": digest, "study": run_id, "num_bytes": len(text.encode())},
        )  # fmt: skip
    return found


def _config(question: Any) -> dict[str, Json]:
    """Numbers and choices from fixed lists alone: a command line, a path or a name may hold a secret."""
    kept = _choices(Plan, question)
    return {**kept, **{key: question[key] for key in _HASHES if key in question}}


def _choices(model: type[BaseModel], values: Any) -> dict[str, Json]:
    kept: dict[str, Json] = {}
    for key, asked in model.model_fields.items():
        if key not in values:
            continue
        kind = asked.annotation
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


def _frozen_tables(body: Body, frozen: Sequence[Any]) -> dict[str, Table]:
    """Every number and choice of the frozen configs, field by field; names of data are in the artifacts alone."""
    rows = [
        (canon.content_id(decision)[:_ID_DIGITS], name, value)
        for decision in frozen
        for name, value in _fields({**decision, "data": {"data_id": decision["data"]["data_id"]}})
    ]
    return {"frozen_config": Table(columns=("digest", "field", "value"), rows=tuple(rows))} if rows else {}


def _fields(value: Json, name: str = "") -> Iterable[tuple[str, str]]:
    """Path and text of every leaf."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if parts is None:
        yield name, canon.canonical(value).strip('"')
        return
    for key, part in parts:
        yield from _fields(part, f"{name}.{key}" if name else str(key))


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
_VERDICT = (
    "axis", "hyperparameter", "arm", "outcome", "transferred_value", "cost_of_2x_off_nats",
    "drift_octaves_per_doubling", "drift_octaves_per_doubling/low", "drift_octaves_per_doubling/high", "regret_nats",
    "regret_nats/low", "regret_nats/high",
)  # fmt: skip
_VALUE = (
    "hyperparameter", "base_value", "target_value", "rule", "outcome", "tested", "untested", "regret_nats",
    "regret_low", "regret_high", "cost_of_2x_off_nats",
)  # fmt: skip


def _tables(body: Body) -> dict[str, Table]:
    found: dict[str, Table] = {}
    if transfer := body["transfer"]:
        runs = run_rows(transfer)
        verdicts = [{**_asked(test), "arm": arm, **_judged(verdict)} for test, arm, verdict in _verdicts(body)]
        optima = [
            {**optimum, **_asked(test), "arm": arm, **_ends("log2", optimum["interval_log2"])}
            for test, arm, verdict in _verdicts(body)
            for optimum in verdict["optima"]
        ]
        found["transfer_runs"] = _table(runs, _RUN)
        found["optima"] = _table(optima, _OPTIMUM)
        found["verdicts"] = _table(verdicts, _VERDICT)
        found["values"] = _table([_value_row(value) for value in transfer["values"]], _VALUE)
    if search := body["search"]:
        found["search_trials"] = _table(search["trials"], tuple(search["trials"][0]))
    if ladder := body["ladder"]:
        found["ladder_rungs"] = _table(ladder["rungs"], tuple(ladder["rungs"][0]))
    if fit := body["fit"]:
        found["fit"] = _table([_fitted(fit, name) for name in fit["parameters"]], ("parameter", "value", "low", "high"))
    if body["gates"]:
        found["gates"] = _table(body["gates"], ("name", "outcome", "reason"))
    return found


def _table(rows: Sequence[Any], columns: tuple[str, ...]) -> Table:
    return Table(columns=columns, rows=tuple(tuple(row[column] for column in columns) for row in rows))


def _judged(verdict: Any) -> dict[str, Json]:
    plain: dict[str, Json] = {key: verdict[key] for key in ("outcome", "transferred_value", "cost_of_2x_off_nats")}
    for key in ("drift_octaves_per_doubling", "regret_nats"):
        plain |= _estimate(key, verdict[key])
    return plain


def _fitted(fit: Any, name: str) -> dict[str, Json]:
    low, high = (fit["intervals"] or {}).get(name) or (None, None)
    return {"parameter": name, "value": fit["parameters"][name], "low": low, "high": high}


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
