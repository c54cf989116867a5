"""What differs between two reports, part by part, as plain JSON: optima, forecasts, each with its interval.

A difference of two estimates has an interval of its own: the distances from each estimate to the ends of its interval
are added as squares (MOVER, Zou and Donner 2008, doi:10.1002/sim.3095), which holds for independent estimates. Studies
of the same seeds and data share some of their noise, and then the interval errs on the wide side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from launcher.views.numbers import Body
from transfer.question import Hyperparameter, from_log2

NOT_THERE = "(not in the plan)"
"""The value of a plan's key that a study's question lacks, since it has its default."""
_OPTIMUM = ("status", "value", "log2_value", "interval_log2", "loss_nats", "num_runs")
_CHOSEN = ("params", "params_non_embedding", "tokens", "num_steps", "budget_flops")


def difference(
    both: Sequence[Any], levels: Sequence[float | None], value: str = "value", interval: str = "interval"
) -> dict[str, Any]:
    """The second less the first, its interval, and whether that tells the two apart; nulls where it cannot be said.

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
    return {side: None if of is None else read(of) for side, of in zip(("a", "b"), pair, strict=True)}


def question(a: Body, b: Body) -> list[Any]:
    """Keys of the plans that differ."""
    first, second = flat(a["question"]), flat(b["question"])
    keys = sorted(first.keys() | second.keys())
    rows = [{"key": key, "a": first.get(key, NOT_THERE), "b": second.get(key, NOT_THERE)} for key in keys]
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
            {"axis": axis, "hyperparameter": name, "outcome": _sides(pair, lambda v: v["outcome"]),
             "target_size": _sides(pair, lambda v: v["target_size"]), "level": _sides(pair, lambda v: v["level"]),
             "regret_nats": _estimates(pair, "regret_nats", comparable=losses),
             "drift_octaves_per_doubling": _estimates(pair, "drift_octaves_per_doubling", comparable=True),
             "optima": _optima(pair, name, comparable=values)}
        )  # fmt: skip
    return rows


def _estimates(pair: Sequence[Any], key: str, *, comparable: bool) -> dict[str, Any]:
    """Both sides' estimates with intervals, and the difference; none where it says nothing."""
    sides = _sides(pair, lambda verdict: verdict[key])
    return {**sides, "difference": difference([*sides.values()], _levels(pair)) if comparable else None}


def _optima(pair: Sequence[Any], name: Hyperparameter, *, comparable: bool) -> list[Any]:
    """Optima of both at every size that either ran."""
    by_size = [{o["size"]: o for o in (of or {"optima": []})["optima"]} for of in pair]
    rows = []
    for size in sorted(by_size[0].keys() | by_size[1].keys()):
        both = [sizes.get(size) for sizes in by_size]
        octaves = difference(both, _levels(pair), "log2_value", "interval_log2") if comparable else None
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
