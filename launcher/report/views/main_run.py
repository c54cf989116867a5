"""The main run in words: the user's command, and the measured loss compared with the forecast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun._proxies.core.notation import format_interval, format_loss

if TYPE_CHECKING:
    from forerun._launcher.report.views.report_model import Report, UserRun


def format_user_run(run: UserRun) -> str:
    """Return the command of the main run as text for the terminal."""
    return f"the main run with your own trainer (use a fresh folder as RUN_DIR):\n  {run.line}"


def describe_outcome(report: Report) -> str:
    """Return a sentence with the measured and the predicted loss; empty before the main run has
    finished.
    """
    measured = report.measured_loss
    if measured is None or report.decision is None:
        return ""
    predicted = report.decision.predicted
    return (
        f"the main run has finished: validation loss {format_loss(measured)} nats, "
        f"{predicted.locate_loss(measured)} the predicted interval "
        f"{format_interval((predicted.low_nats, predicted.high_nats))} around "
        f"{format_loss(predicted.loss_nats)}"
    )
