"""A run's metrics as arrays over its logged steps, the input of every statistic of the watch.

Values that a source does not have are NaN, or None if it never had the column. Columns are named as
in `launcher.base.metrics`.
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
"""Columns with one number per logged step, besides the loss."""


def _make_empty() -> Floats:
    return np.empty(0)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LogColumns:
    """The columns of one run so far: S logged steps, ascending and each once, and R ranks."""

    steps: Floats
    """Number of steps done at each logged step, whole numbers, [S]."""
    train_loss_nats: Floats
    """Training loss, [S]."""
    grad_norm: Floats
    """Gradient norm before clipping, [S]."""
    tokens_per_second: Floats
    seconds: Floats
    """Seconds that the step took, [S]."""
    mfu: Floats
    validation_steps: Floats
    """Steps with a validation loss, [V]."""
    validation_loss_nats: Floats
    """Validation loss after the update of that step, [V]."""
    noise_scale_tokens: Floats = field(default_factory=_make_empty)
    """Gradient noise scale as logged by the trainer, [S]; the ends of its interval follow."""
    noise_scale_low_tokens: Floats = field(default_factory=_make_empty)
    noise_scale_high_tokens: Floats = field(default_factory=_make_empty)
    line_steps: Floats = field(default_factory=_make_empty)
    """Steps of all lines that have one, with a loss or without, [N]."""
    rank_steps: Floats = field(default_factory=_make_empty)
    """Newest steps whose lines have `rank_seconds`, [K]."""
    rank_seconds: Floats | None = None
    """Compute seconds of each rank, before it waits for the others, [K, R]."""
    events: Sequence[Mapping[str, canon.Json]] = ()
    """Lines that are events rather than steps, in order, as dicts of `launcher.base.metrics`."""
    header: Header | None = None
    """Header of the newest attempt."""
    newest_at: float | None = None
    """Time at which the newest line was written, in seconds since 1970; None if unknown."""

    def __len__(self) -> int:
        """Return the number of logged steps."""
        return len(self.steps)

    @property
    def step(self) -> int:
        """The newest logged step; 0 before the first."""
        return int(self.steps[-1]) if len(self.steps) else 0


def spacing(steps: Floats) -> float:
    """Return the usual number of steps from one line to the next."""
    return float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0


def headers(events: Iterable[Mapping[str, canon.Json]]) -> list[Header]:
    """Return the header of every attempt, in order; unreadable headers are left out."""
    headers_read = []
    for event in events:
        if event.get("event") != "started":
            continue
        try:
            header = canon.decode(Header, dict(event))
            datetime.datetime.fromisoformat(header.started_at)
            headers_read.append(header)
        except ValueError:
            continue
    return headers_read
