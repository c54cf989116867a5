"""Comparison of a run with its frozen band over its whole course, and a new prediction of its end.

The band is the forecast's interval for the training loss at each point of the run, frozen with the
config. A look is the mean training loss near one planned step, compared with the band there. The
band's level holds for one look alone: over all its looks, a healthy run leaves the band far more
often. The departure at a point f of the curve, in standard deviations of the band, is

    z_f = log(mean loss near f / expected) / s_f,        s_f^2 = s_end^2 + e_f^2,

where s_end is the error of the predicted end, one number for the whole run, and e_f is the error of
the curve itself. The latter's correlation between two looks is exp(-octaves / memory)
(`forerun._scaling_fits.forecast.loss_curves.estimate_memory`), or 0 if the memory is unknown, which
gives the larger bound. The mean over the window of a look has noise of its own, which is larger if
deviations of this run's loss last longer (`forerun._launcher.main_run.watch.noise`). This noise is
added to s_f, and counts as independent between looks. The bound on the largest |z_f| over all
planned looks is simulated from draws of these errors. A healthy run exceeds the bound with
probability `FALSE_ALARMS` over the whole run, however often somebody looks. The errors of end and
curve were estimated from few runs, so they follow Student's distribution with `FREEDOM` degrees of
freedom, with one scale for the whole run.

The end is predicted anew from the newest look. The share s_end^2 / s_f^2 of a departure belongs to
the end, and its remaining error is s_end sqrt(1 - s_end^2 / s_f^2).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from forerun._launcher.main_run.frozen.frozen import PredictedLoss
from forerun._launcher.main_run.watch.logs.columns import Floats, compute_spacing
from forerun._launcher.main_run.watch.noise import compute_window_variance
from forerun._scaling_fits.forecast.loss_curves import WINDOW

FALSE_ALARMS = 0.01
"""Probability that a healthy run raises an alarm at some point of its course."""
MIN_NATS = 1e-6
"""Minimum loss before a logarithm is taken. A smaller loss (zero where every label is masked)
counts as this one, and is a departure."""
FREEDOM = 6
"""Degrees of freedom: 9 to 12 rungs of a ladder minus the coefficients of a line or a law."""
_LOOKS_PER_OCTAVE = 8
# Noise below this share of the band's standard deviation counts as 0: it would widen the band by
# about 3 %.
_MIN_NOISE_SHARE = 0.25
_MAX_LOG = 700.0  # Largest logarithm whose exponential is a finite float.
# Simulation of the bound; another number or seed moves every bound a little.
_NUM_DRAWS, _SEED = 40_000, 0


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class BandComparison:
    """The L looks at a run so far."""

    looked_at: Floats
    """Step at the center of each look, [L]."""
    seen_at: Floats
    """First step at which each look is complete, [L]: the share `WINDOW` after its center, but at
    most the run's last step."""
    loss_nats: Floats
    """Mean training loss over the steps within the share `WINDOW` of the center, [L]."""
    expected_nats: Floats
    """Expected loss at the center, [L]."""
    departure: Floats
    """Departure from the expected loss, in standard deviations of the band, [L]."""
    bound: float
    """Limit of the absolute `departure` over the whole run."""
    final: tuple[float, float, float]
    """Final loss predicted from the newest look, in nats: center, low and high at the band's
    level."""

    @property
    def departed(self) -> int | None:
        """Index of the first look beyond the bound; None if there is none."""
        beyond = np.flatnonzero(np.abs(self.departure) > self.bound)
        return int(beyond[0]) if len(beyond) else None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Band:
    """The frozen band at each of the F planned looks."""

    centers: Floats
    """Step at the center of each look, [F]."""
    expected_nats: Floats
    """Expected loss at the center, [F]."""
    low_sd: Floats
    """Standard deviation of the log loss below the expected loss, [F]."""
    high_sd: Floats
    """Standard deviation of the log loss above the expected loss, [F]."""


