"""The report's figures, each a pure function from the report's body to one SVG. The only door to matplotlib.

One panel each, side by side or stacked; panels to be compared share their axes. The same body gives the same bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from launcher.coordinate_view import by_role, points
from launcher.report_html import Body, arm_name
from launcher.svg import INK, KINDS, SEQUENCE, finish, raised, shade

_STYLE: Any = {
    "svg.fonttype": "none", "font.size": 9.5, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "legend.frameon": False,
    "legend.fontsize": 8.5, "legend.handlelength": 1.4, "legend.columnspacing": 1.2, "legend.handletextpad": 0.5,
    "axes.grid": True, "grid.color": INK, "grid.alpha": 0.1, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "path.simplify": False, "text.parse_math": False,
}  # fmt: skip
_INCHES = (4.8, 3.5)
_MARKERS = "osD^vP"
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def _draw(name: str, title: str, labels: tuple[str, str], paint: Callable[[Axes], None]) -> str:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's matplotlibrc must not change a report
        matplotlib.rcParams.update(_STYLE | {"svg.hashsalt": name})
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        paint(axes)
        handles, _ = axes.get_legend_handles_labels()
        if handles:
            columns = min(len(handles), 4)  # filled column by column; read row by row
            handles = [handles[j] for i in range(columns) for j in range(i, len(handles), columns)]
            figure.legend(handles=handles, loc="outside upper left", ncols=columns)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    return finish(buffer.getvalue(), name, title)


def _octaves(axis: Axis, low: float, high: float) -> None:
    """Whole powers of two, on an axis that holds log2(rate); two octaves at least, or noise would look like drift."""
    pad = max(0.4, (2.2 - (high - low)) / 2)
    first, last = math.ceil(low - pad), math.floor(high + pad)
    axis.set_view_interval(low - pad, high + pad, ignore=True)
    axis.set_major_locator(FixedLocator(range(first, last + 1, 1 + (last - first) // 12)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: raised(2, round(value))))


def _width_axis(axes: Axes, widths: Iterable[int]) -> None:
    shown = sorted(set(widths))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(shown[0] / 1.25, shown[-1] * 1.25)


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


def _ceiling(losses: Sequence[float]) -> tuple[float, float]:
    """Loss limits that show the valleys: a few runs near divergence must not flatten all others."""
    low, middle = min(losses), sorted(losses)[len(losses) // 2]
    crowd = low + 4 * (middle - low)
    high = max(losses) if max(losses) <= low + 1.5 * (crowd - low) else max(crowd, min(losses) + 0.05)
    pad = 0.05 * (high - low) or 0.05
    return low - pad, high + pad


def _edge_marks(axes: Axes, points: Sequence[tuple[float, float | None]], colour: str) -> None:
    """A cross at the top for a run without a loss, a triangle for one above the axis."""
    bottom, top = axes.get_ylim()
    at = top - 0.03 * (top - bottom)
    lost = [x for x, loss in points if loss is None]
    above = [x for x, loss in points if loss is not None and loss > top]
    axes.plot(lost, [at] * len(lost), "x", color=colour, markersize=5.5, markeredgewidth=1.4)
    axes.plot(above, [at] * len(above), "^", color=colour, markersize=4.5, fillstyle="none")


def main_arm(body: Body) -> str:
    """The name of the arm that the study is about, as in `transfer.runs`."""
    return str(body["question"]["proxy"]["parametrization"])


def verdict_of(body: Body, arm: str) -> Any:
    """The verdict on one arm, or None where there is no such arm."""
    verdict = body["transfer"]["verdict"]
    return verdict if arm == main_arm(body) else verdict["control"]


def valleys(body: Body, arm: str) -> str:
    """Loss against learning rate at every width of one arm: runs as dots, fitted valleys, minima with intervals.

    The axes hold both arms' runs.
    """
    everything, verdict = body["transfer"]["runs"], verdict_of(body, arm)
    widths = sorted({run["width"] for run in everything})
    rates = [run["log2_lr"] for run in everything]
    losses = [run["loss_nats"] for run in everything if run["loss_nats"] is not None]
    set_rate = verdict["transferred_lr"]

    def paint(axes: Axes) -> None:
        _octaves(axes.xaxis, min(rates), max(rates))
        if losses:
            axes.set_ylim(*_ceiling(losses))
        if set_rate is not None:
            axes.axvline(math.log2(set_rate), color=INK, alpha=0.55, linewidth=0.9, linestyle=(0, (4, 3)))
        for optimum in verdict["optima"]:
            rank = widths.index(optimum["width"])
            points = [(run["log2_lr"], run["loss_nats"]) for run in everything
                      if run["arm"] == arm and run["width"] == optimum["width"]]  # fmt: skip
            _valley(axes, optimum, points, shade(rank, len(widths)), _MARKERS[rank % len(_MARKERS)])

    title = f"Loss against learning rate at each width, {arm_name(arm)}"
    return _draw(f"valleys-{arm}", title, ("learning rate", "validation loss (nats per token)"), paint)


def _valley(axes: Axes, optimum: Any, points: list[tuple[float, float | None]], colour: str, marker: str) -> None:
    top = axes.get_ylim()[1]
    inside = [(x, loss) for x, loss in points if loss is not None and loss <= top]
    axes.plot([x for x, _ in inside], [y for _, y in inside], marker, color=colour, markersize=3.6, alpha=0.75,
              markeredgewidth=0, label=f"width {optimum['width']}")  # fmt: skip
    axes.plot([x for x, _ in optimum["curve"]], [y for _, y in optimum["curve"]], color=colour, linewidth=1.5)
    _edge_marks(axes, points, colour)
    if optimum["log2_lr"] is not None:
        at, (low, high) = optimum["log2_lr"], optimum["interval_log2"]
        axes.errorbar([at], [optimum["loss_nats"]], xerr=[[at - low], [high - at]], fmt=marker, color=colour,
                      markersize=6.5, markeredgecolor=INK, markeredgewidth=0.7, elinewidth=2.2, capsize=4,
                      capthick=1.4)  # fmt: skip


def drift(body: Body) -> str:
    """Optimal learning rate against width, with intervals, for the study's parametrization and its control."""
    verdict = body["transfer"]["verdict"]
    arms = [(arm_name(main_arm(body)), verdict)] + ([("control: SP", verdict["control"])] if verdict["control"] else [])
    widths = {optimum["width"] for _, of in arms for optimum in of["optima"]} | {verdict["target_width"]}

    def paint(axes: Axes) -> None:
        _width_axis(axes, widths)
        axes.axvline(verdict["target_width"], color=INK, alpha=0.55, linewidth=0.9, linestyle=(0, (1, 2)),
                     label=f"target, {verdict['target_width']}")  # fmt: skip
        axes.axhline(math.log2(body["transfer"]["learning_rate"]), color=INK, alpha=0.55, linewidth=0.9,
                     linestyle=(0, (4, 3)), label="rate to launch with")  # fmt: skip
        for i, (name, of) in enumerate(arms):
            _drifting(axes, of["optima"], name, i)
        _octaves(axes.yaxis, *axes.dataLim.intervaly)

    return _draw("drift", "Optimal learning rate against width", ("width", "optimal learning rate"), paint)


