"""Spikes of the training loss, as it was logged.

Spikes are those of the frozen policy, found by the trainer's own detector (`launcher.trainer.rollback`), so that the
watch and the run agree on what one is. Where only every n-th step was logged, the policy's steps are logged ones. The
policy measures a spike by the spread of the window before it; where noise wanders from line to line, healthy losses
leave that window too. So the watch also asks whether the lines before could have led there: a spike is beyond noise if
a line is above what one of the `_ORIGINS` lines before it predicts, given the run's autocorrelation, by more than noise
reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from launcher.base.policy import SpikePolicy
from launcher.trainer.rollback import MAD_TO_SIGMA, Detector
from launcher.watch.logs.columns import Floats
from launcher.watch.noise import learn

_SURPRISE_SDS, _ORIGINS = 5.0, 8
"""A spike is so far above the predictions from the lines before it: wandering noise reached 4.5, planted spikes 5.7."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spike:
    """Logged steps in a row above the policy's limit."""

    first_step: int
    num_lines: int
    level_nats: float
    """Median of the window before it."""
    peak_nats: float
    lasted: bool
    """For the policy's patience."""
    over: bool
    """The loss came back below the limit."""
    within_noise: bool
    """This run's noise wanders so far by itself: the policy's spike, and no sign of a fault."""


def spikes(steps: Floats, losses: Floats, policy: SpikePolicy) -> list[Spike]:
    """Every spike so far; the last one may not be over."""
    there = np.isfinite(losses)
    at, loss = steps[there], losses[there]
    above = _above(loss, policy)
    edges = np.flatnonzero(np.diff(above.astype(np.int8), prepend=0, append=0))
    fine = np.flatnonzero(~above)
    noise = learn(at[fine], loss[fine])
    found = []
    for start, end in edges.reshape(-1, 2).tolist():
        before = fine[: np.searchsorted(fine, start)]
        level = float(np.median(loss[before[-policy.window_steps :]]))
        phi, innovation = noise.before(np.array(len(before)))
        found.append(
            Spike(
                first_step=int(at[start]),
                num_lines=end - start,
                level_nats=level,
                peak_nats=float(loss[start:end].max()),
                lasted=end - start >= policy.patience_steps,
                over=end < len(loss),
                within_noise=_within(loss, before[-_ORIGINS:], np.arange(start, end), level, phi, innovation),
            )
        )
    return found


def _within(
    losses: Floats, origins: NDArray[np.int64], lines: NDArray[np.int64], level: float, phi: Floats, innovation: Floats
) -> bool:  # fmt: skip
    """Whether no line is above what the lines before predict of it; False where no noise is known."""
    ahead = lines - origins[:, None]
    predicted = level + phi**ahead * (losses[origins][:, None] - level)
    sd = innovation * np.sqrt((1 - phi ** (2 * ahead)) / (1 - phi**2))
    return bool((losses[lines] - predicted <= _SURPRISE_SDS * sd).all())


def _above(losses: Floats, policy: SpikePolicy) -> NDArray[np.bool_]:
    """What the detector says of each loss."""
    detector, above = Detector(policy), np.zeros(len(losses), dtype=bool)
    for line, loss in enumerate(losses.tolist()):
        detector.see(loss)
        above[line] = detector.num_above > 0
    return above


def line_noise(values: Floats) -> float:
    """Standard deviation from line to line; a trend is none."""
    return float(MAD_TO_SIGMA * np.median(np.abs(np.diff(values))) / np.sqrt(2))
