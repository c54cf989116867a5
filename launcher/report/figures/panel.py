"""A panel: a matplotlib `Figure` in the report's style; its axes, marks, and conversion to SVG.

A figure is a pure function of the report: the same report gives the same bytes. Panels that are
compared have the same limits of their axes. Only the modules of this folder import matplotlib.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from forerun._launcher.report.figures.svg import INK, KINDS, convert_svg, format_power
from forerun._proxies.core.errors import InputError

# The type is `Any`, because the stubs of `rcParams.update` accept literal keys only.
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
"""Default width and height of a figure."""
_AXIS_SHARE = 0.8
"""Width of the axes as a share of the figure's width; the same share holds for the height."""
_LETTER_INCHES = 0.085
"""Width of a digit of a tick label, rounded up. A digit is about twice as high."""
_LEGEND_LETTER_POINTS = 4.6
"""Usual width of a letter of the legend."""
_LEGEND_GAP_POINTS = 27
"""Width of a legend column's handle and gaps."""
MIN_OCTAVES = 2.2
"""Minimum length of an axis in octaves. On a shorter one, noise of the optima would look like
drift."""
MARKERS = "osD^vP"
"""Markers of ordered series; they repeat if there are more series than markers."""
LOSS = "validation loss (nats per token)"
DASHED = (0, (4, 3))
_Section = TypeVar("_Section")
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


class MissingError(InputError):
    """The report lacks what a figure draws: a stage has not ended, or a test or arm is absent."""


@contextmanager
def _use_style(name: str) -> Iterator[None]:
    """Apply the report's style, instead of the user's settings, which are restored afterwards.

    Args:
        name: Name of the panel. matplotlib derives the ids in the SVG from it.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE | {"svg.hashsalt": name})
        yield


class Panel(Figure):
    """A figure that a notebook shows at the end of a cell, without pyplot."""

    name = ""
    """Name that is unique on the page."""

    def savefig(self, *to: Any, **options: Any) -> None:
        """Save the figure as matplotlib does, in the report's style."""
        with _use_style(self.name):
            super().savefig(*to, **options)

    def _repr_png_(self) -> bytes:
        """Return the figure as PNG; IPython calls this method to show the figure."""
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
    """Draw one panel, with its legend above it.

    Args:
        name: Name that is unique on the page.
        title: Title for screen readers.
        labels: Labels of the x axis and the y axis.
        paint: Function that draws the content into the axes.
        inches: Width and height.
    """
    with _use_style(name):
        figure = Panel(figsize=inches, layout="constrained")
        figure.name = name
        figure.set_label(title)
        axes = figure.add_subplot()
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        paint(axes)
        handles, names = axes.get_legend_handles_labels()
        if handles:
            # matplotlib fills the legend column by column, but people read it row by row.
            columns = _count_legend_columns(names, inches[0])
            handles = [handles[j] for i in range(columns) for j in range(i, len(handles), columns)]
            figure.legend(handles=handles, loc="outside upper left", ncols=columns)
    return figure


def render_svg(panel: Panel) -> str:
    """Render a panel as SVG for use inline in a page."""
    buffer = io.StringIO()
    panel.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    return convert_svg(buffer.getvalue(), panel.name, str(panel.get_label()))


def require(section: _Section | None, name: str, advice: str) -> _Section:
    """Return a section of the report.

    Args:
        section: The section.
        name: Name of the section, for the error message.
        advice: Clause of the error message on how to get the section.

    Raises:
        MissingError: The section is None or empty, because its stage has not ended.
    """
    if not section:
        raise MissingError(f"the report has no {name}: {advice}")
    return section


def _count_legend_columns(names: Sequence[str], inches: float) -> int:
    """Return how many legend columns fit into a width in inches, up to four."""
    for columns in range(min(len(names), 4), 1, -1):
        longest = [max(map(len, names[i::columns])) for i in range(columns)]
        points = sum(_LEGEND_GAP_POINTS + _LEGEND_LETTER_POINTS * length for length in longest)
        if points <= 72 * inches:  # An inch has 72 points.
            return columns
    return 1


