"""The main run's width per layer, where it was chosen with the size, and the cost of other values.

Depth and width follow from it: width per layer is width / number of layers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from proxies.core.notation import (
    counted,
    format_interval,
    format_nats,
    format_number,
    format_percent,
)

if TYPE_CHECKING:
    from launcher.study.decide import Choice
    from proxies.core.canon import Json
    from scaling_fits.allocation.aspect import AspectTerm

FACTORS = (0.25, 0.5, 2.0, 4.0)
"""Factors on the chosen width per layer whose costs are shown, where the rungs cover them."""
NUM_POINTS = 41
"""Points of the fitted curve in the report."""


def aspect_body(choice: Choice) -> Json:
    """Return section `choice.aspect` of the report; None if the plan sets the depth."""
    if choice.ends is None and choice.aspect is None:
        return None
    chosen, term = choice.shape.width / choice.shape.num_layers, choice.aspect
    body: dict[str, Json] = {
        "width_per_layer": chosen,
        "ends": None
        if choice.ends is None
        else [{"width": shape.width, "num_layers": shape.num_layers} for shape in choice.ends],
        "best": None,
        "determined": False,
        "costs": [],
        "points": [],
        "curve": [],
    }
    if term is None:
        return body
    best, low, high = term.best(), *term.reach_log2
    aspects = [2.0 ** (low + (high - low) * i / (NUM_POINTS - 1)) for i in range(NUM_POINTS)]
    losses = [(aspect, term.log_loss(aspect)) for aspect in aspects]
    return body | {
        "tried": [2.0**low, 2.0**high],
        "best": best.value,
        "best_interval": [best.low, best.high],
        "determined": term.determined,
        "costs": _list_costs(term, chosen, "nats", choice.prediction.loss_nats),
        "points": [
            {"width_per_layer": aspect, "log_loss": value - term.mean}
            for aspect, value in term.seen
        ],
        "curve": [
            {"width_per_layer": aspect, "log_loss": loss.value, "interval": [loss.low, loss.high]}
            for aspect, loss in losses
        ],
    }


def term_body(term: AspectTerm) -> Json:
    """Return the best width per layer in a table of runs, and the costs of other widths per layer.

    Costs are shares of the loss above its value at the best width per layer.
    """
    best, (low, high) = term.best(), term.reach_log2
    return {
        "best": best.value,
        "interval": [best.low, best.high],
        "tried": [2.0**low, 2.0**high],
        "determined": term.determined,
        "costs": _list_costs(term, best.value, "share"),
    }


def _list_costs(term: AspectTerm, chosen: float, key: str, loss_nats: float = 1.0) -> list[Json]:
    """Return the costs of other widths per layer, as far as the runs cover both.

    Args:
        term: The fitted term of the loss.
        chosen: Width per layer that the others are compared with.
        key: Key of the cost in each entry.
        loss_nats: Loss by which the cost as a share is multiplied; 1 to keep the share.
    """
    costs: list[Json] = []
    for factor in FACTORS:
        if term.reaches(chosen * factor) and term.reaches(chosen):
            difference = term.cost(chosen * factor, chosen)
            value, low, high = (
                loss_nats * math.expm1(log)
                for log in (difference.value, difference.low, difference.high)
            )
            costs.append({"width_per_layer": chosen * factor, key: value, "interval": [low, high]})
    return costs


def term_text(body: Any) -> str:
    """Describe the best width per layer of a table of runs in one sentence."""
    tried = f"{format_number(body['tried'][0])} to {format_number(body['tried'][1])} were tried"
    if not body["determined"]:
        return f"shape: these runs do not determine the best width per layer, {tried}"
    costs = "; ".join(
        f"{format_number(cost['width_per_layer'])} costs "
        f"{format_percent(cost['share'], is_signed=True)} "
        f"[{format_percent(cost['interval'][0], is_signed=True)}, "
        f"{format_percent(cost['interval'][1], is_signed=True)}]"
        for cost in body["costs"]
    )
    ends = format_interval(body["interval"], ".3g")
    best = f"shape: the best width per layer is {format_number(body['best'])} {ends}, {tried}"
    return best + (f"; of the loss, {costs}" if costs else "")


def aspect_text(body: Any) -> str:
    """Describe the chosen width per layer in one sentence (section `choice.aspect`)."""
    sentence = f"width per layer {format_number(body['width_per_layer'])}"
    if body["ends"]:
        low, high = (
            f"width {end['width']} of {counted(end['num_layers'], 'layer')}" for end in body["ends"]
        )
        sentence += f", by the interval of the optimal size from {low} to {high}"
    if not body["curve"]:
        return (
            f"{sentence}; the ladder has one aspect ratio a size, so another's cost is not measured"
        )
    optimum = (
        f"the best is {format_number(body['best'])} {format_interval(body['best_interval'], '.3g')}"
    )
    at_edge = [
        f"none {which} was tried"
        for end, which in ((0, "lower"), (1, "higher"))
        if math.isclose(body["best_interval"][end], body["tried"][end], rel_tol=1e-6)
    ]
    optimum += f", {' and '.join(at_edge)}" if at_edge else ""
    verdict = (
        optimum
        if body["determined"]
        else "these rungs do not determine the best, the base's is kept"
    )
    costs = "; ".join(
        f"{format_number(cost['width_per_layer'])} would cost "
        f"{format_nats(cost['nats'], is_signed=True)} "
        f"{format_interval(cost['interval'], '+.4f')} nats"
        for cost in body["costs"]
    )
    return f"{sentence}; {verdict}" + (f"; {costs}" if costs else "")
