"""The transfer tests' figures of what values cost: bars of regret, published rules, heat maps. Pure, as the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter

from launcher.figures.figures import INCHES, draw, interval_marks, main_arm
from launcher.figures.svg import INK, KINDS
from launcher.figures.transfer import losses_of, means, sizes_of, value_axis
from launcher.views.html import Body, arm_name
from launcher.views.transfer import (
    Test,
    anchor,
    axis_name,
    exponent,
    hyperparameter_name,
    name_of,
    runs_of,
    short_size,
    verdicts_by_arm,
)

_OUTCOMES = {"holds": ("o", KINDS[2]), "drifts": ("X", KINDS[1]), "cannot_tell": ("D", KINDS[3])}
_DASHED = (0, (4, 3))
MOST_NATS = 10.0
"""A cost beyond this is drawn at the edge."""
DEEPEST_MARGINS = 10.0
"""Loss above the best, in margins, from which a heat map's colour no longer changes."""
_PALEST, _DEEPEST = 0.04, 0.55  # of full colour: text on it stays readable, on a light page and on a dark one
_NUMBER_OCTAVES = 0.082  # share of the axis that a cell's number needs


def regrets(body: Body) -> str:
    """What transferring costs at the target, with its interval: every test, its control, all axes together."""
    together = body["transfer"]["together"]
    rows = [("learning rate, all axes together", together)]
    for test in body["transfer"]["tests"]:
        for i, (arm, of) in enumerate(verdicts_by_arm(test, main_arm(body)).items()):
            rows.append((f"{name_of(test)}{f', control {arm_name(arm)}' if i else ''}", of))
    bars = [(label, of["regret_nats"], *_OUTCOMES[of["outcome"]]) for label, of in rows]
    seen = {of["outcome"] for _, of in rows}
    legend = [(outcome.replace("_", " "), *style) for outcome, style in _OUTCOMES.items() if outcome in seen]
    return _bars("regrets", "What transferring costs at the target", bars, legend, together["margin_nats"])


def rules(test: Test) -> str:
    """What published exponents would cost at the target, beside the one that is used."""
    verdict = test["verdict"]
    used = "measured here" if verdict["power_is_measured"] else "used here"
    every = [(verdict["power"], used, verdict["regret_nats"], "o", KINDS[0])]
    every += [(r["power"], r["source"], r["regret_nats"], "s", KINDS[4]) for r in verdict["alternatives"]]
    bars = [(f"{exponent(power).replace('-', '−')}: {source}", *rest) for power, source, *rest in every]
    title = f"What other exponents would cost at the target, {name_of(test)}"
    return _bars(f"rules-{anchor(test)}", title, bars, [], verdict["margin_nats"])


