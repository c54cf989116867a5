"""Noise of a loss about its own trend, learned from the run: its size, and how long it lasts.

Noise of a loss is seldom independent from step to step. It follows x_t = phi x_(t-1) + e_t, with
the innovation e. With phi of 0.9 or 0.99 it wanders for tens or hundreds of steps, and n steps tell
as much about a mean as n (1 - phi) / (1 + phi) independent ones. Phi and the standard deviation of
e are estimated from lines before those that are judged, so that a fault never widens its own limit.

Estimates of phi from a short history are too low, because removing the trend removes some of the
noise, and phi near 1 cannot be distinguished from 1. Therefore an upper bound is used: the
estimate, plus its bias and `_NUM_STANDARD_ERRORS` standard errors. Too high a phi hides small
lasting rises, but never a jump that is large against one line's innovation; too low a phi raises
false alarms.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from forerun._launcher.main_run.frozen.run_policies import MAD_TO_SIGMA
from forerun._launcher.main_run.watch.logs.columns import Floats

MIN_LINES = 32
"""Minimum number of lines before the first estimate."""
MAX_PHI = 0.999
"""Maximum phi: a correlation time of 2,000 lines, beyond which noise and trend look the same."""
_NOISE_PHI = 0.993  # Upper bound for phi = 0.99, the largest that is promised to count as noise.
_MAX_LINES = 4096  # The standard error of phi = 0.99 is 0.002 there.
_FITS_PER_OCTAVE = 4
# Lines per median: noise that wanders slowly below the quick noise shows in medians of this many.
_COARSE_LINES = 16
_BIAS, _BIAS_PHI, _NUM_STANDARD_ERRORS = 15.0, 11.0, 2.4
"""Corrections of phi, from simulation: removing a parabola lowers phi by (3 + 11 phi) / lines. The
bias is 15 instead of 3, because the first estimates need another 12. The upper bound adds the last
number of standard errors."""
# Lines of a window, and number of lines whose variance a parabola removes from the windows' means:
# about six windows.
_WINDOW, _WINDOW_BIAS = 32, 192
_TOLERANCE = 1e-6  # Relative difference up to which numbers lie on a grid.
_MAX_SDS = 4.0  # Residuals are clipped to this: spikes are not noise.


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LossNoise:
    """Estimates of a run's noise, made after A different numbers of lines.

    An estimate uses the newest 3/4 of the lines before it, at least `MIN_LINES` and at most
    `_MAX_LINES`.
    """

    ends: NDArray[np.int64]
    """Number of lines before each estimate, ascending, [A]."""
    phi: Floats
    """Upper bound on the autocorrelation from one line to the next, [A]."""
    innovation_nats: Floats
    """Standard deviation of what a line adds to phi times the deviation of the line before, [A]."""

    def find_estimates_before(self, line: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return phi and innovation of the newest estimate made before each line; NaN if none."""
        at = np.searchsorted(self.ends, line, side="right")
        return np.append(np.nan, self.phi)[at], np.append(np.nan, self.innovation_nats)[at]