def _drifting(axes: Axes, optima: Sequence[Any], name: str, rank: int) -> None:
    shift = 2.0 ** (0.06 * rank)  # so that two intervals at one width do not lie on each other
    found = [o for o in optima if o["log2_lr"] is not None]
    at = [o["log2_lr"] for o in found]
    arms = [
        [o["log2_lr"] - o["interval_log2"][0] for o in found],
        [o["interval_log2"][1] - o["log2_lr"] for o in found],
    ]
    axes.errorbar([o["width"] * shift for o in found], at, yerr=arms, fmt=f"{_MARKERS[rank]}-", color=KINDS[rank],
                  markersize=5.5, linewidth=1.5, elinewidth=1.5, capsize=4, label=name)  # fmt: skip
    for optimum in optima:
        if optimum["log2_lr"] is None:
            at_bottom = (optimum["width"] / 1.04, 0.02 + 0.06 * rank)
            axes.annotate(f"{name}: {optimum['status'].replace('_', ' ')}", at_bottom, fontsize=8.5, color=KINDS[rank],
                          xycoords=("data", "axes fraction"), ha="right")  # fmt: skip


def coordinates(body: Body, arm: str) -> str:
    """Size of the change of each role's worst layer against width, or depth, log-log; bold or dashed if not passing."""
    check = body["coordinates"][arm]
    shown = {name: [layers[0] for _, layers in by_role(of)] for name, of in body["coordinates"].items()}
    everything = [change for layers in shown.values() for layer in layers for change in layer["change"] if change > 0]
    styles = {"passes": ("-", 1.2), "cannot_tell": ((0, (3, 2)), 1.2), "blows_up": ("-", 2.8), "vanishes": ("-", 2.8)}

    def paint(axes: Axes) -> None:
        _width_axis(axes, points(check))
        axes.set_yscale("log")
        if everything:
            axes.set_ylim(min(everything) / 1.3, max(everything) * 1.3)
        axes.yaxis.set_major_locator(FixedLocator([m * 10.0**e for e in range(-9, 9) for m in (1, 2, 5)]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
        for rank, layer in enumerate(shown[arm]):
            dashes, weight = styles[layer["outcome"]]
            axes.plot(points(check)[: len(layer["change"])], layer["change"], marker=_MARKERS[rank % len(_MARKERS)],
                      markersize=4, linewidth=weight, linestyle=dashes, color=KINDS[rank % len(KINDS)],
                      label=layer["role"].replace("_", " "))  # fmt: skip

    title = f"Coordinate check, {arm_name(arm)}: change of each role's worst layer against {check['axis']}"
    return _draw(f"coordinates-{arm}", title, (check["axis"], "mean absolute change of output"), paint)


def search(body: Body) -> str:
    """Loss of every trial against its learning rate, coloured by gradient clip."""
    trials, asked = body["search"]["trials"], body["question"]["search"]
    rates = [math.log2(trial["learning_rate"]) for trial in trials]
    losses = [trial["loss_nats"] for trial in trials if trial["loss_nats"] is not None]
    low, high = (math.log2(end) for end in asked["clip_norm"])

    def paint(axes: Axes) -> None:
        _octaves(axes.xaxis, min(rates), max(rates))
        if losses:
            axes.set_ylim(*_ceiling(losses))
        axes.axvline(math.log2(body["search"]["best"]["learning_rate"]), color=INK, alpha=0.55, linewidth=0.9,
                     linestyle=(0, (4, 3)), label="best")  # fmt: skip
        for trial, rate in zip(trials, rates, strict=True):
            rank = 0.5 if high == low else (math.log2(trial["clip_norm"]) - low) / (high - low)
            colour = SEQUENCE[min(max(round(rank * (len(SEQUENCE) - 1)), 0), len(SEQUENCE) - 1)]
            loss = trial["loss_nats"]
            if loss is not None and loss <= axes.get_ylim()[1]:
                axes.plot([rate], [loss], "o", color=colour, markersize=6, markeredgecolor=INK, markeredgewidth=0.4)
            else:
                _edge_marks(axes, [(rate, loss)], colour)
        for colour, end in ((SEQUENCE[0], asked["clip_norm"][0]), (SEQUENCE[-1], asked["clip_norm"][1])):
            axes.plot([], [], "o", color=colour, markersize=6, label=f"clip {end:g}")

    return _draw("search", "Loss of every trial against learning rate, coloured by gradient clip",
                 ("learning rate", "validation loss (nats per token)"), paint)  # fmt: skip


def _rungs(axes: Axes, rungs: Sequence[Any], height: Callable[[Any], float]) -> None:
    """Rungs of the ladder as dots by width, over log10(FLOPs)."""
    widths = sorted({rung["width"] for rung in rungs})
    for rank, width in enumerate(widths):
        mine = [rung for rung in rungs if rung["width"] == width]
        at = [math.log10(rung["flops"]) for rung in mine], [height(rung) for rung in mine]
        axes.plot(*at, _MARKERS[rank % len(_MARKERS)], color=shade(rank, len(widths)), markersize=5,
                  label=f"width {width}")  # fmt: skip


def scaling(body: Body) -> str:
    """Loss against compute: the ladder's rungs, the frontier with its band, the target with its interval."""
    frontier, predicted = body["frontier"] or [], (body["choice"] or {}).get("prediction")
    rungs = [rung for rung in body["ladder"]["rungs"] if rung["loss_nats"] is not None]
    flops = [rung["flops"] for rung in body["ladder"]["rungs"]] + [point["flops"] for point in frontier]

    def paint(axes: Axes) -> None:
        x = [math.log10(point["flops"]) for point in frontier]
        if frontier and all(point["interval"] for point in frontier):
            low, high = ([point["interval"][i] for point in frontier] for i in (0, 1))
            axes.fill_between(x, low, high, color=KINDS[0], alpha=0.18, linewidth=0)
        axes.plot(x, [point["loss_nats"] for point in frontier], color=KINDS[0], linewidth=1.6,
                  label="best for the compute" if frontier else None)  # fmt: skip
        _rungs(axes, rungs, lambda rung: float(rung["loss_nats"]))
        if predicted:
            at, (low_end, high_end) = predicted["loss"], predicted["interval"] or (predicted["loss"],) * 2
            axes.errorbar([math.log10(predicted["flops"])], [at], yerr=[[at - low_end], [high_end - at]], fmt="*",
                          markersize=12, color=KINDS[1], elinewidth=1.8, capsize=5, label="main run")  # fmt: skip
        _flops_axis(axes, flops + ([predicted["flops"]] if predicted else []))
        seen = [r["loss_nats"] for r in rungs] + ([predicted["loss"]] if predicted else []) or [0.0]
        room = max(seen) - min(seen) + 0.5  # a band that explodes must not flatten what was measured
        axes.set_ylim(max(axes.get_ylim()[0], min(seen) - room, 0), min(axes.get_ylim()[1], max(seen) + room))

    return _draw("scaling", "Loss against training compute", ("training compute, 6ND (FLOPs)",
                 "validation loss (nats per token)"), paint)  # fmt: skip


def residuals(body: Body) -> str:
    """What the fit misses at every rung, in percent of the loss, with the band of one standard deviation."""
    spread = body["fit"]["residual_sd"]
    rungs = [r for r in body["ladder"]["rungs"] if r["loss_nats"] is not None and r["fitted_nats"] is not None]

    def paint(axes: Axes) -> None:
        axes.axhline(0, color=INK, alpha=0.55, linewidth=0.9)
        if spread is not None:
            axes.axhspan(-100 * spread, 100 * spread, color=KINDS[0], alpha=0.12, linewidth=0)
        _rungs(axes, rungs, lambda rung: 100 * math.log(rung["loss_nats"] / rung["fitted_nats"]))
        _flops_axis(axes, [rung["flops"] for rung in body["ladder"]["rungs"]])
        widest = max(abs(end) for end in axes.get_ylim())
        axes.set_ylim(-widest, widest)

    return _draw("residuals", "Measured loss against fitted loss, rung by rung",
                 ("training compute, 6ND (FLOPs)", "measured above fitted (% of loss)"), paint)  # fmt: skip
