"""Losses that go up: spikes, and rises that last but are slower or smaller than a spike.

Rises: at every line of the log, the lines after it are compared with those before in two ways, each
in its own standard deviations:

- Shift: the change of level that generalized least squares finds there, in noise of the learned
  autocorrelation. In independent noise that is a difference of two means. In wandering (strongly
  autocorrelated) noise it is mostly the difference between the line and its prediction from the
  line before. Thus a jump is found in noise far larger than the jump.
- Climb: the mean after the line minus the lowest mean before it, which shows a slow climb.

Both tests are made at every scale: on lines, and on medians of 2, 4, 8, ... lines. A jump is found
within `LINES_AFTER` lines, and a climb once it is large against the noise of its scale. Each scale
learns its own noise (`forerun._launcher.main_run.watch.noise`), so that slow noise below the quick
noise of the batch is known where it matters.

Spikes: the frozen policy defines them, and the trainer's own detector finds them
(`forerun._launcher.main_run.frozen.run_policies`), so that the watch and the run agree on what a
spike is. If only every n-th step was logged, the policy counts logged steps. The policy compares a
spike with the spread of the window before it. Where noise wanders from line to line, healthy losses
leave that spread too. Therefore a spike counts as more than noise only if one of its lines is
`_SURPRISE_SDS` standard deviations above its prediction from an earlier line, given the run's
autocorrelation. The `_ORIGINS` lines before the spike are used for predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from forerun._launcher.main_run.frozen.run_policies import SpikeDetector, SpikePolicy
from forerun._launcher.main_run.watch.course import FALSE_ALARMS
from forerun._launcher.main_run.watch.logs.columns import Floats, compute_spacing
from forerun._launcher.main_run.watch.noise import (
    MIN_LINES,
    compute_mean_variance,
    find_resolution,
    learn_noise,
)

_SURPRISE_SDS, _ORIGINS = 5.0, 8
"""Number of standard deviations above a prediction that noise does not reach, and number of lines
before a spike that predict the lines of the spike. Wandering noise reached 4.5 standard deviations,
and spikes that were added to it 5.7."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spike:
    """A series of logged steps above the policy's limit."""

    first_step: int
    num_lines: int
    level_nats: float
    """Median of the window before the spike."""
    peak_nats: float
    lasted: bool
    """Whether the spike lasted for the policy's patience."""
    over: bool
    """Whether the loss came back below the limit."""
    within_noise: bool
    """Whether this run's noise wanders that far by itself, so that the spike is no sign of a fault.
    """


def find_spikes(steps: Floats, losses: Floats, policy: SpikePolicy) -> list[Spike]:
    """Return every spike so far; the last one may not be over."""
    is_finite = np.isfinite(losses)
    kept_steps, loss = steps[is_finite], losses[is_finite]
    above = _mark_above_limit(loss, policy)
    edges = np.flatnonzero(np.diff(above.astype(np.int8), prepend=0, append=0))
    fine_lines = np.flatnonzero(~above)
    noise = learn_noise(kept_steps[fine_lines], loss[fine_lines])
    spikes = []
    for start, end in edges.reshape(-1, 2).tolist():
        before = fine_lines[: np.searchsorted(fine_lines, start)]
        level = float(np.median(loss[before[-policy.window_steps :]]))
        phi, innovation = noise.find_estimates_before(np.array(len(before)))
        spikes.append(
            Spike(
                first_step=int(kept_steps[start]),
                num_lines=end - start,
                level_nats=level,
                peak_nats=float(loss[start:end].max()),
                lasted=end - start >= policy.patience_steps,
                over=end < len(loss),
                within_noise=_is_within_noise(
                    loss, before[-_ORIGINS:], np.arange(start, end), level, phi, innovation
                ),
            )
        )
    return spikes


def _is_within_noise(
    losses: Floats,
    origins: NDArray[np.int64],
    lines: NDArray[np.int64],
    level: float,
    phi: Floats,
    innovation: Floats,
) -> bool:
    """Return whether no line of a spike is more than `_SURPRISE_SDS` standard deviations above any
    of its predictions, each made from one of the `origins`.

    The result is False if the noise is unknown.
    """
    ahead = lines - origins[:, None]
    predicted = level + phi**ahead * (losses[origins][:, None] - level)
    sd = innovation * np.sqrt((1 - phi ** (2 * ahead)) / (1 - phi**2))
    return bool((losses[lines] - predicted <= _SURPRISE_SDS * sd).all())


def _mark_above_limit(losses: Floats, policy: SpikePolicy) -> NDArray[np.bool_]:
    """Return whether the trainer's detector counts each loss as above the limit."""
    detector, above = SpikeDetector(policy), np.zeros(len(losses), dtype=bool)
    for line, loss in enumerate(losses.tolist()):
        detector.add_loss(loss)
        above[line] = detector.num_above > 0
    return above


