"""The figures of the ladder (what each law says, out to the main run, over log10(FLOPs)) and of the main run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from launcher.figures.panel import DASHED, LOSS, MARKERS, MissingError, Panel, draw, interval_marks, log_axis, part
from launcher.figures.svg import INK, KINDS, raised, shade
from launcher.views.batch import law_of
from launcher.views.numbers import Body
from proxies.core.notation import counted, format_count, format_percent

# The main run's figure: training loss as logged over the band that was expected.

BINS_PER_DECADE = 40
"""Losses are drawn as means over so many parts of a decade of steps."""


def main_run(report: Body) -> Panel:
    """Training loss of the main run, as logged, over the band that was expected.

    Raises:
        MissingError: it was not launched in its usual place, or no curve was expected.
    """
    run = part(report, "main_run", "`forerun launch FROZEN` starts it")
    curve = part(report, "decision", "the study has not reached one yet")["predicted"]["curve"]
    if not curve:
        raise MissingError("the ladder has too few runs to predict a curve")
    if not run["steps"]:
        raise MissingError("the main run was not trained by the embedded trainer in its usual place")
    at = [point["step"] for point in curve]
    left = max(1.0, min(run["steps"][-1], at[0]) / 3)  # what lies before the band dwarfs it
    seen = [point for point in binned(run["steps"], run["train_loss_nats"]) if point[0] >= left]

    def paint(axes: Axes) -> None:
        right = 1.1 * max(at[-1], run["steps"][-1])
        log_axis(axes.xaxis, left, right, _format_steps)
        low, high = ([point[f"{end}_nats"] for point in curve] for end in ("low", "high"))
        axes.fill_between(at, low, high, color=KINDS[0], alpha=0.18, linewidth=0, label="predicted band")
        axes.plot(at, [point["loss_nats"] for point in curve], color=KINDS[0], linewidth=1.4, label="expected")
        axes.plot(*zip(*seen, strict=True), color=INK, linewidth=1.4, label="training loss")
        axes.set_xlim(left, right)

    title = "Training loss of the main run and its predicted band"
    return draw("main-run", title, ("optimizer steps", "training loss (nats per token)"), paint, (4.8, 3.4))


def binned(steps: Sequence[int], losses: Sequence[float]) -> list[tuple[float, float]]:
    """Mean step and mean loss of each part of a decade of steps that has some."""
    bins: dict[int, list[tuple[int, float]]] = {}
    for step, loss in zip(steps, losses, strict=True):
        bins.setdefault(math.floor(BINS_PER_DECADE * math.log10(step)), []).append((step, loss))
    return [(sum(s for s, _ in part) / len(part), sum(x for _, x in part) / len(part)) for part in bins.values()]


_FLOPS = "training compute, 6ND (FLOPs)"
_WIDE = (4.8, 3.7)
_NUM_TICKS = 7
_BESIDE = 0.025
"""A share of the axis, between a rung and what was predicted of it: their marks do not meet."""


def _flops_axis(axes: Axes, values: Iterable[float]) -> None:
    """Decades, with their twos and fives where there are few, on an axis that holds log10(FLOPs)."""
    shown = [math.log10(value) for value in values]
    low, high = min(shown), max(shown)
    pad = 0.05 * (high - low) + 0.05
    axes.set_xlim(low - pad, high + pad)
    decades, steps = range(math.floor(low) - 1, math.ceil(high) + 1), (1, 2, 5) if high - low < 2 else (1,)
    ticks = {e + math.log10(s): f"{s}×{raised(10, e)}".removeprefix("1×") for e in decades for s in steps}
    axes.xaxis.set_major_locator(FixedLocator([at for at in ticks if low - pad <= at <= high + pad]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: ticks[value]))


def _loss_axis(axes: Axes, low: float, high: float) -> None:
    """Round losses between these nats, the finest step of which at most seven fit, on an axis that holds log10."""
    axes.set_ylim(math.log10(low), math.log10(high))
    steps = [digit * 10.0**power for power in range(-4, 3) for digit in (1, 2, 5)]
    step = next((step for step in steps if (high - low) / step <= _NUM_TICKS), steps[-1])
    ticks = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    axes.yaxis.set_major_locator(FixedLocator([math.log10(tick) for tick in ticks]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{10**value:.4g}"))


def _rungs(axes: Axes, rungs: Sequence[Any]) -> None:
    """Rungs of the ladder as dots by width, over log10(FLOPs)."""
    widths = sorted({rung["width"] for rung in rungs})
    for rank, width in enumerate(widths):
        mine = [rung for rung in rungs if rung["width"] == width]
        at = [math.log10(rung["flops"]) for rung in mine], [_log_loss(rung) for rung in mine]
        axes.plot(*at, MARKERS[rank % len(MARKERS)], color=shade(rank, len(widths)), markersize=5, zorder=3,
                  label=f"width {width}")  # fmt: skip


def _log_loss(rung: Any) -> float:
    return math.log10(rung["loss_nats"])


def ladder(report: Body) -> Panel:
    """Loss against compute, log-log: rungs, back-test, the pooled laws' frontier with its band, the main run.

    Raises:
        MissingError: the ladder has not ended.
    """
    ran = part(report, "ladder", "`forerun ladder PLAN` runs it")["rungs"]
    fit = part(report, "fit", "`forerun ladder PLAN` runs what it needs")
    frontier, predicted = report["frontier"] or [], (report["choice"] or {}).get("prediction")
    rungs = [rung for rung in ran if rung["loss_nats"] is not None]
    held_out = (fit["backtest"] or {"runs": []})["runs"]
    flops = [point["flops"] for point in (*ran, *frontier)]

    def paint(axes: Axes) -> None:
        seen = [rung["loss_nats"] for rung in rungs] + [run["predicted"] for run in held_out]
        seen += [predicted["loss"]] if predicted else []
        _flops_axis(axes, flops + ([predicted["flops"]] if predicted else []))
        _loss_axis(axes, *_room(seen, predicted, frontier))
        if predicted and rungs:
            axes.axvline(math.log10(max(rung["flops"] for rung in rungs)), color=INK, alpha=0.55, linewidth=0.9,
                         linestyle=DASHED, label="largest rung")  # fmt: skip
        _frontier(axes, frontier, f"{format_percent(fit['level'])} of new runs")
        _rungs(axes, rungs)
        (left, right) = axes.get_xlim()
        back = [(math.log10(6 * run["params"] * run["tokens"]) - _BESIDE * (right - left), run["predicted"],
                 run["interval"]) for run in held_out]  # fmt: skip
        _bars(axes, back, "d", KINDS[4], 5, "back-test")
        if predicted:
            at = (math.log10(predicted["flops"]), predicted["loss"], predicted["interval"])
            _bars(axes, [at], "*", KINDS[1], 12, "main run")

    title = "Loss against training compute: rungs, the frontier, and the main run"
    return draw("scaling", title, (_FLOPS, LOSS), paint, _WIDE)


def _format_steps(value: float) -> str:
    return f"{value:,.0f}"


def curves_over_steps(axes: Axes, curves: Sequence[Any], label: Callable[[Any], str]) -> list[tuple[Any, str]]:
    """Draw training losses over log steps; returns each curve with its colour."""
    steps = [step for curve in curves for step in curve["steps"]]
    log_axis(axes.xaxis, min(steps), max(steps), _format_steps)
    drawn = [(curve, shade(rank, len(curves))) for rank, curve in enumerate(curves)]
    for curve, colour in drawn:
        axes.plot(curve["steps"], curve["train_loss_nats"], color=colour, linewidth=1.4, label=label(curve))
    return drawn


def branches(report: Body) -> Panel:
    """Training loss of rungs that share a stable phase: each from where it leaves the shorter one, its decay marked.

    Raises:
        MissingError: the ladder has not ended, or no rungs share one.
    """
    ladder = part(report, "ladder", "`forerun ladder PLAN` runs it")
    found = part(ladder, "branches", "no rungs share a stable phase (proxy.decay_branches)")

    def paint(axes: Axes) -> None:
        for curve, colour in curves_over_steps(
            axes, found["curves"], lambda curve: f"{counted(curve['num_steps'], 'step')}"
        ):
            axes.axvline(curve["branch_step"], color=colour, linewidth=0.8, linestyle=DASHED)
        first, last = found["curves"][0], found["curves"][-1]
        at = len(first["steps"]) // 4  # what lies before dwarfs the decays
        highest, lowest = first["train_loss_nats"][at], min(min(one["train_loss_nats"]) for one in found["curves"])
        axes.set_xlim(first["steps"][at], 1.1 * last["num_steps"])
        axes.set_ylim(lowest - 0.05 * (highest - lowest), highest)

    title = f"Training loss of rungs of width {found['width']} that share a stable phase"
    return draw("branches", title, ("optimizer steps", "training loss (nats per token)"), paint, _WIDE)


def aspect(report: Body) -> Panel:
    """What the width per layer adds to the loss, in percent: rungs, the parabola and its band.

    Raises:
        MissingError: the ladder is no grid of widths and depths.
    """
    part(report, "ladder", "`forerun ladder PLAN` runs it")
    found = part(report, "choice", "the ladder identifies no law")["aspect"]
    if not found or not found["curve"]:
        raise MissingError("the ladder is no grid of widths and depths")

    def percent(log_loss: float) -> float:
        return 100.0 * math.expm1(log_loss)

    def paint(axes: Axes) -> None:
        at = [math.log2(point["width_per_layer"]) for point in found["curve"]]
        low, high = ([percent(point["interval"][end]) for point in found["curve"]] for end in (0, 1))
        axes.fill_between(at, low, high, color=KINDS[0], alpha=0.18, linewidth=0, label="interval")
        axes.plot(at, [percent(point["log_loss"]) for point in found["curve"]], color=KINDS[0], linewidth=1.4)
        seen = [(math.log2(one["width_per_layer"]), percent(one["log_loss"])) for one in found["points"]]
        axes.plot(*zip(*seen, strict=True), MARKERS[0], color=INK, markersize=4, label="rungs")
        axes.axvline(math.log2(found["width_per_layer"]), color=KINDS[1], linewidth=1.1, linestyle=DASHED,
                     label="chosen")  # fmt: skip
        axes.xaxis.set_major_locator(FixedLocator(range(math.floor(min(at)), math.ceil(max(at)) + 1)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{2**value:g}"))

    title = "Loss against width per layer, parameters and tokens equal"
    return draw("aspect", title, ("width per layer", "loss beyond the law (%)"), paint, _WIDE)


def noise(report: Body) -> Panel:
    """The gradient noise scale at each look at a rung, log-log over tokens, with its law and the plan's batch.

    Raises:
        MissingError: no rung was looked at.
    """
    found = part(report, "noise_scale", "no rung was long enough to be looked at")
    looks, law, judged = found["looks"], law_of(found), found["judged"]
    told = [look for look in looks if look["interval"][0] is not None]
    widths = sorted({look["width"] for look in told})
    batch = judged["batch_tokens"] if judged else looks[0]["batch_tokens"]
    last = max([look["tokens"] for look in looks] + ([judged["num_tokens"]] if judged else []))
    shown = [look["scale_tokens"] or look["interval"][0] for look in told] + [batch]
    # The law's line reaches the main run's tokens inside the picture; bounds of the law and of a look may leave it.
    shown += [] if law is None else [law.at(last)[0] / 2]
    floor, ceiling = min([batch, *(look["interval"][0] for look in told)]) / 2, 4 * max(shown)

    def paint(axes: Axes) -> None:
        log_axis(axes.xaxis, min(look["tokens"] for look in looks), last, format_count)
        log_axis(axes.yaxis, floor, ceiling, format_count)
        if law is not None:
            first = min(look["tokens"] for look in looks)
            at = [first * (last / first) ** (i / 40) for i in range(41)]
            middle, low, high = zip(*map(law.at, at), strict=True)
            axes.fill_between(at, low, high, color=KINDS[0], alpha=0.16, linewidth=0, label="law")
            axes.plot(at, middle, color=KINDS[0], linewidth=1.4)
        for rank, width in enumerate(widths):
            mine = [look for look in told if look["width"] == width]
            beside = 1 + 0.08 * (rank - (len(widths) - 1) / 2)  # or bars of one step would hide each other
            colour, x = shade(rank, len(widths)), [look["tokens"] * beside for look in mine]
            y = [look["scale_tokens"] or look["interval"][0] for look in mine]
            ends = [(look["interval"][0], look["interval"][1] or 10 * ceiling) for look in mine]  # open: past the top
            axes.vlines(x, *zip(*ends, strict=True), color=colour, linewidth=1.2)
            axes.plot(x, y, MARKERS[rank % len(MARKERS)], color=colour, markersize=5, label=f"width {width}")
        axes.axhline(batch, color=KINDS[1], linewidth=1.1, linestyle=DASHED, label="batch")
        axes.set_ylim(floor, ceiling)

    title = "Gradient noise scale of the rungs against tokens trained on, and the main run's batch"
    return draw("noise", title, ("tokens trained on", "noise scale (tokens)"), paint, _WIDE)


def _room(seen: Sequence[float], predicted: Any, frontier: Sequence[Any]) -> tuple[float, float]:
    """Limits in nats that hold what was measured and predicted: a band that explodes must not flatten it."""
    low, high = min(seen, default=1.0), max(seen, default=1.0)
    reach = max(high / low, 1.1) ** 0.4
    ends = [end for point in frontier for end in point["interval"] or ()]
    ends += (predicted or {}).get("interval") or ()
    return max(min([low, *ends]), low / reach) / 1.02, min(max([high, *ends]), high * reach) * 1.02


def _frontier(axes: Axes, frontier: Sequence[Any], band: str) -> None:
    """The best loss for the compute, with the band of one new run where there is one."""
    x = [math.log10(point["flops"]) for point in frontier]
    if frontier and all(point["interval"] for point in frontier):
        low, high = ([math.log10(point["interval"][i]) for point in frontier] for i in (0, 1))
        axes.fill_between(x, low, high, color=KINDS[0], alpha=0.16, linewidth=0, label=band)
    axes.plot(x, [_log_loss(point) for point in frontier], color=KINDS[0], linewidth=1.8,
              label="best at its compute" if frontier else None)  # fmt: skip


def _bars(
    axes: Axes, points: Sequence[tuple[float, float, Any]], marker: str, colour: str, size: float, label: str
) -> None:
    """Losses with their intervals, (log10 FLOPs, nats, interval), on the axis of log10; nothing without any."""
    if points:
        ends = [[math.log10(end) for end in interval or (loss, loss)] for _, loss, interval in points]
        interval_marks(axes, [(x, math.log10(loss)) for x, loss, _ in points], ends, along="y", fmt=marker,
                       color=colour, markersize=size, elinewidth=1.4, capsize=3.5, zorder=4 if marker == "*" else 2,
                       label=label)  # fmt: skip
