"""Figures of the transfer tests: loss basins, and the optimum against size."""

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
    draw_edge_marks,
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
    """Return a transfer test of the report.

    Raises:
        MissingError: The transfer runs have not ended, or there is no such test.
    """
    tests: list[Test] = part(report, "transfer", "`forerun transfer PLAN` runs what it needs")[
        "tests"
    ]
    for test in tests:
        if (test["hyperparameter"], test["axis"]) == (hyperparameter, axis):
            return test
    names = ", ".join(name_of(test) for test in tests)
    raise MissingError(f"{hyperparameter} over {axis} was not tested; the report has: {names}")


def _select_spaced_ticks(ticks: Iterable[float], gap: float) -> list[float]:
    """Return those ticks, given in order of importance, that are at least `gap` apart."""
    kept_ticks: list[float] = []
    for tick in ticks:
        if all(abs(tick - kept_tick) >= gap for kept_tick in kept_ticks):
            kept_ticks.append(tick)
    return sorted(kept_ticks)


def _set_value_axis(
    axis: Axis, name: Hyperparameter, ends: Sequence[float], tried: Iterable[float]
) -> None:
    """Put ticks on an axis that holds octaves of a hyperparameter.

    They are powers of two for a learning rate, and the values that were run for others.
    """
    octaves(axis, min(ends), max(ends))
    if name != "learning_rate":
        first, last = axis.get_view_interval()
        ticks = _select_spaced_ticks(
            sorted(x for x in tried if first <= x <= last), 0.11 * (last - first)
        )
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{from_log2(name, value):.3g}"))


def _set_size_axis(axes: Axes, sizes: Iterable[int], first: Iterable[int]) -> None:
    """Put ticks at sizes on an x axis that holds log2(size).

    Sizes in `first` have ticks; the others have them where there is space.
    """
    size_by_log2 = {math.log2(size): size for size in sorted(sizes)}
    low, high = min(size_by_log2), max(size_by_log2)
    padding = 0.06 * (high - low) + 0.2
    axes.set_xlim(low - padding, high + padding)
    ticks = _select_spaced_ticks(
        [*map(math.log2, first), *size_by_log2], 0.12 * (high - low + 2 * padding)
    )
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_size(size_by_log2[value])))


