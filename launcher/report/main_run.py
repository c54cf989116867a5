"""The main run's log beside the loss it was expected to have: `report.json`'s part, and the page's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.report.main_run_watch import watched_parts
from launcher.views import html as show
from launcher.views.html import Body
from proxies.core.canon import Json

if TYPE_CHECKING:
    from launcher.frozen.frozen import CurvePoint

NUM_SHOWN = 6
"""Points of the expected curve in the table: the last that the run has passed."""


def beside_curve(
    steps: Sequence[int], losses_nats: Sequence[float], curve: Sequence[CurvePoint], num_steps: int
) -> dict[str, Json]:
    """Training loss near each point of the expected curve that the run has wholly passed, and how many lie inside.

    Args:
        steps: logged, ascending.
        losses_nats: of these steps.
        curve: expected; each point is of the mean over the steps within `WINDOW` of it.
        num_steps: of the whole run.
    """
    from scaling_fits.forecast.loss_curves import WINDOW

    passed: list[Json] = []
    num_inside = 0
    for point in curve:
        reach = int(point.step * WINDOW + 1e-9)
        first, last = point.step - reach, min(point.step + reach, num_steps)
        near = [loss for step, loss in zip(steps, losses_nats, strict=True) if first <= step <= last]
        if not near or steps[-1] < last:
            continue
        seen = sum(near) / len(near)
        where = "below" if seen < point.low_nats else "above" if seen > point.high_nats else "inside"
        num_inside += where == "inside"
        passed.append({"step": point.step, "seen_nats": seen, "loss_nats": point.loss_nats, "where": where,
                       "low_nats": point.low_nats, "high_nats": point.high_nats})  # fmt: skip
    return {"passed": passed, "num_passed": len(passed), "num_inside": num_inside, "num_points": len(curve)}


def main_run_section(body: Body) -> str:
    """How far the embedded trainer has come with this config, if it was launched, and how that was expected to go."""
    run = body.get("main_run")
    if run is None:
        return ""
    num_steps, after = body["decision"]["learning_rate"]["schedule"]["num_steps"], run["event"]
    said = f"The embedded trainer has logged {show.count(run['steps'][-1])} of {show.count(num_steps)} steps"
    said += f"; it ended with: {show.words(after)}." if after else "."
    first, last = (show.loss(run["train_loss_nats"][at]) for at in (0, -1))
    said += f" Training loss began at {first} nats; its last step's was {last}."
    held_out = run["validation_loss_nats"]
    if held_out is not None:
        forecast = _beside_forecast(held_out, body) if after == "finished" else ""
        said += f" Validation loss {show.loss(held_out)} nats{forecast}."
    parts = [f"<p>{said}</p>", *_on_the_way(run, body), *watched_parts(run)]
    return show.section("main-run", "The main run so far", *parts)


def _beside_forecast(held_out: float, body: Body) -> str:
    """Where the last validation loss lies beside what was expected of it."""
    predicted = body["decision"]["predicted"]
    ends = (predicted["low_nats"], predicted["high_nats"])
    where = "inside" if ends[0] <= held_out <= ends[1] else "outside"
    return f", {where} the interval {show.interval(ends)} that was expected"


def _on_the_way(run: Any, body: Body) -> list[str]:
    """The points of the expected curve that the run has passed, and a drawing of both."""
    predicted, beside = body["decision"]["predicted"], run["beside_curve"]
    if not predicted["curve"]:
        return ["<p>The ladder had too few runs to say how training loss would run down.</p>"]
    from launcher.figures.main_run import loss_curve

    level = show.percent(predicted["level"])
    drawn = show.figure(loss_curve(body), f"The band is {level} for a mean over steps near each point.")
    if not beside["passed"]:
        first = show.count(predicted["curve"][0]["step"])
        return [f"<p>The expected curve begins near step {first}: the run is not past that point yet.</p>", drawn]
    share = f"{show.count(beside['num_inside'])} of the {show.count(beside['num_passed'])}"
    last = show.words(beside["passed"][-1]["where"])
    head = (f"<p>Training loss lay inside the expected {level} band at <b>{share}</b> points passed so far, of "
            f"{show.count(beside['num_points'])} in all; at the last of them {last} it.</p>")  # fmt: skip
    rows = [
        (show.count(at["step"]), show.loss(at["seen_nats"]), show.loss(at["loss_nats"]),
         show.interval((at["low_nats"], at["high_nats"])), show.words(at["where"]))
        for at in beside["passed"][-NUM_SHOWN:]
    ]  # fmt: skip
    columns = ("near step", "training loss (nats)", "expected", "interval", "lies")
    return [head, drawn, show.table(columns, rows, ())]
