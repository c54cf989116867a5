"""One panel of a figure, as matplotlib's own `Figure` and as SVG for the page, and what the figures
share.

A figure is a pure function of the report's body: the same body gives the same bytes. Panels to be
compared share their axes. matplotlib is imported by the modules of this folder alone.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from launcher.figures.svg import INK, finish, raised
from launcher.views.numbers import Body
from proxies.core.errors import InputError

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
    "legend.handletextpad": 0.5,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.1,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "path.simplify": False,
    "text.parse_math": False,
}
INCHES = (4.8, 3.5)
_AXIS_SHARE = 0.8
"""Width of the axes as a share of the figure's width."""
_LETTER_INCHES = 0.085
"""Width of a digit of a tick label, rounded up."""
MARKERS = "osD^vP"
LOSS = "validation loss (nats per token)"
DASHED = (0, (4, 3))
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


class MissingError(InputError):
    """The report lacks what a figure draws: the stage has not ended, or there is no such test or
    arm.
    """


@contextmanager
def _style(name: str) -> Iterator[None]:
    """A user's matplotlibrc must not change a report, nor a report anything of the user's."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE | {"svg.hashsalt": name})
        yield


class Panel(Figure):
    """A figure that a notebook shows at the end of a cell, with no pyplot and no line of magic."""

    name = ""
    """Unique on the page."""

    def savefig(self, *to: Any, **options: Any) -> None:
        """As matplotlib does, in the report's style."""
        with _style(self.name):
            super().savefig(*to, **options)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=120)
        return buffer.getvalue()


def draw(
    name: str,
    title: str,
    labels: tuple[str, str],
    paint: Callable[[Axes], None],
    inches: tuple[float, float] = INCHES,
) -> Panel:
    """One panel, its legend above it.

    Args:
        name: unique on the page.
        title: what a screen reader says.
        labels: of both axes.
        paint: draws into the axes.
        inches: width and height.
    """
    with _style(name):
        figure = Panel(figsize=inches, layout="constrained")
        figure.name = name
        figure.set_label(title)
        axes = figure.add_subplot()
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        paint(axes)
        handles, names = axes.get_legend_handles_labels()
        if handles:
            columns = _legend_columns(names, inches[0])  # filled column by column; read row by row
            handles = [handles[j] for i in range(columns) for j in range(i, len(handles), columns)]
            figure.legend(handles=handles, loc="outside upper left", ncols=columns)
    return figure


def svg_of(panel: Panel) -> str:
    """A panel as SVG that stands inline in a page."""
    buffer = io.StringIO()
    panel.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    return finish(buffer.getvalue(), panel.name, str(panel.get_label()))


def part(report: Body, key: str, stage: str) -> Any:
    """What a stage gave.

    Raises:
        MissingError: it has not ended.
    """
    found = report.get(key)
    if not found:
        raise MissingError(f"the report has no {key}: {stage}")
    return found


def main_arm(body: Body) -> str:
    """The name of the arm that the study is about, as in the runs of a transfer test."""
    return str(body["question"]["proxy"]["parametrization"])


def _legend_columns(names: Sequence[str], inches: float) -> int:
    """As many columns as fit, four at most, by the usual width of a letter."""
    for columns in range(min(len(names), 4), 1, -1):
        longest = [max(map(len, names[i::columns])) for i in range(columns)]
        if sum(27 + 4.6 * length for length in longest) <= 72 * inches:
            return columns
    return 1


def octaves(axis: Axis, low: float, high: float) -> None:
    """Whole powers of two, on an axis that holds log2(rate); two octaves at least, or noise would
    look like drift.
    """
    pad = max(0.4, (2.2 - (high - low)) / 2)
    first, last = math.ceil(low - pad), math.floor(high + pad)
    axis.set_view_interval(low - pad, high + pad, ignore=True)
    axis.set_major_locator(FixedLocator(range(first, last + 1, 1 + (last - first) // 12)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: raised(2, round(value))))


def log_axis(axis: Axis, low: float, high: float, label: Callable[[float], str]) -> None:
    """Put ticks on a logarithmic axis, as many per decade as have room for their labels.

    Args:
        axis: Of axes whose limits are set later; it is made logarithmic.
        low: Lower end of what will be seen.
        high: Upper end.
        label: Text of a tick.
    """
    across = axis is axis.axes.xaxis
    (axis.axes.set_xscale if across else axis.axes.set_yscale)("log")
    figure = axis.axes.get_figure(root=True)
    assert figure is not None
    inches = _AXIS_SHARE * figure.get_size_inches()[0 if across else 1]
    per_decade = inches / max(math.log10(high / low), 0.1)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    candidates = [
        [digit * 10.0**power for power in decades for digit in digits]
        for digits in ((1, 2, 5), (1, 3), (1,))
    ]
    candidates += [[10.0**power for power in decades[::stride]] for stride in (2, 3, 4)]
    axis.set_major_locator(
        FixedLocator(
            next(
                (ticks for ticks in candidates if _have_room(ticks, label, per_decade, across)),
                candidates[-1],
            )
        )
    )
    axis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
    axis.set_minor_locator(NullLocator())


def _have_room(
    ticks: Sequence[float], label: Callable[[float], str], per_decade: float, across: bool
) -> bool:
    """Return whether labels of neighboring ticks do not overlap, by the usual size of a letter in
    inches.
    """
    for left, right in itertools.pairwise(ticks):
        taken = (
            _LETTER_INCHES * (len(label(left)) + len(label(right)) + 2) / 2
            if across
            else 2 * _LETTER_INCHES
        )
        if math.log10(right / left) * per_decade < taken:
            return False
    return True


def ceiling(losses: Sequence[float]) -> tuple[float, float]:
    """Loss limits that show the loss basins: a few runs near divergence must not flatten all
    others.
    """
    low, middle = min(losses), sorted(losses)[len(losses) // 2]
    crowd = low + 4 * (middle - low)
    high = (
        max(losses) if max(losses) <= low + 1.5 * (crowd - low) else max(crowd, min(losses) + 0.05)
    )
    pad = 0.05 * (high - low) or 0.05
    return low - pad, high + pad


def interval_marks(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    intervals: Sequence[Sequence[float]],
    *,
    along: str,
    **style: Any,
) -> None:
    """Marks with bars: each mark where its point is, each bar where its interval is, which need not
    hold the point.

    An interval comes of resampled fits, the point of the fit to all runs: a degenerate one may lie
    outside.

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
