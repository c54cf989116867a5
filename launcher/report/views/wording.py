"""Outcomes, names, and the main run in words, the same on the terminal and on the page.

Numbers are formatted by `forerun._proxies.core.notation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Self

from forerun._proxies.core.notation import format_interval, format_loss

if TYPE_CHECKING:
    from forerun._launcher.report.views.report_model import Report, UserRun

Tone = Literal["good", "bad", "open"]

# Outcomes in words by tone; an outcome in neither set is open.
_GOOD = {"passed", "passes", "holds", "converged", "finished", "ok", "tuned", "yes", "inside"}
_BAD = {
    "failed",
    "drifts",
    "blows up",
    "vanishes",
    "diverged",
    "unidentified",
    "mis tuned",
    "no",
    "different",
}


def to_words(name: object) -> str:
    """Return a name of the records as words: `cannot_tell` becomes "cannot tell"."""
    return str(name).replace("_", " ")


def find_tone(outcome: str) -> Tone:
    """Return the tone of an outcome, which sets the color of its label and of its mark."""
    name = to_words(outcome)
    return "good" if name in _GOOD else "bad" if name in _BAD else "open"


class Outcome(str):
    """An outcome in words, which the page draws as a label in the color of its tone."""

    __slots__ = ()

    def __new__(cls, name: str) -> Self:
        """Create the outcome from its name in the records."""
        return super().__new__(cls, to_words(name))


def join_names(names: Sequence[str]) -> str:
    """Join names as in a sentence: `a`, `a and b`, `a, b and c`."""
    # The filter removes the empty first part if there is only one name.
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def format_arm(arm: str) -> str:
    """Return the usual spelling of a parametrization, or of the coordinate check over depths."""
    return {"mup": "muP", "sp": "SP", "depth": "over depths"}.get(arm, arm)


# ---- The main run ----


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