def compare_with_band(
    predicted: PredictedLoss, num_steps: int, steps: Floats, losses: Floats, warmup_steps: int = 0
) -> BandComparison | None:
    """Compare a run with its frozen band at every look so far.

    Args:
        predicted: The frozen forecast.
        num_steps: Steps of the whole run.
        steps: Logged steps, ascending, [S].
        losses: Training losses in nats, [S]; NaN where there is none.
        warmup_steps: Steps whose losses are not used to learn the noise.

    Returns:
        The looks so far; None if the frozen config has no curve, or no look is complete.
    """
    if not predicted.curve or not len(steps):
        return None
    band = _interpolate_band(predicted, num_steps)
    last_steps = _compute_last_steps(band, num_steps)
    means = np.full(len(band.centers), np.nan)
    finite = np.isfinite(losses)
    for i, (center, end) in enumerate(zip(band.centers, last_steps, strict=True)):
        near = finite & (np.abs(steps - center) <= WINDOW * center)
        if steps[-1] >= np.floor(end) and near.any():
            means[i] = losses[near].mean()
    is_complete = np.isfinite(means)
    if not is_complete.any():
        return None
    noise = _estimate_noise(band, steps, losses, finite & (steps > warmup_steps))
    log_ratios = np.log(np.maximum(means[is_complete], MIN_NATS) / band.expected_nats[is_complete])
    sd = np.hypot(
        np.where(log_ratios < 0, band.low_sd[is_complete], band.high_sd[is_complete]),
        noise[is_complete],
    )
    return BandComparison(
        looked_at=band.centers[is_complete],
        seen_at=np.floor(last_steps[is_complete]),
        loss_nats=means[is_complete],
        expected_nats=band.expected_nats[is_complete],
        departure=log_ratios / sd,
        bound=_compute_bound(
            predicted, tuple(band.centers), tuple((band.low_sd + band.high_sd) / 2), tuple(noise)
        ),
        final=_predict_end(predicted, float(log_ratios[-1]), float(sd[-1])),
    )


def find_first_look(predicted: PredictedLoss, num_steps: int) -> int:
    """Return the first step at which a run can be compared with the band of a predicted curve."""
    return int(_compute_last_steps(_interpolate_band(predicted, num_steps), num_steps)[0])


def _compute_last_steps(band: _Band, num_steps: int) -> Floats:
    """Return the last step of each planned look, [F]."""
    return np.minimum(band.centers * (1 + WINDOW), num_steps)


def _estimate_noise(
    band: _Band, steps: Floats, losses: Floats, is_usable: NDArray[np.bool_]
) -> Floats:
    """Estimate the standard deviation of the log of each planned look's mean, from loss noise, [F].

    The log of each value is rounded up to a tenth, and values below `_MIN_NOISE_SHARE` of the
    band's are 0. Thus the values seldom change, and the bound is seldom simulated again.
    """
    starts, ends = band.centers * (1 - WINDOW), band.centers * (1 + WINDOW)
    line_spacing = compute_spacing(steps)
    num_lines = np.maximum(np.minimum(ends, band.centers[-1]) - starts, line_spacing) / line_spacing
    sd = (
        np.sqrt(compute_window_variance(steps[is_usable], losses[is_usable], starts, num_lines))
        / band.expected_nats
    )
    rounded = np.exp(np.ceil(np.log(np.maximum(sd, MIN_NATS)) * 10) / 10)
    return np.where(sd < _MIN_NOISE_SHARE * band.high_sd, 0.0, rounded)


def _compute_half_width_sds(level: float) -> float:
    """Return the half width of an interval of this level, in standard deviations."""
    return float(stdtrit(FREEDOM, (1 + level) / 2))


