"""Callbacks of the training loop: they look at every step, and may ask it to go back or to stop.

Every method is called on every rank, in the same order, so callbacks may communicate. Their answers
must be the same on every rank, except for the columns of a step's line, which rank 0 writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from forerun._proxies.core.canon import Json

if TYPE_CHECKING:
    from forerun._launcher.main_run.trainer.rollback import Rollback
    from forerun._launcher.main_run.trainer.training import Trainer

Columns = dict[str, Json]
"""A line of `metrics.jsonl`, or a part of one: values by the name of their column."""


class StepInfo(NamedTuple):
    """A step whose gradients are computed. The numbers are the same on every rank."""

    step: int
    """Number of updates made before this step, which the metrics call step `step + 1`."""
    num_tokens: int
    """Number of tokens of the global batch, that is, of all ranks together."""
    loss_nats: float
    """Loss of the global batch in nats per token."""
    grad_norm: float
    """Norm of the full gradient before clipping."""


def is_due(every_steps: int, step: int) -> bool:
    """Return whether the update of `step` ends an interval of `every_steps` updates.

    With an interval of 0, no update does.
    """
    return every_steps > 0 and (step + 1) % every_steps == 0


class Callback:
    """A callback that does nothing; subclasses override what they need."""

    run: Trainer
    """The trainer that calls this callback. It sets this attribute before the first call."""
    every_steps = 1
    """Steps between calls of `before_gradients`, `before_update`, and `after_update`; 0 for no
    call."""

    def begin(self, step: int, carried: Any) -> None:
        """Prepare for the first step of an attempt, or for the first one after a rollback.

        Args:
            step: Number of updates made.
            carried: State that this callback put into the checkpoint (`get_state`), as read from
                JSON; None if there is none.
        """

    def before_gradients(self, step: int) -> None:
        """Prepare for the gradients of update `step + 1`."""

    def before_update(self, info: StepInfo) -> Rollback | str | None:
        """Look at the computed gradients.

        Returns:
            A rollback (a decision to go back to a checkpoint and skip some data), or the reason to
            end the run as aborted. With either, the update is not made, and no further callback is
            asked. None to make the update.
        """
        return None

    def after_update(self, info: StepInfo) -> Columns:
        """Return further columns of the step's line in the metrics.

        A number that is not finite ends the run, so it must be the same on every rank.
        """
        return {}

    def get_state(self) -> Json:
        """Return the state to put into the next checkpoint, so that a resumed run is the same.

        A thread writes it while training goes on, so later steps must not change it.
        """
        return None
