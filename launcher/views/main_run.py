"""The main run's measured loss compared with the predicted one, in words."""

from __future__ import annotations

from typing import cast

from launcher.views.numbers import Body
from proxies.core.notation import format_interval, format_loss


def measured_loss(body: Body) -> float | None:
    """Return the final validation loss of a main run that has finished, in nats per token; None
    before.
    """
    run = body.get("main_run")
    if run is None or run["event"] != "finished":
        return None
    return cast(float | None, run["validation_loss_nats"])


def describe_outcome(body: Body) -> str:
    """Return a sentence with the measured and the predicted loss; empty before the main run has
    finished.

    Args:
        body: `report.json`.
    """
    measured = measured_loss(body)
    if measured is None:
        return ""
    predicted = body["decision"]["predicted"]
    low, high = predicted["low_nats"], predicted["high_nats"]
    place = "inside" if low <= measured <= high else "outside"
    return (
        f"the main run has finished: validation loss {format_loss(measured)} nats, {place} the "
        "predicted interval "
        f"{format_interval((low, high))} around {format_loss(predicted['loss_nats'])}"
    )
