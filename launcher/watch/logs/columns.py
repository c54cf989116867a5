"""A run's metrics as arrays over its logged steps: what every statistic of the watch reads,
wherever it came from.

What a source does not have is NaN, or None where it never had it. Columns are named as in
`launcher.base.metrics`.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from launcher.base.metrics import Header
from launcher.watch.logs.keys import NOISE_SCALE
from proxies.core import canon

Floats = NDArray[np.float64]
SCALARS = ("grad_norm", "tokens_per_second", "seconds", "mfu", *NOISE_SCALE)


def _empty() -> Floats:
    return np.empty(0)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LogColumns:
    """One run so far. S logged steps, ascending and each once; R ranks."""

    steps: Floats
    """[S] Steps done, whole numbers."""
    train_loss_nats: Floats
    """[S]"""
    grad_norm: Floats
    """[S] Before clipping."""
    tokens_per_second: Floats
    seconds: Floats
    """[S] How long that step took."""
    mfu: Floats
    validation_steps: Floats
    """[V]"""
    validation_loss_nats: Floats
    """[V] After the update of that step."""
    noise_scale_tokens: Floats = field(default_factory=_empty)
    """[S] The gradient noise scale, where the trainer tells it, and the ends of its interval."""
    noise_scale_low_tokens: Floats = field(default_factory=_empty)
    noise_scale_high_tokens: Floats = field(default_factory=_empty)
    line_steps: Floats = field(default_factory=_empty)
    """[N] Steps of all lines that have one, with a loss or without."""
    rank_steps: Floats = field(default_factory=_empty)
    """[K] The newest steps whose lines have `rank_seconds`."""
    rank_seconds: Floats | None = None
    """[K, R] Compute time of each rank, before it waits for the others."""
    events: Sequence[Mapping[str, canon.Json]] = ()
    """The lines that are no steps, in the order they came, as dicts of `launcher.base.metrics`."""
    header: Header | None = None
    """The header of the newest attempt."""
    newest_at: float | None = None
    """When the newest line was written, in seconds since 1970; None where the source does not
    say."""

    def __len__(self) -> int:
        """Logged steps."""
        return len(self.steps)

    @property
    def step(self) -> int:
        """The newest logged step; 0 before the first."""
        return int(self.steps[-1]) if len(self.steps) else 0


def spacing(steps: Floats) -> float:
    """Steps from one line to the next, as a rule."""
    return float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0


def headers(events: Iterable[Mapping[str, canon.Json]]) -> list[Header]:
    """One an attempt, in order; one that this version cannot read is left out."""
    found = []
    for event in events:
        if event.get("event") != "started":
            continue
        try:
            header = canon.decode(Header, dict(event))
            datetime.datetime.fromisoformat(header.started_at)
            found.append(header)
        except ValueError:
            continue
    return found
