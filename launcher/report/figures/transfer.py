"""Figures of the transfer tests: loss basins, and the optimum against size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis

from forerun._launcher.report.figures.panel import (
    DASHED,
    LOSS,
    MARKERS,
    MissingError,
    Panel,
    choose_loss_limits,
    draw,
    draw_band,
    draw_edge_marks,
    draw_interval_marks,
    draw_reference,
    require,
    set_octave_axis,
    set_ticks,
)
from forerun._launcher.report.figures.svg import INK, KINDS, choose_shade
from forerun._launcher.report.views.finding import Interval
from forerun._launcher.report.views.report_model import AnyReport, Report, to_report
from forerun._launcher.report.views.transfer import (
    format_anchor,
    format_axis,
    format_axis_size,
    format_hyperparameter,
    format_short_size,
    format_test,
)
from forerun._launcher.report.views.transfer_findings import Optimum, TransferTest, Verdict
from forerun._launcher.report.views.wording import format_arm
from forerun._transfer.question import Hyperparameter, from_log2


def find_test(report: Report, hyperparameter: str, axis: str) -> TransferTest:
    """Return a transfer test of the report.

    Raises:
        MissingError: The transfer runs have not ended, or there is no such test.
    """
    advice = "`forerun transfer PLAN` runs what it needs"
    tests = require(report.transfer, "transfer", advice).tests
    for test in tests:
        if (test.hyperparameter, test.axis) == (hyperparameter, axis):
            return test
    names = ", ".join(format_test(test) for test in tests)
    raise MissingError(f"{hyperparameter} over {axis} was not tested; the report has: {names}")


def _select_spaced_ticks(ticks: Iterable[float], gap: float) -> list[float]:
    """Return ticks that are at least `gap` apart, in ascending order.

    Args:
        ticks: Ticks in order of importance; of two that are too close, the first is kept.
        gap: Minimum distance of two ticks.
    """
    kept_ticks: list[float] = []
    for tick in ticks:
        if all(abs(tick - kept_tick) >= gap for kept_tick in kept_ticks):
            kept_ticks.append(tick)
    return sorted(kept_ticks)


def _set_value_axis(
    axis: Axis, name: Hyperparameter, ends: Sequence[float], tried: Iterable[float]
) -> None:
    """Put ticks on an axis that holds log2 of a hyperparameter.

    A learning rate has ticks at powers of two. Another hyperparameter has ticks at the values that
    were run.

    Args:
        axis: Axis to set.
        name: The hyperparameter.
        ends: Values that the axis must show, as log2.
        tried: Values that were run, as log2.
    """
    set_octave_axis(axis, min(ends), max(ends))
    if name != "learning_rate":
        first, last = axis.get_view_interval()
        ticks = _select_spaced_ticks(
            sorted(x for x in tried if first <= x <= last), 0.11 * (last - first)
        )
        set_ticks(axis, ticks, lambda value: f"{from_log2(name, value):.3g}")


def _set_size_axis(axes: Axes, sizes: Iterable[int], important: Iterable[int]) -> None:
    """Put ticks at sizes on an x axis that holds log2(size).

    The sizes in `important` have ticks; another size has a tick if there is room.
    """
    size_by_log2 = {math.log2(size): size for size in sorted(sizes)}
    low, high = min(size_by_log2), max(size_by_log2)
    padding = 0.06 * (high - low) + 0.2
    axes.set_xlim(low - padding, high + padding)
    ticks = _select_spaced_ticks(
        [*map(math.log2, important), *size_by_log2], 0.12 * (high - low + 2 * padding)
    )
    set_ticks(axes.xaxis, ticks, lambda value: format_short_size(size_by_log2[value]))


def _average_seeds(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Return the values without a diverged run, ascending, each with its mean loss over seeds."""
    by_value: dict[float, list[float]] = {}
    for value, loss in points:
        by_value.setdefault(value, []).append(math.inf if loss is None else loss)
    means = [(value, sum(losses) / len(losses)) for value, losses in sorted(by_value.items())]
    return [(value, mean) for value, mean in means if math.isfinite(mean)]