def _bars(
    name: str, title: str, bars: Sequence[tuple[Any, ...]], legend: Sequence[tuple[str, str, str]], margin: float
) -> str:
    """One line for each (label, estimate, marker, colour), from the top; costs from nothing over decades."""
    floor = 10.0 ** math.floor(math.log10(margin) - 2)
    ends = [min(found["interval"][1], MOST_NATS) for _, found, *_ in bars if found["interval"] is not None]
    most = 1.6 * max([*ends, 10 * margin])

    def paint(axes: Axes) -> None:
        axes.set_xscale("symlog", linthresh=floor, linscale=0.6)
        decades = [floor * 10.0**i for i in range(12) if floor * 10.0**i <= most]
        axes.xaxis.set_major_locator(FixedLocator([0.0, *decades]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlim(-0.25 * floor, most)
        axes.set_ylim(len(bars) - 0.35, -0.65)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        for row, (label, found, marker, colour) in enumerate(bars):
            _bar(axes, row, label if found["value"] is not None else f"{label}: no estimate", found, marker, colour)
            at = [row - 0.05, row + 0.35] if found["value"] is not None else []
            axes.plot([margin] * len(at), at, color=INK, linewidth=0.9, linestyle=_DASHED,
                      label=f"margin, {margin:g}" if row == 0 else None)  # fmt: skip
        for label, marker, colour in legend:
            axes.plot([], [], marker, color=colour, markersize=6, label=label)

    return draw(name, title, ("nats lost at the target", ""), paint, (INCHES[0], 1.05 + 0.4 * len(bars)))


def _bar(axes: Axes, row: int, label: str, found: Any, marker: str, colour: str) -> None:
    axes.text(0.0, row - 0.15, label, transform=axes.get_yaxis_transform(), va="bottom", fontsize=8.8)
    if found["value"] is None:
        return
    low, high = found["interval"]
    axes.barh([row + 0.15], [min(found["value"], MOST_NATS)], height=0.26, color=colour, alpha=0.22, linewidth=0)
    axes.plot([low, high], [row + 0.15] * 2, color=colour, linewidth=2.2, solid_capstyle="butt")
    axes.plot([min(found["value"], MOST_NATS)], [row + 0.15], marker, color=colour, markersize=6.5,
              markeredgecolor=INK, markeredgewidth=0.6)  # fmt: skip


def heat(body: Body, test: Test) -> str:
    """Size by value: how far the mean loss of every cell lies above its size's best; crosses are diverged cells."""
    verdict, name, arm = test["verdict"], test["hyperparameter"], main_arm(body)
    sizes, tried = sizes_of(test), sorted({run["log2_value"] for run in runs_of(test, arm)})
    margin = verdict["margin_nats"]

    def paint(axes: Axes) -> None:
        value_axis(axes.xaxis, name, tried, tried)
        axes.grid(visible=False)
        axes.set_ylim(-0.5, len(sizes) - 0.5)
        axes.set_yticks(range(len(sizes)), [short_size(size) for size in sizes])
        for row, size in enumerate(sizes):
            _heat_row(axes, row, means(losses_of(test, arm, size)), margin)
        found = [optimum for optimum in verdict["optima"] if optimum["log2_value"] is not None]
        for optimum in found:
            label = "optimum" if optimum is found[0] else None
            _heat_optimum(axes, sizes.index(optimum["size"]), optimum, label)
        for nats, label in ((margin, f"{margin:g} nats above"), (DEEPEST_MARGINS * margin, "ten times, or more")):
            axes.add_patch(
                Rectangle((0, 0), 0, 0, color=KINDS[1], alpha=_depth(nats, margin), linewidth=0, label=label)
            )
        axes.plot([], [], "x", color=INK, markersize=5.5, markeredgewidth=1.4, label="diverged")

    what = hyperparameter_name(name)
    title = f"Loss above the best of each {test['axis']}, by {what}"
    height = max(INCHES[1], 1.1 + 0.48 * len(sizes))
    return draw(f"heat-{anchor(test)}", title, (what, axis_name(test["axis"])), paint, (INCHES[0], height))


def _depth(nats: float, margin: float) -> float:
    """Opacity of a cell; by the root, since a valley's bottom is what matters."""
    return _PALEST + (_DEEPEST - _PALEST) * math.sqrt(min(nats / (DEEPEST_MARGINS * margin), 1.0))


def _heat_row(axes: Axes, row: int, cells: Mapping[float, float | None], margin: float) -> None:
    """Cells reach halfway to their neighbours, half an octave at most."""
    best = min((loss for loss in cells.values() if loss is not None), default=0.0)
    values, (first, last) = list(cells), axes.get_xlim()
    for i, (value, loss) in enumerate(cells.items()):
        left = min(0.5, (value - values[i - 1]) / 2) if i else 0.5
        right = min(0.5, (values[i + 1] - value) / 2) if i + 1 < len(values) else 0.5
        if loss is None:
            axes.plot([value], [row], "x", color=INK, markersize=5.5, markeredgewidth=1.4)
            continue
        cell = (value - left, row - 0.46), left + right, 0.92
        axes.add_patch(Rectangle(*cell, color=KINDS[1], alpha=_depth(loss - best, margin), linewidth=0))
        if left + right >= _NUMBER_OCTAVES * (last - first):
            axes.text(value + (right - left) / 2, row + 0.16, f"{loss - best:.3f}", fontsize=8.5, ha="center",
                      va="center")  # fmt: skip


def _heat_optimum(axes: Axes, row: int, optimum: Any, label: str | None) -> None:
    """The fitted optimum with its interval, in the lower part of its row."""
    interval_marks(axes, [(optimum["log2_value"], row - 0.26)], [optimum["interval_log2"]], along="x", fmt="o",
                   color=KINDS[0], markersize=5, markeredgecolor=INK, markeredgewidth=0.6, elinewidth=2, capsize=3,
                   label=label)  # fmt: skip
