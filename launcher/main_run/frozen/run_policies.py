"""The policies of a main run: when it saves and stops, how it reacts to loss spikes, and what it
monitors.

The trainer and the watch share `SpikeDetector`, so they agree on what a spike is.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

from forerun._proxies.core.checks import Checks

RecomputeMode = Literal["none", "selective", "full"]
"""Activations that the backward pass recomputes: none; selective, which keeps only the outputs of
matrix products and attention; or full, which recomputes whole blocks.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing:
    """The interval between checkpoints, and the number of complete checkpoints that are kept."""

    every_steps: int
    keep: int = 2
    """Number of checkpoints to keep: at least two, because the newest may be corrupt."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole("every_steps")
        checks.require_whole("keep", least=2)
        checks.raise_problems()


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortPolicy:
    """The conditions under which the run stops by itself."""

    on_non_finite: bool
    """Whether a loss or gradient that is not finite stops the run, before the optimizer step, so
    that the last checkpoint is intact.
    """
    train_loss_above_nats: float
    """Training loss in nats above which the run stops after the warmup: ln(vocabulary) + 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikePolicy:
    """The definition of a spike of the training loss, and the reaction to one that does not
    recover.

    PaLM went back about 100 steps and skipped 200 to 500 batches (arXiv 2204.02311, section 5.1);
    OPT lowered its clip norm from 1.0 to 0.3 (arXiv 2205.01068, section 2.5). A spike is a loss
    above the median of the last `window_steps` by more than `threshold` robust standard deviations
    (`MAD_TO_SIGMA` times the median absolute deviation) and by more than `least_nats`. If a spike
    lasts `patience_steps` in a row, this policy applies.
    """

    rollback_steps: int = 100
    """Number of steps before the spike to which the run goes back."""
    skip_batches: int = 200
    """Number of batches of the data that are skipped from there on."""
    clip_share: float = 0.3
    """Factor on `clip_norm` from the second rollback on."""
    max_rollbacks: int = 0
    """Number of rollbacks that the trainer makes by itself; with 0, a person must make them."""
    window_steps: int = 64
    threshold: float = 6.0
    least_nats: float = 0.1
    patience_steps: int = 8

    @property
    def reach_steps(self) -> int:
        """Number of steps by which the trainer may go back by itself; 0 if it never does."""
        return self.rollback_steps + self.patience_steps if self.max_rollbacks else 0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole("rollback_steps", "skip_batches", "patience_steps")
        checks.require_whole("max_rollbacks", least=0)
        checks.require_whole("window_steps", least=8)
        checks.require_number("clip_share", above=0, most=1)
        checks.require_number("threshold", above=0)
        checks.require_number("least_nats", above=0)
        checks.raise_problems()


MAD_TO_SIGMA = 1.4826
"""Standard deviations of a normal sample per median absolute deviation."""


class SpikeDetector:
    """A detector of loss spikes (see `SpikePolicy`)."""

    def __init__(
        self, policy: SpikePolicy, window: tuple[float, ...] = (), num_above: int = 0
    ) -> None:
        self._policy = policy
        self.window = deque(window, maxlen=policy.window_steps)
        """Losses in nats of the last steps that were no spike."""
        self.num_above = num_above
        """Number of steps in a row, up to the last one, that were above the limit."""

    @property
    def limit_nats(self) -> float:
        """Loss above which a step belongs to a spike; infinite until the window is full."""
        if len(self.window) < self._policy.window_steps:
            return math.inf
        median = statistics.median(self.window)
        sigma = MAD_TO_SIGMA * statistics.median(abs(loss - median) for loss in self.window)
        return median + max(self._policy.threshold * sigma, self._policy.least_nats)

    def add_loss(self, loss_nats: float) -> bool:
        """Add the next step's loss, and return whether it is the step at which a spike has lasted
        for `patience_steps`.

        The losses of a spike do not enter the window, because the spike is compared with it.
        """
        # The limit is at least `least_nats` above the window's minimum. This cheap test spares most
        # steps the computation of the limit.
        minimum = min(self.window, default=math.inf)
        if loss_nats > minimum + self._policy.least_nats and loss_nats > self.limit_nats:
            self.num_above += 1
        else:
            self.num_above = 0
            self.window.append(loss_nats)
        return self.num_above == self._policy.patience_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Monitoring:
    """The measurements of a run in addition to the loss of each step, with their intervals in
    steps; 0 turns one off.
    """

    validate_every_steps: int = 0
    layers_every_steps: int = 0
    """Steps between measurements of every layer: norms, weight RMS, and update ratio."""
    replay_every_steps: int = 0
    """Steps between replays: a step is computed twice and compared, against silent data corruption
    (arXiv 2102.11245).
    """

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole(
            "validate_every_steps", "layers_every_steps", "replay_every_steps", least=0
        )
        checks.raise_problems()
