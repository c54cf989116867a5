"""The report's figures for notebooks: each function returns a matplotlib `Figure`.

    import json
    import forerun

    report = json.load(open("study/report.json"))
    forerun.plots.basins(report)

A function takes the body of one report, as read from `report.json`, and raises `MissingError` if
the study has not reached the figure's stage. The figures are those of the page, drawn by the same
functions. Importing this module loads matplotlib without pyplot: nothing opens a window, and no
global setting changes. A notebook shows a figure by its name at the end of a cell; elsewhere
`figure.savefig("basins.png")` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

from forerun._launcher.report.figures.ladder import (
    aspect,
    branches,
    draw_curves_over_steps,
    ladder,
    main_run,
    noise,
)
from forerun._launcher.report.figures.panel import (
    LOSS,
    MARKERS,
    MissingError,
    Panel,
    choose_loss_limits,
    draw,
    draw_edge_marks,
    draw_reference,
    require,
    set_log_axis,
    set_octave_axis,
    set_ticks,
)
from forerun._launcher.report.figures.svg import INK, KINDS
from forerun._launcher.report.figures.transfer import basins, drift
from forerun._launcher.report.views.report_model import AnyReport, to_report
from forerun._launcher.report.views.wording import format_arm, to_words

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
"""Line styles by the outcome of a layer."""


def coordinates(report: AnyReport, arm: str | None = None) -> Panel:
    """Draw the change of each role's worst layer against width, or depth, log-log.

    The line of a layer that fails is bold. The line of a layer that cannot tell is dashed.

    Args:
        report: Content of `report.json`.
        arm: Arm of the check: None for the study's own parametrization, `sp`, or `depth` for the
            check over depths.

    Raises:
        MissingError: The coordinate check has not run, or not for this arm.
    """
    report = to_report(report)
    checks = require(report.coordinates, "coordinates", "`forerun check PLAN` runs the check")
    chosen = report.main_arm if arm is None else arm
    if chosen not in checks:
        raise MissingError(f"no coordinate check {chosen}; the report has: {', '.join(checks)}")
    check = checks[chosen]
    worst_layers = {
        name: [layers[0] for _, layers in check_of_arm.group_by_role()]
        for name, check_of_arm in checks.items()
    }
    changes = [
        change
        for layers in worst_layers.values()
        for layer in layers
        for change in layer.change
        if change > 0
    ]

    def paint(axes: Axes) -> None:
        _set_change_axes(axes, sorted(check.sizes), changes)
        for rank, layer in enumerate(worst_layers[chosen]):
            line_width = 1.2 if layer.outcome in ("passes", "cannot_tell") else 2.8
            axes.plot(
                check.sizes[: len(layer.change)],
                layer.change,
                marker=MARKERS[rank % len(MARKERS)],
                markersize=4,
                linewidth=line_width,
                linestyle=_DASHES[layer.outcome],
                color=KINDS[rank % len(KINDS)],
                label=to_words(layer.role),
            )

    title = (
        f"Coordinate check, {format_arm(chosen)}: change of each role's worst layer against "
        f"{check.axis}"
    )
    return draw(
        f"coordinates-{chosen}", title, (check.axis, "mean absolute change of output"), paint
    )


def _set_change_axes(axes: Axes, sizes: Sequence[int], changes: Sequence[float]) -> None:
    """Make both axes logarithmic, with ticks at the sizes and around the changes."""
    axes.set_xscale("log", base=2)
    set_ticks(axes.xaxis, sizes, "{:.0f}".format)
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)
    if changes:
        low, high = min(changes) / 1.3, max(changes) * 1.3
        set_log_axis(axes.yaxis, low, high, "{:g}".format)
        axes.set_ylim(low, high)


def wider(report: AnyReport) -> Panel:
    """Draw the mean training loss of each width at one learning rate, over log steps.

    Raises:
        MissingError: No rate was run at two widths, or the transfer runs have not ended.
    """
    report = to_report(report)
    require(report.transfer, "transfer", "`forerun transfer PLAN` runs it")
    section = require(report.wider, "wider", "no rate was run at two widths")

    def paint(axes: Axes) -> None:
        draw_curves_over_steps(axes, section.curves, lambda curve: f"width {curve.width}")

    return draw(
        "wider",
        "Training loss by width at one learning rate",
        ("optimizer steps", TRAIN_LOSS),
        paint,
    )


def search(report: AnyReport) -> Panel:
    """Draw the loss of every trial of the search against its learning rate.

    Raises:
        MissingError: The search has not ended.
    """
    section = require(to_report(report).search, "search", "`forerun sweep PLAN` runs it")
    rates = [
        (math.log2(trial.get_value("learning_rate") or math.nan), trial) for trial in section.trials
    ]
    losses = [trial.loss_nats for _, trial in rates if trial.loss_nats is not None]
    ended = [(rate, trial.loss_nats) for rate, trial in rates if trial.status != "pruned"]
    pruned = [rate for rate, trial in rates if trial.status == "pruned"]

    def paint(axes: Axes) -> None:
        set_octave_axis(axes.xaxis, min(rate for rate, _ in rates), max(rate for rate, _ in rates))
        if losses:
            axes.set_ylim(*choose_loss_limits(losses))
        draw_reference(axes, math.log2(section.best["learning_rate"]), "best")
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
