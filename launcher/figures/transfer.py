"""The transfer tests' figures: loss basins, the optimum against size, and what transferred values
cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter

from launcher.figures.panel import (
    DASHED,
    LOSS,
    MARKERS,
    MissingError,
    Panel,
    ceiling,
    draw,
    edge_marks,
    interval_marks,
    main_arm,
    octaves,
    part,
)
from launcher.figures.svg import INK, KINDS, shade
from launcher.views.numbers import Body, arm_name
from launcher.views.transfer import (
    Test,
    anchor,
    axis_name,
    hyperparameter_name,
    name_of,
    runs_of,
    short_size,
    size_name,
    verdicts_by_arm,
)
from transfer.question import Hyperparameter, from_log2


def test_of(report: Body, hyperparameter: str, axis: str) -> Test:
    """A transfer test.

    Raises:
        MissingError: the transfer runs have not ended, or there is no such test.
    """
    tests: list[Test] = part(report, "transfer", "`forerun transfer PLAN` runs what it needs")[
        "tests"
    ]
    for test in tests:
        if (test["hyperparameter"], test["axis"]) == (hyperparameter, axis):
            return test
    there = ", ".join(name_of(test) for test in tests)
    raise MissingError(f"{hyperparameter} over {axis} was not tested; the report has: {there}")


def _spaced(ticks: Iterable[float], gap: float) -> list[float]:
    """Return those ticks, given in order of importance, that are at least `gap` apart."""
    kept: list[float] = []
    for tick in ticks:
        if all(abs(tick - other) >= gap for other in kept):
            kept.append(tick)
    return sorted(kept)


def _value_axis(
    axis: Axis, name: Hyperparameter, ends: Sequence[float], tried: Iterable[float]
) -> None:
    """Powers of two for learning rates, other hyperparameters' values as they are; the axis holds
    octaves.
    """
    octaves(axis, min(ends), max(ends))
    if name != "learning_rate":
        first, last = axis.get_view_interval()
        ticks = _spaced(sorted(x for x in tried if first <= x <= last), 0.11 * (last - first))
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{from_log2(name, value):.3g}"))


def _size_axis(axes: Axes, sizes: Iterable[int], first: Iterable[int]) -> None:
    """Doublings, on an axis that holds log2(size); those named `first` have ticks, others where
    there is space.
    """
    at = {math.log2(size): size for size in sorted(sizes)}
    low, high = min(at), max(at)
    pad = 0.06 * (high - low) + 0.2
    axes.set_xlim(low - pad, high + pad)
    shown = _spaced([*map(math.log2, first), *at], 0.12 * (high - low + 2 * pad))
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_size(at[value])))


def _means(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Mean loss over the seeds of every value at which no run diverged, ascending."""
    by_value: dict[float, list[float]] = {}
    for value, loss in points:
        by_value.setdefault(value, []).append(math.inf if loss is None else loss)
    means = [(value, sum(losses) / len(losses)) for value, losses in sorted(by_value.items())]
    return [(value, mean) for value, mean in means if math.isfinite(mean)]


def basins(
    report: Body, hyperparameter: str = "learning_rate", axis: str = "width", arm: str | None = None
) -> Panel:
    """Loss against a hyperparameter at every size of one arm: runs, fitted basins, minima with
    intervals.

    The axes hold all arms' runs. A size without a fitted basin has a thin line through its mean
    losses.

    Args:
        report: the body of `report.json`.
        hyperparameter: its name, as in the plan.
        axis: `width`, `depth`, `batch` or `duration`.
        arm: the parametrization; the study's own if None, `sp` for the control.

    Raises:
        MissingError: the transfer runs have not ended, or there is no such test or arm.
    """
    test, own = test_of(report, hyperparameter, axis), main_arm(report)
    arms, chosen = verdicts_by_arm(test, own), own if arm is None else arm
    if chosen not in arms:
        raise MissingError(
            f"no parametrization {chosen} in {name_of(test)}; the report has: {', '.join(arms)}"
        )
    verdict, runs = arms[chosen], runs_of(test)
    sizes = sorted(
        {optimum["size"] for optimum in verdict["optima"]} | {run["size"] for run in runs}
    )
    tried = {run["log2_value"] for run in runs}
    losses = [run["loss_nats"] for run in runs if run["loss_nats"] is not None]

    def paint(axes: Axes) -> None:
        _value_axis(axes.xaxis, test["hyperparameter"], sorted(tried), tried)
        if losses:
            axes.set_ylim(*ceiling(losses))
        if verdict["base_log2"] is not None:
            axes.axvline(
                verdict["base_log2"], color=INK, alpha=0.55, linewidth=0.9, linestyle=DASHED
            )
        for optimum in verdict["optima"]:
            rank, size = sizes.index(optimum["size"]), optimum["size"]
            points = [
                (run["log2_value"], run["loss_nats"])
                for run in runs_of(test, chosen)
                if run["size"] == size
            ]
            colour, marker = shade(rank, len(sizes)), MARKERS[rank % len(MARKERS)]
            _runs(axes, points, colour, marker, size_name(test["axis"], size))
            if optimum["log2_value"] is not None:
                _basin(axes, optimum, colour, marker)
            elif seen := [point for point in _means(points) if point[1] <= axes.get_ylim()[1]]:
                axes.plot(*zip(*seen, strict=True), color=colour, linewidth=0.8, alpha=0.75)

    what = hyperparameter_name(test["hyperparameter"])
    title = f"Loss against {what} at each {test['axis']}, {arm_name(chosen)}"
    return draw(f"basins-{anchor(test)}-{chosen}", title, (what, LOSS), paint)


