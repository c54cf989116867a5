"""Spikes of the training loss, found as the frozen policy says, and the run sent back before them.

PaLM's protocol (arXiv 2204.02311, section 5.1): a checkpoint from before the spike, and other data
from there on. Where spikes come again the clip is lowered too, as OPT did (arXiv 2205.01068,
section 2.5).
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from typing import TYPE_CHECKING

from launcher.base import chronicle
from launcher.base.policy import SpikePolicy
from launcher.trainer.callbacks import Callback, RollbackOrder, StepInfo
from proxies.core.canon import Json
from proxies.core.notation import counted, format_loss

if TYPE_CHECKING:
    from launcher.trainer.training import Trainer

MAD_TO_SIGMA = 1.4826
"""Standard deviations of a normal sample per median absolute deviation."""


class Detector:
    """Tells where a loss has left the level of the steps before it. O(window) a step, and a pure
    function of losses.
    """

    def __init__(
        self, policy: SpikePolicy, window: tuple[float, ...] = (), num_above: int = 0
    ) -> None:
        self._policy = policy
        self.window = deque(window, maxlen=policy.window_steps)
        """Losses in nats of the last steps that were no spike."""
        self.num_above = num_above
        """Steps in a row, up to the last one, that were above the limit."""

    @property
    def limit_nats(self) -> float:
        """What a loss must exceed to be a spike's; infinite until the window is full."""
        if len(self.window) < self._policy.window_steps:
            return math.inf
        median = statistics.median(self.window)
        sigma = MAD_TO_SIGMA * statistics.median(abs(loss - median) for loss in self.window)
        return median + max(self._policy.threshold * sigma, self._policy.least_nats)

    def see(self, loss_nats: float) -> bool:
        """Take the next step's loss; whether it is the one with which a spike has lasted for too
        long.

        A spike's losses do not enter the window: they must not become the level that it is compared
        with.
        """
        # No median is below the window's least: few losses of a healthy run are worth one.
        least = min(self.window, default=math.inf)
        if loss_nats > least + self._policy.least_nats and loss_nats > self.limit_nats:
            self.num_above += 1
        else:
            self.num_above = 0
            self.window.append(loss_nats)
        return self.num_above == self._policy.patience_steps


class SpikeWatch(Callback):
    """Goes back before a spike that lasts, as often as the policy allows; after that it says so,
    and the run continues.

    The run's own ceiling (`AbortPolicy`) holds all the while.
    """

    def __init__(self, policy: SpikePolicy) -> None:
        self._policy = policy
        self._detector = Detector(policy)

    def begin(self, run: Trainer, step: int, carried: Json) -> None:
        """With the window that the checkpoint holds."""
        self._run = run
        window, num_above = carried if isinstance(carried, list) else ([], 0)
        self._detector = Detector(self._policy, tuple(window), num_above)  # type: ignore[arg-type]

    def before_update(self, seen: StepInfo) -> RollbackOrder | None:
        """To before the spike's first step, with the data skipped that led to it."""
        limit_nats = self._detector.limit_nats
        if not self._detector.see(seen.loss_nats):
            return None
        policy, run = self._policy, self._run
        first = seen.step - policy.patience_steps + 1
        reason = (
            f"a loss of {format_loss(seen.loss_nats)} nats at step {seen.step + 1}, above "
            f"{limit_nats:.4f} for "
            f"{counted(policy.patience_steps, 'step')}"
        )
        if len(run.rollbacks) >= policy.max_rollbacks:
            self._say_that_none_is_left(seen.step + 1, reason)
            return None
        # Not farther than last time: that state was held for good, and older checkpoints may be
        # gone.
        to_step = max(
            first - policy.rollback_steps, run.rollbacks[-1].to_step if run.rollbacks else 0
        )
        return RollbackOrder(
            to_step=to_step,
            skipped_sequences=run.first_sequence(to_step + policy.skip_batches)
            - run.first_sequence(to_step),
            clip_norm=self._clip_norm(),
            reason=reason,
        )

    def _clip_norm(self) -> float | None:
        """The frozen one the first time; lower where spikes come again."""
        clip_norm = self._run.decision.clip_norm
        return (
            clip_norm
            if clip_norm is None or not self._run.rollbacks
            else clip_norm * self._policy.clip_share
        )

    def _say_that_none_is_left(self, step: int, reason: str) -> None:
        run = self._run
        if run.rank != 0 or any(
            e.kind == "alert" and e.step == step for e in chronicle.entries(run.run_dir)
        ):
            return  # resumed, the run meets the same step again
        text = f"{reason}; all {self._policy.max_rollbacks} rollbacks are used: the run continues"
        print(text, file=sys.stderr)
        chronicle.record(run.run_dir, "alert", text, step=step, digest=run.decision.digest)

    def carried(self) -> Json:
        """The window, and how many steps the loss has been above it."""
        return [list(self._detector.window), self._detector.num_above]