def basins(
    report: AnyReport,
    hyperparameter: str = "learning_rate",
    axis: str = "width",
    arm: str | None = None,
) -> Panel:
    """Draw loss against a hyperparameter at every size of one arm (`draw_basins`).

    Args:
        report: Content of `report.json`.
        hyperparameter: Name of the hyperparameter, as in the plan.
        axis: `width`, `depth`, `batch` or `duration`.
        arm: Parametrization: None for the study's own, `sp` for the control.

    Raises:
        MissingError: The transfer runs have not ended, or there is no such test or arm.
    """
    report = to_report(report)
    test = find_test(report, hyperparameter, axis)
    arms, chosen = test.list_verdicts(report.main_arm), arm or report.main_arm
    if chosen not in arms:
        raise MissingError(
            f"no parametrization {chosen} in {format_test(test)}; the report has: {', '.join(arms)}"
        )
    return draw_basins(test, arms[chosen], chosen)


def draw_basins(test: TransferTest, verdict: Verdict, arm: str) -> Panel:
    """Draw the runs of a test's arm, the fitted basins, and their minima with intervals.

    The limits of the axes are chosen for the runs of all arms, so that the arms can be compared. A
    size without a fitted basin has a thin line through its mean losses.
    """
    runs = test.select_runs()
    sizes = sorted({optimum.size for optimum in verdict.optima} | {run.size for run in runs})
    tried = {run.log2_value for run in runs}
    losses = [run.loss_nats for run in runs if run.loss_nats is not None]

    def paint(axes: Axes) -> None:
        _set_value_axis(axes.xaxis, test.hyperparameter, sorted(tried), tried)
        if losses:
            axes.set_ylim(*choose_loss_limits(losses))
        if verdict.base_log2 is not None:
            draw_reference(axes, verdict.base_log2)
        for optimum in verdict.optima:
            rank, size = sizes.index(optimum.size), optimum.size
            points = [
                (run.log2_value, run.loss_nats) for run in test.select_runs(arm) if run.size == size
            ]
            color, marker = choose_shade(rank, len(sizes)), MARKERS[rank % len(MARKERS)]
            _draw_runs(axes, points, color, marker, format_axis_size(test.axis, size))
            if optimum.minimum is not None:
                _draw_basin(axes, optimum.curve, optimum.minimum, color, marker)
            elif shown_means := [
                point for point in _average_seeds(points) if point[1] <= axes.get_ylim()[1]
            ]:
                axes.plot(*zip(*shown_means, strict=True), color=color, linewidth=0.8, alpha=0.75)

    label = format_hyperparameter(test.hyperparameter)
    title = f"Loss against {label} at each {test.axis}, {format_arm(arm)}"
    return draw(f"basins-{format_anchor(test)}-{arm}", title, (label, LOSS), paint)


def _draw_runs(
    axes: Axes, points: list[tuple[float, float | None]], color: str, marker: str, label: str
) -> None:
    """Draw runs as (log2 of the value, loss), with marks for those outside of the axes."""
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


def _draw_basin(
    axes: Axes,
    curve: Sequence[Interval],
    minimum: tuple[float, Interval, float],
    color: str,
    marker: str,
) -> None:
    """Draw a fitted basin with its minimum.

    Args:
        axes: Axes to draw on.
        curve: Points (log2 of the value, loss) of the basin.
        minimum: log2 of the value at the minimum, its interval, and the loss there.
        color: Color of the basin.
        marker: Marker of the minimum.
    """
    log2_value, interval, loss = minimum
    axes.plot(*zip(*curve, strict=True), color=color, linewidth=1.5)
    draw_interval_marks(
        axes,
        [(log2_value, loss)],
        [interval],
        along="x",
        fmt=marker,
        color=color,
        markersize=6.5,
        markeredgewidth=0.7,
        elinewidth=2,
        capsize=4,
        markeredgecolor=INK,
    )


