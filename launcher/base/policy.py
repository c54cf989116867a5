"""What a frozen config says about the run itself: when it saves, when it stops, what it does about
a spike, and what it looks at on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from proxies.core.checks import Checks

Recomputed = Literal["none", "selective", "full"]
"""What the backward pass computes again; selective: all but outputs of products and attention;
full: whole blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing:
    """When the run saves, and how many complete checkpoints stay."""

    every_steps: int
    keep: int = 2
    """Two at least: the newest may turn out corrupt."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("every_steps")
        checks.whole("keep", least=2)
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortPolicy:
    """When the run must stop by itself."""

    on_non_finite: bool
    """Before the optimizer step, the last checkpoint intact."""
    train_loss_above_nats: float
    """Past the warmup: ln(vocabulary) + 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikePolicy:
    """What a spike of the training loss is, and what is done when it does not come back.

    PaLM went back about 100 steps and skipped 200 to 500 batches (arXiv 2204.02311, section 5.1);
    OPT lowered its clip from 1.0 to 0.3 (arXiv 2205.01068, section 2.5). A spike is a loss above
    the median of the last `window_steps` by more than `threshold` robust standard deviations
    (1.4826 times the median absolute deviation) and `least_nats`; one that lasts `patience_steps`
    in a row calls for this policy.
    """

    rollback_steps: int = 100
    skip_batches: int = 200
    clip_share: float = 0.3
    """The share of `clip_norm` that is left if spikes come again."""
    max_rollbacks: int = 0
    """How often the trainer may do so by itself; 0: never, it is for people to do."""
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
    """What a run looks at besides the loss of each step; 0 is never."""

    validate_every_steps: int = 0
    layers_every_steps: int = 0
    """Norms, weight RMS and update ratio of every layer."""
    replay_every_steps: int = 0
    """A step is computed twice and compared, against silent data corruption (arXiv 2102.11245)."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("validate_every_steps", "layers_every_steps", "replay_every_steps", least=0)
        checks.done()
