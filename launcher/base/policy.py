"""The run policies of a frozen config: when the run saves and stops, how it treats loss spikes, and
what it monitors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from proxies.core.checks import Checks

Recomputed = Literal["none", "selective", "full"]
"""Activations that the backward pass recomputes: none; selective, which keeps only the outputs of
matrix products and attention; or full, which recomputes whole blocks.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing:
    """The interval between checkpoints, and the number of complete checkpoints that are kept."""

    every_steps: int
    keep: int = 2
    """Number of checkpoints to keep; at least two, because the newest may turn out to be corrupt.
    """

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("every_steps")
        checks.whole("keep", least=2)
        checks.done()


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
    (1.4826 times the median absolute deviation) and by more than `least_nats`. If it lasts
    `patience_steps` in a row, this policy applies.
    """

    rollback_steps: int = 100
    skip_batches: int = 200
    clip_share: float = 0.3
    """Factor on `clip_norm` if spikes come again."""
    max_rollbacks: int = 0
    """Number of rollbacks that the trainer may do by itself; with 0, a person must do them."""
    window_steps: int = 64
    threshold: float = 6.0
    least_nats: float = 0.1
    patience_steps: int = 8

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("rollback_steps", "skip_batches", "patience_steps")
        checks.whole("max_rollbacks", least=0)
        checks.whole("window_steps", least=8)
        checks.number("clip_share", above=0, most=1)
        checks.number("threshold", above=0)
        checks.number("least_nats", above=0)
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Monitoring:
    """The measurements of a run besides the loss of each step, with their intervals in steps; 0
    turns one off.
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
        checks.whole("validate_every_steps", "layers_every_steps", "replay_every_steps", least=0)
        checks.done()
