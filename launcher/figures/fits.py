"""The ladder's figures: what each law says, out to the main run, and what the fit misses. Pure, as those of `figures`.

Both go over the same log10(FLOPs); heights of the first are log10 of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from launcher.figures.figures import MARKERS, apart, draw, interval_marks
from launcher.figures.svg import INK, KINDS, raised, shade
from launcher.views.fit import rung_names
from launcher.views.html import Body

_FLOPS = "training compute, 6ND (FLOPs)"
_WIDE = (4.8, 3.7)
_LAW_STYLES = ((KINDS[2], (0, (5, 2))), (KINDS[5], (0, (1, 1.2))), (KINDS[3], (0, (6, 2, 1, 2))))
_NUM_TICKS = 7
_BESIDE = 0.025
"""Of the axis, between a rung and what was foretold of it: their marks do not meet."""
_MOST_NAMES = 5
_GAP = 0.055
"""Between names, as a share of the axis."""


def flops_axis(axes: Axes, values: Iterable[float]) -> None:
    """Decades, with their twos and fives where there are few, on an axis that holds log10(FLOPs)."""
    shown = [math.log10(value) for value in values]
    low, high = min(shown), max(shown)
    pad = 0.05 * (high - low) + 0.05
    axes.set_xlim(low - pad, high + pad)
    decades, steps = range(math.floor(low) - 1, math.ceil(high) + 1), (1, 2, 5) if high - low < 2 else (1,)
    ticks = {e + math.log10(s): f"{s}×{raised(10, e)}".removeprefix("1×") for e in decades for s in steps}
    axes.xaxis.set_major_locator(FixedLocator([at for at in ticks if low - pad <= at <= high + pad]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: ticks[value]))


def loss_axis(axes: Axes, low: float, high: float) -> None:
    """Round losses between these nats, the finest step of which at most seven fit, on an axis that holds log10."""
    axes.set_ylim(math.log10(low), math.log10(high))
    steps = [digit * 10.0**power for power in range(-4, 3) for digit in (1, 2, 5)]
    step = next((step for step in steps if (high - low) / step <= _NUM_TICKS), steps[-1])
    ticks = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    axes.yaxis.set_major_locator(FixedLocator([math.log10(tick) for tick in ticks]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{10**value:.4g}"))


def _rungs(axes: Axes, rungs: Sequence[Any], height: Callable[[Any], float]) -> None:
    """Rungs of the ladder as dots by width, over log10(FLOPs)."""
    widths = sorted({rung["width"] for rung in rungs})
    for rank, width in enumerate(widths):
        mine = [rung for rung in rungs if rung["width"] == width]
        at = [math.log10(rung["flops"]) for rung in mine], [height(rung) for rung in mine]
        axes.plot(*at, MARKERS[rank % len(MARKERS)], color=shade(rank, len(widths)), markersize=5, zorder=3,
                  label=f"width {width}")  # fmt: skip


def laws(body: Body) -> str:
    """Loss against compute, log-log: rungs, back-test, the pooled laws' frontier with its band, each law's, the run."""
    frontier, predicted = body["frontier"] or [], (body["choice"] or {}).get("prediction")
    rungs = [rung for rung in body["ladder"]["rungs"] if rung["loss_nats"] is not None]
    held_out = (body["fit"]["backtest"] or {"runs": []})["runs"]
    flops = [rung["flops"] for rung in body["ladder"]["rungs"]] + [point["flops"] for point in frontier]

    def paint(axes: Axes) -> None:
        seen = [rung["loss_nats"] for rung in rungs] + [run["predicted"] for run in held_out]
        seen += [predicted["loss"]] if predicted else []
        flops_axis(axes, flops + ([predicted["flops"]] if predicted else []))
        loss_axis(axes, *_room(seen, predicted, frontier, body["fit"]["members"]))
        if predicted and rungs:
            axes.axvline(math.log10(max(rung["flops"] for rung in rungs)), color=INK, alpha=0.55, linewidth=0.9,
                         linestyle=(0, (4, 3)), label="largest rung")  # fmt: skip
        _pool(axes, frontier, body["fit"]["level"])
        _members(axes, body["fit"]["members"])
        _rungs(axes, rungs, lambda rung: math.log10(rung["loss_nats"]))
        _held_out(axes, held_out)
        if predicted:
            x, y = math.log10(predicted["flops"]), predicted["loss"]
            _bars(axes, [(x, y, predicted["interval"])], "*", KINDS[1], 12, "main run")

    return draw("scaling", "Loss against training compute: rungs, frontiers of the laws, and the main run",
                 (_FLOPS, "validation loss (nats per token)"), paint, _WIDE)  # fmt: skip


def _room(
    seen: Sequence[float], predicted: Any, frontier: Sequence[Any], members: Sequence[Any]
) -> tuple[float, float]:
    """Limits in nats that hold what was measured and predicted: a band or a law that explodes must not flatten it."""
    low, high = min(seen, default=1.0), max(seen, default=1.0)
    reach = max(high / low, 1.1) ** 0.4
    ends = [end for point in frontier for end in point["interval"] or ()]
    ends += (predicted or {}).get("interval") or ()
    ends += [point["loss_nats"] for member in members for point in member["frontier"] or ()]
    return max(min([low, *ends]), low / reach) / 1.02, min(max([high, *ends]), high * reach) * 1.02


def _pool(axes: Axes, frontier: Sequence[Any], level: float) -> None:
    """The frontier of the pooled laws, with the band of one new run."""
    x = [math.log10(point["flops"]) for point in frontier]
    if frontier and all(point["interval"] for point in frontier):
        low, high = ([math.log10(point["interval"][i]) for point in frontier] for i in (0, 1))
        axes.fill_between(x, low, high, color=KINDS[0], alpha=0.16, linewidth=0, label=f"{100 * level:g} % of new runs")
    axes.plot(x, [math.log10(point["loss_nats"]) for point in frontier], color=KINDS[0], linewidth=1.8,
              label="best for the compute" if frontier else None)  # fmt: skip


def _members(axes: Axes, members: Sequence[Any]) -> None:
    """Each law's own frontier as a thin line, its name and weight at the end, pushed apart where lines meet."""
    found = [(member, style) for member, style in zip(members, _LAW_STYLES, strict=False) if member["frontier"]]
    if len(found) < 2:
        return
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    found.sort(key=lambda one: float(one[0]["frontier"][-1]["loss_nats"]))
    ends = [math.log10(member["frontier"][-1]["loss_nats"]) for member, _ in found]
    places = apart([min(max(end, bottom), top) for end in ends], _GAP * (top - bottom))
    for (member, (colour, dashes)), end, place in zip(found, ends, places, strict=True):
        x = [math.log10(point["flops"]) for point in member["frontier"]]
        axes.plot(x, [math.log10(point["loss_nats"]) for point in member["frontier"]], color=colour, linewidth=1.2,
                  linestyle=dashes)  # fmt: skip
        axes.plot([x[-1], right], [end, place], color=colour, linewidth=0.6)
        axes.annotate(f"{member['form']} {100 * member['weight']:.0f} %", (right, place), xytext=(3, 0), va="center",
                      textcoords="offset points", fontsize=8.5, color=colour, annotation_clip=False)  # fmt: skip
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)