RISE_NATS, RISE_SDS = 0.02, 5.0
"""Minimum rise, in nats and in standard deviations. Runs of more than about 8,000 lines have a
larger limit (`compute_limit_sds`). `benchmarks/statistics/watch_noise.py` measures how often
healthy noise passes both."""
_NUM_TESTS = 4  # Tests per line: two at each scale, and 1 + 1/2 + 1/4 + ... scales per line.
_POWER_SDS = 1.3  # Nine of ten rises are found whose size is this much beyond the limit.
# Maximum number of lines before a place, and number of lines after it, that are compared
_LINES_BEFORE, LINES_AFTER = 64, 32
# Distances of the earlier means that a climb is measured from, in lines.
_GAPS = (0, 64, 128, 256, 512)
# A rise has lasted if each of this many parts of the lines after it shows this share of it, and the
# median of all these lines twice that share.
_PARTS, _MIN_STAYED_SHARE = 4, 0.25
_CHUNK = 4096  # Places that are checked at once, which limits the memory.


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRise:
    """A rise of the loss that lasted."""

    first_step: int
    lowest_nats: float
    """Level before the rise."""
    now_nats: float
    """Median of the lines that show the rise."""
    sds: float
    """Size of the rise, in standard deviations of its own noise."""
    seen_step: int
    """Step of the line at which the rise was found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """The smallest rises that the noise of a run allows to detect."""

    phi: float
    """Upper bound of the autocorrelation from line to line."""
    innovation_nats: float
    """Standard deviation of what a line adds to the noise."""
    jump_nats: float
    """Smallest jump that is found in time nine times of ten."""
    climb_nats: float
    """Smallest slow climb that is found in time nine times of ten."""
    num_lines: int
    """Lines within which a rise is found in time."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Scale:
    """Tests on M medians of equally many lines, made at C of them."""

    num_lines: int
    medians: Floats
    """Median losses in nats, [M]."""
    starts: Floats
    """First step of each median, [M]."""
    at: NDArray[np.int64]
    """Indices where a rise may begin, with enough medians before and after, [C]."""
    rises: Floats
    """Shift and climb in nats, [2, C]."""
    sds: Floats
    """Standard deviations of shift and climb, [2, C]."""


def measure_rise(
    steps: Floats, losses: Floats, warmup_steps: int, num_steps: int = 0
) -> LossRise | None:
    """Return the rise past the warmup that was found first; None if there is none.

    Args:
        steps: Logged steps, ascending, [S].
        losses: Training losses in nats, [S].
        warmup_steps: Steps that are left out.
        num_steps: Steps of the whole run; the steps so far count if they are more.
    """
    kept_steps, loss = _select_past_warmup(steps, losses, warmup_steps)
    min_nats = max(RISE_NATS, find_resolution(loss))
    limit = compute_limit_sds(_estimate_num_lines(kept_steps, num_steps))
    rises = [
        first
        for scale in generate_scales(kept_steps, loss)
        if (first := _find_first_rise(scale, kept_steps, min_nats, limit))
    ]
    return min(rises, key=lambda rise: rise.seen_step, default=None)


def compute_sensitivity(
    steps: Floats, losses: Floats, warmup_steps: int, num_steps: int, within_steps: float
) -> Sensitivity | None:
    """Return the rises that could be found now within this many steps; None before an estimate."""
    kept_steps, loss = _select_past_warmup(steps, losses, warmup_steps)
    if len(kept_steps) < MIN_LINES + LINES_AFTER:
        return None
    min_nats, noise = max(RISE_NATS, find_resolution(loss)), learn_noise(kept_steps, loss)
    num_lines = max(LINES_AFTER, int((kept_steps > kept_steps[-1] - within_steps).sum()))
    limit = compute_limit_sds(_estimate_num_lines(kept_steps, num_steps)) + _POWER_SDS
    detectable = [
        np.maximum(min_nats, limit * scale.sds[:, -1])
        for scale in generate_scales(kept_steps, loss)
        if scale.num_lines * LINES_AFTER <= num_lines
    ]
    jump, climb = np.min(detectable, axis=0).tolist()
    return Sensitivity(
        phi=float(noise.phi[-1]),
        innovation_nats=float(noise.innovation_nats[-1]),
        jump_nats=min(jump, climb),
        climb_nats=climb,
        num_lines=num_lines,
    )


def _estimate_num_lines(steps: Floats, num_steps: int) -> float:
    """Estimate the lines of the whole run, if logging goes on as before."""
    return max(float(len(steps)), num_steps / compute_spacing(steps)) if len(steps) > 1 else 1.0


def compute_limit_sds(num_lines: float) -> float:
    """Return the limit in standard deviations for a run of this many lines.

    Gaussian noise exceeds it in the share `FALSE_ALARMS` of runs.
    """
    return max(RISE_SDS, float(-ndtri(FALSE_ALARMS / (_NUM_TESTS * max(num_lines, 1.0)))))


def _select_past_warmup(steps: Floats, losses: Floats, warmup_steps: int) -> tuple[Floats, Floats]:
    is_used = np.isfinite(losses) & (steps > warmup_steps)
    return steps[is_used], losses[is_used]