def drift(report: AnyReport, hyperparameter: str = "learning_rate", axis: str = "width") -> Panel:
    """Draw the optimum against size, the values used up to the target, and the optimum expected.

    If the exponent was measured, a band shows its interval up to the largest size that was run.
    Beyond that size, the band widens to the interval of the optimum at the target.

    Raises:
        MissingError: The transfer runs have not ended, or there is no such test, or it found no
            optimum.
    """
    report = to_report(report)
    test = find_test(report, hyperparameter, axis)
    arms = test.list_verdicts(report.main_arm)
    verdict, name = test.verdict, test.hyperparameter
    if not any(arm_verdict.has_optimum for arm_verdict in arms.values()):
        raise MissingError(f"{format_test(test)} found no optimum")
    sizes = {optimum.size for arm_verdict in arms.values() for optimum in arm_verdict.optima}

    def paint(axes: Axes) -> None:
        sizes_with_ticks = (verdict.target_size, verdict.base_size)
        _set_size_axis(axes, sizes | {*sizes_with_ticks}, sizes_with_ticks)
        draw_reference(axes, math.log2(verdict.target_size), "target", (0, (1, 2)))
        ends = _draw_rule(axes, verdict)
        for i, (arm, arm_verdict) in enumerate(arms.items()):
            _draw_optima(
                axes, arm_verdict.optima, f"control: {format_arm(arm)}" if i else format_arm(arm), i
            )
        interval_ends = [
            y
            for arm_verdict in arms.values()
            for optimum in arm_verdict.optima
            for y in optimum.interval_log2 or ()
        ]
        _set_value_axis(
            axes.yaxis,
            name,
            [*ends, *interval_ends] or [0.0],
            {run.log2_value for run in test.select_runs()},
        )

    label = format_hyperparameter(name)
    title = f"Optimal {label} against {test.axis}"
    return draw(
        f"drift-{format_anchor(test)}", title, (format_axis(test.axis), f"optimal {label}"), paint
    )


def _draw_rule(axes: Axes, verdict: Verdict) -> list[float]:
    """Draw the rule from base to target, its band, and the optimum expected at the target.

    Returns:
        The log2 values that the y axis must show; empty if the base has no value.
    """
    base, target_log2 = verdict.base_log2, verdict.transferred_log2
    if base is None or target_log2 is None:
        return []
    x = [math.log2(verdict.base_size), math.log2(verdict.target_size)]
    axes.plot(
        x,
        [base, target_log2],
        color=INK,
        alpha=0.7,
        linewidth=0.9,
        linestyle=DASHED,
        label="value used",
    )
    heights = [base, target_log2]
    if verdict.offset_octaves.known is None:
        return heights
    offset, (low, high) = verdict.offset_octaves.known
    slopes = verdict.drift_octaves_per_doubling.interval
    if verdict.power_is_measured and slopes is not None:
        # The band bends at the largest size that was run: up to it the drift's interval counts,
        # and from there on the interval of the target's optimum.
        largest_fitted = max(optimum.size for optimum in verdict.optima if optimum.minimum)
        largest = min(math.log2(largest_fitted), x[1])
        edges = [
            [base, base + slope * (largest - x[0]), target_log2 - offset_end]
            for slope, offset_end in zip(slopes, (high, low), strict=True)
        ]
        draw_band(axes, [x[0], largest, x[1]], edges[0], edges[1])
        heights += [*edges[0], *edges[1]]
    draw_interval_marks(
        axes,
        [(x[1], target_log2 - offset)],
        [(target_log2 - high, target_log2 - low)],
        along="y",
        fmt="*",
        color=KINDS[0],
        markersize=8,
        elinewidth=1.5,
        capsize=4,
        label="predicted optimum",
    )
    return [*heights, target_log2 - low, target_log2 - high]


def _draw_optima(axes: Axes, optima: Sequence[Optimum], label: str, rank: int) -> None:
    """Draw the fitted optima of the arm at position `rank` over log2(size)."""
    fitted = [(optimum.size, *optimum.minimum) for optimum in optima if optimum.minimum]
    # The shift keeps two intervals at one size apart.
    points = [(math.log2(size) + 0.06 * rank, log2_value) for size, log2_value, _, _ in fitted]
    draw_interval_marks(
        axes,
        points,
        [interval for _, _, interval, _ in fitted],
        along="y",
        fmt=f"{MARKERS[rank]}-",
        color=KINDS[rank],
        markersize=5.5,
        linewidth=1.5,
        elinewidth=1.5,
        capsize=4,
        label=label,
    )
