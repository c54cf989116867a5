"""The transfer tests' figures of where optima lie: valleys, and drift. Pure, as those of `launcher.figures.figures`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter

from launcher.figures.figures import MARKERS, apart, ceiling, draw, edge_marks, interval_marks, main_arm, octaves
from launcher.figures.svg import INK, KINDS, shade
from launcher.views.html import Body, arm_name
from launcher.views.transfer import (
    Test,
    anchor,
    axis_name,
    doublings,
    exponent,
    hyperparameter_name,
    runs_of,
    short_size,
    size_name,
    verdicts_by_arm,
)
from transfer.question import Hyperparameter, from_log2

_LOSS = "validation loss (nats per token)"
_DASHED, _DOTTED = (0, (4, 3)), (0, (1, 2))


def _spaced(wanted: Iterable[float], gap: float) -> list[float]:
    """Of ticks in order of importance those at least `gap` apart."""
    kept: list[float] = []
    for tick in wanted:
        if all(abs(tick - other) >= gap for other in kept):
            kept.append(tick)
    return sorted(kept)


def value_axis(axis: Axis, name: Hyperparameter, ends: Sequence[float], tried: Iterable[float]) -> None:
    """Powers of two for learning rates, other hyperparameters' values as they are; the axis holds octaves."""
    low, high = min(ends), max(ends)
    octaves(axis, low, high)
    if name != "learning_rate":
        first, last = axis.get_view_interval()
        ticks = _spaced(sorted(x for x in tried if first <= x <= last), 0.11 * (last - first))
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{from_log2(name, value):.3g}"))


def size_axis(axes: Axes, sizes: Iterable[int], first: Iterable[int]) -> None:
    """Doublings, on an axis that holds log2(size); those named `first` have ticks, others where there is room."""
    at = {math.log2(size): size for size in sorted(sizes)}
    low, high = min(at), max(at)
    pad = 0.06 * (high - low) + 0.2
    axes.set_xlim(low - pad, high + pad)
    shown = _spaced([*map(math.log2, first), *at], 0.12 * (high - low + 2 * pad))
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_size(at[value])))


def sizes_of(test: Test) -> list[int]:
    """Sizes that were run, ascending."""
    return sorted({optimum["size"] for optimum in test["verdict"]["optima"]} | {run["size"] for run in runs_of(test)})


def losses_of(test: Test, arm: str, size: int) -> list[tuple[float, float | None]]:
    """Octaves and loss of every run of an arm at a size; None: it diverged."""
    return [(run["log2_value"], run["loss_nats"]) for run in runs_of(test, arm) if run["size"] == size]


def means(points: Sequence[tuple[float, float | None]]) -> dict[float, float | None]:
    """Mean loss over the seeds of every value, ascending; None where any run diverged."""
    by_value: dict[float, list[float | None]] = {}
    for value, loss in sorted(points, key=lambda point: point[0]):
        by_value.setdefault(value, []).append(loss)
    return {
        value: None if any(loss is None for loss in losses) else sum(loss or 0.0 for loss in losses) / len(losses)
        for value, losses in by_value.items()
    }


def valleys(body: Body, test: Test, arm: str) -> str:
    """Loss against a hyperparameter at every size of one arm: runs as dots, fitted valleys, minima with intervals.

    The axes hold all arms' runs. A size without a valley has a thin line through its mean losses.
    """
    verdict, sizes = verdicts_by_arm(test, main_arm(body))[arm], sizes_of(test)
    tried = {run["log2_value"] for run in runs_of(test)}
    losses = [run["loss_nats"] for run in runs_of(test) if run["loss_nats"] is not None]
    carried = verdict["base_log2"]

    def paint(axes: Axes) -> None:
        value_axis(axes.xaxis, test["hyperparameter"], sorted(tried), tried)
        if losses:
            axes.set_ylim(*ceiling(losses))
        if carried is not None:
            axes.axvline(carried, color=INK, alpha=0.55, linewidth=0.9, linestyle=_DASHED)
        for optimum in verdict["optima"]:
            rank = sizes.index(optimum["size"])
            _valley(axes, optimum, losses_of(test, arm, optimum["size"]), shade(rank, len(sizes)),
                    MARKERS[rank % len(MARKERS)], size_name(test["axis"], optimum["size"]))  # fmt: skip

    what = hyperparameter_name(test["hyperparameter"])
    title = f"Loss against {what} at each {test['axis']}, {arm_name(arm)}"
    return draw(f"valleys-{anchor(test)}-{arm}", title, (what, _LOSS), paint)


def _valley(
    axes: Axes, optimum: Any, points: list[tuple[float, float | None]], colour: str, marker: str, label: str
) -> None:
    top = axes.get_ylim()[1]
    inside = [(x, loss) for x, loss in points if loss is not None and loss <= top]
    axes.plot([x for x, _ in inside], [y for _, y in inside], marker, color=colour, markersize=3.6, alpha=0.75,
              markeredgewidth=0, label=label)  # fmt: skip
    edge_marks(axes, points, colour)
    if optimum["log2_value"] is None:
        middle = [(x, loss) for x, loss in means(points).items() if loss is not None and loss <= top]
        axes.plot([x for x, _ in middle], [y for _, y in middle], color=colour, linewidth=0.8, alpha=0.75)
        return
    axes.plot([x for x, _ in optimum["curve"]], [y for _, y in optimum["curve"]], color=colour, linewidth=1.5)
    interval_marks(axes, [(optimum["log2_value"], optimum["loss_nats"])], [optimum["interval_log2"]], along="x",
                   fmt=marker, color=colour, markersize=6.5, markeredgecolor=INK, markeredgewidth=0.7, elinewidth=2.2,
                   capsize=4, capthick=1.4)  # fmt: skip


