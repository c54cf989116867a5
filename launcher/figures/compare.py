"""Two studies over each other: valleys, optima and ladders of both on one pair of axes. Pure, as those of `figures`.

The first study is drawn full, the second dashed and hollow; sizes and widths have the colours of the reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from launcher.figures.figures import MARKERS, draw, interval_marks
from launcher.figures.fits import flops_axis, loss_axis
from launcher.figures.svg import INK, KINDS, shade
from launcher.figures.transfer import size_axis, value_axis
from launcher.views.transfer import anchor, axis_name, hyperparameter_name, size_name

_LOSS = "validation loss (nats per token)"
_STYLES: Mapping[str, tuple[Any, str]] = {"a": ("-", "full"), "b": ((0, (4, 2)), "none")}
"""Of each study: the line, and how its marks are filled."""
_WIDE = (4.8, 3.7)


def valleys(row: Any) -> str:
    """Fitted valleys of both studies at the sizes where both have one, with their minima and intervals.

    Args:
        row: one entry of `tests` in the body of a comparison.
    """
    shared = shared_sizes(row)
    ends = [x for o in shared for side in "ab" for x, _ in o[side]["curve"]]
    losses = [y for o in shared for side in "ab" for _, y in o[side]["curve"]]

    def paint(axes: Axes) -> None:
        value_axis(axes.xaxis, row["hyperparameter"], ends, octaves_within(ends))
        pad = 0.05 * (max(losses) - min(losses)) or 0.05
        axes.set_ylim(min(losses) - pad, max(losses) + pad)
        for rank, optimum in enumerate(shared):
            colour, marker = shade(rank, len(shared)), MARKERS[rank % len(MARKERS)]
            for side, (dashes, fill) in _STYLES.items():
                of = optimum[side]
                axes.plot(*zip(*of["curve"], strict=True), color=colour, linewidth=1.5, linestyle=dashes)
                interval_marks(axes, [(of["log2_value"], of["loss_nats"])], [of["interval_log2"]], along="x",
                               fmt=marker, fillstyle=fill, color=colour, markersize=6, elinewidth=1.6,
                               capsize=4)  # fmt: skip
            axes.plot([], [], marker, color=colour, label=size_name(row["axis"], optimum["size"]))
        _studies(axes)

    what = hyperparameter_name(row["hyperparameter"])
    title = f"Loss against {what} at each {row['axis']}, both studies"
    return draw(f"valleys-{anchor(row)}", title, (what, _LOSS), paint, _WIDE)


def shared_sizes(row: Any) -> list[Any]:
    """Sizes at which both studies have a fitted valley."""
    return [
        o for o in row["optima"]
        if all(o[side] and o[side]["curve"] and o[side]["log2_value"] is not None for side in "ab")
    ]  # fmt: skip


def octaves_within(ends: Sequence[float]) -> list[float]:
    """Factors of two from the lowest on, on an axis that holds octaves."""
    return [min(ends) + i for i in range(int(max(ends) - min(ends)) + 1)]


def optima(row: Any) -> str:
    """The optimum against size, of both studies, with intervals."""
    sizes = [o["size"] for o in row["optima"]]
    found = {
        side: [(o["size"], o[side]) for o in row["optima"] if o[side] and o[side]["log2_value"] is not None]
        for side in "ab"
    }
    ends = [end for held in found.values() for _, o in held for end in o["interval_log2"]]

    def paint(axes: Axes) -> None:
        size_axis(axes, sizes, sizes)
        for rank, (side, held) in enumerate(found.items()):
            dashes, fill = _STYLES[side]
            # Shifted, so that two intervals at one size do not lie on each other.
            points = [(math.log2(size) + 0.06 * rank, o["log2_value"]) for size, o in held]
            interval_marks(axes, points, [o["interval_log2"] for _, o in held], along="y", fmt=MARKERS[rank],
                           linestyle=dashes, fillstyle=fill, color=KINDS[rank], markersize=5.5, linewidth=1.5,
                           elinewidth=1.5, capsize=4, label=side.upper())  # fmt: skip
        value_axis(
            axes.yaxis, row["hyperparameter"], ends, [o["log2_value"] for held in found.values() for _, o in held]
        )

    what = hyperparameter_name(row["hyperparameter"])
    title = f"Optimal {what} against {row['axis']}, both studies"
    return draw(f"optima-{anchor(row)}", title, (axis_name(row["axis"]), f"optimal {what}"), paint)


def ladders(sides: Mapping[str, Any]) -> str:
    """Rungs, frontiers with their bands, and forecasts of both studies, loss against compute, log-log.

    Args:
        sides: `ladder` in the body of a comparison, both sides there.
    """
    rungs = {side: [rung for rung in of["rungs"] if rung["loss_nats"] is not None] for side, of in sides.items()}
    seen = [(rung["flops"], rung["loss_nats"]) for held in rungs.values() for rung in held]
    seen += [(of["prediction"]["flops"], of["prediction"]["loss"]) for of in sides.values() if of["prediction"]]
    seen += [(point["flops"], point["loss_nats"]) for of in sides.values() for point in of["frontier"] or ()]

    def paint(axes: Axes) -> None:
        losses = [loss for _, loss in seen]
        flops_axis(axes, [flops for flops, _ in seen])
        loss_axis(axes, min(losses) / 1.04, max(losses) * 1.04)
        for rank, (side, of) in enumerate(sides.items()):
            _ladder(axes, rank, side, of["frontier"] or [], rungs[side], of["prediction"])

    title = "Loss against training compute: rungs, frontiers and main runs of both studies"
    return draw("ladders", title, ("training compute, 6ND (FLOPs)", _LOSS), paint, _WIDE)


def _ladder(
    axes: Axes, rank: int, side: str, frontier: Sequence[Any], rungs: Sequence[Any], predicted: Any
) -> None:  # fmt: skip
    (dashes, fill), colour, name = _STYLES[side], KINDS[rank], side.upper()
    x = [math.log10(point["flops"]) for point in frontier]
    if frontier and all(point["interval"] for point in frontier):
        low, high = ([math.log10(point["interval"][i]) for point in frontier] for i in (0, 1))
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.plot(x, [math.log10(point["loss_nats"]) for point in frontier], color=colour, linewidth=1.6, linestyle=dashes,
              label=f"{name}, best for the compute" if frontier else None)  # fmt: skip
    at = [math.log10(rung["flops"]) for rung in rungs], [math.log10(rung["loss_nats"]) for rung in rungs]
    axes.plot(*at, MARKERS[rank], color=colour, fillstyle=fill, markersize=4.5, label=f"{name}, rungs")
    if predicted:
        ends = [math.log10(end) for end in predicted["interval"] or [predicted["loss"]] * 2]
        interval_marks(axes, [(math.log10(predicted["flops"]), math.log10(predicted["loss"]))], [ends], along="y",
                       fmt="*", color=colour, fillstyle=fill, markersize=11, elinewidth=1.4, capsize=3.5, zorder=4,
                       label=f"{name}, main run")  # fmt: skip


def _studies(axes: Axes) -> None:
    for side, (dashes, _) in _STYLES.items():
        axes.plot([], [], color=INK, linewidth=1.5, linestyle=dashes, label=side.upper())
