"""The main run's width per layer (its aspect ratio, width / number of layers), and the loss that
other widths per layer would cost.

The best width per layer is fitted if the ladder is a grid of widths and depths. It determines width
and depth of a model of a given size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from forerun._launcher.report.views.fit_findings import (
    Aspect,
    AspectCost,
    AspectEstimate,
    AspectPoint,
    ShapeSize,
)
from forerun._launcher.report.views.fit_findings import AspectTerm as ReportedTerm
from forerun._proxies.core.notation import (
    format_counted,
    format_interval,
    format_nats,
    format_number,
    format_percent,
)

if TYPE_CHECKING:
    from forerun._launcher.study.stages.main_run_choice import MainRunChoice
    from forerun._scaling_fits.allocation.aspect import AspectTerm

FACTORS = (0.25, 0.5, 2.0, 4.0)
"""Factors on the chosen width per layer whose costs are shown, where the rungs cover them."""
NUM_POINTS = 41
"""Points of the fitted curve in the report."""


def build_aspect_section(choice: MainRunChoice) -> Aspect | None:
    """Return section `choice.aspect` of the report; None if the plan sets the depth."""
    if choice.ends is None and choice.aspect is None:
        return None
    chosen, term = choice.shape.width / choice.shape.num_layers, choice.aspect
    aspect = Aspect(
        width_per_layer=chosen,
        ends=None
        if choice.ends is None
        else [ShapeSize(width=end.width, num_layers=end.num_layers) for end in choice.ends],
        best=None,
        determined=False,
        costs=[],
        points=[],
        curve=[],
    )
    if term is None:
        return aspect
    best, low, high = term.find_best(), *term.reach_log2
    widths = [2.0 ** (low + (high - low) * i / (NUM_POINTS - 1)) for i in range(NUM_POINTS)]
    fields_from_term = {
        "tried": (2.0**low, 2.0**high),
        "best": best.estimate,
        "best_interval": (best.low, best.high),
        "determined": term.determined,
        "costs": _list_costs(term, chosen, "nats", choice.prediction.loss_nats),
        "points": [
            AspectPoint(width_per_layer=width_per_layer, log_loss=value - term.mean)
            for width_per_layer, value in term.residuals
        ],
        "curve": [
            AspectEstimate(
                width_per_layer=width_per_layer,
                log_loss=loss.estimate,
                interval=(loss.low, loss.high),
            )
            for width_per_layer, loss in zip(widths, map(term.estimate_shift, widths), strict=True)
        ],
    }
    return aspect.model_copy(update=fields_from_term)


def build_aspect_term(term: AspectTerm) -> ReportedTerm:
    """Return the best width per layer in a table of runs, and the costs of other widths per layer.

    Costs are shares of the loss above its value at the best width per layer.
    """
    best, (low, high) = term.find_best(), term.reach_log2
    return ReportedTerm(
        best=best.estimate,
        interval=(best.low, best.high),
        tried=(2.0**low, 2.0**high),
        determined=term.determined,
        costs=_list_costs(term, best.estimate, "share"),
    )


def _list_costs(
    term: AspectTerm, chosen: float, key: Literal["nats", "share"], loss_nats: float = 1.0
) -> list[AspectCost]:
    """Return the costs of other widths per layer, without those that no run came near.

    Args:
        term: The fitted term of the loss.
        chosen: Width per layer that the others are compared with.
        key: Field of `AspectCost` that holds the cost.
        loss_nats: Factor on the cost as a share of the loss: the loss for a cost in nats, 1 for a
            share.
    """
    costs = []
    for factor in FACTORS:
        if term.is_within_reach(chosen * factor) and term.is_within_reach(chosen):
            difference = term.estimate_cost(chosen * factor, chosen)
            value, low, high = (
                loss_nats * math.expm1(log)
                for log in (difference.estimate, difference.low, difference.high)
            )
            cost = {"width_per_layer": chosen * factor, key: value, "interval": (low, high)}
            costs.append(AspectCost.model_validate(cost))
    return costs


def format_aspect_term(term: ReportedTerm) -> str:
    """Describe the best width per layer of a table of runs in one sentence."""
    tried = f"{format_number(term.tried[0])} to {format_number(term.tried[1])} were tried"
    if not term.determined:
        return f"shape: these runs do not determine the best width per layer, {tried}"
    costs = "; ".join(
        f"{format_number(cost.width_per_layer)} costs {format_percent(cost.share, is_signed=True)} "
        f"[{format_percent(cost.interval[0], is_signed=True)}, "
        f"{format_percent(cost.interval[1], is_signed=True)}]"
        for cost in term.costs
    )
    ends = format_interval(term.interval, ".3g")
    best = f"shape: the best width per layer is {format_number(term.best)} {ends}, {tried}"
    return best + (f"; of the loss, {costs}" if costs else "")


def format_aspect_choice(aspect: Aspect) -> str:
    """Describe the chosen width per layer in one sentence (section `choice.aspect`)."""
    sentence = f"width per layer {format_number(aspect.width_per_layer)}"
    if aspect.ends:
        low, high = (
            f"width {end.width} of {format_counted(end.num_layers, 'layer')}" for end in aspect.ends
        )
        sentence += f", by the interval of the optimal size from {low} to {high}"
    if not aspect.curve:
        return (
            f"{sentence}; the ladder has one aspect ratio a size, so another's cost is not measured"
        )
    optimum = (
        f"the best is {format_number(aspect.best)} {format_interval(aspect.best_interval, '.3g')}"
    )
    at_edge = [
        f"none {which} was tried"
        for end, which in ((0, "lower"), (1, "higher"))
        if math.isclose(aspect.best_interval[end], aspect.tried[end], rel_tol=1e-6)
    ]
    optimum += f", {' and '.join(at_edge)}" if at_edge else ""
    verdict = (
        optimum
        if aspect.determined
        else "these rungs do not determine the best, the base's is kept"
    )
    costs = "; ".join(
        f"{format_number(cost.width_per_layer)} would cost "
        f"{format_nats(cost.nats, is_signed=True)} {format_interval(cost.interval, '+.4f')} nats"
        for cost in aspect.costs
    )
    return f"{sentence}; {verdict}" + (f"; {costs}" if costs else "")
