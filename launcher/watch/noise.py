"""The noise of a loss about its own trend, learned from the run: how large, and for how long a
deviation lasts.

Noise of a loss is seldom independent from step to step: x_t = phi x_(t-1) + e_t with phi of 0.9 or
0.99 wanders for tens or hundreds of steps, and a mean over n steps is then worth (1 - phi) / (1 +
phi) of what n independent ones are. Phi and the scale of e are estimated from lines before the ones
that are judged, so that a fault never widens its own limit.

From a short history phi comes out too low (the trend is taken out, and some of the noise with it),
and phi near 1 looks the same as 1. So an upper bound is used: the estimate, its bias, and `_ERRORS`
standard errors. Too high a phi costs sight of small lasting rises, never of a jump that is large
against one line's innovation; too low a phi cries wolf.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from launcher.trainer.spikes import MAD_TO_SIGMA
from launcher.watch.logs.columns import Floats

LEAST_LINES = 32
"""Before the first estimate."""
MOST_PHI = 0.999
"""A correlation time of 2,000 lines; beyond it noise and trend are one."""
_NOISE_PHI = 0.993  # an upper bound of 0.99, the most that is promised
_MOST_LINES = 4096  # the standard error of phi = 0.99 is 0.002 there
_FITS_PER_OCTAVE = 4
_COARSE = 16  # lines: noise that wanders slowly below the quick noise shows in their medians
_BIAS, _BIAS_PHI, _ERRORS = 15.0, 11.0, 2.4
"""Simulated: a parabola takes (3 + 11 phi) / lines from phi; the other 12 are for the first
estimates."""
# lines; a parabola takes some six windows' share of the variance of their means
_WINDOW, _WINDOW_BIAS = 32, 192
_FINE = 1e-6
_MOST_SDS = 4.0  # a residual beyond counts as this: spikes are not the noise


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LossNoise:
    """Estimates after ever more lines, A of them; each of the newest three quarters of what lies
    before it.
    """

    ends: NDArray[np.int64]
    """[A] Lines before, ascending."""
    phi: Floats
    """[A] Upper bound on the autocorrelation from one line to the next."""
    innovation_nats: Floats
    """[A] Standard deviation of what a line adds to phi times the deviation of the line before."""

    def before(self, line: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Phi and innovation of the newest estimate from lines before this one; NaN where there is
        none.
        """
        at = np.searchsorted(self.ends, line, side="right")
        return np.append(np.nan, self.phi)[at], np.append(np.nan, self.innovation_nats)[at]


def learn(steps: Floats, values: Floats, most_phi: float = MOST_PHI) -> LossNoise:
    """The noise before ever more of these lines.

    Args:
        steps: [S] ascending, above 0.
        values: [S] finite.
        most_phi: what wanders for longer is no noise.
    """
    num_fits = max(
        0, int(np.floor(np.log2(max(len(values), 1) / LEAST_LINES) * _FITS_PER_OCTAVE)) + 1
    )
    ends = np.floor(LEAST_LINES * 2 ** (np.arange(num_fits) / _FITS_PER_OCTAVE)).astype(int)
    fits = [
        _fit(np.log(steps[start:end]), values[start:end], most_phi)
        for end in ends.tolist()
        for start in [end - min(max(LEAST_LINES, end * 3 // 4), _MOST_LINES)]
    ]
    phi, innovation = np.array(fits).reshape(-1, 2).T
    return LossNoise(ends=ends, phi=phi, innovation_nats=innovation)


def _fit(x: Floats, values: Floats, most_phi: float) -> tuple[float, float]:
    """Phi and innovation about a parabola over the log of the step."""
    num = len(values)
    unit = (x - x[0]) / (x[-1] - x[0])
    basis, _ = np.linalg.qr(np.column_stack([np.ones(num), unit, unit**2]))
    residuals = values - basis @ (basis.T @ values)
    sd = MAD_TO_SIGMA * np.median(np.abs(residuals))
    if sd > 0:
        residuals = np.clip(residuals, -_MOST_SDS * sd, _MOST_SDS * sd)
    power = float(residuals @ residuals)
    if power == 0:
        return 0.0, 0.0
    seen = float(residuals[1:] @ residuals[:-1]) / power
    bound = (
        seen + (_BIAS + _BIAS_PHI * max(seen, 0.0)) / num + _ERRORS * np.sqrt((1 - seen**2) / num)
    )
    phi = float(np.clip(bound, 0.0, most_phi))
    innovations = residuals[1:] - phi * residuals[:-1]
    innovation = float(np.sqrt(innovations @ innovations / (num - 4)))
    # Noise that wanders slowly below the quick noise of the batch hardly shows from one line to the
    # next.
    sums = np.append(0.0, np.cumsum(residuals))
    means = (sums[_WINDOW:] - sums[:-_WINDOW]) / _WINDOW
    found = float(means @ means) / len(means) * (1 + _WINDOW_BIAS / num)
    return phi, innovation * max(
        1.0, float(np.sqrt(found / mean_variance(phi, innovation, _WINDOW)))
    )


def mean_variance(
    phi: Floats | float, innovation: Floats | float, num_lines: Floats | float
) -> Floats:
    """Return the variance of the mean over so many lines, in nats squared."""
    total = innovation**2 / (1 - phi**2)
    times = (1 + phi) / (1 - phi) - 2 * phi * (1 - phi**num_lines) / (num_lines * (1 - phi) ** 2)
    return np.asarray(total * times / num_lines)


def noise_of_differences(values: Floats) -> float:
    """Standard deviation of independent noise with these differences from line to line; a trend is
    hardly any.
    """
    changes = np.diff(values)
    most = _MOST_SDS * MAD_TO_SIGMA * np.median(np.abs(changes))
    changes = np.clip(changes, -most, most) if most > 0 else changes
    return float(np.sqrt((changes @ changes) / (2 * len(changes))))


def resolution(values: Floats) -> float:
    """To what the numbers of a log were rounded: the step of the grid that they lie on, else of
    their last digit.
    """
    numbers = np.unique(values)
    steps = np.diff(numbers)
    least = float(steps.min(initial=np.inf))
    if least < _FINE or (
        len(steps) and np.abs(steps / least - np.round(steps / least)).max() < _FINE * len(steps)
    ):
        return least
    digits = [Decimal(repr(number)).as_tuple().exponent for number in numbers.tolist()]
    return float(10.0 ** min(map(int, digits), default=0))


def window_variance(steps: Floats, losses: Floats, starts: Floats, num_lines: Floats) -> Floats:
    """[W] Return the variance of the mean loss over windows of so many lines from these steps on,
    by the noise before.

    0 where none is known yet. What wanders for longer than noise of `_NOISE_PHI` is a departure and
    no noise.
    """
    found = np.zeros(len(starts))
    for size in (1, _COARSE):
        num = len(losses) // size
        medians = np.median(losses[: num * size].reshape(num, size), axis=1)
        noise = learn(
            steps[: num * size : size],
            medians,
            _NOISE_PHI if size == 1 else _mean_phi(_NOISE_PHI, size),
        )
        phi, innovation = noise.before(np.searchsorted(steps, starts) // size)
        variance = mean_variance(phi, innovation, np.maximum(num_lines / size, 1.0))
        found = np.fmax(found, variance)
    return found


def _mean_phi(phi: float, num_lines: int) -> float:
    """Autocorrelation of means over so many lines."""
    times = -num_lines * np.log(phi)
    return float((1 - np.exp(-times)) ** 2 / (2 * (times - 1 + np.exp(-times))))
