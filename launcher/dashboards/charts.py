"""Tables that W&B's own line chart draws: a column along, one up, one that names the line. Pure; knows no wandb.

A chart of W&B's has one table, so there is one a drawing, with the sizes, arms and ends of intervals as lines in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from launcher.views.html import Body
from launcher.views.transfer import runs_of, size_name, verdicts_by_arm
from proxies.core.canon import Json

VALLEY, DRIFT, SCALING, BAND = "chart_valley", "chart_drift", "chart_scaling", "chart_main_run"
"""How the names of such tables begin."""
LINE = "line"
"""The last column: which line a point is of."""
_MOST_POINTS = 1000
"""Of a line of the main run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under named columns, one type to a column, null where there is no value."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Json, ...], ...]


def run_rows(transfer: Any) -> list[dict[str, Json]]:
    """Every run of every test with what the test asks."""
    return [
        {**run, "axis": test["axis"], "hyperparameter": test["hyperparameter"]}
        for test in transfer["tests"]
        for run in test["runs"]
    ]


def charts(body: Body) -> dict[str, Table]:
    """Of a study, finished or not: what has not run has no chart."""
    found: dict[str, Table] = {}
    if body["transfer"]:
        main_arm = str(body["question"]["proxy"]["parametrization"])
        for test in body["transfer"]["tests"]:
            about = f"{test['hyperparameter']}_over_{test['axis']}"
            arms = verdicts_by_arm(test, main_arm)
            for arm in arms:
                found[f"{VALLEY}_{about}_{arm}"] = _valleys(test, arm)
            found[f"{DRIFT}_{about}"] = _drift(arms)
    if body["frontier"] and body["ladder"] and body["choice"]:
        found[SCALING] = _scaling(body)
    if body["main_run"] and body["decision"] and body["decision"]["predicted"]["curve"]:
        found[BAND] = _band(body)
    return {name: table for name, table in found.items() if table.rows}


def _valleys(test: Any, arm: str) -> Table:
    """Loss against the value, the mean over seeds, a line a size; diverged runs have no loss."""
    points: dict[tuple[int, float], list[float]] = {}
    for run in runs_of(test, arm):
        if run["loss_nats"] is not None:
            points.setdefault((run["size"], run["log2_value"]), []).append(run["loss_nats"])
    rows = [(log2, fmean(losses), size_name(test["axis"], size)) for (size, log2), losses in sorted(points.items())]
    return Table(columns=("log2_value", "loss_nats", LINE), rows=tuple(rows))


def _drift(arms: dict[str, Any]) -> Table:
    """Where the optimum lies at every size, with the ends of its interval; sizes without an optimum are left out."""
    rows: list[tuple[Json, ...]] = []
    for arm, verdict in arms.items():
        for optimum in verdict["optima"]:
            if optimum["log2_value"] is None:
                continue
            along = math.log2(optimum["size"])
            rows.append((along, optimum["log2_value"], arm))
            for end, value in zip(("low", "high"), optimum["interval_log2"] or (), strict=False):
                rows.append((along, value, f"{arm} {end}"))
    return Table(columns=("log2_size", "log2_optimum", LINE), rows=tuple(rows))


def _scaling(body: Body) -> Table:
    """Loss against training FLOPs: what was measured, what is expected at best with its band, and the target."""
    rows: list[tuple[Json, ...]] = [
        (math.log10(rung["flops"]), rung["loss_nats"], "measured")
        for rung in body["ladder"]["rungs"]
        if rung["loss_nats"] is not None
    ]
    for point in body["frontier"]:
        rows += _three(math.log10(point["flops"]), point["loss_nats"], point["interval"])
    predicted = body["choice"]["prediction"]
    at = math.log10(6.0 * body["choice"]["params"] * body["choice"]["tokens"])
    rows.append((at, predicted["loss"], "target"))
    return Table(columns=("log10_flops", "loss_nats", LINE), rows=tuple(rows))


def _three(along: float, expected: float, interval: Sequence[float] | None) -> list[tuple[Json, ...]]:
    low, high = interval or (None, None)
    rows: list[tuple[Json, ...]] = [(along, low, "low"), (along, expected, "expected"), (along, high, "high")]
    return [row for row in rows if row[1] is not None]


def _band(body: Body) -> Table:
    """The main run's training loss against the expected curve and its band."""
    rows: list[tuple[Json, ...]] = []
    run = body["main_run"]
    every = -(-len(run["steps"]) // _MOST_POINTS)
    for step, loss in list(zip(run["steps"], run["train_loss_nats"], strict=True))[::every]:
        rows.append((math.log2(step), loss, "main run"))
    for point in body["decision"]["predicted"]["curve"]:
        rows += _three(math.log2(point["step"]), point["loss_nats"], (point["low_nats"], point["high_nats"]))
    return Table(columns=("log2_step", "loss_nats", LINE), rows=tuple(rows))