def learn_noise(steps: Floats, values: Floats, max_phi: float = MAX_PHI) -> LossNoise:
    """Estimate the noise repeatedly, from ever more of these lines.

    Args:
        steps: Steps of the lines, ascending and above 0, [S].
        values: Finite values, [S].
        max_phi: Maximum phi; deviations that last longer do not count as noise.
    """
    num_fits = max(
        0, int(np.floor(np.log2(max(len(values), 1) / MIN_LINES) * _FITS_PER_OCTAVE)) + 1
    )
    ends = np.floor(MIN_LINES * 2 ** (np.arange(num_fits) / _FITS_PER_OCTAVE)).astype(int)
    starts = ends - np.clip(ends * 3 // 4, MIN_LINES, _MAX_LINES)
    fits = [
        _fit_noise(np.log(steps[start:end]), values[start:end], max_phi)
        for start, end in zip(starts, ends, strict=True)
    ]
    phi, innovation = np.array(fits).reshape(-1, 2).T
    return LossNoise(ends=ends, phi=phi, innovation_nats=innovation)


def _fit_noise(log_steps: Floats, values: Floats, max_phi: float) -> tuple[float, float]:
    """Fit phi and the innovation of the deviations from a parabola over the log of the step."""
    num = len(values)
    unit = (log_steps - log_steps[0]) / (log_steps[-1] - log_steps[0])
    basis, _ = np.linalg.qr(np.column_stack([np.ones(num), unit, unit**2]))
    residuals = values - basis @ (basis.T @ values)
    sd = MAD_TO_SIGMA * np.median(np.abs(residuals))
    if sd > 0:
        # Spikes are not noise.
        residuals = np.clip(residuals, -_MAX_SDS * sd, _MAX_SDS * sd)
    power = float(residuals @ residuals)
    if power == 0:
        return 0.0, 0.0
    estimate = float(residuals[1:] @ residuals[:-1]) / power
    bound = (
        estimate
        + (_BIAS + _BIAS_PHI * max(estimate, 0.0)) / num
        + _NUM_STANDARD_ERRORS * np.sqrt((1 - estimate**2) / num)
    )
    phi = float(np.clip(bound, 0.0, max_phi))
    innovations = residuals[1:] - phi * residuals[:-1]
    # The fit has four parameters: three of the parabola, and phi.
    innovation = float(np.sqrt(innovations @ innovations / (num - 4)))
    # Noise that wanders slowly below the quick noise of the batch hardly shows from one line to the
    # next, but it does in means over windows.
    sums = np.append(0.0, np.cumsum(residuals))
    means = (sums[_WINDOW:] - sums[:-_WINDOW]) / _WINDOW
    window_mean_square = float(means @ means) / len(means) * (1 + _WINDOW_BIAS / num)
    return phi, innovation * max(
        1.0, float(np.sqrt(window_mean_square / compute_mean_variance(phi, innovation, _WINDOW)))
    )


def compute_mean_variance(
    phi: Floats | float, innovation: Floats | float, num_lines: Floats | float
) -> Floats:
    """Return the variance of the mean over `num_lines` lines, in nats squared."""
    total = innovation**2 / (1 - phi**2)
    # Ratio to the variance of the mean over as many independent values
    ratio = (1 + phi) / (1 - phi) - 2 * phi * (1 - phi**num_lines) / (num_lines * (1 - phi) ** 2)
    return np.asarray(total * ratio / num_lines)


def estimate_noise_from_differences(values: Floats) -> float:
    """Return the standard deviation of independent noise that changes as much from line to line.

    A trend contributes hardly anything to these changes.
    """
    changes = np.diff(values)
    limit = _MAX_SDS * MAD_TO_SIGMA * np.median(np.abs(changes))
    changes = np.clip(changes, -limit, limit) if limit > 0 else changes
    return float(np.sqrt((changes @ changes) / (2 * len(changes))))


def find_resolution(values: Floats) -> float:
    """Return the precision to which the numbers of a log were rounded.

    If the numbers lie on a grid, the precision is the step of the grid; otherwise it is the place
    of their last digit.
    """
    numbers = np.unique(values)
    steps = np.diff(numbers)
    smallest_step = float(steps.min(initial=np.inf))
    if smallest_step < _TOLERANCE or (
        len(steps)
        and np.abs(steps / smallest_step - np.round(steps / smallest_step)).max()
        < _TOLERANCE * len(steps)
    ):
        return smallest_step
    digits = [Decimal(repr(number)).as_tuple().exponent for number in numbers.tolist()]
    return float(10.0 ** min(map(int, digits), default=0))


def compute_window_variance(
    steps: Floats, losses: Floats, starts: Floats, num_lines: Floats
) -> Floats:
    """Return the variance of the mean loss over windows, from the noise before each, [W].

    The variance is 0 where no noise is known yet. Deviations that last longer than noise of
    `_NOISE_PHI` count as departures, not as noise.

    Args:
        steps: Logged steps, [S].
        losses: Training losses in nats, [S].
        starts: First step of each window, [W].
        num_lines: Lines of each window, [W].
    """
    variances = np.zeros(len(starts))
    for size in (1, _COARSE_LINES):
        num_blocks = len(losses) // size
        medians = np.median(losses[: num_blocks * size].reshape(num_blocks, size), axis=1)
        noise = learn_noise(
            steps[: num_blocks * size : size],
            medians,
            _NOISE_PHI if size == 1 else _autocorrelate_means(_NOISE_PHI, size),
        )
        phi, innovation = noise.find_estimates_before(np.searchsorted(steps, starts) // size)
        variance = compute_mean_variance(phi, innovation, np.maximum(num_lines / size, 1.0))
        variances = np.fmax(variances, variance)
    return variances


def _autocorrelate_means(phi: float, num_lines: int) -> float:
    """Return the autocorrelation of means over blocks of this many lines."""
    # Length of a block in correlation times
    length = -num_lines * np.log(phi)
    return float((1 - np.exp(-length)) ** 2 / (2 * (length - 1 + np.exp(-length))))