def set_octave_axis(axis: Axis, low: float, high: float) -> None:
    """Put at most 13 ticks at powers of two on an axis that holds log2 of a hyperparameter.

    Args:
        axis: Axis to set. It shows at least `MIN_OCTAVES`.
        low: Lowest log2 of a value.
        high: Highest log2 of a value.
    """
    padding = max(0.4, (MIN_OCTAVES - (high - low)) / 2)
    first, last = math.ceil(low - padding), math.floor(high + padding)
    axis.set_view_interval(low - padding, high + padding, ignore=True)
    ticks = range(first, last + 1, 1 + (last - first) // 12)
    set_ticks(axis, ticks, lambda value: format_power(2, round(value)))


def set_ticks(axis: Axis, ticks: Sequence[float], label: Callable[[float], str]) -> None:
    """Put ticks on an axis, and no others."""
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
    axis.set_minor_locator(NullLocator())


def set_log_axis(axis: Axis, low: float, high: float, label: Callable[[float], str]) -> None:
    """Put ticks on a logarithmic axis, as many per decade as have room for their labels.

    Args:
        axis: Axis to set; it is made logarithmic. Its limits may be set later.
        low: Lower end of the values that will be seen.
        high: Upper end of these values.
        label: Function that returns the text of a tick.
    """
    across = axis is axis.axes.xaxis
    (axis.axes.set_xscale if across else axis.axes.set_yscale)("log")
    figure = axis.axes.get_figure(root=True)
    assert figure is not None
    inches = _AXIS_SHARE * figure.get_size_inches()[0 if across else 1]
    per_decade = inches / max(math.log10(high / low), 0.1)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    # From the densest ticks to the sparsest
    candidates = [
        [digit * 10.0**power for power in decades for digit in digits]
        for digits in ((1, 2, 5), (1, 3), (1,))
    ]
    candidates += [[10.0**power for power in decades[::stride]] for stride in (2, 3, 4)]
    spaced = (ticks for ticks in candidates if _has_room(ticks, label, per_decade, across))
    set_ticks(axis, next(spaced, candidates[-1]), label)


def _has_room(
    ticks: Sequence[float], label: Callable[[float], str], per_decade: float, across: bool
) -> bool:
    """Return whether the labels of neighboring ticks do not overlap, by the usual letter size."""
    for left, right in itertools.pairwise(ticks):
        needed = (
            _LETTER_INCHES * (len(label(left)) + len(label(right)) + 2) / 2
            if across
            else 2 * _LETTER_INCHES
        )
        if math.log10(right / left) * per_decade < needed:
            return False
    return True


def choose_loss_limits(losses: Sequence[float]) -> tuple[float, float]:
    """Return limits of a loss axis in nats that show the loss basins.

    A few runs near divergence must not flatten all others. So the axis reaches up to four times the
    median's height above the lowest loss. It reaches up to the highest loss instead if that is at
    most half as high again.
    """
    low, middle = min(losses), sorted(losses)[len(losses) // 2]
    crowd_top = low + 4 * (middle - low)
    high = max(losses)
    if high > low + 1.5 * (crowd_top - low):
        high = max(crowd_top, low + 0.05)
    pad = 0.05 * (high - low) or 0.05
    return low - pad, high + pad


def draw_band(
    axes: Axes,
    x: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    label: str | None = None,
) -> None:
    """Draw a band between two curves."""
    axes.fill_between(x, low, high, color=KINDS[0], alpha=0.17, linewidth=0, label=label)


def draw_reference(axes: Axes, x: float, label: str | None = None, dashes: Any = DASHED) -> None:
    """Draw a thin vertical line at a value that others are compared with."""
    axes.axvline(x, color=INK, alpha=0.55, linewidth=0.9, linestyle=dashes, label=label)


def draw_interval_marks(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    intervals: Sequence[Sequence[float]],
    *,
    along: str,
    **style: Any,
) -> None:
    """Draw points, each with a bar over its interval.

    A point comes from the fit to all runs, and its interval from fits to resampled runs. So the
    interval need not contain the point.

    Args:
        axes: Axes to draw on.
        points: (x, y) of each point.
        intervals: (low, high) of each point.
        along: Axis of the intervals, "x" or "y".
        **style: Options of matplotlib's `errorbar`.
    """
    # `errorbar` takes no interval without its point. So the bars are drawn around the centers of
    # the intervals, and then the marks are moved to the points.
    interval_centers = [(low + high) / 2 for low, high in intervals]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    centers = (interval_centers, ys) if along == "x" else (xs, interval_centers)
    style = {**style, f"{along}err": [(high - low) / 2 for low, high in intervals]}
    marks, _, _ = axes.errorbar(*centers, **style)
    marks.set_data(xs, ys)
    axes.update_datalim(points)


def draw_edge_marks(axes: Axes, points: Sequence[tuple[float, float | None]], color: str) -> None:
    """Mark runs outside the axes: a cross for no loss, a triangle for a loss above the top."""
    bottom, top = axes.get_ylim()
    marker_height = top - 0.03 * (top - bottom)
    diverged = [x for x, loss in points if loss is None]
    above = [x for x, loss in points if loss is not None and loss > top]
    axes.plot(
        diverged,
        [marker_height] * len(diverged),
        "x",
        color=color,
        markersize=5.5,
        markeredgewidth=1.4,
    )
    axes.plot(
        above, [marker_height] * len(above), "^", color=color, markersize=4.5, fillstyle="none"
    )
