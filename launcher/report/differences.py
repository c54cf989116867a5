"""What differs between two reports, part by part, as plain JSON: optima, laws, forecasts, each with its interval.

A difference of two estimates has an interval of its own: the distances from each estimate to the ends of its interval
are added as squares (MOVER, Zou and Donner 2008, doi:10.1002/sim.3095), which holds for independent estimates. Studies
of the same seeds and data share some of their noise, and then the interval errs on the wide side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from launcher.views.numbers import Body
from proxies.core.canon import Json
from transfer.question import Hyperparameter, from_log2

NOT_THERE = "(not in the plan)"
"""Of a plan's key that a study's question lacks: it was begun by a version without it, or has its default."""

_OPTIMUM = ("status", "value", "log2_value", "interval_log2", "loss_nats", "num_runs", "curve")
_CHOSEN = ("params", "params_non_embedding", "tokens", "num_steps", "budget_flops")


def difference(
    values: Sequence[float | None], intervals: Sequence[Sequence[float] | None], levels: Sequence[float | None],
    *, same: bool = False,
) -> dict[str, Json]:  # fmt: skip
    """The second less the first, its interval, and whether the two intervals overlap; nulls where it cannot be said.

    Args:
        values: of both.
        intervals: of both, (low, high).
        levels: of both intervals; intervals of other levels give none.
        same: both are one estimate, so that nothing is left open.
    """
    a, b = values
    if a is None or b is None:
        return {"value": None, "interval": None, "overlap": None, "apart": None}
    if same:
        return {"value": 0.0, "interval": [0.0, 0.0], "overlap": True, "apart": False}
    first, second = intervals
    if first is None or second is None or levels[0] != levels[1]:
        return {"value": b - a, "interval": None, "overlap": None, "apart": None}
    # An interval of resampled fits need not hold the estimate: a distance is none then, not less.
    low = b - a - math.hypot(max(b - second[0], 0.0), max(first[1] - a, 0.0))
    high = b - a + math.hypot(max(second[1] - b, 0.0), max(a - first[0], 0.0))
    return {
        "value": b - a,
        "interval": [low, high],
        "overlap": first[0] <= second[1] and second[0] <= first[1],
        "apart": low > 0 or high < 0,
    }


def _between(
    both: Sequence[Any], levels: Sequence[float | None], value: str = "value", interval: str = "interval", *, same: bool
) -> dict[str, Json]:
    """The difference of two records by the names of estimate and interval in them; a record may be None."""
    held = [of or {value: None, interval: None} for of in both]
    return difference([of[value] for of in held], [of[interval] for of in held], levels, same=same)


def _levels(pair: Sequence[Any]) -> list[float | None]:
    return [None if of is None else of["level"] for of in pair]


def budget(body: Body) -> float | None:
    """The main run's FLOPs, as chosen or as the plan has them."""
    chosen = (body.get("choice") or {}).get("budget_flops")
    found = chosen or body["question"].get("target", {}).get("budget_flops")
    return None if found is None else float(found)


def question(a: Body, b: Body) -> list[Json]:
    """Keys of the plans that differ."""
    first, second = flat(a["question"]), flat(b["question"])
    keys = sorted(first.keys() | second.keys())
    rows = [{"key": key, "a": first.get(key, NOT_THERE), "b": second.get(key, NOT_THERE)} for key in keys]
    return cast(list[Json], [row for row in rows if row["a"] != row["b"]])


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of JSON data by its path; a list is one leaf."""
    if isinstance(value, dict) and (value or not path):
        found: dict[str, Any] = {}
        for key, held in value.items():
            found |= flat(held, f"{path}.{key}" if path else str(key))
        return found
    return {path: value}


def _by_name(body: Body) -> dict[tuple[str, Hyperparameter], Any]:
    tests = (body.get("transfer") or {"tests": []})["tests"]
    return {(test["axis"], test["hyperparameter"]): test["verdict"] for test in tests}


def tests(a: Body, b: Body, *, same: bool, values: bool, losses: bool) -> list[Json]:
    """Every test of either: outcome, regret, drift, and the optima at the sizes that both ran.

    Args:
        a: the first report's body.
        b: the second's.
        same: both are one study.
        values: whether optima may be subtracted.
        losses: whether costs in nats may be.
    """
    first, second = _by_name(a), _by_name(b)
    rows = []
    for axis, name in first | second:
        pair = (first.get((axis, name)), second.get((axis, name)))
        estimates = {
            "regret_nats": _estimates(pair, "regret_nats", same=same, comparable=losses),
            "drift_octaves_per_doubling": _estimates(pair, "drift_octaves_per_doubling", same=same),
        }
        rows.append(
            {"axis": axis, "hyperparameter": name, "outcome": _sides(pair, lambda v: v["outcome"]),
             "target_size": _sides(pair, lambda v: v["target_size"]), "level": _sides(pair, lambda v: v["level"]),
             **estimates, "optima": _optima(pair, name, same=same, comparable=values)}
        )  # fmt: skip
    return cast(list[Json], rows)


def _sides(pair: Sequence[Any], read: Any) -> dict[str, Any]:
    return {side: None if of is None else read(of) for side, of in zip(("a", "b"), pair, strict=True)}


def _estimates(pair: Sequence[Any], key: str, *, same: bool, comparable: bool = True) -> dict[str, Any]:
    """Both sides' estimates with intervals, and the difference; none where it says nothing."""
    sides = _sides(pair, lambda verdict: verdict[key])
    found = _between([*sides.values()], _levels(pair), same=same)
    return {**sides, "difference": found if comparable else None}


