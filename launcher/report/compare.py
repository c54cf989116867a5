"""`compare.json`: two reports side by side: what they asked, what came out, how far apart, and what
cannot be compared.

The first study is `a`, the second `b`; every difference is b less a.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from launcher.views.numbers import Body, words
from launcher.views.transfer import hyperparameter_name, name_of, size_name
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.errors import InputError
from proxies.core.plain_files import read_plain
from scaling_fits.forecast.conclusive import first_and_rest
from transfer.question import Hyperparameter, from_log2

# What differs between two reports, part by part, as plain JSON: optima, forecasts, each with its
# interval.
#
# A difference of two estimates has an interval of its own: the distances from each estimate to the
# ends of its interval are added as squares (MOVER, Zou and Donner 2008, doi:10.1002/sim.3095),
# which holds for independent estimates. Studies of the same seeds and data share some of their
# noise, and then the interval errs on the wide side.

NOT_THERE = "(not in the plan)"
"""The value of a plan's key that a study's question lacks, since it has its default."""
_OPTIMUM = ("status", "value", "log2_value", "interval_log2", "loss_nats", "num_runs")
_CHOSEN = ("params", "params_non_embedding", "tokens", "num_steps", "budget_flops")


def difference(
    both: Sequence[Any],
    levels: Sequence[float | None],
    value: str = "value",
    interval: str = "interval",
) -> dict[str, Any]:
    """The second less the first, its interval, and whether it is significant; nulls where that is
    unknown.

    Args:
        both: records of estimates; None where there is none.
        levels: of both intervals; intervals of other levels give none.
        value: the estimate's name in a record.
        interval: its interval's, (low, high).
    """
    (a, first), (b, second) = ((of[value], of[interval]) if of else (None, None) for of in both)
    if a is None or b is None:
        return {"value": None, "interval": None, "apart": None}
    if first is None or second is None or levels[0] != levels[1]:
        return {"value": b - a, "interval": None, "apart": None}
    # An interval of resampled fits need not hold the estimate: a distance is none then, not less.
    low = b - a - math.hypot(max(b - second[0], 0.0), max(first[1] - a, 0.0))
    high = b - a + math.hypot(max(second[1] - b, 0.0), max(a - first[0], 0.0))
    return {"value": b - a, "interval": [low, high], "apart": low > 0 or high < 0}


def _levels(pair: Sequence[Any]) -> list[float | None]:
    return [None if of is None else of["level"] for of in pair]


def _sides(pair: Sequence[Any], read: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        side: None if of is None else read(of) for side, of in zip(("a", "b"), pair, strict=True)
    }


def question(a: Body, b: Body) -> list[Any]:
    """Keys of the plans that differ."""
    first, second = flat(a["question"]), flat(b["question"])
    keys = sorted(first.keys() | second.keys())
    rows = [
        {"key": key, "a": first.get(key, NOT_THERE), "b": second.get(key, NOT_THERE)}
        for key in keys
    ]
    return [row for row in rows if row["a"] != row["b"]]


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of JSON data by its path; a list is one leaf."""
    if isinstance(value, dict) and (value or not path):
        found: dict[str, Any] = {}
        for key, held in value.items():
            found |= flat(held, f"{path}.{key}" if path else str(key))
        return found
    return {path: value}


def _by_name(body: Body) -> dict[tuple[str, Hyperparameter], Any]:
    tests = (body["transfer"] or {"tests": []})["tests"]
    return {(test["axis"], test["hyperparameter"]): test["verdict"] for test in tests}


def tests(a: Body, b: Body, *, values: bool, losses: bool) -> list[Any]:
    """Every test of either: outcome, regret, drift, and the optima at the sizes that both ran.

    Args:
        a: the first report's body.
        b: the second's.
        values: whether optima may be subtracted.
        losses: whether costs in nats may be.
    """
    first, second = _by_name(a), _by_name(b)
    rows = []
    for axis, name in first | second:
        pair = (first.get((axis, name)), second.get((axis, name)))
        rows.append(
            {
                "axis": axis,
                "hyperparameter": name,
                "outcome": _sides(pair, lambda v: v["outcome"]),
                "target_size": _sides(pair, lambda v: v["target_size"]),
                "level": _sides(pair, lambda v: v["level"]),
                "regret_nats": _estimates(pair, "regret_nats", comparable=losses),
                "drift_octaves_per_doubling": _estimates(
                    pair, "drift_octaves_per_doubling", comparable=True
                ),
                "optima": _optima(pair, name, comparable=values),
            }
        )
    return rows