def _average_seeds(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Return the mean loss over seeds of every value without a diverged run, ascending."""
    by_value: dict[float, list[float]] = {}
    for value, loss in points:
        by_value.setdefault(value, []).append(math.inf if loss is None else loss)
    means = [(value, sum(losses) / len(losses)) for value, losses in sorted(by_value.items())]
    return [(value, mean) for value, mean in means if math.isfinite(mean)]


def basins(
    report: Body, hyperparameter: str = "learning_rate", axis: str = "width", arm: str | None = None
) -> Panel:
    """Draw loss against a hyperparameter at every size of one arm.

    The figure has runs, fitted basins, and minima with intervals. Its axes hold the runs of all
    arms. A size without a fitted basin has a thin line through its mean losses.

    Args:
        report: Content of `report.json`.
        hyperparameter: Name of the hyperparameter, as in the plan.
        axis: `width`, `depth`, `batch` or `duration`.
        arm: Parametrization: None for the study's own, `sp` for the control.

    Raises:
        MissingError: The transfer runs have not ended, or there is no such test or arm.
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
        _set_value_axis(axes.xaxis, test["hyperparameter"], sorted(tried), tried)
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
            color, marker = shade(rank, len(sizes)), MARKERS[rank % len(MARKERS)]
            _draw_runs(axes, points, color, marker, size_name(test["axis"], size))
            if optimum["log2_value"] is not None:
                _draw_basin(axes, optimum, color, marker)
            elif shown_means := [
                point for point in _average_seeds(points) if point[1] <= axes.get_ylim()[1]
            ]:
                axes.plot(*zip(*shown_means, strict=True), color=color, linewidth=0.8, alpha=0.75)

    label = hyperparameter_name(test["hyperparameter"])
    title = f"Loss against {label} at each {test['axis']}, {arm_name(chosen)}"
    return draw(f"basins-{anchor(test)}-{chosen}", title, (label, LOSS), paint)


def _draw_runs(
    axes: Axes, points: list[tuple[float, float | None]], color: str, marker: str, label: str
) -> None:
    top = axes.get_ylim()[1]
    inside = [(x, loss) for x, loss in points if loss is not None and loss <= top]
    axes.plot(
        [x for x, _ in inside],
        [y for _, y in inside],
        marker,
        color=color,
        markersize=3.6,
        alpha=0.75,
        markeredgewidth=0,
        label=label,
    )
    draw_edge_marks(axes, points, color)


def _draw_basin(axes: Axes, optimum: Any, color: str, marker: str) -> None:
    """Draw a fitted basin with its minimum and the interval of the minimum."""
    axes.plot(*zip(*optimum["curve"], strict=True), color=color, linewidth=1.5)
    interval_marks(
        axes,
        [(optimum["log2_value"], optimum["loss_nats"])],
        [optimum["interval_log2"]],
        along="x",
        fmt=marker,
        color=color,
        markersize=6.5,
        markeredgewidth=0.7,
        elinewidth=2,
        capsize=4,
        markeredgecolor=INK,
    )


def drift(report: Body, hyperparameter: str = "learning_rate", axis: str = "width") -> Panel:
    """Draw the optimum against size, the values used up to the target, and the optimum expected.

    If an exponent was measured, its interval is a band; beyond the sizes that were run it is the
    band of the optimum.

    Raises:
        MissingError: The transfer runs have not ended, or there is no such test, or it found no
            optimum.
    """
    test = test_of(report, hyperparameter, axis)
    arms = verdicts_by_arm(test, main_arm(report))
    verdict, name = test["verdict"], test["hyperparameter"]
    if not any(has_optimum(arm_verdict) for arm_verdict in arms.values()):
        raise MissingError(f"{name_of(test)} found no optimum")
    sizes = {optimum["size"] for arm_verdict in arms.values() for optimum in arm_verdict["optima"]}

    def paint(axes: Axes) -> None:
        sizes_with_ticks = (verdict["target_size"], verdict["base_size"])
        _set_size_axis(axes, sizes | {*sizes_with_ticks}, sizes_with_ticks)
        axes.axvline(
            math.log2(verdict["target_size"]),
            color=INK,
            alpha=0.55,
            linewidth=0.9,
            linestyle=(0, (1, 2)),
            label="target",
        )
        ends = _draw_rule(axes, verdict)
        for i, (arm, arm_verdict) in enumerate(arms.items()):
            _draw_optima(
                axes, arm_verdict["optima"], f"control: {arm_name(arm)}" if i else arm_name(arm), i
            )
        interval_ends = [
            y
            for arm_verdict in arms.values()
            for optimum in arm_verdict["optima"]
            for y in optimum["interval_log2"] or ()
        ]
        _set_value_axis(
            axes.yaxis,
            name,
            [*ends, *interval_ends] or [0.0],
            {run["log2_value"] for run in runs_of(test)},
        )

    label = hyperparameter_name(name)
    title = f"Optimal {label} against {test['axis']}"
    return draw(
        f"drift-{anchor(test)}", title, (axis_name(test["axis"]), f"optimal {label}"), paint
    )


def has_optimum(verdict: Any) -> bool:
    """Return whether a verdict has an optimum at any size."""
    return any(optimum["log2_value"] is not None for optimum in verdict["optima"])


def _draw_rule(axes: Axes, verdict: Any) -> list[float]:
    """Draw the rule from base to target, its band, and the optimum expected at the target.

    Returns:
        The heights that were drawn at.
    """
    base, target_log2 = verdict["base_log2"], verdict["transferred_log2"]
    if base is None:
        return []
    x = [math.log2(verdict["base_size"]), math.log2(verdict["target_size"])]
    axes.plot(
        x,
        [base, target_log2],
        color=INK,
        alpha=0.7,
        linewidth=0.9,
        linestyle=DASHED,
        label="value used",
    )
    heights, steps, offset = (
        [base, target_log2],
        verdict["drift_octaves_per_doubling"]["interval"],
        verdict["offset_octaves"],
    )
    if verdict["power_is_measured"] and steps is not None and offset["value"] is not None:
        # The band bends at the largest size that was run: up to it the drift's interval counts,
        # and from there on the interval of the target's optimum.
        largest = min(
            max(
                math.log2(optimum["size"])
                for optimum in verdict["optima"]
                if optimum["log2_value"] is not None
            ),
            x[1],
        )
        edges = [
            [base, base + slope * (largest - x[0]), target_log2 - offset_end]
            for slope, offset_end in zip(steps, reversed(offset["interval"]), strict=True)
        ]
        axes.fill_between(
            [x[0], largest, x[1]], edges[0], edges[1], color=KINDS[0], alpha=0.14, linewidth=0
        )
        heights += [*edges[0], *edges[1]]
    if offset["value"] is not None:
        low, high = offset["interval"]
        interval_marks(
            axes,
            [(x[1], target_log2 - offset["value"])],
            [(target_log2 - high, target_log2 - low)],
            along="y",
            fmt="*",
            color=KINDS[0],
            markersize=8,
            elinewidth=1.5,
            capsize=4,
            label="predicted optimum",
        )
        heights += [target_log2 - low, target_log2 - high]
    return heights


def _draw_optima(axes: Axes, optima: Sequence[Any], label: str, rank: int) -> None:
    fitted = [optimum for optimum in optima if optimum["log2_value"] is not None]
    # The shift keeps two intervals at one size apart.
    points = [
        (math.log2(optimum["size"]) + 0.06 * rank, optimum["log2_value"]) for optimum in fitted
    ]
    interval_marks(
        axes,
        points,
        [optimum["interval_log2"] for optimum in fitted],
        along="y",
        fmt=f"{MARKERS[rank]}-",
        color=KINDS[rank],
        markersize=5.5,
        linewidth=1.5,
        elinewidth=1.5,
        capsize=4,
        label=label,
    )
