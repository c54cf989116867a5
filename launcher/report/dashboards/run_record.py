"""A run as a dashboard receives it: settings, rows by step, and a summary.

The record is the same for any dashboard. `build_study_record` builds the record that stands for a
whole study. Module `runs` builds the records of the study's proxies, and module `main_run` builds
the record of its main run. `wandb_writer` writes them to W&B.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import BaseModel

from forerun._launcher.report.views.finding import Finding
from forerun._launcher.report.views.report_model import Report
from forerun._launcher.study.plan.plan import Plan
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json

VERSION = 3
"""Version of the records' format. Raise it to have every run logged again."""
ID_DIGITS = 16
"""Hexadecimal digits of a run's id."""
Scalar = str | float | bool | None
Row = Mapping[str, float]
"""Numbers logged for one `step`. `take` is 1 plus the number of rollbacks so far. A row of a higher
take voids the rows of lower takes at the same step and later."""
_HASH_KEYS = ("data_id", "factory_sha256", "semantics")
"""Keys of a study's question that are hashes, and so hold no text that a person wrote."""
_VERDICT_KEYS = {
    "outcome",
    "transferred_value",
    "cost_of_2x_off_nats",
    "drift_octaves_per_doubling",
    "regret_nats",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run as a dashboard shows it."""

    run_id: str
    """Id of the logged object. The same id is the same run, however often it is logged."""
    name: str
    config: dict[str, Json]
    """Settings, without any free text that a person wrote."""
    summary: dict[str, Json] = field(default_factory=dict)
    """Numbers, outcomes and ids, with units in the keys; a key without a value is absent."""
    group: str = "study"
    """Stage, by which the dashboard groups runs."""
    job_type: str = "study"
    """Purpose of the run within its stage."""
    rows: Callable[[], Iterable[Row]] = tuple
    """Function that produces the logged rows, step by step, when they are needed. The default,
    `tuple`, produces none."""
    rows_id: str = ""
    """Id of the content of `rows`."""

    @property
    def body(self) -> dict[str, Any]:
        """Everything except the rows, as plain JSON."""
        return {name: value for name, value in asdict(self).items() if name != "rows"}

    @property
    def content(self) -> str:
        """Content id of the whole record: a record with the same id is not logged twice."""
        return canon.compute_content_id([VERSION, self.body])


def flatten_json(value: Json, name: str = "") -> dict[str, Scalar]:
    """Return every leaf of JSON data by its path, with the keys joined by `/`.

    A list of words is one leaf. An estimate (an object with `value` and `interval`) becomes its
    value at the path of the object, and the ends of its interval at `/low` and `/high`.
    """
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return {name: ", ".join(map(str, value))}
    if isinstance(value, dict):
        parts = list(value.items())
        if value.keys() >= {"value", "interval"}:
            low, high = typing.cast(list[Json], value["interval"]) or (None, None)
            other_fields = [(key, part) for key, part in parts if key not in ("value", "interval")]
            return {name: typing.cast(Scalar, value["value"])} | flatten_json(
                {"low": low, "high": high, **dict(other_fields)}, name
            )
    elif isinstance(value, list):
        parts = [(str(index), part) for index, part in enumerate(value)]
    else:
        return {name: value}
    return {
        path: leaf
        for key, part in parts
        for path, leaf in flatten_json(part, f"{name}/{key}" if name else key).items()
    }


def select_numbers(value: Json) -> dict[str, float]:
    """Return every number of JSON data by its path, without text, booleans, and nulls."""
    return {
        name: leaf
        for name, leaf in flatten_json(value).items()
        if isinstance(leaf, int | float) and not isinstance(leaf, bool)
    }


def compute_study_id(question: Any) -> str:
    """Return the id of the run that stands for a study; `study` in the config of its other runs.

    Args:
        question: The plan, without the keys that only set where and how fast to run.
    """
    return canon.compute_content_id(question)[:ID_DIGITS]


def build_study_record(report: Report) -> RunRecord:
    """Build the record of a study from its report; parts that have not run are absent."""
    question = report.question
    run_id = compute_study_id(question)
    hashes = {key: question[key] for key in _HASH_KEYS if key in question}
    return RunRecord(
        run_id=run_id,
        name=f"study {run_id[:8]}",
        config={**_select_choices(Plan, question), **hashes, "study": run_id},
        summary=_summarize_study(report),
    )


def _select_choices(model: type[BaseModel], values: Any) -> dict[str, Json]:
    """Return the numbers and fixed choices of a plan.

    Free text is left out: a command line, a path, or a name may hold a secret.
    """
    choices: dict[str, Json] = {}
    for key, plan_field in model.model_fields.items():
        if key not in values:
            continue
        annotation = plan_field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            choices[key] = _select_choices(annotation, values[key])
        elif not _allows_free_text(annotation):
            choices[key] = values[key]
    return choices


def _allows_free_text(annotation: Any) -> bool:
    """Return whether a value of this type can be text that is not from a fixed list."""
    if typing.get_origin(annotation) is typing.Literal:
        return False
    return annotation in (str, Any) or any(
        _allows_free_text(part) for part in typing.get_args(annotation)
    )


def _summarize_study(report: Report) -> dict[str, Json]:
    """Return the numbers and outcomes of every stage that has ended, by path."""
    outcomes = {gate.name: gate.outcome for gate in report.gates}
    summary: dict[str, Any] = {
        "gates": outcomes | dict.fromkeys(report.accepted_failures, "accepted failure"),
        "digest": report.digest,
        "ledger_head": report.ledger_head,
        "spend": report.spend.model_dump(include={"num_runs", "flops_causal", "share_of_target"}),
    }
    if search := report.search:
        losses = [trial.loss_nats for trial in search.trials if trial.loss_nats is not None]
        summary["search"] = {
            **{f"best_{key}": value for key, value in search.best.items()},
            "num_trials": len(search.trials),
            "best_loss_nats": min(losses, default=None),
        }
    if transfer := report.transfer:
        for test in transfer.tests:
            path = f"transfer/{test.axis}/{test.hyperparameter}"
            for key, verdict in ((path, test.verdict), (f"{path}/control", test.verdict.control)):
                if verdict is not None:
                    summary[key] = _dump(verdict, _VERDICT_KEYS)
        keys = {"outcome", "transferred_value", "margin_nats", "regret_nats"}
        summary["transfer/together"] = _dump(transfer.together, keys)
        for value in transfer.values:
            path = f"values/{value.hyperparameter}"
            summary |= {path: value.target_value, f"{path}/outcome": value.outcome}
    if fit := report.fit:
        summary["fit"] = {"status": fit.status, "residual_sd": fit.residual_sd, **fit.parameters}
    if choice := report.choice:
        prediction = choice.prediction
        summary["choice"] = {
            **_dump(choice, {"params", "tokens", "num_steps", "budget_flops"}),
            "loss_nats": {"value": prediction.loss, "interval": prediction.interval},
        }
    return {name: value for name, value in flatten_json(summary).items() if value is not None}


def _dump(finding: Finding, keys: set[str]) -> dict[str, Any]:
    """Return some keys of a finding as JSON; a key that was not set is absent."""
    return finding.model_dump(include=keys, exclude_unset=True)
