"""The content of `compare.json`: two reports compared, part by part.

It lists which plan keys differ, how far results are apart, and what cannot be compared. The first
study is `a`, the second `b`; every difference is b minus a.

A difference of two estimates has an interval of its own: the distances from each estimate to the
ends of its interval are added as squares (MOVER, Zou and Donner 2008, doi:10.1002/sim.3095), which
holds for independent estimates. Studies of the same seeds and data share some of their noise, and
then the interval is too wide.
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

NOT_THERE = "(not in the plan)"
"""Value shown for a key that one study's plan lacks because it has the default."""
_OPTIMUM_KEYS = ("status", "value", "log2_value", "interval_log2", "loss_nats", "num_runs")
_CHOICE_KEYS = ("params", "params_non_embedding", "tokens", "num_steps", "budget_flops")


def difference(
    both: Sequence[Any],
    levels: Sequence[float | None],
    value: str = "value",
    interval: str = "interval",
) -> dict[str, Any]:
    """Return the second estimate minus the first, its interval, and whether it excludes zero.

    Args:
        both: Records of the two estimates; None where there is none.
        levels: Levels of the two intervals; if they differ, the difference has no interval.
        value: Key of the estimate in a record.
        interval: Key of its interval, (low, high).

    Returns:
        `value`, `interval`, and `apart` (whether the interval excludes zero); null where unknown.
    """
    (a, first), (b, second) = ((of[value], of[interval]) if of else (None, None) for of in both)
    if a is None or b is None:
        return {"value": None, "interval": None, "apart": None}
    if first is None or second is None or levels[0] != levels[1]:
        return {"value": b - a, "interval": None, "apart": None}
    # An interval from resampled fits may lie beside its estimate; the distance to that end is 0.
    low = b - a - math.hypot(max(b - second[0], 0.0), max(first[1] - a, 0.0))
    high = b - a + math.hypot(max(second[1] - b, 0.0), max(a - first[0], 0.0))
    return {"value": b - a, "interval": [low, high], "apart": low > 0 or high < 0}


def _get_levels(pair: Sequence[Any]) -> list[float | None]:
    return [None if record is None else record["level"] for record in pair]


def _read_sides(pair: Sequence[Any], read: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        side: None if record is None else read(record)
        for side, record in zip(("a", "b"), pair, strict=True)
    }


def question(a: Body, b: Body) -> list[Any]:
    """Return the keys of the plans that differ, with both values."""
    first_leaves, second_leaves = flat(a["question"]), flat(b["question"])
    keys = sorted(first_leaves.keys() | second_leaves.keys())
    rows = [
        {"key": key, "a": first_leaves.get(key, NOT_THERE), "b": second_leaves.get(key, NOT_THERE)}
        for key in keys
    ]
    return [row for row in rows if row["a"] != row["b"]]


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return every leaf of JSON data by its dotted path; a list is one leaf."""
    if isinstance(value, dict) and (value or not path):
        leaves: dict[str, Any] = {}
        for key, child in value.items():
            leaves |= flat(child, f"{path}.{key}" if path else str(key))
        return leaves
    return {path: value}


def _index_verdicts(body: Body) -> dict[tuple[str, Hyperparameter], Any]:
    tests = (body["transfer"] or {"tests": []})["tests"]
    return {(test["axis"], test["hyperparameter"]): test["verdict"] for test in tests}


def tests(a: Body, b: Body, *, values: bool, losses: bool) -> list[Any]:
    """Compare every test that either study made: outcome, regret, drift, and optima by size.

    Args:
        a: Body of the first report.
        b: Body of the second report.
        values: Whether optima may be subtracted.
        losses: Whether losses in nats may be subtracted.
    """
    first_verdicts, second_verdicts = _index_verdicts(a), _index_verdicts(b)
    rows = []
    for axis, name in first_verdicts | second_verdicts:
        pair = (first_verdicts.get((axis, name)), second_verdicts.get((axis, name)))
        rows.append(
            {
                "axis": axis,
                "hyperparameter": name,
                "outcome": _read_sides(pair, lambda v: v["outcome"]),
                "target_size": _read_sides(pair, lambda v: v["target_size"]),
                "level": _read_sides(pair, lambda v: v["level"]),
                "regret_nats": _compare_estimates(pair, "regret_nats", comparable=losses),
                "drift_octaves_per_doubling": _compare_estimates(
                    pair, "drift_octaves_per_doubling", comparable=True
                ),
                "optima": _compare_optima(pair, name, comparable=values),
            }
        )
    return rows


def _compare_estimates(pair: Sequence[Any], key: str, *, comparable: bool) -> dict[str, Any]:
    """Return both sides' estimates and their difference; null if they are not comparable."""
    sides = _read_sides(pair, lambda verdict: verdict[key])
    return {
        **sides,
        "difference": difference([*sides.values()], _get_levels(pair)) if comparable else None,
    }