def _runs(
    axes: Axes, points: list[tuple[float, float | None]], colour: str, marker: str, label: str
) -> None:
    top = axes.get_ylim()[1]
    inside = [(x, loss) for x, loss in points if loss is not None and loss <= top]
    axes.plot(
        [x for x, _ in inside],
        [y for _, y in inside],
        marker,
        color=colour,
        markersize=3.6,
        alpha=0.75,
        markeredgewidth=0,
        label=label,
    )
    edge_marks(axes, points, colour)


def _basin(axes: Axes, optimum: Any, colour: str, marker: str) -> None:
    """A fitted curve with its minimum and the interval of that."""
    axes.plot(*zip(*optimum["curve"], strict=True), color=colour, linewidth=1.5)
    interval_marks(
        axes,
        [(optimum["log2_value"], optimum["loss_nats"])],
        [optimum["interval_log2"]],
        along="x",
        fmt=marker,
        color=colour,
        markersize=6.5,
        markeredgewidth=0.7,
        elinewidth=2,
        capsize=4,
        markeredgecolor=INK,
    )


def drift(report: Body, hyperparameter: str = "learning_rate", axis: str = "width") -> Panel:
    """The optimum against size with its intervals, the value used up to the target, and the optimum
    expected there.

    Where an exponent was measured, its interval is a band, and beyond the sizes that were run that
    of the optimum.

    Raises:
        MissingError: the transfer runs have not ended, or there is no such test, or it found no
            optimum.
    """
    test = test_of(report, hyperparameter, axis)
    arms = verdicts_by_arm(test, main_arm(report))
    verdict, name = test["verdict"], test["hyperparameter"]
    if not any(has_optimum(of) for of in arms.values()):
        raise MissingError(f"{name_of(test)} found no optimum")
    sizes = {optimum["size"] for of in arms.values() for optimum in of["optima"]}

    def paint(axes: Axes) -> None:
        named = (verdict["target_size"], verdict["base_size"])
        _size_axis(axes, sizes | {*named}, named)
        axes.axvline(
            math.log2(verdict["target_size"]),
            color=INK,
            alpha=0.55,
            linewidth=0.9,
            linestyle=(0, (1, 2)),
            label="target",
        )
        ends = _used(axes, verdict)
        for i, (arm, of) in enumerate(arms.items()):
            _optima(axes, of["optima"], f"control: {arm_name(arm)}" if i else arm_name(arm), i)
        found = [y for of in arms.values() for o in of["optima"] for y in o["interval_log2"] or ()]
        _value_axis(
            axes.yaxis, name, [*ends, *found] or [0.0], {run["log2_value"] for run in runs_of(test)}
        )

    what = hyperparameter_name(name)
    title = f"Optimal {what} against {test['axis']}"
    return draw(f"drift-{anchor(test)}", title, (axis_name(test["axis"]), f"optimal {what}"), paint)


def has_optimum(verdict: Any) -> bool:
    """Whether there is one at any size."""
    return any(optimum["log2_value"] is not None for optimum in verdict["optima"])


def _used(axes: Axes, verdict: Any) -> list[float]:
    """Draws the rule from base to target, its band, and the optimum expected at the target; the
    heights it drew at.
    """
    base, there = verdict["base_log2"], verdict["transferred_log2"]
    if base is None:
        return []
    x = [math.log2(verdict["base_size"]), math.log2(verdict["target_size"])]
    axes.plot(
        x, [base, there], color=INK, alpha=0.7, linewidth=0.9, linestyle=DASHED, label="value used"
    )
    heights, steps, offset = (
        [base, there],
        verdict["drift_octaves_per_doubling"]["interval"],
        verdict["offset_octaves"],
    )
    if verdict["power_is_measured"] and steps is not None and offset["value"] is not None:
        # Bent where the line is: by the drift up to the largest size that was run, from there to
        # the target's optimum.
        largest = min(
            max(math.log2(o["size"]) for o in verdict["optima"] if o["log2_value"] is not None),
            x[1],
        )
        edges = [
            [base, base + slope * (largest - x[0]), there - off]
            for slope, off in zip(steps, reversed(offset["interval"]), strict=True)
        ]
        axes.fill_between(
            [x[0], largest, x[1]], edges[0], edges[1], color=KINDS[0], alpha=0.14, linewidth=0
        )
        heights += [*edges[0], *edges[1]]
    if offset["value"] is not None:
        low, high = offset["interval"]
        interval_marks(
            axes,
            [(x[1], there - offset["value"])],
            [(there - high, there - low)],
            along="y",
            fmt="*",
            color=KINDS[0],
            markersize=8,
            elinewidth=1.5,
            capsize=4,
            label="predicted optimum",
        )
        heights += [there - low, there - high]
    return heights


def _optima(axes: Axes, optima: Sequence[Any], label: str, rank: int) -> None:
    found = [o for o in optima if o["log2_value"] is not None]
    # Shifted, so that two intervals at one size do not lie on each other.
    points = [(math.log2(o["size"]) + 0.06 * rank, o["log2_value"]) for o in found]
    interval_marks(
        axes,
        points,
        [o["interval_log2"] for o in found],
        along="y",
        fmt=f"{MARKERS[rank]}-",
        color=KINDS[rank],
        markersize=5.5,
        linewidth=1.5,
        elinewidth=1.5,
        capsize=4,
        label=label,
    )
