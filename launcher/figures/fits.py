"""Figures of the ladder and of the main run: the laws, up to the main run, over log10(FLOPs)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from launcher.figures.panel import (
    DASHED,
    LOSS,
    MARKERS,
    MissingError,
    Panel,
    draw,
    interval_marks,
    log_axis,
    part,
)
from launcher.figures.svg import INK, KINDS, format_power, shade
from launcher.views.batch import law_of
from launcher.views.numbers import Body
from proxies.core.noise_scale import NoiseLaw
from proxies.core.notation import counted, format_count, format_percent

BINS_PER_DECADE = 40
"""Parts of a decade of steps over which losses are averaged for drawing."""


def main_run(report: Body) -> Panel:
    """Draw the training loss of the main run over the predicted band.

    Raises:
        MissingError: The run was not launched in its usual place, or has no predicted curve.
    """
    run = part(report, "main_run", "`forerun launch FROZEN` starts it")
    curve = part(report, "decision", "the study has not reached one yet")["predicted"]["curve"]
    if not curve:
        raise MissingError("the ladder has too few runs to predict a curve")
    if not run["steps"]:
        raise MissingError(
            "the main run was not trained by the embedded trainer in its usual place"
        )
    curve_steps = [point["step"] for point in curve]
    # The losses before the band are so high that they would flatten it.
    left = max(1.0, min(run["steps"][-1], curve_steps[0]) / 3)
    shown_losses = [
        point for point in bin_losses(run["steps"], run["train_loss_nats"]) if point[0] >= left
    ]

    def paint(axes: Axes) -> None:
        right = 1.1 * max(curve_steps[-1], run["steps"][-1])
        log_axis(axes.xaxis, left, right, _format_steps)
        low, high = ([point[f"{end}_nats"] for point in curve] for end in ("low", "high"))
        axes.fill_between(
            curve_steps, low, high, color=KINDS[0], alpha=0.18, linewidth=0, label="predicted band"
        )
        axes.plot(
            curve_steps,
            [point["loss_nats"] for point in curve],
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
        (sum(s for s, _ in group) / len(group), sum(x for _, x in group) / len(group))
        for group in bins.values()
    ]


_FLOPS = "training compute, 6ND (FLOPs)"
_WIDE = (4.8, 3.7)
_NUM_TICKS = 7
_BACKTEST_SHIFT = 0.025
"""Share of the axis between a rung and its back-test prediction, so that their marks do not meet.
"""


def _set_flops_axis(axes: Axes, values: Iterable[float]) -> None:
    """Put ticks at decades on an x axis that holds log10(FLOPs).

    Twos and fives are added where there are few decades.
    """
    logs = [math.log10(value) for value in values]
    low, high = min(logs), max(logs)
    pad = 0.05 * (high - low) + 0.05
    axes.set_xlim(low - pad, high + pad)
    decades, steps = (
        range(math.floor(low) - 1, math.ceil(high) + 1),
        (1, 2, 5) if high - low < 2 else (1,),
    )
    ticks = {
        e + math.log10(s): f"{s}×{format_power(10, e)}".removeprefix("1×")
        for e in decades
        for s in steps
    }
    axes.xaxis.set_major_locator(
        FixedLocator([tick for tick in ticks if low - pad <= tick <= high + pad])
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: ticks[value]))


def _set_loss_axis(axes: Axes, low: float, high: float) -> None:
    """Put ticks at round losses on a y axis that holds log10(nats).

    The step is the finest of which at most `_NUM_TICKS` fit.
    """
    axes.set_ylim(math.log10(low), math.log10(high))
    steps = [digit * 10.0**power for power in range(-4, 3) for digit in (1, 2, 5)]
    step = next((step for step in steps if (high - low) / step <= _NUM_TICKS), steps[-1])
    ticks = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    axes.yaxis.set_major_locator(FixedLocator([math.log10(tick) for tick in ticks]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{10**value:.4g}"))


def _draw_rungs(axes: Axes, rungs: Sequence[Any]) -> None:
    """Draw the rungs of the ladder as dots, by width, over log10(FLOPs)."""
    widths = sorted({rung["width"] for rung in rungs})
    for rank, width in enumerate(widths):
        rungs_of_width = [rung for rung in rungs if rung["width"] == width]
        position = (
            [math.log10(rung["flops"]) for rung in rungs_of_width],
            [_compute_log10_loss(rung) for rung in rungs_of_width],
        )
        axes.plot(
            *position,
            MARKERS[rank % len(MARKERS)],
            color=shade(rank, len(widths)),
            markersize=5,
            zorder=3,
            label=f"width {width}",
        )


def _compute_log10_loss(rung: Any) -> float:
    return math.log10(rung["loss_nats"])


def ladder(report: Body) -> Panel:
    """Draw loss against compute, log-log: rungs, back-test, frontier with band, and main run.

    The frontier is that of the pooled laws.

    Raises:
        MissingError: The ladder has not ended.
    """
    all_rungs = part(report, "ladder", "`forerun ladder PLAN` runs it")["rungs"]
    fit = part(report, "fit", "`forerun ladder PLAN` runs what it needs")
    frontier, predicted = report["frontier"] or [], (report["choice"] or {}).get("prediction")
    rungs = [rung for rung in all_rungs if rung["loss_nats"] is not None]
    held_out = (fit["backtest"] or {"runs": []})["runs"]
    flops = [point["flops"] for point in (*all_rungs, *frontier)]

    def paint(axes: Axes) -> None:
        losses = [rung["loss_nats"] for rung in rungs] + [run["predicted"] for run in held_out]
        losses += [predicted["loss"]] if predicted else []
        _set_flops_axis(axes, flops + ([predicted["flops"]] if predicted else []))
        _set_loss_axis(axes, *_choose_loss_limits(losses, predicted, frontier))
        if predicted and rungs:
            axes.axvline(
                math.log10(max(rung["flops"] for rung in rungs)),
                color=INK,
                alpha=0.55,
                linewidth=0.9,
                linestyle=DASHED,
                label="largest rung",
            )
        _draw_frontier(axes, frontier, f"{format_percent(fit['level'])} of new runs")
        _draw_rungs(axes, rungs)
        (left, right) = axes.get_xlim()
        backtest_points = [
            (
                math.log10(6 * run["params"] * run["tokens"]) - _BACKTEST_SHIFT * (right - left),
                run["predicted"],
                run["interval"],
            )
            for run in held_out
        ]
        _draw_intervals(axes, backtest_points, "d", KINDS[4], 5, "back-test")
        if predicted:
            at = (math.log10(predicted["flops"]), predicted["loss"], predicted["interval"])
            _draw_intervals(axes, [at], "*", KINDS[1], 12, "main run")

    title = "Loss against training compute: rungs, the frontier, and the main run"
    return draw("scaling", title, (_FLOPS, LOSS), paint, _WIDE)


def _format_steps(value: float) -> str:
    return f"{value:,.0f}"


def curves_over_steps(
    axes: Axes, curves: Sequence[Any], label: Callable[[Any], str]
) -> list[tuple[Any, str]]:
    """Draw training losses over log steps, and return each curve with its color."""
    steps = [step for curve in curves for step in curve["steps"]]
    log_axis(axes.xaxis, min(steps), max(steps), _format_steps)
    drawn = [(curve, shade(rank, len(curves))) for rank, curve in enumerate(curves)]
    for curve, color in drawn:
        axes.plot(
            curve["steps"],
            curve["train_loss_nats"],
            color=color,
            linewidth=1.4,
            label=label(curve),
        )
    return drawn


def branches(report: Body) -> Panel:
    """Draw the training loss of rungs that share a stable phase, with their decays marked.

    Each curve begins where it leaves the shorter one.

    Raises:
        MissingError: The ladder has not ended, or no rungs share a stable phase.
    """
    ladder = part(report, "ladder", "`forerun ladder PLAN` runs it")
    shared_phase = part(ladder, "branches", "no rungs share a stable phase (proxy.decay_branches)")

    def paint(axes: Axes) -> None:
        for curve, color in curves_over_steps(
            axes, shared_phase["curves"], lambda curve: f"{counted(curve['num_steps'], 'step')}"
        ):
            axes.axvline(curve["branch_step"], color=color, linewidth=0.8, linestyle=DASHED)
        first, last = shared_phase["curves"][0], shared_phase["curves"][-1]
        start = len(first["steps"]) // 4  # Earlier losses are so high that they flatten the decays.
        highest, lowest = (
            first["train_loss_nats"][start],
            min(min(curve["train_loss_nats"]) for curve in shared_phase["curves"]),
        )
        axes.set_xlim(first["steps"][start], 1.1 * last["num_steps"])
        axes.set_ylim(lowest - 0.05 * (highest - lowest), highest)

    title = f"Training loss of rungs of width {shared_phase['width']} that share a stable phase"
    return draw(
        "branches", title, ("optimizer steps", "training loss (nats per token)"), paint, _WIDE
    )


def aspect(report: Body) -> Panel:
    """Draw what the width per layer adds to the loss, in percent, with rungs, parabola and band.

    Raises:
        MissingError: The ladder is not a grid of widths and depths.
    """
    part(report, "ladder", "`forerun ladder PLAN` runs it")
    section = part(report, "choice", "the ladder identifies no law")["aspect"]
    if not section or not section["curve"]:
        raise MissingError("the ladder is no grid of widths and depths")

    def percent(log_loss: float) -> float:
        return 100.0 * math.expm1(log_loss)

    def paint(axes: Axes) -> None:
        log_aspects = [math.log2(point["width_per_layer"]) for point in section["curve"]]
        low, high = (
            [percent(point["interval"][end]) for point in section["curve"]] for end in (0, 1)
        )
        axes.fill_between(
            log_aspects, low, high, color=KINDS[0], alpha=0.18, linewidth=0, label="interval"
        )
        axes.plot(
            log_aspects,
            [percent(point["log_loss"]) for point in section["curve"]],
            color=KINDS[0],
            linewidth=1.4,
        )
        rung_points = [
            (math.log2(point["width_per_layer"]), percent(point["log_loss"]))
            for point in section["points"]
        ]
        axes.plot(
            *zip(*rung_points, strict=True), MARKERS[0], color=INK, markersize=4, label="rungs"
        )
        axes.axvline(
            math.log2(section["width_per_layer"]),
            color=KINDS[1],
            linewidth=1.1,
            linestyle=DASHED,
            label="chosen",
        )
        axes.xaxis.set_major_locator(
            FixedLocator(range(math.floor(min(log_aspects)), math.ceil(max(log_aspects)) + 1))
        )
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{2**value:g}"))

    title = "Loss against width per layer, parameters and tokens equal"
    return draw("aspect", title, ("width per layer", "loss beyond the law (%)"), paint, _WIDE)


def noise(report: Body) -> Panel:
    """Draw the gradient noise scale of every look over tokens, with its law and the plan's batch.

    Raises:
        MissingError: The noise was not measured at any rung.
    """
    section = part(report, "noise_scale", "no rung was long enough to be looked at")
    looks, law, judged = section["looks"], law_of(section), section["judged"]
    bounded_looks = [look for look in looks if look["interval"][0] is not None]
    widths = sorted({look["width"] for look in bounded_looks})
    batch = judged["batch_tokens"] if judged else looks[0]["batch_tokens"]
    last = max([look["tokens"] for look in looks] + ([judged["num_tokens"]] if judged else []))
    scales = [look["scale_tokens"] or look["interval"][0] for look in bounded_looks] + [batch]
    # The figure holds the law's line up to the main run's tokens; bounds of the law and of a look
    # may leave it.
    scales += [] if law is None else [law.at(last)[0] / 2]
    floor, ceiling = (
        min([batch, *(look["interval"][0] for look in bounded_looks)]) / 2,
        4 * max(scales),
    )

    def paint(axes: Axes) -> None:
        log_axis(axes.xaxis, min(look["tokens"] for look in looks), last, format_count)
        log_axis(axes.yaxis, floor, ceiling, format_count)
        if law is not None:
            _draw_noise_law(axes, law, min(look["tokens"] for look in looks), last)
        for rank, width in enumerate(widths):
            looks_of_width = [look for look in bounded_looks if look["width"] == width]
            # Without a shift, the bars of one step would hide each other.
            shift = 1 + 0.08 * (rank - (len(widths) - 1) / 2)
            color, x = (
                shade(rank, len(widths)),
                [look["tokens"] * shift for look in looks_of_width],
            )
            y = [look["scale_tokens"] or look["interval"][0] for look in looks_of_width]
            # A look without an upper bound has a bar that leaves the figure at the top.
            intervals = [
                (look["interval"][0], look["interval"][1] or 10 * ceiling)
                for look in looks_of_width
            ]
            axes.vlines(x, *zip(*intervals, strict=True), color=color, linewidth=1.2)
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
    axes.fill_between(tokens, low, high, color=KINDS[0], alpha=0.16, linewidth=0, label="law")
    axes.plot(tokens, middle, color=KINDS[0], linewidth=1.4)


def _choose_loss_limits(
    losses: Sequence[float], predicted: Any, frontier: Sequence[Any]
) -> tuple[float, float]:
    """Return loss limits in nats that hold what was measured and predicted.

    A band that grows without bound must not flatten it.
    """
    low, high = min(losses, default=1.0), max(losses, default=1.0)
    reach = max(high / low, 1.1) ** 0.4
    ends = [end for point in frontier for end in point["interval"] or ()]
    ends += (predicted or {}).get("interval") or ()
    return max(min([low, *ends]), low / reach) / 1.02, min(max([high, *ends]), high * reach) * 1.02


def _draw_frontier(axes: Axes, frontier: Sequence[Any], band: str) -> None:
    """Draw the best loss for the compute, with the band of one new run if there is one."""
    x = [math.log10(point["flops"]) for point in frontier]
    if frontier and all(point["interval"] for point in frontier):
        low, high = ([math.log10(point["interval"][i]) for point in frontier] for i in (0, 1))
        axes.fill_between(x, low, high, color=KINDS[0], alpha=0.16, linewidth=0, label=band)
    axes.plot(
        x,
        [_compute_log10_loss(point) for point in frontier],
        color=KINDS[0],
        linewidth=1.8,
        label="best at its compute" if frontier else None,
    )


def _draw_intervals(
    axes: Axes,
    points: Sequence[tuple[float, float, Any]],
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
        interval_marks(
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
