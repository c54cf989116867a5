"""What the training loss says against its own past: spikes, a slow rise, values that are none.

Spikes are those of the frozen policy, found by the trainer's own detector (`launcher.spikes`), so that the watch and
the run agree on what one is. Where only every n-th step was logged, the policy's steps are logged ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from launcher.policy import SpikePolicy
from launcher.spikes import MAD_TO_SIGMA, Detector
from launcher.watch.series import Floats

RISE_NATS, RISE_SDS = 0.02, 6.0
"""A block's median above the lowest before it, by both and in two blocks on end: no healthy run does."""
_BLOCKS_PER_OCTAVE, _LEAST_LINES, _NUM_RISEN = 16, 8, 2
_CHUNK = 4096  # lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Spike:
    """Logged steps in a row above the policy's limit."""

    first_step: int
    last_step: int
    num_lines: int
    level_nats: float
    """Median of the window before it."""
    peak_nats: float
    lasted: bool
    """For the policy's patience."""
    over: bool
    """The loss came back below the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """The loss rose, and stayed up."""

    first_step: int
    """Of the first of the blocks that show it."""
    lowest_nats: float
    """Median of the lowest block before."""
    now_nats: float
    """Median of the newest block that shows it."""
    sds: float
    """The difference in standard deviations of its own noise."""


def spikes(steps: Floats, losses: Floats, policy: SpikePolicy) -> list[Spike]:
    """Every spike so far; the last one may not be over."""
    there = np.isfinite(losses)
    at, loss = steps[there], losses[there]
    above = _above(loss, policy)
    edges = np.flatnonzero(np.diff(above.astype(np.int8), prepend=0, append=0))
    found = []
    for start, end in edges.reshape(-1, 2).tolist():
        before = loss[:start][~above[:start]][-policy.window_steps :]
        found.append(
            Spike(
                first_step=int(at[start]),
                last_step=int(at[end - 1]),
                num_lines=end - start,
                level_nats=float(np.median(before)),
                peak_nats=float(loss[start:end].max()),
                lasted=end - start >= policy.patience_steps,
                over=end < len(loss),
            )
        )
    return found


def _above(losses: Floats, policy: SpikePolicy) -> NDArray[np.bool_]:
    """What the detector says of each loss. Where the window is the lines right before, of many lines at once."""
    size, at = policy.window_steps, policy.window_steps
    above = np.zeros(len(losses), dtype=bool)
    while at < len(losses):
        end = min(at + _CHUNK, len(losses))
        windows = np.lib.stride_tricks.sliding_window_view(losses, size)[at - size : end - size]
        # No median is below its window's least: few lines of a healthy run are worth a median.
        high = np.flatnonzero(losses[at:end] > windows.min(axis=1) + policy.least_nats)
        medians = np.median(windows[high], axis=1)
        sigmas = MAD_TO_SIGMA * np.median(np.abs(windows[high] - medians[:, None]), axis=1)
        above_limit = losses[at:end][high] > medians + np.maximum(policy.threshold * sigmas, policy.least_nats)
        hits = high[above_limit]
        if not len(hits):
            at = end
            continue
        at += int(hits[0])
        detector, num_fine = Detector(policy, tuple(losses[at - size : at].tolist())), 0
        while at < len(losses) and num_fine < size:
            detector.see(float(losses[at]))
            above[at] = detector.num_above > 0
            num_fine = 0 if above[at] else num_fine + 1
            at += 1
    return above


def rise(steps: Floats, losses: Floats, warmup_steps: int) -> Rise | None:
    """The first rise past the warmup, as it stands in the newest of its blocks; None if there is none.

    Blocks are a sixteenth of an octave of the step, `_LEAST_LINES` lines at least. Medians: a spike is no rise.
    """
    there = np.isfinite(losses) & (steps > warmup_steps)
    at, loss = steps[there], losses[there]
    blocks = _blocks(at)
    if len(blocks) < _NUM_RISEN + 1:
        return None
    medians = np.array([np.median(loss[a:b]) for a, b in blocks])
    noise = np.array([line_noise(loss[a:b]) * np.sqrt(np.pi / 2 / (b - a)) for a, b in blocks])
    lowest, floor, num_risen = 0, RISE_NATS, 0
    for i in range(1, len(blocks)):
        sd = float(np.hypot(noise[i], noise[lowest]))
        by = float(medians[i] - medians[lowest])
        num_risen = num_risen + 1 if by > max(floor, RISE_SDS * sd) else 0
        if num_risen >= _NUM_RISEN:
            return Rise(
                first_step=int(at[blocks[i - num_risen + 1][0]]), lowest_nats=float(medians[lowest]),
                now_nats=float(medians[i]), sds=by / sd if sd > 0 else float("inf"),
            )  # fmt: skip
        lowest = i if medians[i] < medians[lowest] else lowest
    return None


def _blocks(steps: Floats) -> list[tuple[int, int]]:
    """Whole ones, as ranges of lines."""
    found, start = [], 0
    while start < len(steps):
        end = max(int(np.searchsorted(steps, steps[start] * 2 ** (1 / _BLOCKS_PER_OCTAVE))), start + _LEAST_LINES)
        if end >= len(steps):
            break
        found.append((start, end))
        start = end
    return found


def line_noise(values: Floats) -> float:
    """Standard deviation from line to line; a trend is none."""
    return float(MAD_TO_SIGMA * np.median(np.abs(np.diff(values))) / np.sqrt(2))
