"""`compare.json`: two reports side by side: what they asked, what came out, how far apart, and what cannot be compared.

The first study is `a`, the second `b`; every difference is b less a.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from launcher.report import differences as differ
from launcher.views.numbers import Body, words
from launcher.views.transfer import hyperparameter_name, name_of, size_name
from proxies.core import canon
from proxies.core.canon import Json
from scaling_fits.forecast.conclusive import first_and_rest

_PARTS = ("question", "corpus", "transfer", "choice", "progress")
_OTHER_LOSSES = {
    "tokenizer": "the tokenizers are others, so are their losses per token",
    "vocab_size": "the vocabularies are others, so are their losses per token",
    "data_id": "the data is other data, and so are the texts that the losses were measured on",
}
_ANOTHER = "differs, and a value as set at the base means another one in the model"
_OTHER_VALUES = {
    "parametrization": ("no", f"the parametrization {_ANOTHER}"),
    "base_width": ("no", f"the base width {_ANOTHER}"),
    "batch_tokens": ("with_care", "the batch at the base differs, and optima move with it"),
    "num_steps": ("with_care", "the number of steps at the base differs, and optima move with it"),
}
"""By key of the proxy: learning rates are set at the base, under one parametrization."""


class NotAReportError(ValueError):
    """What was given is no study and no report; `problems` names each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def read_two(first: Path, second: Path) -> tuple[Body, Body]:
    """The bodies of two reports: of files, or of the studies in two folders, as they were last written.

    Raises:
        NotAReportError: one is none, or both; every problem is named.
    """
    read: list[Body] = []
    problems = []
    for path in (first, second):
        try:
            read.append(_report(path / "report.json" if path.is_dir() else path))
        except (OSError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else error
            problems.append(f"{path}: {what}; name a study that `forerun report` wrote a report of, or its report.json")
    if problems:
        raise NotAReportError(problems)
    return read[0], read[1]


def _report(path: Path) -> Body:
    body = canon.parse(path.read_bytes())
    if not isinstance(body, dict) or body.get("schema_version") != 1 or not body.keys() >= {*_PARTS}:
        raise ValueError("not a report as this version writes it")
    return body


def compare_body(a: Body, b: Body, names: tuple[str, str]) -> dict[str, Json]:
    """Everything the page says of both, differences first; parts that only one has, or neither, are null on a side."""
    limits = comparability(a, b)
    values = limits["values"]["comparable"] != "no"
    losses = limits["losses"]["comparable"] != "no"
    found: dict[str, Any] = {
        "schema_version": 1,
        "studies": {side: _study(body, name) for side, body, name in zip("ab", (a, b), names, strict=True)},
        "same_study": a["question"] == b["question"] and a["ledger_head"] == b["ledger_head"],
        "comparable": limits,
        "question": differ.question(a, b),
        "tests": differ.tests(a, b, values=values, losses=losses),
        "choice": differ.choices(a, b),
        "forecast": differ.forecasts(a, b, losses=losses),
    }
    return {**found, "summary": [f"{said[0].upper()}{said[1:]}." for said in sentences(found)]}


def _study(body: Body, name: str) -> dict[str, Json]:
    corpus, proxy = body["corpus"], body["question"]["proxy"]
    return {
        "name": name,
        "digest": body["digest"],
        "ledger_head": body["ledger_head"],
        **{key: corpus[key] for key in ("data_id", "tokenizer", "vocab_size")},
        **{key: proxy[key] for key in ("parametrization", "base_width")},
        "budget_flops": _budget(body),
        "progress": body["progress"],
    }


def _budget(body: Body) -> float | None:
    """The main run's FLOPs, as chosen or as the plan has them."""
    return cast("float | None", (body["choice"] or body["question"].get("target", {})).get("budget_flops"))


def comparability(a: Body, b: Body) -> dict[str, dict[str, Any]]:
    """Whether losses, values and forecasts can be compared: `yes`, `with_care` or `no`, each with reasons."""
    other = [key for key in ("tokenizer", "vocab_size", "data_id") if a["corpus"][key] != b["corpus"][key]]
    lengths = [body["question"].get("model", {}).get("seq_len") for body in (a, b)]
    losses = [("no", _OTHER_LOSSES[other[0]])] if "data_id" in other else []
    if lengths[0] != lengths[1]:
        losses.append(
            ("with_care", "the sequences are of other lengths: a model that sees more before a token loses less at it")
        )
    forecasts = list(losses)
    if _budget(a) != _budget(b):
        forecasts.append(("with_care", "the budgets differ, so the forecasts are of main runs of other compute"))
    first, second = (body["question"]["proxy"] for body in (a, b))
    values = [found for key, found in _OTHER_VALUES.items() if first.get(key) != second.get(key)]
    if "data_id" in other:
        values.append(("with_care", "the data differs, and optima may move with it"))
    found = {"losses": losses, "values": values, "forecasts": forecasts}
    return {what: _worst(limits) for what, limits in found.items()}


def _worst(limits: list[tuple[str, str]]) -> dict[str, Any]:
    """The worst of some limits with its reasons; without any all can be compared."""
    worst = min((limit for limit, _ in limits), default="yes")  # no, with_care, yes
    return {"comparable": worst, "reasons": [why for limit, why in limits if limit == worst]}


def sentences(body: Body) -> list[str]:
    """What differs, most telling first, as plain text."""
    if body["same_study"]:
        return ["both are one study at one moment: nothing differs"]
    said = []
    if body["comparable"]["losses"]["comparable"] == "no":
        said.append(f"losses cannot be compared: {'; '.join(body['comparable']['losses']['reasons'])}")
    found = body["forecast"]
    if found is not None and found["difference_nats"] and found["difference_nats"]["value"] is not None:
        said += forecast_doubts(found)
        said.append(f"main run's expected loss, B less A: {_plain(found['difference_nats'], '+.4f', 'nats')}")
    for test in body["tests"]:  # of optima the differences that their intervals do not explain
        said += [
            f"optimal {hyperparameter_name(test['hyperparameter'])} at {size_name(test['axis'], row['size'])}, "
            f"B less A: {_plain(row['difference_octaves'], '+.2f', 'octaves')}"
            for row in test["optima"]
            if row["difference_octaves"] and row["difference_octaves"]["apart"]
        ]
    for test in body["tests"]:
        a, b = test["outcome"]["a"], test["outcome"]["b"]
        if a is not None and b is not None and a != b:
            said.append(f"{name_of(test)}: A {words(a)}, B {words(b)}")
    return [*said, f"keys of the plans that differ: {len(body['question'])}"]


def forecast_doubts(found: Any) -> list[str]:
    """Why each side's forecast is inconclusive, if it is: said before its number."""
    sides = {name: found[side] for name, side in (("A", "a"), ("B", "b")) if found[side] is not None}
    return [f"{name}: {doubt}" for name, side in sides.items() for doubt in first_and_rest(side["warnings"])[0]]


def _plain(found: Any, spec: str, unit: str) -> str:
    """A difference as text, with its interval and what that says."""
    value, *ends = (format(x, f"+z{spec[1:]}") for x in [found["value"], *(found["interval"] or ())])
    if not ends:
        return f"{value} {unit}, with no interval"
    return f"{value} {unit} [{', '.join(ends)}]{'' if found['apart'] else ', which may be nothing'}"