def _estimates(pair: Sequence[Any], key: str, *, comparable: bool) -> dict[str, Any]:
    """Both sides' estimates with intervals, and the difference; none where it says nothing."""
    sides = _sides(pair, lambda verdict: verdict[key])
    return {
        **sides,
        "difference": difference([*sides.values()], _levels(pair)) if comparable else None,
    }


def _optima(pair: Sequence[Any], name: Hyperparameter, *, comparable: bool) -> list[Any]:
    """Optima of both at every size that either ran."""
    by_size = [{o["size"]: o for o in (of or {"optima": []})["optima"]} for of in pair]
    rows = []
    for size in sorted(by_size[0].keys() | by_size[1].keys()):
        both = [sizes.get(size) for sizes in by_size]
        octaves = (
            difference(both, _levels(pair), "log2_value", "interval_log2") if comparable else None
        )
        sides = _sides(both, lambda optimum: _optimum(optimum, name))
        rows.append({"size": size, **sides, "difference_octaves": octaves})
    return rows


def _optimum(optimum: Any, name: Hyperparameter) -> dict[str, Any]:
    """What is kept of an optimum; its interval in octaves, and as values."""
    ends = optimum["interval_log2"]
    shown = None if ends is None else sorted(from_log2(name, end) for end in ends)
    return {**{key: optimum[key] for key in _OPTIMUM}, "interval": shown}


def choices(a: Body, b: Body) -> list[Any]:
    """What each would launch, one row a property."""
    chosen = [body["choice"] or {} for body in (a, b)]
    shapes = [of.get("shape", {}) for of in chosen]
    rows = [(key, [of.get(key) for of in chosen]) for key in _CHOSEN]
    rows += [(key, [of.get(key) for of in shapes]) for key in shapes[0] | shapes[1]]
    return [{"key": key, "a": both[0], "b": both[1]} for key, both in rows if both != [None, None]]


def forecasts(a: Body, b: Body, *, losses: bool) -> Any:
    """The main runs' predicted losses."""
    pair = [body["choice"] and body["choice"]["prediction"] for body in (a, b)]
    if pair == [None, None]:
        return None
    keys = ("loss", "interval", "level", "flops", "extrapolation", "warnings")
    found = difference(pair, _levels(pair), "loss") if losses else None
    return {**_sides(pair, lambda of: {key: of[key] for key in keys}), "difference_nats": found}


_PARTS = ("question", "corpus", "transfer", "choice", "progress")
_OTHER_LOSSES = {
    "tokenizer": "the tokenizers differ, so losses per token are not on one scale",
    "vocab_size": "the vocabularies differ, so losses per token are not on one scale",
    "data_id": "the data differs, so the losses were measured on different texts",
}
_ANOTHER = "differs, so one value at the base means different values in the model"
_OTHER_VALUES = {
    "parametrization": ("no", f"the parametrization {_ANOTHER}"),
    "base_width": ("no", f"the base width {_ANOTHER}"),
    "batch_tokens": ("with_care", "the batch at the base differs, and optima shift with it"),
    "num_steps": ("with_care", "the number of steps at the base differs, and optima shift with it"),
}
"""By key of the proxy: learning rates are set at the base, under one parametrization."""


class NotAReportError(InputError):
    """What was given is neither a study nor a report; `problems` names each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def read_two(first: Path, second: Path) -> tuple[Body, Body]:
    """The bodies of two reports: of files, or of the studies in two folders, as they were last
    written.

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
            problems.append(
                f"{path}: {what}; name a study with a report (`forerun report` writes it) or a "
                "report.json"
            )
    if problems:
        raise NotAReportError(problems)
    return read[0], read[1]


def _report(path: Path) -> Body:
    body = canon.parse(read_plain(path))
    if (
        not isinstance(body, dict)
        or body.get("schema_version") != 1
        or not body.keys() >= {*_PARTS}
    ):
        raise ValueError("not a report of this version")
    return body


