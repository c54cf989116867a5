"""Losses that go up: spikes, and what stays up, slower or smaller than a spike.

At every line the lines after it are compared with those before, in two ways, each in standard
deviations of its own:

- the shift of level that generalized least squares finds there in noise of the learned
  autocorrelation. In independent noise that is a difference of two means; where noise wanders, most
  of it is what the line adds to the prediction from the line before it, so that a jump is seen in
  noise far larger than itself;
- the mean after it above the lowest mean before it, which a slow climb shows.

Both are asked at every scale: of lines, and of medians of 2, 4, 8, ... lines. A jump is seen within
`_AFTER` lines, and a climb once it is large against the noise of its scale. Each scale learns its
own noise (`launcher.watch.noise`), so that noise which wanders slowly below the quick noise of the
batch is known where it matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from launcher.base.policy import SpikePolicy
from launcher.trainer.spikes import MAD_TO_SIGMA, Detector
from launcher.watch.course import FALSE_ALARMS
from launcher.watch.logs.columns import Floats, spacing
from launcher.watch.noise import LEAST_LINES, learn, mean_variance, resolution

# Spikes of the training loss, as it was logged.
#
# Spikes are those of the frozen policy, found by the trainer's own detector
# (`launcher.trainer.rollback`), so that the watch and the run agree on what one is. Where only
# every n-th step was logged, the policy's steps are logged ones. The policy measures a spike by the
# spread of the window before it; where noise wanders from line to line, healthy losses leave that
# window too. So the watch also asks whether the lines before could have led there: a spike is
# beyond noise if a line is above what one of the `_ORIGINS` lines before it predicts, given the
# run's autocorrelation, by more than noise reaches.

_SURPRISE_SDS, _ORIGINS = 5.0, 8
"""A spike is so far above the predictions from the lines before it: wandering noise reached 4.5,
planted spikes 5.7."""


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
                within_noise=_within(
                    loss, before[-_ORIGINS:], np.arange(start, end), level, phi, innovation
                ),
            )
        )
    return found


def _within(
    losses: Floats,
    origins: NDArray[np.int64],
    lines: NDArray[np.int64],
    level: float,
    phi: Floats,
    innovation: Floats,
) -> bool:
    """Whether no line is above what the lines before predict of it; False where no noise is
    known.
    """
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


RISE_NATS, RISE_SDS = 0.02, 5.0
"""A rise is above both, in a log of up to 8,000 lines (`limit_sds`); `benchmarks/watch_noise.py`
says how often healthy noise is."""
_NUM_TESTS = 4  # a line: two at each of its scales, which are 1 + 1/2 + 1/4 + ...
_POWER_SDS = 1.3  # beyond the limit nine rises of ten pass it
_BEFORE, _AFTER = 64, 32
_GAPS = (0, 64, 128, 256, 512)
_PARTS = 4
# of the rise: what each of so many parts of the lines after must show, and all twice that
_STAYED = 0.25
_CHUNK = 4096

KnownNoise = Callable[[int], tuple[float, float]]
"""Phi and innovation of medians of so many lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRise:
    """The loss rose, and stayed up."""

    first_step: int
    lowest_nats: float
    """Level before."""
    now_nats: float
    """Median of the lines that show it."""
    sds: float
    """The difference in standard deviations of its own noise."""
    seen_step: int
    """The step of the line with which it was seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """What the noise of the run lets one see."""

    phi: float
    """Autocorrelation from line to line, at most."""
    innovation_nats: float
    """Standard deviation of what a line adds to it."""
    jump_nats: float
    """The smallest jump that nine times of ten is seen in time."""
    climb_nats: float
    """The smallest slow climb."""
    num_lines: int
    """In time: within so many lines."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Scale:
    """What is asked of the medians of so many lines each, M of them, at C of them."""

    num_lines: int
    medians: Floats
    """[M]"""
    starts: Floats
    """[M] First step of each."""
    at: NDArray[np.int64]
    """[C] Where a rise may begin: enough lies before and after."""
    rises: Floats
    """[2, C] In nats: the shift, and the climb."""
    sds: Floats
    """[2, C]"""


def rise(
    steps: Floats,
    losses: Floats,
    warmup_steps: int,
    num_steps: int = 0,
    known: KnownNoise | None = None,
    sds: float | None = None,
) -> LossRise | None:
    """The rise past the warmup that was seen first; None if there is none.

    Args:
        steps: [S] of the logged lines, ascending.
        losses: [S] in nats.
        warmup_steps: what lies before is not looked at.
        num_steps: of the whole run; fewer than there are: as many as there are.
        known: the noise, if it is not to be learned.
        sds: above so many standard deviations; None: `limit_sds` of the whole run.
    """
    at, loss = _past(steps, losses, warmup_steps)
    least = max(RISE_NATS, resolution(loss))
    limit = limit_sds(_whole(at, num_steps)) if sds is None else sds
    found = [
        first for scale in scales(at, loss, known) if (first := _first(scale, at, least, limit))
    ]
    return min(found, key=lambda each: each.seen_step, default=None)


def sight(
    steps: Floats, losses: Floats, warmup_steps: int, num_steps: int, within_steps: float
) -> Sensitivity | None:
    """What could be seen now within so many steps; None before there is an estimate."""
    at, loss = _past(steps, losses, warmup_steps)
    if len(at) < LEAST_LINES + _AFTER:
        return None
    least, noise = max(RISE_NATS, resolution(loss)), learn(at, loss)
    num_lines = max(_AFTER, int((at > at[-1] - within_steps).sum()))
    limit = limit_sds(_whole(at, num_steps)) + _POWER_SDS
    seen = [
        np.maximum(least, limit * scale.sds[:, -1])
        for scale in scales(at, loss)
        if scale.num_lines * _AFTER <= num_lines
    ]
    jump, climb = np.min(seen, axis=0).tolist()
    return Sensitivity(
        phi=float(noise.phi[-1]),
        innovation_nats=float(noise.innovation_nats[-1]),
        jump_nats=min(jump, climb),
        climb_nats=climb,
        num_lines=num_lines,
    )


