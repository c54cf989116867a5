"""What a dashboard gets of a run: settings, rows step by step, numbers. Knows no dashboard.

`study_record` makes the run that stands for a whole study; `runs` makes those of its proxies,
`main_run` that of its main run. `wandb_writer` takes any of them.
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
"""The version of how records are made: when it is raised, all runs are logged anew."""
ID_DIGITS = 16
Scalar = str | float | bool | None
Row = Mapping[str, float]
"""What was logged of one `step`. `take` counts how often the run went back: a higher one voids the
later steps."""
_HASHES = ("data_id", "factory_sha256", "semantics")
_VERDICT = (
    "outcome",
    "transferred_value",
    "cost_of_2x_off_nats",
    "drift_octaves_per_doubling",
    "regret_nats",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run of a dashboard."""

    run_id: str
    """The id of what it is about: the same id is the same run, however often it is logged."""
    name: str
    config: dict[str, Json]
    """Settings: nothing that a person wrote freely."""
    summary: dict[str, Json] = field(default_factory=dict)
    """Numbers, outcomes and ids; units in the keys; no key where there is no value."""
    group: str = "study"
    """The stage."""
    job_type: str = "study"
    rows: Callable[[], Iterable[Row]] = tuple
    """What was logged, step by step; made when it is needed."""
    rows_id: str = ""
    """Names the content of `rows`."""

    @property
    def body(self) -> dict[str, Any]:
        """All but the rows, as plain JSON."""
        return {name: value for name, value in asdict(self).items() if name != "rows"}

    @property
    def content(self) -> str:
        """Content id of all of it: the same is not logged twice."""
        return canon.content_id([VERSION, self.body])


def flat(value: Json, name: str = "") -> dict[str, Scalar]:
    """Every leaf by its path, joined with `/`; an estimate by its own name, with `/low` and `/high`
    of its interval.
    """
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return {name: ", ".join(map(str, value))}
    if isinstance(value, dict):
        parts = list(value.items())
        if value.keys() >= {"value", "interval"}:
            low, high = typing.cast(list[Json], value["interval"]) or (None, None)
            rest = [(key, part) for key, part in parts if key not in ("value", "interval")]
            return {name: typing.cast(Scalar, value["value"])} | flat(
                {"low": low, "high": high, **dict(rest)}, name
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
    """Every number in it by its path; text, truth and what is not known are left out."""
    found = flat(value).items()
    return {
        name: leaf
        for name, leaf in found
        if isinstance(leaf, int | float) and not isinstance(leaf, bool)
    }


def study_id(question: Any) -> str:
    """The id of the run that stands for a study, and the value of `study` in the config of all its
    runs.
    """
    return canon.content_id(question)[:ID_DIGITS]


def study_record(body: Body) -> RunRecord:
    """What to log of a study by its report's body, finished or not: a part that has not run is
    absent.
    """
    run_id = study_id(body["question"])
    return RunRecord(
        run_id=run_id,
        name=f"study {run_id[:8]}",
        config={**_config(body["question"]), "study": run_id},
        summary=_summary(body),
    )


def _config(question: Any) -> dict[str, Json]:
    """Numbers and choices from fixed lists alone: a command line, a path or a name may hold a
    secret.
    """
    return {
        **_choices(Plan, question),
        **{key: question[key] for key in _HASHES if key in question},
    }


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
    failures = list_accepted_failures(body["gates"], body["accepted"])
    outcomes = {gate["name"]: gate["outcome"] for gate in body["gates"]}
    found: dict[str, Any] = {
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
        found["search"] = {
            **best,
            "num_trials": len(search["trials"]),
            "best_loss_nats": min(losses, default=None),
        }
    if transfer := body["transfer"]:
        for test in transfer["tests"]:
            at, verdict = f"transfer/{test['axis']}/{test['hyperparameter']}", test["verdict"]
            arms = {at: verdict} | (
                {f"{at}/control": verdict["control"]} if verdict["control"] else {}
            )
            found |= {arm: {key: of[key] for key in _VERDICT} for arm, of in arms.items()}
        if together := transfer["together"]:
            shown = ("outcome", "transferred_value", "margin_nats", "regret_nats")
            found["transfer/together"] = {key: together[key] for key in shown}
        for value in transfer["values"]:
            at = f"values/{value['hyperparameter']}"
            found |= {at: value["target_value"], f"{at}/outcome": value["outcome"]}
    if fit := body["fit"]:
        found["fit"] = {
            "status": fit["status"],
            "residual_sd": fit["residual_sd"],
            **fit["parameters"],
        }
    if choice := body["choice"]:
        loss = {"value": choice["prediction"]["loss"], "interval": choice["prediction"]["interval"]}
        shown = ("params", "tokens", "num_steps", "budget_flops")
        found["choice"] = {**{key: choice[key] for key in shown}, "loss_nats": loss}
    return {name: value for name, value in flat(found).items() if value is not None}
