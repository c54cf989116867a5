"""A coordinate check's record as people read it: what is wrong first, then one row for every role. Plain JSON in."""

from __future__ import annotations

from typing import Any

_ORDER = ("blows_up", "vanishes", "cannot_tell", "passes")
NUM_NAMED = 4
"""Layers named in a sentence; the rest is in the table."""


def beside(layer: Any) -> float:
    """How far a layer's slope lies outside what is expected of it."""
    low, high = layer["expected"]
    return float(max(low - layer["slope"], layer["slope"] - high, 0.0))


def worst_first(layers: list[Any]) -> list[Any]:
    """By outcome, then by how far off."""
    return sorted(layers, key=lambda layer: (_ORDER.index(layer["outcome"]), -beside(layer)))


def by_role(check: Any) -> list[tuple[str, list[Any]]]:
    """Role and its layers, the worst first; in order of the first calls."""
    roles: dict[str, list[Any]] = {}
    for layer in check["layers"]:
        roles.setdefault(layer["role"], []).append(layer)
    return [(role, worst_first(layers)) for role, layers in roles.items()]


def points(check: Any) -> list[int]:
    """The widths, or depths, that were compared."""
    found: list[int] = check["depths"] if check["axis"] == "depth" else check["widths"]
    return found


def findings(check: Any) -> list[str]:
    """What keeps a check from passing, in sentences; nothing for one that passes."""
    said = list(check["mistakes"])
    if not said and check["not_finite_step"] is not None:
        said.append(f"{check['axis']} {_lost(check)} left the finite numbers at step {check['not_finite_step']}")
    flagged = [layer for layer in check["layers"] if layer["outcome"] != "passes"]
    said += (
        []
        if check["mistakes"]
        else [
            f"{layer['layer']} {layer['outcome'].replace('_', ' ')} (slope {layer['slope']:+.2f})"
            + (f": {layer['cause']}" if layer["cause"] else "")
            for layer in worst_first(flagged)[:NUM_NAMED]
        ]
    )
    if len(flagged) > NUM_NAMED or (flagged and check["mistakes"]):
        said.append(f"{len(flagged)} of {len(check['layers'])} layers do not pass")
    return said


def _lost(check: Any) -> int:
    return int(check["not_finite_depth" if check["axis"] == "depth" else "not_finite_width"])