def _compare_optima(pair: Sequence[Any], name: Hyperparameter, *, comparable: bool) -> list[Any]:
    """Return both sides' optima at every size that either study ran."""
    by_size = [
        {optimum["size"]: optimum for optimum in (verdict or {"optima": []})["optima"]}
        for verdict in pair
    ]
    rows = []
    for size in sorted(by_size[0].keys() | by_size[1].keys()):
        both = [sizes.get(size) for sizes in by_size]
        octaves = (
            difference(both, _get_levels(pair), "log2_value", "interval_log2")
            if comparable
            else None
        )
        sides = _read_sides(both, lambda optimum: _describe_optimum(optimum, name))
        rows.append({"size": size, **sides, "difference_octaves": octaves})
    return rows


def _describe_optimum(optimum: Any, name: Hyperparameter) -> dict[str, Any]:
    """Return the compared keys of an optimum, with its interval as values besides octaves."""
    ends = optimum["interval_log2"]
    shown = None if ends is None else sorted(from_log2(name, end) for end in ends)
    return {**{key: optimum[key] for key in _OPTIMUM_KEYS}, "interval": shown}


def choices(a: Body, b: Body) -> list[Any]:
    """Return the main run that each study chose, one row per property."""
    chosen = [body["choice"] or {} for body in (a, b)]
    shapes = [choice.get("shape", {}) for choice in chosen]
    rows = [(key, [choice.get(key) for choice in chosen]) for key in _CHOICE_KEYS]
    rows += [(key, [choice.get(key) for choice in shapes]) for key in shapes[0] | shapes[1]]
    return [{"key": key, "a": both[0], "b": both[1]} for key, both in rows if both != [None, None]]


def forecasts(a: Body, b: Body, *, losses: bool) -> Any:
    """Return the predicted losses of both main runs, and their difference."""
    pair = [body["choice"] and body["choice"]["prediction"] for body in (a, b)]
    if pair == [None, None]:
        return None
    keys = ("loss", "interval", "level", "flops", "extrapolation", "warnings")
    loss_difference = difference(pair, _get_levels(pair), "loss") if losses else None
    return {
        **_read_sides(pair, lambda prediction: {key: prediction[key] for key in keys}),
        "difference_nats": loss_difference,
    }


_REQUIRED_SECTIONS = ("question", "corpus", "transfer", "choice", "progress")
_OTHER_LOSSES = {
    "tokenizer": "the tokenizers differ, so losses per token are not on one scale",
    "vocab_size": "the vocabularies differ, so losses per token are not on one scale",
    "data_id": "the data differs, so the losses were measured on different texts",
}
_MEANING_DIFFERS = "differs, so one value at the base means different values in the model"
_OTHER_VALUES = {
    "parametrization": ("no", f"the parametrization {_MEANING_DIFFERS}"),
    "base_width": ("no", f"the base width {_MEANING_DIFFERS}"),
    "batch_tokens": ("with_care", "the batch at the base differs, and optima shift with it"),
    "num_steps": ("with_care", "the number of steps at the base differs, and optima shift with it"),
}
"""Limits on comparing hyperparameters, by the key of `proxy` that differs. Learning rates are set
at the base, under one parametrization."""


class NotAReportError(InputError):
    """An input is neither a study nor a report; `problems` names each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def read_two(first: Path, second: Path) -> tuple[Body, Body]:
    """Read two reports, from files or from the folders of studies.

    Args:
        first: Path of a `report.json`, or a study's folder, for side `a`.
        second: The same for side `b`.

    Raises:
        NotAReportError: One path, or both, are not reports; every problem is named.
    """
    read: list[Body] = []
    problems = []
    for path in (first, second):
        try:
            read.append(_read_report(path / "report.json" if path.is_dir() else path))
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else error
            problems.append(
                f"{path}: {problem}; name a study with a report (`forerun report` writes it) or a "
                "report.json"
            )
    if problems:
        raise NotAReportError(problems)
    return read[0], read[1]


def _read_report(path: Path) -> Body:
    body = canon.parse(read_plain(path))
    if (
        not isinstance(body, dict)
        or body.get("schema_version") != 1
        or not body.keys() >= {*_REQUIRED_SECTIONS}
    ):
        raise ValueError("not a report of this version")
    return body


def compare_body(a: Body, b: Body, names: tuple[str, str]) -> dict[str, Json]:
    """Return the content of `compare.json`. A section that a study lacks is null on its side.

    Args:
        a: Body of the first report.
        b: Body of the second report.
        names: Names of the two studies.
    """
    limits = comparability(a, b)
    values = limits["values"]["comparable"] != "no"
    losses = limits["losses"]["comparable"] != "no"
    comparison: dict[str, Any] = {
        "schema_version": 1,
        "studies": {
            side: _describe_study(body, name)
            for side, body, name in zip("ab", (a, b), names, strict=True)
        },
        "same_study": a["question"] == b["question"] and a["ledger_head"] == b["ledger_head"],
        "comparable": limits,
        "question": question(a, b),
        "tests": tests(a, b, values=values, losses=losses),
        "choice": choices(a, b),
        "forecast": forecasts(a, b, losses=losses),
    }
    return {
        **comparison,
        "summary": [f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences(comparison)],
    }


def _describe_study(body: Body, name: str) -> dict[str, Json]:
    corpus, proxy = body["corpus"], body["question"]["proxy"]
    return {
        "name": name,
        "digest": body["digest"],
        "ledger_head": body["ledger_head"],
        **{key: corpus[key] for key in ("data_id", "tokenizer", "vocab_size")},
        **{key: proxy[key] for key in ("parametrization", "base_width")},
        "budget_flops": _find_budget(body),
        "progress": body["progress"],
    }


def _find_budget(body: Body) -> float | None:
    """Return the main run's FLOPs as chosen, or as the plan gives them."""
    return cast(
        "float | None", (body["choice"] or body["question"].get("target", {})).get("budget_flops")
    )


