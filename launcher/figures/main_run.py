"""The main run's figure: training loss as logged over the band that was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from launcher.figures.panel import MissingError, Panel, draw, part
from launcher.figures.svg import INK, KINDS
from launcher.views.numbers import Body

BINS_PER_DECADE = 40
"""Losses are drawn as means over so many parts of a decade of steps."""


def main_run(report: Body) -> Panel:
    """Training loss of the main run, as logged, over the band that was expected.

    Raises:
        MissingError: it was not launched in its usual place, or no curve was expected.
    """
    run = part(report, "main_run", "`forerun launch FROZEN` starts it")
    curve = part(report, "decision", "the study has not come to one")["predicted"]["curve"]
    if not curve:
        raise MissingError("the ladder had too few runs to expect a curve")
    at = [point["step"] for point in curve]
    left = max(1.0, min(run["steps"][-1], at[0]) / 3)  # what lies before the band dwarfs it
    seen = [point for point in binned(run["steps"], run["train_loss_nats"]) if point[0] >= left]

    def paint(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([n * 10.0**k for k in range(8) for n in (1, 2, 5)]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        low, high = ([point[f"{end}_nats"] for point in curve] for end in ("low", "high"))
        axes.fill_between(at, low, high, color=KINDS[0], alpha=0.18, linewidth=0, label="expected band")
        axes.plot(at, [point["loss_nats"] for point in curve], color=KINDS[0], linewidth=1.4, label="expected")
        axes.plot(*zip(*seen, strict=True), color=INK, linewidth=1.4, label="training loss")
        axes.set_xlim(left, 1.1 * max(at[-1], run["steps"][-1]))

    title = "Training loss of the main run, and the band that was expected"
    return draw("main-run", title, ("optimizer steps", "training loss (nats per token)"), paint, (4.8, 3.4))


def binned(steps: Sequence[int], losses: Sequence[float]) -> list[tuple[float, float]]:
    """Mean step and mean loss of each part of a decade of steps that has some."""
    bins: dict[int, list[tuple[int, float]]] = {}
    for step, loss in zip(steps, losses, strict=True):
        bins.setdefault(math.floor(BINS_PER_DECADE * math.log10(step)), []).append((step, loss))
    return [(sum(s for s, _ in part) / len(part), sum(x for _, x in part) / len(part)) for part in bins.values()]
