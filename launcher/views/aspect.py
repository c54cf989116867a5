"""The main run's depth, where it is chosen with its width: its interval, and what another one would
cost.
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
"""Of the chosen width per layer: what these cost is told, as far as they were tried."""
NUM_POINTS = 41


def aspect_body(choice: Choice) -> Json:
    """What a report says of the depth; None where the plan gives it."""
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
    places = [2.0 ** (low + (high - low) * i / (NUM_POINTS - 1)) for i in range(NUM_POINTS)]
    spans = [(aspect, term.log_loss(aspect)) for aspect in places]
    return body | {
        "tried": [2.0**low, 2.0**high],
        "best": best.value,
        "best_interval": [best.low, best.high],
        "determined": term.determined,
        "costs": _costs(term, chosen, "nats", choice.prediction.loss_nats),
        "points": [
            {"width_per_layer": aspect, "log_loss": value - term.mean}
            for aspect, value in term.seen
        ],
        "curve": [
            {"width_per_layer": aspect, "log_loss": span.value, "interval": [span.low, span.high]}
            for aspect, span in spans
        ],
    }


def term_body(term: AspectTerm) -> Json:
    """The best width per layer of a table of runs, and by which share of the loss others lie above
    it.
    """
    best, (low, high) = term.best(), term.reach_log2
    return {
        "best": best.value,
        "interval": [best.low, best.high],
        "tried": [2.0**low, 2.0**high],
        "determined": term.determined,
        "costs": _costs(term, best.value, "share"),
    }


def _costs(term: AspectTerm, chosen: float, name: str, loss_nats: float = 1.0) -> list[Json]:
    """What other widths per layer cost beside one, as far as they and it were tried: the share of a
    loss, times it.
    """
    costs: list[Json] = []
    for factor in FACTORS:
        if term.reaches(chosen * factor) and term.reaches(chosen):
            cost = term.cost(chosen * factor, chosen)
            value, low, high = (
                loss_nats * math.expm1(log) for log in (cost.value, cost.low, cost.high)
            )
            costs.append({"width_per_layer": chosen * factor, name: value, "interval": [low, high]})
    return costs


def term_text(body: Any) -> str:
    """One sentence about it."""
    tried = f"{format_number(body['tried'][0])} to {format_number(body['tried'][1])} were tried"
    if not body["determined"]:
        return f"shape: these runs do not determine the best width per layer, {tried}"
    costs = "; ".join(
        f"{format_number(one['width_per_layer'])} costs "
        f"{format_percent(one['share'], is_signed=True)} "
        f"[{format_percent(one['interval'][0], is_signed=True)}, "
        f"{format_percent(one['interval'][1], is_signed=True)}]"
        for one in body["costs"]
    )
    ends = format_interval(body["interval"], ".3g")
    best = f"shape: the best width per layer is {format_number(body['best'])} {ends}, {tried}"
    return best + (f"; of the loss, {costs}" if costs else "")


def aspect_text(body: Any) -> str:
    """One sentence about it."""
    said = f"{format_number(body['width_per_layer'])} widths a layer"
    if body["ends"]:
        low, high = (
            f"width {end['width']} of {counted(end['num_layers'], 'layer')}" for end in body["ends"]
        )
        said += f", by the interval of the optimal size from {low} to {high}"
    if not body["curve"]:
        return f"{said}; the ladder has one aspect ratio a size, so another's cost is not measured"
    best = (
        f"the best is {format_number(body['best'])} {format_interval(body['best_interval'], '.3g')}"
    )
    at_edge = [
        f"none {which} was tried"
        for end, which in ((0, "lower"), (1, "higher"))
        if math.isclose(body["best_interval"][end], body["tried"][end], rel_tol=1e-6)
    ]
    best += f", {' and '.join(at_edge)}" if at_edge else ""
    found = (
        best if body["determined"] else "these rungs do not determine the best, the base's is kept"
    )
    others = "; ".join(
        f"{format_number(one['width_per_layer'])} would cost "
        f"{format_nats(one['nats'], is_signed=True)} "
        f"{format_interval(one['interval'], '+.4f')} nats"
        for one in body["costs"]
    )
    return f"{said}; {found}" + (f"; {others}" if others else "")