def _optima(pair: Sequence[Any], name: Hyperparameter, *, same: bool, comparable: bool) -> list[Any]:
    """Optima of both at every size that either ran, with the curve of each, as the figures draw them."""
    by_size = [{o["size"]: o for o in (of or {"optima": []})["optima"]} for of in pair]
    levels = _levels(pair)
    rows = []
    for size in sorted(by_size[0].keys() | by_size[1].keys()):
        both = [sizes.get(size) for sizes in by_size]
        octaves = _between(both, levels, "log2_value", "interval_log2", same=same)
        sides = _sides(both, lambda optimum: _optimum(optimum, name))
        rows.append({"size": size, **sides, "difference_octaves": octaves if comparable else None})
    return rows


def _optimum(optimum: Any, name: Hyperparameter) -> dict[str, Any]:
    """What is kept of an optimum; its interval in octaves, and as values."""
    ends = optimum["interval_log2"]
    shown = None if ends is None else sorted(from_log2(name, end) for end in ends)
    return {**{key: optimum.get(key) for key in _OPTIMUM}, "interval": shown}


def values(a: Body, b: Body) -> list[Json]:
    """Values for the target, of every hyperparameter that either carries."""
    found = [{v["hyperparameter"]: v for v in (body.get("transfer") or {}).get("values", ())} for body in (a, b)]
    keys = ("base_value", "target_value", "outcome", "rule")
    return cast(
        list[Json],
        [
            {"hyperparameter": name,
             **_sides([of.get(name) for of in found], lambda value: {key: value.get(key) for key in keys})}
            for name in found[0] | found[1]
        ],
    )  # fmt: skip


def gates(a: Body, b: Body) -> list[Json]:
    """Outcome of every gate, with its reason, and the reason of whoever accepted it."""
    found = [{gate["name"]: gate for gate in body["gates"]} for body in (a, b)]
    accepted = [body.get("accepted") or {} for body in (a, b)]

    def side(i: int, name: str) -> Any:
        gate = found[i].get(name)
        return gate and {"outcome": gate["outcome"], "reason": gate["reason"], "accepted": accepted[i].get(name)}

    return cast(list[Json], [{"name": name, "a": side(0, name), "b": side(1, name)} for name in found[0] | found[1]])


def fits(a: Body, b: Body, *, same: bool, losses: bool) -> Json:
    """Exponents of the frontier, and the heaviest law's parameters where it is one law in both."""
    pair: list[Any] = [body.get("fit") for body in (a, b)]
    if pair == [None, None]:
        return None
    levels = _levels(pair)
    rows = []
    for name in ("params_vs_flops", "tokens_vs_flops"):
        both = [None if of is None else of["exponents"].get(name) for of in pair]
        rows.append(_parameter(name, both, levels, same=same, comparable=True))
    forms = [heaviest(of) for of in pair]
    if forms[0] == forms[1] and forms[0] is not None:
        for name in pair[0]["parameters"]:
            both = [{"value": of["parameters"][name], "interval": of["intervals"].get(name)} for of in pair]
            shared = losses or name in ("alpha", "beta", "k")  # the others are in nats, or hold powers of them
            rows.append(_parameter(name, both, levels, same=same, comparable=shared))
    return cast(
        Json,
        {
            "status": _sides(pair, lambda fit: fit["status"]),
            "num_runs": _sides(pair, lambda fit: fit["num_runs"]),
            "heaviest_law": dict(zip(("a", "b"), forms, strict=True)),
            "rows": rows,
        },
    )


