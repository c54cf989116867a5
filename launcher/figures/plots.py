"""The report's figures for notebooks: each function returns a matplotlib `Figure`.

    import json
    import forerun

    report = json.load(open("study/report.json"))
    forerun.plots.basins(report)

A function takes the body of one report, as read from `report.json`, and raises `MissingError` if
the study has not come so far. The figures are those of the page, drawn by the same functions.
Importing this module loads matplotlib without pyplot: nothing opens a window, and no global setting
changes. A notebook shows a figure by its name at the end of a cell; elsewhere
`figure.savefig("basins.png")` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from launcher.figures.fits import aspect, branches, curves_over_steps, ladder, main_run, noise
from launcher.figures.panel import (
    DASHED,
    LOSS,
    MARKERS,
    MissingError,
    Panel,
    ceiling,
    draw,
    draw_edge_marks,
    main_arm,
    octaves,
    part,
)
from launcher.figures.svg import INK, KINDS
from launcher.figures.transfer import basins, drift
from launcher.study.gates import by_role, points
from launcher.views.numbers import Body, arm_name, words

__all__ = [
    "MissingError",
    "aspect",
    "basins",
    "branches",
    "coordinates",
    "drift",
    "ladder",
    "main_run",
    "noise",
    "search",
    "wider",
]

TRAIN_LOSS = "training loss (nats per token)"
_DASHES = {"passes": "-", "cannot_tell": (0, (3, 2)), "blows_up": "-", "vanishes": "-"}


def coordinates(report: Body, arm: str | None = None) -> Panel:
    """Draw the change of each role's worst layer against width, or depth, log-log.

    A line is bold or dashed if its layer does not pass.

    Args:
        report: Content of `report.json`.
        arm: Arm of the check: None for the study's own parametrization, `sp`, or `depth` for the
            check over depths.

    Raises:
        MissingError: The coordinate check has not run, or not for this arm.
    """
    checks = part(report, "coordinates", "`forerun check PLAN` runs the check")
    chosen = main_arm(report) if arm is None else arm
    if chosen not in checks:
        raise MissingError(f"no coordinate check {chosen}; the report has: {', '.join(checks)}")
    check = checks[chosen]
    worst_layers = {
        name: [layers[0] for _, layers in by_role(check_of_arm)]
        for name, check_of_arm in checks.items()
    }
    changes = [
        change
        for layers in worst_layers.values()
        for layer in layers
        for change in layer["change"]
        if change > 0
    ]

    def paint(axes: Axes) -> None:
        _set_size_axis(axes, points(check))
        _set_change_axis(axes, changes)
        for rank, layer in enumerate(worst_layers[chosen]):
            weight = 1.2 if layer["outcome"] in ("passes", "cannot_tell") else 2.8
            axes.plot(
                points(check)[: len(layer["change"])],
                layer["change"],
                marker=MARKERS[rank % len(MARKERS)],
                markersize=4,
                linewidth=weight,
                linestyle=_DASHES[layer["outcome"]],
                color=KINDS[rank % len(KINDS)],
                label=words(layer["role"]),
            )

    title = (
        f"Coordinate check, {arm_name(chosen)}: change of each role's worst layer against "
        f"{check['axis']}"
    )
    return draw(
        f"coordinates-{chosen}", title, (check["axis"], "mean absolute change of output"), paint
    )


def _set_change_axis(axes: Axes, changes: Sequence[float]) -> None:
    """Put a logarithmic y axis with ticks at 1, 2 and 5 of each decade around the changes."""
    axes.set_yscale("log")
    if changes:
        axes.set_ylim(min(changes) / 1.3, max(changes) * 1.3)
    axes.yaxis.set_major_locator(
        FixedLocator([m * 10.0**e for e in range(-9, 9) for m in (1, 2, 5)])
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


def _set_size_axis(axes: Axes, widths: Iterable[int]) -> None:
    sizes = sorted(set(widths))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)


def wider(report: Body) -> Panel:
    """Draw the mean training loss of each width at one learning rate, over log steps.

    Raises:
        MissingError: No rate over width was run with two seeds, or the transfer runs have not
            ended.
    """
    part(report, "transfer", "`forerun transfer PLAN` runs it")
    section = part(report, "wider", "no rate was run at two widths with two seeds")

    def paint(axes: Axes) -> None:
        curves_over_steps(axes, section["curves"], lambda curve: f"width {curve['width']}")

    return draw(
        "wider",
        "Training loss by width at one learning rate",
        ("optimizer steps", TRAIN_LOSS),
        paint,
    )


def search(report: Body) -> Panel:
    """Draw the loss of every trial of the search against its learning rate.

    Raises:
        MissingError: The search has not ended.
    """
    section = part(report, "search", "`forerun sweep PLAN` runs it")
    rates = [(math.log2(trial["learning_rate"]), trial) for trial in section["trials"]]
    losses = [trial["loss_nats"] for _, trial in rates if trial["loss_nats"] is not None]
    ended = [(rate, trial["loss_nats"]) for rate, trial in rates if trial["status"] != "pruned"]
    pruned = [rate for rate, trial in rates if trial["status"] == "pruned"]

    def paint(axes: Axes) -> None:
        octaves(axes.xaxis, min(rate for rate, _ in rates), max(rate for rate, _ in rates))
        if losses:
            axes.set_ylim(*ceiling(losses))
        axes.axvline(
            math.log2(section["best"]["learning_rate"]),
            color=INK,
            alpha=0.55,
            linewidth=0.9,
            linestyle=DASHED,
            label="best",
        )
        top = axes.get_ylim()[1]
        shown_trials = [(rate, loss) for rate, loss in ended if loss is not None and loss <= top]
        axes.plot(
            *zip(*shown_trials, strict=True) if shown_trials else ([], []),
            "o",
            color=KINDS[0],
            markersize=6,
            markeredgecolor=INK,
            markeredgewidth=0.4,
            label="trial",
        )
        draw_edge_marks(axes, ended, KINDS[0])
        if pruned:
            axes.plot(
                pruned,
                [0.97] * len(pruned),
                "_",
                color=INK,
                markersize=8,
                label="pruned",
                transform=axes.get_xaxis_transform(),
            )

    return draw(
        "search", "Loss of every trial against learning rate", ("learning rate", LOSS), paint
    )