def drift(body: Body, test: Test) -> str:
    """The optimum against size with its intervals, the value carried to the target, and the optimum expected there.

    Where an exponent was measured, its interval is a band, and published exponents are thin lines with numbers.
    """
    arms = verdicts_by_arm(test, main_arm(body))
    verdict, name = test["verdict"], test["hyperparameter"]
    sizes = {optimum["size"] for of in arms.values() for optimum in of["optima"]}
    target = math.log2(verdict["target_size"])

    def paint(axes: Axes) -> None:
        named = (verdict["target_size"], verdict["base_size"])
        size_axis(axes, sizes | {*named}, named)
        axes.axvline(target, color=INK, alpha=0.55, linewidth=0.9, linestyle=_DOTTED,
                     label="target")  # fmt: skip
        ends = _carried(axes, verdict)
        for i, (arm, of) in enumerate(arms.items()):
            _optima(axes, of["optima"], arm_name(arm) if i == 0 else f"control: {arm_name(arm)}", i)
        found = [y for of in arms.values() for o in of["optima"] for y in o["interval_log2"] or ()]
        value_axis(axes.yaxis, name, [*ends, *found] or [0.0], {run["log2_value"] for run in runs_of(test)})
        for i, of in enumerate(arms.values()):
            _missing_optima(axes, of["optima"], i)
        _published(axes, verdict)

    what = hyperparameter_name(name)
    title = f"Optimal {what} against {test['axis']}"
    return draw(f"drift-{anchor(test)}", title, (axis_name(test["axis"]), f"optimal {what}"), paint)


def _carried(axes: Axes, verdict: Any) -> list[float]:
    """Draws the rule from base to target, its band, and the optimum expected at the target; the heights it drew at."""
    base, there = verdict["base_log2"], verdict["transferred_log2"]
    if base is None:
        return []
    x = [math.log2(verdict["base_size"]), math.log2(verdict["target_size"])]
    axes.plot(x, [base, there], color=INK, alpha=0.7, linewidth=0.9, linestyle=_DASHED, label="value used")
    heights, steps = [base, there], verdict["drift_octaves_per_doubling"]["interval"]
    if verdict["power_is_measured"] and steps is not None:
        edges = [base + slope * doublings(verdict) for slope in steps]
        axes.fill_between(x, [base, edges[0]], [base, edges[1]], color=KINDS[0], alpha=0.14, linewidth=0)
        heights += edges
    offset = verdict["offset_octaves"]
    if offset["value"] is not None:
        low, high = offset["interval"]
        interval_marks(axes, [(x[1], there - offset["value"])], [(there - high, there - low)], along="y", fmt="*",
                       color=KINDS[0], markersize=8, elinewidth=1.5, capsize=4, label="expected there")  # fmt: skip
        heights += [there - low, there - high]
    return heights + [_rule_at_target(verdict, rule) for rule in verdict["alternatives"]]


def _rule_at_target(verdict: Any, rule: Any) -> float:
    return float(verdict["transferred_log2"] + (rule["power"] - verdict["power"]) * doublings(verdict))


def _published(axes: Axes, verdict: Any) -> None:
    """Thin lines of published exponents; their numbers stand right of the target, pushed apart where they meet."""
    rules, base = sorted(verdict["alternatives"], key=lambda rule: rule["power"]), verdict["base_log2"]
    if base is None or doublings(verdict) <= 0:
        return
    x = [math.log2(verdict["base_size"]), math.log2(verdict["target_size"])]
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    ends = [_rule_at_target(verdict, rule) for rule in rules]
    for rule, there, shown in zip(rules, ends, apart(ends, 0.062 * (top - bottom)), strict=True):
        axes.plot([*x, right], [base, there, shown], color=KINDS[4], linewidth=0.7)
        number = exponent(rule["power"]).replace("-", "−")
        axes.annotate(number, (right, shown), xytext=(3, 0), textcoords="offset points", fontsize=8.5, va="center",
                      color=KINDS[4], annotation_clip=False)  # fmt: skip
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)


def _optima(axes: Axes, optima: Sequence[Any], label: str, rank: int) -> None:
    found = [o for o in optima if o["log2_value"] is not None]
    # Shifted, so that two intervals at one size do not lie on each other.
    points = [(math.log2(o["size"]) + 0.06 * rank, o["log2_value"]) for o in found]
    interval_marks(axes, points, [o["interval_log2"] for o in found], along="y", fmt=f"{MARKERS[rank]}-",
                   color=KINDS[rank], markersize=5.5, linewidth=1.5, elinewidth=1.5, capsize=4,
                   label=label)  # fmt: skip


def _missing_optima(axes: Axes, optima: Sequence[Any], rank: int) -> None:
    """Why a size has no optimum, upright above it."""
    for optimum in optima:
        if optimum["log2_value"] is None:
            axes.annotate(optimum["status"].replace("_", " "), (math.log2(optimum["size"]), 0.02), rotation=90,
                          xytext=(-5 + 11 * rank, 0), textcoords="offset points", xycoords=("data", "axes fraction"),
                          fontsize=8.5, color=KINDS[rank], ha="center", va="bottom")  # fmt: skip