def comparability(a: Body, b: Body) -> dict[str, dict[str, Any]]:
    """Return whether losses, values and forecasts can be compared, with reasons.

    Each is `yes`, `with_care`, or `no`.
    """
    changed_keys = [
        key
        for key in ("tokenizer", "vocab_size", "data_id")
        if a["corpus"][key] != b["corpus"][key]
    ]
    lengths = [body["question"].get("model", {}).get("seq_len") for body in (a, b)]
    losses = [("no", _OTHER_LOSSES[changed_keys[0]])] if "data_id" in changed_keys else []
    if lengths[0] != lengths[1]:
        losses.append(
            (
                "with_care",
                "the sequence lengths differ, and more context before a token lowers its loss",
            )
        )
    forecasts = list(losses)
    if _find_budget(a) != _find_budget(b):
        forecasts.append(
            (
                "with_care",
                "the budgets differ, so the forecasts are for main runs with different compute",
            )
        )
    first, second = (body["question"]["proxy"] for body in (a, b))
    values = [limit for key, limit in _OTHER_VALUES.items() if first.get(key) != second.get(key)]
    if "data_id" in changed_keys:
        values.append(("with_care", "the data differs, and optima may shift with it"))
    limits_by_quantity = {"losses": losses, "values": values, "forecasts": forecasts}
    return {
        quantity: _combine_limits(quantity_limits)
        for quantity, quantity_limits in limits_by_quantity.items()
    }


def _combine_limits(limits: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the strictest of some limits, with its reasons; `yes` if there is no limit."""
    # Alphabetical order happens to be the order of strictness: no, with_care, yes.
    worst = min((limit for limit, _ in limits), default="yes")
    return {"comparable": worst, "reasons": [reason for limit, reason in limits if limit == worst]}


def sentences(body: Body) -> list[str]:
    """Return the differences as plain sentences, the most important first."""
    if body["same_study"]:
        return ["both are the same study at the same moment: nothing differs"]
    lines = []
    if body["comparable"]["losses"]["comparable"] == "no":
        lines.append(
            f"losses cannot be compared: {'; '.join(body['comparable']['losses']['reasons'])}"
        )
    forecast = body["forecast"]
    if (
        forecast is not None
        and forecast["difference_nats"]
        and forecast["difference_nats"]["value"] is not None
    ):
        lines += forecast_doubts(forecast)
        lines.append(
            "the main run's expected loss, B minus A: "
            f"{_format_difference(forecast['difference_nats'], '+.4f', 'nats')}"
        )
    # Only the differences of optima that their intervals do not explain are shown.
    for test in body["tests"]:
        lines += [
            f"optimal {hyperparameter_name(test['hyperparameter'])} at "
            f"{size_name(test['axis'], row['size'])}, "
            f"B minus A: {_format_difference(row['difference_octaves'], '+.2f', 'octaves')}"
            for row in test["optima"]
            if row["difference_octaves"] and row["difference_octaves"]["apart"]
        ]
    for test in body["tests"]:
        a, b = test["outcome"]["a"], test["outcome"]["b"]
        if a is not None and b is not None and a != b:
            lines.append(f"{name_of(test)}: A {words(a)}, B {words(b)}")
    return [*lines, f"keys of the plans that differ: {len(body['question'])}"]


def forecast_doubts(forecast: Any) -> list[str]:
    """Return the reasons why each side's forecast is inconclusive; they precede its number."""
    sides = {
        name: forecast[side]
        for name, side in (("A", "a"), ("B", "b"))
        if forecast[side] is not None
    }
    return [
        f"{name}: {doubt}"
        for name, side in sides.items()
        for doubt in first_and_rest(side["warnings"])[0]
    ]


def _format_difference(difference: Any, spec: str, unit: str) -> str:
    """Format a difference with its interval, and say if it may be zero."""
    value, *ends = (
        format(x, f"+z{spec[1:]}") for x in [difference["value"], *(difference["interval"] or ())]
    )
    if not ends:
        return f"{value} {unit}, with no interval"
    return (
        f"{value} {unit} [{', '.join(ends)}]{'' if difference['apart'] else ', which may be zero'}"
    )
