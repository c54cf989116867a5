"""A run as a dashboard receives it: settings, rows by step, and a summary, for any dashboard.

`study_record` makes the run that stands for a whole study, `runs` those of its proxies, and
`main_run` that of its main run. `wandb_writer` writes any of them.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import BaseModel

from launcher.frozen.launch_file import list_accepted_failures
from launcher.plan.plan import Plan
from launcher.views.numbers import Body
from proxies.core import canon
from proxies.core.canon import Json

VERSION = 3
"""Version of the records' format: raising it makes every run be logged again."""
ID_DIGITS = 16
"""Hexadecimal digits of a run's id."""
Scalar = str | float | bool | None
Row = Mapping[str, float]
"""Numbers logged for one `step`. `take` counts how often the run went back: a higher one voids the
later steps of earlier takes."""
_HASH_KEYS = ("data_id", "factory_sha256", "semantics")
_VERDICT_KEYS = (
    "outcome",
    "transferred_value",
    "cost_of_2x_off_nats",
    "drift_octaves_per_doubling",
    "regret_nats",
)


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
    rows: Callable[[], Iterable[Row]] = tuple
    """Function that produces the logged rows, step by step, when they are needed."""
    rows_id: str = ""
    """Id of the content of `rows`."""

    @property
    def body(self) -> dict[str, Any]:
        """Everything except the rows, as plain JSON."""
        return {name: value for name, value in asdict(self).items() if name != "rows"}

    @property
    def content(self) -> str:
        """Content id of the whole record: a record with the same id is not logged twice."""
        return canon.content_id([VERSION, self.body])


def flat(value: Json, name: str = "") -> dict[str, Scalar]:
    """Return every leaf of JSON data by its path, joined with `/`.

    An estimate goes by its own name, and the ends of its interval by `/low` and `/high`.
    """
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return {name: ", ".join(map(str, value))}
    if isinstance(value, dict):
        parts = list(value.items())
        if value.keys() >= {"value", "interval"}:
            low, high = typing.cast(list[Json], value["interval"]) or (None, None)
            other_fields = [(key, part) for key, part in parts if key not in ("value", "interval")]
            return {name: typing.cast(Scalar, value["value"])} | flat(
                {"low": low, "high": high, **dict(other_fields)}, name
            )
    elif isinstance(value, list):
        parts = [(str(index), part) for index, part in enumerate(value)]
    else:
        return {name: value}
    return {
        path: leaf
        for key, part in parts
        for path, leaf in flat(part, f"{name}/{key}" if name else key).items()
    }


def numbers(value: Json) -> dict[str, float]:
    """Return every number of JSON data by its path, without text, booleans, and nulls."""
    leaves = flat(value).items()
    return {
        name: leaf
        for name, leaf in leaves
        if isinstance(leaf, int | float) and not isinstance(leaf, bool)
    }


def study_id(question: Any) -> str:
    """Return the id of the run that stands for a study; `study` in the config of its other runs."""
    return canon.content_id(question)[:ID_DIGITS]


def study_record(body: Body) -> RunRecord:
    """Build the record of a study from its report's body; parts that have not run are absent."""
    run_id = study_id(body["question"])
    return RunRecord(
        run_id=run_id,
        name=f"study {run_id[:8]}",
        config={**_select_config(body["question"]), "study": run_id},
        summary=_summarize_study(body),
    )


def _select_config(question: Any) -> dict[str, Json]:
    """Return the numbers and fixed choices of a plan.

    Free text is left out: a command line, a path, or a name may hold a secret.
    """
    return {
        **_select_choices(Plan, question),
        **{key: question[key] for key in _HASH_KEYS if key in question},
    }


def _select_choices(model: type[BaseModel], values: Any) -> dict[str, Json]:
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


def _summarize_study(body: Body) -> dict[str, Json]:
    failures = list_accepted_failures(body["gates"], body["accepted"])
    outcomes = {gate["name"]: gate["outcome"] for gate in body["gates"]}
    summary: dict[str, Any] = {
        "gates": outcomes | dict.fromkeys(failures, "accepted failure"),
        "digest": body["digest"],
        "ledger_head": body["ledger_head"],
        "spend": {
            key: body["spend"][key] for key in ("num_runs", "flops_causal", "share_of_target")
        },
    }
    if search := body["search"]:
        losses = [
            trial["loss_nats"] for trial in search["trials"] if trial["loss_nats"] is not None
        ]
        best = {f"best_{key}": value for key, value in search["best"].items()}
        summary["search"] = {
            **best,
            "num_trials": len(search["trials"]),
            "best_loss_nats": min(losses, default=None),
        }
    if transfer := body["transfer"]:
        for test in transfer["tests"]:
            path, verdict = f"transfer/{test['axis']}/{test['hyperparameter']}", test["verdict"]
            arms = {path: verdict} | (
                {f"{path}/control": verdict["control"]} if verdict["control"] else {}
            )
            summary |= {
                arm: {key: verdict[key] for key in _VERDICT_KEYS} for arm, verdict in arms.items()
            }
        if together := transfer["together"]:
            keys = ("outcome", "transferred_value", "margin_nats", "regret_nats")
            summary["transfer/together"] = {key: together[key] for key in keys}
        for value in transfer["values"]:
            path = f"values/{value['hyperparameter']}"
            summary |= {path: value["target_value"], f"{path}/outcome": value["outcome"]}
    if fit := body["fit"]:
        summary["fit"] = {
            "status": fit["status"],
            "residual_sd": fit["residual_sd"],
            **fit["parameters"],
        }
    if choice := body["choice"]:
        loss = {"value": choice["prediction"]["loss"], "interval": choice["prediction"]["interval"]}
        keys = ("params", "tokens", "num_steps", "budget_flops")
        summary["choice"] = {**{key: choice[key] for key in keys}, "loss_nats": loss}
    return {name: value for name, value in flat(summary).items() if value is not None}
