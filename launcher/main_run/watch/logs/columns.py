"""A run's metrics as arrays over its logged steps, the input of every statistic of `forerun watch`.

Columns are named as in `forerun._launcher.main_run.metrics_file`. Absent values have three forms:

- A column with one number per logged step is NaN at the steps whose line lacks it; if the whole log
  lacks it, it is NaN at every step. Columns of the noise scale may be empty instead.
- A list of steps that have a certain value, such as `validation_steps`, is empty if no step has
  one.
- `rank_seconds` and `newest_at` are None if the log has none.

Dimensions: S logged steps with a training loss, V steps with a validation loss, N steps with any
line, K lines with a time of each rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forerun._launcher.main_run.event_log import parse_time
from forerun._launcher.main_run.metrics_file import AttemptStart
from forerun._launcher.main_run.watch.logs.keys import NOISE_SCALE
from forerun._proxies.core import canon

Floats = NDArray[np.float64]
SCALARS = ("grad_norm", "tokens_per_second", "seconds", "mfu", *NOISE_SCALE)
"""Columns with one number per logged step, in addition to the loss."""


def _make_empty() -> Floats:
    return np.empty(0)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LogColumns:
    """The columns of one run so far."""

    steps: Floats
    """Logged steps, counted from 1, ascending, each once, [S]."""
    train_loss_nats: Floats
    """Training loss, [S]."""
    grad_norm: Floats
    """Gradient norm before clipping, [S]."""
    tokens_per_second: Floats
    """Tokens of all ranks per second, [S]."""
    seconds: Floats
    """Seconds that the step took, [S]."""
    mfu: Floats
    """Share of the devices' peak (model FLOPs utilization), [S]."""
    validation_steps: Floats
    """Steps with a validation loss, [V]."""
    validation_loss_nats: Floats
    """Validation loss after the update of that step, [V]."""
    noise_scale_tokens: Floats = field(default_factory=_make_empty)
    """Gradient noise scale as logged by the trainer, [S]."""
    noise_scale_low_tokens: Floats = field(default_factory=_make_empty)
    """Lower end of its interval, [S]."""
    noise_scale_high_tokens: Floats = field(default_factory=_make_empty)
    """Upper end of its interval, [S]."""
    line_steps: Floats = field(default_factory=_make_empty)
    """Steps of all lines that name a step, with a loss or without, [N]."""
    rank_steps: Floats = field(default_factory=_make_empty)
    """Newest steps whose lines have `rank_seconds`, [K]."""
    rank_seconds: Floats | None = None
    """Compute seconds of each rank, without the wait for the others, [K, R]; None if no line has
    them."""
    events: Sequence[Mapping[str, canon.Json]] = ()
    """Lines that are events rather than steps, in order, as dicts of
    `forerun._launcher.main_run.metrics_file`.
    """
    newest_at: float | None = None
    """Time at which the newest line was written, in seconds since 1970; None if unknown."""

    def __len__(self) -> int:
        """Return the number of logged steps."""
        return len(self.steps)

    @property
    def step(self) -> int:
        """The newest logged step; 0 before the first."""
        return int(self.steps[-1]) if len(self.steps) else 0

    @property
    def last_event(self) -> Mapping[str, canon.Json]:
        """The newest event; empty if there is none."""
        return self.events[-1] if self.events else {}

    def find_final_loss(self, num_steps: int) -> float | None:
        """Return the validation loss after the last step in nats; None if it is not logged.

        Args:
            num_steps: Steps of the whole run.
        """
        is_logged = len(self.validation_steps) and self.validation_steps[-1] >= num_steps
        return float(self.validation_loss_nats[-1]) if is_logged else None


def compute_spacing(steps: Floats) -> float:
    """Return the median number of steps from one line to the next; 1 for fewer than two lines."""
    return float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0


def list_headers(events: Iterable[Mapping[str, canon.Json]]) -> list[AttemptStart]:
    """Return the headers of the attempts in order, without those that cannot be read.

    A header is the event with which an attempt begins its part of the log.
    """
    headers = []
    for event in events:
        if event.get("event") != "started":
            continue
        try:
            header = canon.decode(AttemptStart, dict(event))
            parse_time(header.started_at)  # ValueError if it is no time
            headers.append(header)
        except ValueError:
            continue
    return headers