def heaviest(fit: Any) -> str | None:
    """The law whose parameters a pool of laws gives as its own."""
    members = [] if fit is None else [member for member in fit.get("members", ()) if member["weight"] > 0]
    return str(max(members, key=lambda member: float(member["weight"]))["form"]) if members else None


def _parameter(
    name: str, both: Sequence[Any], levels: Sequence[float | None], *, same: bool, comparable: bool
) -> dict[str, Any]:  # fmt: skip
    found = _between(both, levels, same=same)
    return {"name": name, "a": both[0], "b": both[1], "difference": found if comparable else None}


def choices(a: Body, b: Body) -> list[Json]:
    """What each would launch, one row a property: of the choice, the shape, the config's own numbers, the schedule."""
    chosen = [body.get("choice") or {} for body in (a, b)]
    rows = [(key, [of.get(key) for of in chosen]) for key in _CHOSEN]
    frozen = [_properties(body.get("decision") or {}) for body in (a, b)]
    rows += [(key, [of.get(key) for of in frozen]) for key in frozen[0] | frozen[1] if key not in _CHOSEN]
    return cast(
        list[Json], [{"key": key, "a": both[0], "b": both[1]} for key, both in rows if both != [None, None]]
    )  # fmt: skip


def _properties(decision: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in decision.items() if not isinstance(value, dict | list)}
    return {**decision.get("shape", {}), **own, **decision.get("learning_rate", {}).get("schedule", {})}


def forecasts(a: Body, b: Body, *, same: bool, losses: bool) -> Json:
    """The main runs' predicted losses, and both at the smaller one's compute on each one's own frontier."""
    pair = [(body.get("choice") or {}).get("prediction") for body in (a, b)]
    if pair == [None, None]:
        return None
    keys = ("loss", "interval", "level", "flops", "extrapolation", "warnings")
    sides = _sides(pair, lambda of: {key: of[key] for key in keys})
    levels = _levels(pair)
    found = _between(pair, levels, "loss", same=same)
    return cast(
        Json,
        {
            **sides,
            "difference_nats": found if losses else None,
            "at_one_compute": _at_one_compute(a, b, levels, same=same) if losses else None,
        },
    )


def _at_one_compute(a: Body, b: Body, levels: Sequence[float | None], *, same: bool) -> Any:
    """Both frontiers at the smaller budget, if both reach it."""
    frontiers: list[Any] = [body.get("frontier") for body in (a, b)]
    if not all(frontiers):
        return None
    flops = min(float(frontier[-1]["flops"]) for frontier in frontiers)
    if any(float(frontier[0]["flops"]) > flops for frontier in frontiers):
        return None
    sides = [along(frontier, flops) for frontier in frontiers]
    found = _between(sides, levels, "loss_nats", same=same)
    return {"flops": flops, "a": sides[0], "b": sides[1], "difference_nats": found}


def along(frontier: Sequence[Any], flops: float) -> dict[str, Any]:
    """Loss and interval of a frontier at a compute within it: straight between its points, log-log."""
    above = next((i for i, point in enumerate(frontier) if point["flops"] >= flops), len(frontier) - 1)
    low, high = frontier[max(above - 1, 0)], frontier[above]
    span = math.log(high["flops"] / low["flops"])
    share = math.log(flops / low["flops"]) / span if span else 1.0

    def between(x: float, y: float) -> float:
        return math.exp((1 - share) * math.log(x) + share * math.log(y))

    ends = [point["interval"] for point in (low, high)]
    interval = None if None in ends else [between(x, y) for x, y in zip(*ends, strict=True)]
    return {"loss_nats": between(low["loss_nats"], high["loss_nats"]), "interval": interval}


def spends(a: Body, b: Body) -> dict[str, Json]:
    """What the proxies of each cost."""
    keys = ("num_runs", "num_imported", "flops_causal", "worker_seconds", "share_of_target")
    return {side: {key: body["spend"].get(key) for key in keys} for side, body in (("a", a), ("b", b))}
