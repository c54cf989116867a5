"""The report's figures, each a pure function from the report's body to one SVG.

With `figures_transfer` and `figures_cost`, which draw the transfer tests, `figures_fits`, which draws the ladder,
`figures_main_run` and `figures_compare`, which lays two studies over each other, the only door to matplotlib; `plots`
hands the same figures to notebooks.

One panel each, side by side or stacked; panels to be compared share their axes. The same body gives the same bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from launcher.figures.svg import INK, KINDS, SEQUENCE, finish, raised
from launcher.study.gates import by_role, points
from launcher.views.html import Body, arm_name

_STYLE: Any = {
    "svg.fonttype": "none", "font.size": 9.5, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "legend.frameon": False,
    "legend.fontsize": 8.5, "legend.handlelength": 1.4, "legend.columnspacing": 1.2, "legend.handletextpad": 0.5,
    "axes.grid": True, "grid.color": INK, "grid.alpha": 0.1, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "path.simplify": False, "text.parse_math": False,
}  # fmt: skip
INCHES = (4.8, 3.5)
MARKERS = "osD^vP"
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_KEPT: ContextVar[list[Figure] | None] = ContextVar("kept figures", default=None)


class Panel(Figure):
    """A figure that a notebook shows at the end of a cell, with no pyplot and no line of magic."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=120)
        return buffer.getvalue()


def draw(
    name: str, title: str, labels: tuple[str, str], paint: Callable[[Axes], None], inches: tuple[float, float] = INCHES
) -> str:
    """One panel as SVG, its legend above it; within `kept`, nothing is written and the figure is kept.

    Args:
        name: unique on the page.
        title: what a screen reader says.
        labels: of both axes.
        paint: draws into the axes.
        inches: width and height.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's matplotlibrc must not change a report
        matplotlib.rcParams.update(_STYLE | {"svg.hashsalt": name})
        figure = Panel(figsize=inches, layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        paint(axes)
        handles, names = axes.get_legend_handles_labels()
        if handles:
            columns = _legend_columns(names, inches[0])  # filled column by column; read row by row
            handles = [handles[j] for i in range(columns) for j in range(i, len(handles), columns)]
            figure.legend(handles=handles, loc="outside upper left", ncols=columns)
        if (keeping := _KEPT.get()) is not None:
            figure.set_label(title)
            keeping.append(figure)
            return ""
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    return finish(buffer.getvalue(), name, title)


@contextmanager
def kept() -> Iterator[list[Figure]]:
    """Figures that are drawn inside, as matplotlib's own, each labelled with its title; as SVG they are empty then."""
    figures: list[Figure] = []
    token = _KEPT.set(figures)
    try:
        yield figures
    finally:
        _KEPT.reset(token)


def _legend_columns(names: Sequence[str], inches: float) -> int:
    """As many columns as fit, four at most, by the usual width of a letter."""
    for columns in range(min(len(names), 4), 1, -1):
        longest = [max(map(len, names[i::columns])) for i in range(columns)]
        if sum(27 + 4.6 * length for length in longest) <= 72 * inches:
            return columns
    return 1


def octaves(axis: Axis, low: float, high: float) -> None:
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