def _held_out(axes: Axes, runs: Sequence[Any]) -> None:
    """What the rungs below said of the largest, a little left of what was measured there."""
    (left, right) = axes.get_xlim()
    at = [math.log10(6 * run["params"] * run["tokens"]) - _BESIDE * (right - left) for run in runs]
    points = [(x, run["predicted"], run["interval"]) for x, run in zip(at, runs, strict=True)]
    _bars(axes, points, "d", KINDS[4], 5, "back-test")


def _bars(
    axes: Axes, points: Sequence[tuple[float, float, Any]], marker: str, colour: str, size: float, label: str
) -> None:
    """Losses with their intervals, (log10 FLOPs, nats, interval), on the axis of log10; nothing without any."""
    if not points:
        return
    ends = [[math.log10(end) for end in interval or (loss, loss)] for _, loss, interval in points]
    interval_marks(axes, [(x, math.log10(loss)) for x, loss, _ in points], ends, along="y", fmt=marker, color=colour,
                   markersize=size, elinewidth=1.4, capsize=3.5, zorder=4 if marker == "*" else 2,
                   label=label)  # fmt: skip


def residuals(body: Body) -> str:
    """Measured over fitted at every rung, in percent, with one and two sd of all; the worst outliers are named."""
    spread = body["fit"]["residual_sd"]
    rungs = [r for r in body["ladder"]["rungs"] if r["loss_nats"] is not None and r["fitted_nats"] is not None]
    rows = (body["fit"]["influence"] or {"rows": []})["rows"]
    names = rung_names(body["ladder"]["rungs"])
    outliers = sorted((row for row in rows if row["outlier"]), key=lambda row: -abs(row["residual_sds"]))

    def height(rung: Any) -> float:
        return 100 * math.log(rung["loss_nats"] / rung["fitted_nats"])

    def paint(axes: Axes) -> None:
        axes.axhline(0, color=INK, alpha=0.55, linewidth=0.9)
        for num_sd in (1, 2) if spread is not None else ():
            axes.axhspan(-100 * num_sd * spread, 100 * num_sd * spread, color=KINDS[0], alpha=0.1, linewidth=0,
                         label="1 and 2 sd of all rungs" if num_sd == 1 else None)  # fmt: skip
        _rungs(axes, rungs, height)
        flops_axis(axes, [rung["flops"] for rung in body["ladder"]["rungs"]])
        widest = 1.08 * max([abs(height(rung)) for rung in rungs] + [200 * (spread or 0.0), 1e-3])
        axes.set_ylim(-widest, widest)
        middle, taken = sum(axes.get_xlim()) / 2, list[float]()
        for row in outliers:
            rung = body["ladder"]["rungs"][row["rung"]]
            x, y = math.log10(rung["flops"]), height(rung)
            if len(taken) == _MOST_NAMES or any(abs(y - other) < 2 * _GAP * widest for other in taken):
                continue  # names must not lie on each other; the caption has them all
            taken.append(y)
            axes.annotate(names[row["rung"]], (x, y), xytext=(7 if x < middle else -7, 0), textcoords="offset points",
                          fontsize=8.5, va="center", ha="left" if x < middle else "right")  # fmt: skip

    return draw("residuals", "Measured loss against fitted loss, rung by rung",
                 (_FLOPS, "measured above fitted (% of loss)"), paint)  # fmt: skip