def _whole(steps: Floats, num_steps: int) -> float:
    """Lines of the whole run, if it is logged on as it was."""
    return max(float(len(steps)), num_steps / spacing(steps)) if len(steps) > 1 else 1.0


def limit_sds(num_lines: float) -> float:
    """What a rise must exceed in a run of so many lines, so that Gaussian noise passes it in
    `FALSE_ALARMS` of runs.
    """
    return max(RISE_SDS, float(-ndtri(FALSE_ALARMS / (_NUM_TESTS * max(num_lines, 1.0)))))


def _past(steps: Floats, losses: Floats, warmup_steps: int) -> tuple[Floats, Floats]:
    there = np.isfinite(losses) & (steps > warmup_steps)
    return steps[there], losses[there]


def scales(steps: Floats, losses: Floats, known: KnownNoise | None = None) -> Iterator[Scale]:
    """Every scale that these lines are enough for; `known`: the noise, if it is not to be
    learned.
    """
    num_lines = 1
    while (num := len(losses) // num_lines) >= LEAST_LINES + _AFTER:
        medians = np.median(losses[: num * num_lines].reshape(num, num_lines), axis=1)
        starts = steps[: num * num_lines : num_lines]
        at = np.arange(LEAST_LINES, num - _AFTER + 1)
        phi, innovation = (
            learn(starts, medians).before(at)
            if known is None
            else (np.full(len(at), x) for x in known(num_lines))
        )
        found = [_shifts(medians, at, phi, innovation), _climbs(medians, at, phi, innovation)]
        rises, sds = np.stack(found, axis=1)
        yield Scale(
            num_lines=num_lines, medians=medians, starts=starts, at=at, rises=rises, sds=sds
        )
        num_lines *= 2


def _first(scale: Scale, steps: Floats, least_nats: float, least_sds: float) -> LossRise | None:
    """The rise that this scale shows first."""
    hits, tests = np.nonzero((scale.rises > np.maximum(least_nats, least_sds * scale.sds)).T)
    for start in range(0, len(hits), _CHUNK):
        hit, test = hits[start : start + _CHUNK], tests[start : start + _CHUNK]
        at, nats, sds = scale.at[hit], scale.rises[test, hit], scale.sds[test, hit]
        after = scale.medians[at[:, None] + np.arange(_AFTER)]
        past = scale.medians[np.maximum(at[:, None] - 1 - np.arange(_BEFORE), 0)]
        before = np.where(test == 0, np.median(past, axis=1), after.mean(axis=1) - nats)
        now, parts = (
            np.median(after, axis=1),
            np.median(after.reshape(-1, _PARTS, _AFTER // _PARTS), axis=2),
        )
        stayed = (parts.min(axis=1) - before > _STAYED * nats) & (
            now - before > np.maximum(2 * _STAYED * nats, least_nats)
        )
        if stayed.any():
            i = int(np.argmax(stayed))
            return LossRise(
                first_step=int(scale.starts[at[i]]),
                lowest_nats=float(before[i]),
                now_nats=float(now[i]),
                sds=float(nats[i] / sds[i]) if sds[i] > 0 else float("inf"),
                seen_step=int(steps[(at[i] + _AFTER) * scale.num_lines - 1]),
            )
    return None


def _shifts(
    values: Floats, at: NDArray[np.int64], phi: Floats, innovation: Floats
) -> tuple[Floats, Floats]:
    """[C] The shift of level at each place by generalized least squares, and its standard
    deviation.
    """
    y = values - values[0]
    sums = np.append(0.0, np.cumsum(y))

    def whitened(first: NDArray[np.int64], end: NDArray[np.int64]) -> Floats:
        total: Floats = sums[end] - sums[first] - phi * (sums[end - 1] - sums[first - 1])
        return total

    start, end, kept = np.maximum(at - _BEFORE, 0), at + _AFTER, 1 - phi
    alone = 1 - phi**2  # the information of the first line, which has none before it
    level_level = alone + (end - start - 1) * kept**2
    shift_shift = 1 + (_AFTER - 1) * kept**2
    level_shift = kept + (_AFTER - 1) * kept**2
    level_y = alone * y[start] + kept * whitened(start + 1, end)
    shift_y = y[at] - phi * y[at - 1] + kept * whitened(at + 1, end)
    determinant = level_level * shift_shift - level_shift**2
    shift: Floats = (level_level * shift_y - level_shift * level_y) / determinant
    return shift, innovation * np.sqrt(level_level / determinant)


def _climbs(
    values: Floats, at: NDArray[np.int64], phi: Floats, innovation: Floats
) -> tuple[Floats, Floats]:
    """[C] How far the mean after each place is above the lowest before it, and its standard
    deviation.
    """
    sums = np.append(0.0, np.cumsum(values - values[0]))
    lowest = np.full(len(at), np.inf)
    for gap in _GAPS:
        ends = at - gap
        starts = np.maximum(ends - _BEFORE, 0)
        means = (sums[np.maximum(ends, 1)] - sums[starts]) / np.maximum(ends - starts, 1)
        lowest = np.where(ends >= LEAST_LINES, np.minimum(lowest, means), lowest)
    now = (sums[at + _AFTER] - sums[at]) / _AFTER
    variance = mean_variance(phi, innovation, _AFTER) + mean_variance(phi, innovation, LEAST_LINES)
    return now - lowest, np.sqrt(variance)