def ceiling(losses: Sequence[float]) -> tuple[float, float]:
    """Loss limits that show the valleys: a few runs near divergence must not flatten all others."""
    low, middle = min(losses), sorted(losses)[len(losses) // 2]
    crowd = low + 4 * (middle - low)
    high = max(losses) if max(losses) <= low + 1.5 * (crowd - low) else max(crowd, min(losses) + 0.05)
    pad = 0.05 * (high - low) or 0.05
    return low - pad, high + pad


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved until they are `gap` apart at least: halfway between pushing up and pushing down."""
    up, down = list(heights), list(heights)
    for i in range(1, len(up)):
        up[i] = max(up[i], up[i - 1] + gap)
        down[-1 - i] = min(down[-1 - i], down[-i] - gap)
    return [(high + low) / 2 for high, low in zip(up, down, strict=True)]


def interval_marks(
    axes: Axes, points: Sequence[tuple[float, float]], intervals: Sequence[Sequence[float]], *, along: str, **style: Any
) -> None:
    """Marks with bars: each mark where its point is, each bar where its interval is, which need not hold the point.

    An interval comes of resampled fits, the point of the fit to all runs: a degenerate one may lie outside.

    Args:
        axes: to draw on.
        points: (x, y) of each.
        intervals: (low, high) of each.
        along: "x" or "y", the axis of the intervals.
        **style: of matplotlib's `errorbar`.
    """
    middles = [(low + high) / 2 for low, high in intervals]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    shown = (middles, ys) if along == "x" else (xs, middles)
    style = {**style, f"{along}err": [(high - low) / 2 for low, high in intervals]}
    marks, _, _ = axes.errorbar(*shown, **style)
    marks.set_data(xs, ys)
    axes.update_datalim(points)


def edge_marks(axes: Axes, points: Sequence[tuple[float, float | None]], colour: str) -> None:
    """A cross at the top for a run without a loss, a triangle for one above the axis."""
    bottom, top = axes.get_ylim()
    at = top - 0.03 * (top - bottom)
    lost = [x for x, loss in points if loss is None]
    above = [x for x, loss in points if loss is not None and loss > top]
    axes.plot(lost, [at] * len(lost), "x", color=colour, markersize=5.5, markeredgewidth=1.4)
    axes.plot(above, [at] * len(above), "^", color=colour, markersize=4.5, fillstyle="none")


def main_arm(body: Body) -> str:
    """The name of the arm that the study is about, as in the runs of a transfer test."""
    return str(body["question"]["proxy"]["parametrization"])


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
            axes.plot(points(check)[: len(layer["change"])], layer["change"], marker=MARKERS[rank % len(MARKERS)],
                      markersize=4, linewidth=weight, linestyle=dashes, color=KINDS[rank % len(KINDS)],
                      label=layer["role"].replace("_", " "))  # fmt: skip

    title = f"Coordinate check, {arm_name(arm)}: change of each role's worst layer against {check['axis']}"
    return draw(f"coordinates-{arm}", title, (check["axis"], "mean absolute change of output"), paint)


def search(body: Body) -> str:
    """Loss of every trial against its learning rate, coloured by gradient clip."""
    trials, clips = body["search"]["trials"], body["search"]["ranges"]["clip_norm"]
    rates = [math.log2(trial["learning_rate"]) for trial in trials]
    losses = [trial["loss_nats"] for trial in trials if trial["loss_nats"] is not None]

    def paint(axes: Axes) -> None:
        octaves(axes.xaxis, min(rates), max(rates))
        if losses:
            axes.set_ylim(*ceiling(losses))
        axes.axvline(math.log2(body["search"]["best"]["learning_rate"]), color=INK, alpha=0.55, linewidth=0.9,
                     linestyle=(0, (4, 3)), label="best")  # fmt: skip
        for trial, rate in zip(trials, rates, strict=True):
            colour = _clip_colour(trial["clip_norm"], clips)
            loss = trial["loss_nats"]
            if trial["status"] == "pruned":
                axes.plot([rate], [0.97], "_", color=colour, markersize=8, transform=axes.get_xaxis_transform())
            elif loss is not None and loss <= axes.get_ylim()[1]:
                axes.plot([rate], [loss], "o", color=colour, markersize=6, markeredgecolor=INK, markeredgewidth=0.4)
            else:
                edge_marks(axes, [(rate, loss)], colour)
        for colour, end in ((SEQUENCE[0], min(clips)), (SEQUENCE[-1], max(clips))):
            axes.plot([], [], "o", color=colour, markersize=6, label=f"clip {end:g}")
        if not all(trial["clip_norm"] for trial in trials):
            axes.plot([], [], "o", color=INK, markersize=6, label="no clip")
        if any(trial["status"] == "pruned" for trial in trials):
            axes.plot([], [], "_", color=INK, markersize=8, label="pruned")

    return draw("search", "Loss of every trial against learning rate, coloured by gradient clip",
                 ("learning rate", "validation loss (nats per token)"), paint)  # fmt: skip


def _clip_colour(clip: float, clips: Sequence[float]) -> str:
    """Of a trial, between the colours of the ends; ink where nothing was clipped."""
    if not clip:
        return INK
    low, high = math.log2(min(clips)), math.log2(max(clips))
    rank = 0.5 if high == low else (math.log2(clip) - low) / (high - low)
    return SEQUENCE[min(max(round(rank * (len(SEQUENCE) - 1)), 0), len(SEQUENCE) - 1)]