def compare_body(a: Body, b: Body, names: tuple[str, str]) -> dict[str, Json]:
    """Everything the page says of both, differences first; parts that only one has, or neither, are
    null on a side.
    """
    limits = comparability(a, b)
    values = limits["values"]["comparable"] != "no"
    losses = limits["losses"]["comparable"] != "no"
    found: dict[str, Any] = {
        "schema_version": 1,
        "studies": {
            side: _study(body, name) for side, body, name in zip("ab", (a, b), names, strict=True)
        },
        "same_study": a["question"] == b["question"] and a["ledger_head"] == b["ledger_head"],
        "comparable": limits,
        "question": question(a, b),
        "tests": tests(a, b, values=values, losses=losses),
        "choice": choices(a, b),
        "forecast": forecasts(a, b, losses=losses),
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
    return cast(
        "float | None", (body["choice"] or body["question"].get("target", {})).get("budget_flops")
    )


def comparability(a: Body, b: Body) -> dict[str, dict[str, Any]]:
    """Whether losses, values and forecasts can be compared: `yes`, `with_care` or `no`, each with
    reasons.
    """
    other = [
        key
        for key in ("tokenizer", "vocab_size", "data_id")
        if a["corpus"][key] != b["corpus"][key]
    ]
    lengths = [body["question"].get("model", {}).get("seq_len") for body in (a, b)]
    losses = [("no", _OTHER_LOSSES[other[0]])] if "data_id" in other else []
    if lengths[0] != lengths[1]:
        losses.append(
            (
                "with_care",
                "the sequence lengths differ, and more context before a token lowers its loss",
            )
        )
    forecasts = list(losses)
    if _budget(a) != _budget(b):
        forecasts.append(
            (
                "with_care",
                "the budgets differ, so the forecasts are for main runs with different compute",
            )
        )
    first, second = (body["question"]["proxy"] for body in (a, b))
    values = [found for key, found in _OTHER_VALUES.items() if first.get(key) != second.get(key)]
    if "data_id" in other:
        values.append(("with_care", "the data differs, and optima may shift with it"))
    found = {"losses": losses, "values": values, "forecasts": forecasts}
    return {what: _worst(limits) for what, limits in found.items()}


def _worst(limits: list[tuple[str, str]]) -> dict[str, Any]:
    """The worst of some limits with its reasons; without any all can be compared."""
    worst = min((limit for limit, _ in limits), default="yes")  # no, with_care, yes
    return {"comparable": worst, "reasons": [why for limit, why in limits if limit == worst]}


def sentences(body: Body) -> list[str]:
    """What differs, most important first, as plain text."""
    if body["same_study"]:
        return ["both are the same study at the same moment: nothing differs"]
    said = []
    if body["comparable"]["losses"]["comparable"] == "no":
        said.append(
            f"losses cannot be compared: {'; '.join(body['comparable']['losses']['reasons'])}"
        )
    found = body["forecast"]
    if (
        found is not None
        and found["difference_nats"]
        and found["difference_nats"]["value"] is not None
    ):
        said += forecast_doubts(found)
        said.append(
            "the main run's expected loss, B minus A: "
            f"{_plain(found['difference_nats'], '+.4f', 'nats')}"
        )
    for test in body["tests"]:  # of optima the differences that their intervals do not explain
        said += [
            f"optimal {hyperparameter_name(test['hyperparameter'])} at "
            f"{size_name(test['axis'], row['size'])}, "
            f"B minus A: {_plain(row['difference_octaves'], '+.2f', 'octaves')}"
            for row in test["optima"]
            if row["difference_octaves"] and row["difference_octaves"]["apart"]
        ]
    for test in body["tests"]:
        a, b = test["outcome"]["a"], test["outcome"]["b"]
        if a is not None and b is not None and a != b:
            said.append(f"{name_of(test)}: A {words(a)}, B {words(b)}")
    return [*said, f"keys of the plans that differ: {len(body['question'])}"]


def forecast_doubts(found: Any) -> list[str]:
    """Why each side's forecast is inconclusive, if it is: shown before its number."""
    sides = {
        name: found[side] for name, side in (("A", "a"), ("B", "b")) if found[side] is not None
    }
    return [
        f"{name}: {doubt}"
        for name, side in sides.items()
        for doubt in first_and_rest(side["warnings"])[0]
    ]


def _plain(found: Any, spec: str, unit: str) -> str:
    """A difference as text, with its interval and what that says."""
    value, *ends = (
        format(x, f"+z{spec[1:]}") for x in [found["value"], *(found["interval"] or ())]
    )
    if not ends:
        return f"{value} {unit}, with no interval"
    return f"{value} {unit} [{', '.join(ends)}]{'' if found['apart'] else ', which may be zero'}"