def _interpolate_band(predicted: PredictedLoss, num_steps: int) -> _Band:
    """Interpolate the frozen curve to the planned looks, linearly over the log of the step."""
    # Points of a short run may fall on the same step.
    points = {point.step: point for point in predicted.curve if point.step > 0}
    octaves_of_points = np.log2(list(points))
    num_looks = (
        int(np.floor((octaves_of_points[-1] - octaves_of_points[0]) * _LOOKS_PER_OCTAVE)) + 1
    )
    octaves = octaves_of_points[-1] - np.arange(num_looks)[::-1] / _LOOKS_PER_OCTAVE
    loss, low, high = (
        np.array([np.log(getattr(point, name)) for point in points.values()])
        for name in ("loss_nats", "low_nats", "high_nats")
    )
    width = _compute_half_width_sds(predicted.level)
    return _Band(
        centers=np.minimum(2**octaves, num_steps),
        expected_nats=np.exp(np.interp(octaves, octaves_of_points, loss)),
        low_sd=np.interp(octaves, octaves_of_points, loss - low) / width,
        high_sd=np.interp(octaves, octaves_of_points, high - loss) / width,
    )


def compute_end_sd(predicted: PredictedLoss) -> tuple[float, float]:
    """Return the standard deviations of the log of the predicted end, below and above it."""
    width = _compute_half_width_sds(predicted.level)
    below = predicted.loss_nats / predicted.low_nats
    above = predicted.high_nats / predicted.loss_nats
    return float(np.log(below)) / width, float(np.log(above)) / width


@functools.lru_cache(maxsize=16)
def _compute_bound(
    predicted: PredictedLoss,
    centers: tuple[float, ...],
    sds: tuple[float, ...],
    noise: tuple[float, ...],
) -> float:
    """Return the bound that a healthy run's largest departure passes with probability
    `FALSE_ALARMS`.
    """
    departures, noise_draws = _draw_departures(predicted, centers, sds)
    if any(noise):
        total = np.hypot(sds, noise)
        departures = departures * (sds / total).astype(np.float32) + noise_draws * (
            noise / total
        ).astype(np.float32)
    return float(np.quantile(np.abs(departures).max(axis=1), 1 - FALSE_ALARMS))


@functools.lru_cache(maxsize=1)
def _draw_departures(
    predicted: PredictedLoss, centers: tuple[float, ...], sds: tuple[float, ...]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Draw the departures of healthy runs without noise, and the noise, in standard deviations.

    Both have shape [draws, F].
    """
    end_error_sd = np.mean(compute_end_sd(predicted))
    end_share = np.minimum(end_error_sd / np.array(sds), 1.0)
    octaves = np.log2(centers)
    distances = np.abs(octaves[:, None] - octaves)
    memory = predicted.memory_octaves
    correlation = np.eye(len(centers)) if memory is None else np.exp(-distances / memory)
    curve_share = np.sqrt(1 - end_share**2)
    rng = np.random.default_rng(_SEED)
    # Looks are nearly equal, so rounding may make the smallest eigenvalues negative.
    values, vectors = np.linalg.eigh(correlation)
    root = vectors * np.sqrt(np.maximum(values, 0))
    curves = rng.standard_normal((_NUM_DRAWS, len(centers))) @ root.T
    departures = end_share * rng.standard_normal((_NUM_DRAWS, 1)) + curve_share * curves
    departures *= np.sqrt(FREEDOM / rng.chisquare(FREEDOM, _NUM_DRAWS))[:, None]
    return departures.astype(np.float32), rng.standard_normal(departures.shape, dtype=np.float32)


def _predict_end(
    predicted: PredictedLoss, departure: float, sd: float
) -> tuple[float, float, float]:
    """Predict the end of the run from one look.

    Args:
        predicted: The frozen forecast.
        departure: Departure of the log loss at the look.
        sd: Standard deviation of the band, with noise, at the look.

    Returns:
        Final loss in nats: center, low and high.
    """
    low_sd, high_sd = compute_end_sd(predicted)
    end_error_sd = low_sd if departure < 0 else high_sd
    share = min(1.0, end_error_sd / sd) ** 2 if sd > 0 else 1.0
    center = np.log(predicted.loss_nats) + share * departure
    offsets = (
        _compute_half_width_sds(predicted.level) * np.sqrt(1 - share) * np.array([-low_sd, high_sd])
    )
    loss, low, high = (float(np.exp(min(center + offset, _MAX_LOG))) for offset in (0.0, *offsets))
    return loss, low, high
