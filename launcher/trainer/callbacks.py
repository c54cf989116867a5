"""Callbacks of the training loop, which may ask it to go back or to stop: the part of the trainer
that others fill in.

Every method is called on every rank, in the same order, so hooks may communicate. What they answer
must be the same on every rank, but for the columns of a step's line, which are rank 0's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxies.core.canon import Json

if TYPE_CHECKING:
    from launcher.trainer.training import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """A step whose gradients are there; the same on every rank."""

    step: int
    """Updates made before it: this is the step that the metrics call `step + 1`."""
    loss_nats: float
    """The loss of the global batch."""
    grad_norm: float
    """Before clipping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RollbackOrder:
    """To the newest good checkpoint of at most `to_step` steps, as before up to that step, and then
    with other data.
    """

    to_step: int
    """Updates made from where on it is another run."""
    skipped_sequences: int
    """How many sequences of the data are skipped there."""
    clip_norm: float | None
    """In force from there on; None: no clip."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """The run must not go on: it ends as one that its own brake stopped."""

    reason: str


class Callback:
    """A callback. By itself it does nothing: override what you need."""

    def begin(self, run: Trainer, step: int, carried: Json) -> None:
        """The run begins, or resumes, after `step` updates; `carried` is what this hook left in the
        checkpoint.
        """

    def before_update(self, seen: StepInfo) -> RollbackOrder | Stop | None:
        """Gradients are there, the update is not made. A run that goes back or stops never makes
        it.
        """
        return None

    def after_update(self, seen: StepInfo) -> dict[str, Json]:
        """The update is made; what is returned stands in the step's line of metrics beside its own
        columns.

        A number that is not finite ends the run, and so must be there on every rank.
        """
        return {}

    def carried(self) -> Json:
        """What goes into the next checkpoint's manifest, so that a resumed run is as if it had
        never stopped.
        """
        return None
