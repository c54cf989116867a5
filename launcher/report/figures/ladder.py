"""Figures of the ladder and of the main run that it forecasts.

The figures show the ladder's losses with the fitted law, its decay branches, the width per layer,
the gradient noise scale of the rungs, and the training loss of the main run over its forecast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from matplotlib.axes import Axes

from forerun._launcher.report.figures.panel import (
    DASHED,
    LOSS,
    MARKERS,
    MissingError,
    Panel,
    draw,
    draw_band,
    draw_interval_marks,
    draw_reference,
    require,
    set_log_axis,
    set_ticks,
)
from forerun._launcher.report.figures.svg import INK, KINDS, choose_shade, format_power
from forerun._launcher.report.views.finding import Interval, LossCurve
from forerun._launcher.report.views.fit_findings import FrontierPoint, Prediction, Rung
from forerun._launcher.report.views.noise_scale import fit_noise_looks
from forerun._launcher.report.views.report_model import AnyReport, to_report
from forerun._proxies.core.noise_scale import NoiseLaw
from forerun._proxies.core.notation import format_count, format_counted, format_percent

BINS_PER_DECADE = 40
"""Parts of a decade of steps over which losses are averaged for drawing."""


def main_run(report: AnyReport) -> Panel:
    """Draw the training loss of the main run over the predicted band.

    Raises:
        MissingError: The run was not launched in its usual place, or has no predicted curve.
    """
    report = to_report(report)
    run = require(report.main_run, "main_run", "`forerun launch FROZEN` starts it")
    advice = "the study has not reached one yet"
    curve = require(report.decision, "decision", advice).predicted.curve
    if not curve:
        raise MissingError("the ladder has too few runs to predict a curve")
    if not run.steps:
        raise MissingError(
            "the main run was not trained by the embedded trainer in its usual place"
        )
    curve_steps = [point.step for point in curve]
    # The losses before the band are so high that they would flatten the band. So the axis begins at
    # a third of the band's first step, or of the run's last step if the run has not reached the
    # band.
    left = max(1.0, min(run.steps[-1], curve_steps[0]) / 3)
    shown_losses = [
        point for point in bin_losses(run.steps, run.train_loss_nats) if point[0] >= left
    ]

    def paint(axes: Axes) -> None:
        right = 1.1 * max(curve_steps[-1], run.steps[-1])
        set_log_axis(axes.xaxis, left, right, _format_steps)
        low, high = [point.low_nats for point in curve], [point.high_nats for point in curve]
        draw_band(axes, curve_steps, low, high, "predicted band")
        axes.plot(
            curve_steps,
            [point.loss_nats for point in curve],
            color=KINDS[0],
            linewidth=1.4,
            label="expected",
        )
        axes.plot(*zip(*shown_losses, strict=True), color=INK, linewidth=1.4, label="training loss")
        axes.set_xlim(left, right)

    title = "Training loss of the main run and its predicted band"
    return draw(
        "main-run", title, ("optimizer steps", "training loss (nats per token)"), paint, (4.8, 3.4)
    )


def bin_losses(steps: Sequence[int], losses: Sequence[float]) -> list[tuple[float, float]]:
    """Return the mean step and mean loss of each part of a decade that has losses."""
    bins: dict[int, list[tuple[int, float]]] = {}
    for step, loss in zip(steps, losses, strict=True):
        bins.setdefault(math.floor(BINS_PER_DECADE * math.log10(step)), []).append((step, loss))
    return [
        (sum(step for step, _ in group) / len(group), sum(loss for _, loss in group) / len(group))
        for group in bins.values()
    ]


_FLOPS = "training compute, 6ND (FLOPs)"
_WIDE = (4.8, 3.7)
"""Width and height of a figure in inches."""
_NUM_TICKS = 7
"""Maximum number of ticks of a loss axis."""
_BACKTEST_SHIFT = 0.025
"""Distance from a rung to its back-test prediction, as a share of the axis: the marks must not
overlap."""


def _set_flops_axis(axes: Axes, values: Iterable[float]) -> None:
    """Put ticks at decades on an x axis that holds log10(FLOPs).

    Twos and fives are added where there are few decades.
    """
    logs = [math.log10(value) for value in values]
    low, high = min(logs), max(logs)
    pad = 0.05 * (high - low) + 0.05
    axes.set_xlim(low - pad, high + pad)
    decades = range(math.floor(low) - 1, math.ceil(high) + 1)
    digits = (1, 2, 5) if high - low < 2 else (1,)
    ticks = {
        exponent + math.log10(digit): f"{digit}×{format_power(10, exponent)}".removeprefix("1×")
        for exponent in decades
        for digit in digits
    }
    shown_ticks = [tick for tick in ticks if low - pad <= tick <= high + pad]
    set_ticks(axes.xaxis, shown_ticks, lambda value: ticks[value])


def _set_loss_axis(axes: Axes, low: float, high: float) -> None:
    """Put ticks at round losses on a y axis that holds log10(nats).

    The distance of ticks is the smallest with which the axis has about `_NUM_TICKS` ticks or fewer.
    """
    axes.set_ylim(math.log10(low), math.log10(high))
    steps = [digit * 10.0**power for power in range(-4, 3) for digit in (1, 2, 5)]
    step = next((step for step in steps if (high - low) / step <= _NUM_TICKS), steps[-1])
    ticks = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    set_ticks(axes.yaxis, [math.log10(tick) for tick in ticks], lambda value: f"{10**value:.4g}")


def _draw_rungs(axes: Axes, rungs: Sequence[Rung]) -> None:
    """Draw the rungs of the ladder as dots, by width, over log10(FLOPs)."""
    widths = sorted({rung.width for rung in rungs})
    for rank, width in enumerate(widths):
        rungs_of_width = [rung for rung in rungs if rung.width == width]
        position = (
            [math.log10(rung.flops) for rung in rungs_of_width],
            [math.log10(rung.loss_nats or math.nan) for rung in rungs_of_width],
        )
        axes.plot(
            *position,
            MARKERS[rank % len(MARKERS)],
            color=choose_shade(rank, len(widths)),
            markersize=5,
            zorder=3,
            label=f"width {width}",
        )


def ladder(report: AnyReport) -> Panel:
    """Draw loss against compute, log-log: rungs, back-test, frontier with band, and main run.

    The frontier is the best loss at each compute, as the laws of the fit predict it together.

    Raises:
        MissingError: The ladder has not ended.
    """
    report = to_report(report)
    all_rungs = require(report.ladder, "ladder", "`forerun ladder PLAN` runs it").rungs
    fit = require(report.fit, "fit", "`forerun ladder PLAN` runs what it needs")
    frontier, predicted = report.frontier or [], report.choice.prediction if report.choice else None
    rungs = [rung for rung in all_rungs if rung.loss_nats is not None]
    held_out = fit.backtest.runs if fit.backtest else ()
    flops = [rung.flops for rung in all_rungs] + [point.flops for point in frontier]

    def paint(axes: Axes) -> None:
        losses = [rung.loss_nats for rung in rungs if rung.loss_nats is not None]
        losses += [run.predicted for run in held_out]
        losses += [predicted.loss] if predicted else []
        _set_flops_axis(axes, flops + ([predicted.flops] if predicted else []))
        _set_loss_axis(axes, *_choose_forecast_limits(losses, predicted, frontier))
        if predicted and rungs:
            largest_flops = max(rung.flops for rung in rungs)
            draw_reference(axes, math.log10(largest_flops), "largest rung")
        _draw_frontier(axes, frontier, f"{format_percent(fit.level)} of new runs")
        _draw_rungs(axes, rungs)
        left, right = axes.get_xlim()
        backtest_points = [
            (
                math.log10(6 * run.params * run.tokens) - _BACKTEST_SHIFT * (right - left),
                run.predicted,
                run.interval,
            )
            for run in held_out
        ]
        _draw_intervals(axes, backtest_points, "d", KINDS[4], 5, "back-test")
        if predicted:
            main_run_point = (math.log10(predicted.flops), predicted.loss, predicted.interval)
            _draw_intervals(axes, [main_run_point], "*", KINDS[1], 12, "main run")

    title = "Loss against training compute: rungs, the frontier, and the main run"
    return draw("scaling", title, (_FLOPS, LOSS), paint, _WIDE)


def _format_steps(value: float) -> str:
    return f"{value:,.0f}"


def draw_curves_over_steps(
    axes: Axes, curves: Sequence[LossCurve], label: Callable[[LossCurve], str]
) -> list[tuple[LossCurve, str]]:
    """Draw training losses over log steps, and return each curve with its color."""
    steps = [step for curve in curves for step in curve.steps]
    set_log_axis(axes.xaxis, min(steps), max(steps), _format_steps)
    drawn = [(curve, choose_shade(rank, len(curves))) for rank, curve in enumerate(curves)]
    for curve, color in drawn:
        axes.plot(
            curve.steps, curve.train_loss_nats, color=color, linewidth=1.4, label=label(curve)
        )
    return drawn


def branches(report: AnyReport) -> Panel:
    """Draw the training loss of rungs that share a stable phase, with their decays marked.

    Each curve begins at the step where it leaves the curve of the next shorter rung.

    Raises:
        MissingError: The ladder has not ended, or no rungs share a stable phase.
    """
    ladder = require(to_report(report).ladder, "ladder", "`forerun ladder PLAN` runs it")
    advice = "no rungs share a stable phase (proxy.decay_branches)"
    shared_phase = require(ladder.branches, "branches", advice)

    def paint(axes: Axes) -> None:
        for curve, color in draw_curves_over_steps(
            axes, shared_phase.curves, lambda curve: f"{format_counted(curve.num_steps, 'step')}"
        ):
            axes.axvline(curve.branch_step, color=color, linewidth=0.8, linestyle=DASHED)
        first, last = shared_phase.curves[0], shared_phase.curves[-1]
        start = len(first.steps) // 4  # Earlier losses are so high that they flatten the decays.
        highest = first.train_loss_nats[start]
        lowest = min(min(curve.train_loss_nats) for curve in shared_phase.curves)
        axes.set_xlim(first.steps[start], 1.1 * last.num_steps)
        axes.set_ylim(lowest - 0.05 * (highest - lowest), highest)

    title = f"Training loss of rungs of width {shared_phase.width} that share a stable phase"
    return draw(
        "branches", title, ("optimizer steps", "training loss (nats per token)"), paint, _WIDE
    )


def aspect(report: AnyReport) -> Panel:
    """Draw what the width per layer adds to the loss, in percent, with rungs, parabola and band.

    Raises:
        MissingError: The ladder is not a grid of widths and depths.
    """
    report = to_report(report)
    require(report.ladder, "ladder", "`forerun ladder PLAN` runs it")
    section = require(report.choice, "choice", "the ladder identifies no law").aspect
    if not section or not section.curve:
        raise MissingError("the ladder is no grid of widths and depths")

    def to_percent(log_loss: float) -> float:
        return 100.0 * math.expm1(log_loss)

    def paint(axes: Axes) -> None:
        log_aspects = [math.log2(point.width_per_layer) for point in section.curve]
        low, high = (
            [to_percent((point.interval or (0, 0))[end]) for point in section.curve]
            for end in (0, 1)
        )
        draw_band(axes, log_aspects, low, high, "interval")
        axes.plot(
            log_aspects,
            [to_percent(point.log_loss) for point in section.curve],
            color=KINDS[0],
            linewidth=1.4,
        )
        rung_points = [
            (math.log2(point.width_per_layer), to_percent(point.log_loss))
            for point in section.points
        ]
        axes.plot(
            *zip(*rung_points, strict=True), MARKERS[0], color=INK, markersize=4, label="rungs"
        )
        axes.axvline(
            math.log2(section.width_per_layer),
            color=KINDS[1],
            linewidth=1.1,
            linestyle=DASHED,
            label="chosen",
        )
        ticks = range(math.floor(min(log_aspects)), math.ceil(max(log_aspects)) + 1)
        set_ticks(axes.xaxis, ticks, lambda value: f"{2**value:g}")

    title = "Loss against width per layer, parameters and tokens equal"
    return draw("aspect", title, ("width per layer", "loss beyond the law (%)"), paint, _WIDE)


def noise(report: AnyReport) -> Panel:
    """Draw the gradient noise scale over tokens, with its law and the plan's batch.

    A look is a measurement of the gradient noise at one step of a rung.

    Raises:
        MissingError: The noise was not measured at any rung.
    """
    advice = "no rung was long enough to be looked at"
    section = require(to_report(report).noise_scale, "noise_scale", advice)
    looks, law, judged = (
        section.looks,
        fit_noise_looks(section.looks, section.level),
        section.judged,
    )
    bounded_looks = [
        (look, low, high) for look in looks for low, high in [look.interval] if low is not None
    ]
    widths = sorted({look.width for look, _, _ in bounded_looks})
    batch = judged.batch_tokens if judged else looks[0].batch_tokens
    last = max([look.tokens for look in looks] + ([judged.num_tokens] if judged else []))
    scales = [look.scale_tokens or low for look, low, _ in bounded_looks] + [batch]
    # The axes have room for the law's line up to the main run's tokens. Bounds of the law and of
    # looks may lie outside the axes.
    if law is not None:
        # Half of the law's value: `ceiling` is four times the largest scale, so twice the law's.
        scales.append(law.at(last)[0] / 2)
    floor, ceiling = min([batch, *(low for _, low, _ in bounded_looks)]) / 2, 4 * max(scales)

    def paint(axes: Axes) -> None:
        set_log_axis(axes.xaxis, min(look.tokens for look in looks), last, format_count)
        set_log_axis(axes.yaxis, floor, ceiling, format_count)
        if law is not None:
            _draw_noise_law(axes, law, min(look.tokens for look in looks), last)
        for rank, width in enumerate(widths):
            looks_of_width = [bounded for bounded in bounded_looks if bounded[0].width == width]
            # Without a shift, the bars of one step would hide each other.
            shift = 1 + 0.08 * (rank - (len(widths) - 1) / 2)
            color = choose_shade(rank, len(widths))
            x = [look.tokens * shift for look, _, _ in looks_of_width]
            y = [look.scale_tokens or low for look, low, _ in looks_of_width]
            # A look without an upper bound has a bar that leaves the figure at the top.
            highs = [high or 10 * ceiling for _, _, high in looks_of_width]
            axes.vlines(x, [low for _, low, _ in looks_of_width], highs, color=color, linewidth=1.2)
            axes.plot(
                x,
                y,
                MARKERS[rank % len(MARKERS)],
                color=color,
                markersize=5,
                label=f"width {width}",
            )
        axes.axhline(batch, color=KINDS[1], linewidth=1.1, linestyle=DASHED, label="batch")
        axes.set_ylim(floor, ceiling)

    title = "Gradient noise scale of the rungs against tokens trained on, and the main run's batch"
    return draw("noise", title, ("tokens trained on", "noise scale (tokens)"), paint, _WIDE)


def _draw_noise_law(axes: Axes, law: NoiseLaw, first: float, last: float) -> None:
    """Draw the law of the noise scale with its band, over tokens from `first` to `last`."""
    tokens = [first * (last / first) ** (i / 40) for i in range(41)]
    middle, low, high = zip(*map(law.at, tokens), strict=True)
    draw_band(axes, tokens, low, high, "law")
    axes.plot(tokens, middle, color=KINDS[0], linewidth=1.4)


def _choose_forecast_limits(
    losses: Sequence[float], predicted: Prediction | None, frontier: Sequence[FrontierPoint]
) -> tuple[float, float]:
    """Return limits of the loss axis in nats: all losses, and intervals as far as there is room.

    A band that grows without bound must not flatten the losses. So the axis reaches beyond the
    losses by at most 40 % of their range on the logarithmic axis, and ends 2 % farther out.
    """
    low, high = min(losses, default=1.0), max(losses, default=1.0)
    reach = max(high / low, 1.1) ** 0.4
    ends = [end for point in frontier for end in point.interval or ()]
    ends += (predicted.interval if predicted else None) or ()
    return max(min([low, *ends]), low / reach) / 1.02, min(max([high, *ends]), high * reach) * 1.02


def _draw_frontier(axes: Axes, frontier: Sequence[FrontierPoint], band: str) -> None:
    """Draw the best loss at each compute, with the band of one new run if every point has one."""
    x = [math.log10(point.flops) for point in frontier]
    intervals = [point.interval for point in frontier if point.interval]
    if frontier and len(intervals) == len(frontier):
        low, high = ([math.log10(interval[i]) for interval in intervals] for i in (0, 1))
        draw_band(axes, x, low, high, band)
    axes.plot(
        x,
        [math.log10(point.loss_nats) for point in frontier],
        color=KINDS[0],
        linewidth=1.8,
        label="best at its compute" if frontier else None,
    )


def _draw_intervals(
    axes: Axes,
    points: Sequence[tuple[float, float, Interval | None]],
    marker: str,
    color: str,
    size: float,
    label: str,
) -> None:
    """Draw losses with their intervals, given as (log10 FLOPs, nats, interval), on log10 axes."""
    if points:
        ends = [
            [math.log10(end) for end in interval or (loss, loss)] for _, loss, interval in points
        ]
        draw_interval_marks(
            axes,
            [(x, math.log10(loss)) for x, loss, _ in points],
            ends,
            along="y",
            fmt=marker,
            color=color,
            markersize=size,
            elinewidth=1.4,
            capsize=3.5,
            zorder=4 if marker == "*" else 2,
            label=label,
        )