def generate_scales(steps: Floats, losses: Floats) -> Iterator[Scale]:
    """Yield every scale for which there are enough lines.

    Args:
        steps: Logged steps, ascending, [S].
        losses: Finite losses, [S].
    """
    num_lines = 1
    while (num_medians := len(losses) // num_lines) >= MIN_LINES + LINES_AFTER:
        medians = np.median(
            losses[: num_medians * num_lines].reshape(num_medians, num_lines), axis=1
        )
        starts = steps[: num_medians * num_lines : num_lines]
        at = np.arange(MIN_LINES, num_medians - LINES_AFTER + 1)
        phi, innovation = learn_noise(starts, medians).find_estimates_before(at)
        tests = [
            _estimate_shifts(medians, at, phi, innovation),
            _estimate_climbs(medians, at, phi, innovation),
        ]
        rises, sds = np.stack(tests, axis=1)
        yield Scale(
            num_lines=num_lines, medians=medians, starts=starts, at=at, rises=rises, sds=sds
        )
        num_lines *= 2


def _find_first_rise(
    scale: Scale, steps: Floats, min_nats: float, min_sds: float
) -> LossRise | None:
    """Return the rise that this scale shows first and that has lasted."""
    hit_places, hit_tests = np.nonzero((scale.rises > np.maximum(min_nats, min_sds * scale.sds)).T)
    for start in range(0, len(hit_places), _CHUNK):
        hit, test = hit_places[start : start + _CHUNK], hit_tests[start : start + _CHUNK]
        at, nats, sds = scale.at[hit], scale.rises[test, hit], scale.sds[test, hit]
        after = scale.medians[at[:, None] + np.arange(LINES_AFTER)]
        lines_before = scale.medians[np.maximum(at[:, None] - 1 - np.arange(_LINES_BEFORE), 0)]
        # Test 0 is the shift, test 1 the climb.
        before = np.where(test == 0, np.median(lines_before, axis=1), after.mean(axis=1) - nats)
        now = np.median(after, axis=1)
        parts = np.median(after.reshape(-1, _PARTS, LINES_AFTER // _PARTS), axis=2)
        has_stayed = (parts.min(axis=1) - before > _MIN_STAYED_SHARE * nats) & (
            now - before > np.maximum(2 * _MIN_STAYED_SHARE * nats, min_nats)
        )
        if has_stayed.any():
            i = int(np.argmax(has_stayed))
            return LossRise(
                first_step=int(scale.starts[at[i]]),
                lowest_nats=float(before[i]),
                now_nats=float(now[i]),
                sds=float(nats[i] / sds[i]) if sds[i] > 0 else float("inf"),
                seen_step=int(steps[(at[i] + LINES_AFTER) * scale.num_lines - 1]),
            )
    return None


def _estimate_shifts(
    values: Floats, at: NDArray[np.int64], phi: Floats, innovation: Floats
) -> tuple[Floats, Floats]:
    """Estimate the shift of level at each place by generalized least squares.

    Returns:
        Shifts in nats and their standard deviations, both [C].
    """
    y = values - values[0]
    sums = np.append(0.0, np.cumsum(y))

    # Whitening subtracts phi times the line before, which leaves independent innovations.
    def sum_whitened(first: NDArray[np.int64], end: NDArray[np.int64]) -> Floats:
        total: Floats = sums[end] - sums[first] - phi * (sums[end - 1] - sums[first - 1])
        return total

    start, end, whitening = np.maximum(at - _LINES_BEFORE, 0), at + LINES_AFTER, 1 - phi
    first_weight = 1 - phi**2  # Information of the first line, which has no line before it.
    # Normal equations of the level before the place and the shift there
    level_level = first_weight + (end - start - 1) * whitening**2
    shift_shift = 1 + (LINES_AFTER - 1) * whitening**2
    level_shift = whitening + (LINES_AFTER - 1) * whitening**2
    level_y = first_weight * y[start] + whitening * sum_whitened(start + 1, end)
    shift_y = y[at] - phi * y[at - 1] + whitening * sum_whitened(at + 1, end)
    determinant = level_level * shift_shift - level_shift**2
    shift: Floats = (level_level * shift_y - level_shift * level_y) / determinant
    return shift, innovation * np.sqrt(level_level / determinant)


def _estimate_climbs(
    values: Floats, at: NDArray[np.int64], phi: Floats, innovation: Floats
) -> tuple[Floats, Floats]:
    """Measure how far the mean after each place is above the lowest mean before it.

    Returns:
        Climbs in nats and their standard deviations, both [C].
    """
    sums = np.append(0.0, np.cumsum(values - values[0]))
    lowest = np.full(len(at), np.inf)
    for gap in _GAPS:
        ends = at - gap
        starts = np.maximum(ends - _LINES_BEFORE, 0)
        means = (sums[np.maximum(ends, 1)] - sums[starts]) / np.maximum(ends - starts, 1)
        lowest = np.where(ends >= MIN_LINES, np.minimum(lowest, means), lowest)
    now = (sums[at + LINES_AFTER] - sums[at]) / LINES_AFTER
    variance = compute_mean_variance(phi, innovation, LINES_AFTER) + compute_mean_variance(
        phi, innovation, MIN_LINES
    )
    return now - lowest, np.sqrt(variance)
