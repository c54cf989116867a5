"""A run compared with its frozen band over its whole course, and its end predicted anew from where
it is.

The band of a point f of the curve holds for one new run at that point. Held at every point, a
healthy run leaves it somewhere far more often. The departure there, in standard deviations of the
band, is

    z_f = log(mean loss near f / expected) / s_f,        s_f^2 = s_end^2 + e_f^2,

with s_end of the error of the predicted end, which is one number for the whole run, and e_f of the
curve's own, which is forgotten as exp(-octaves / memory)
(`scaling_fits.forecast.loss_curves.memory_octaves`; unknown: at once, which asks for more). The
mean over a look's window has noise of its own, the wider the longer deviations of this run's loss
last (`launcher.watch.noise`): n_f is added to s_f, and taken as new at every look. The bound on the
largest |z_f| of a healthy run at every look that there will be is drawn from that law, so that a
healthy run passes it with probability `FALSE_ALARMS` over the whole run, however often one looks.
Both errors were estimated from few runs: they are Student's with `FREEDOM` degrees of freedom, one
scale for the whole run.

The end is predicted anew from the newest look. Of a departure there the share s_end^2 / s_f^2 is
the end's, and what is left of its error is s_end sqrt(1 - s_end^2 / s_f^2).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from launcher.frozen.frozen import PredictedLoss
from launcher.watch.logs.columns import Floats, spacing
from launcher.watch.noise import window_variance
from scaling_fits.forecast.loss_curves import WINDOW

FALSE_ALARMS = 0.01
LEAST_NATS = 1e-6
"""A loss below is none (zero where every label is masked): held as this, it is a departure, and has
a log."""
FREEDOM = 6  # a ladder's 9 to 12 rungs less the coefficients of a line or a law
_LOOKS_PER_OCTAVE = 8
_LEAST_NOISE = 0.25  # of the band's: less widens it by less than 3 %
_MOST_LOG = 700.0  # of a number
_NUM_DRAWS, _SEED = 40_000, 0


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Course:
    """Looks at a run, L of them so far."""

    looked_at: Floats
    """[L] Step at the centre of each look."""
    seen_at: Floats
    """[L] First step by which the look is complete: 15 % later, or the run's end."""
    loss_nats: Floats
    """[L] Mean training loss over the steps within 15 % of the centre."""
    expected_nats: Floats
    departure: Floats
    """[L] In standard deviations of the band."""
    bound: float
    """On the size of `departure`, over the whole run."""
    final: tuple[float, float, float]
    """The end predicted from the newest look, in nats: centre, low and high at the band's level."""

    @property
    def departed(self) -> int | None:
        """Number of the first look beyond the bound."""
        beyond = np.flatnonzero(np.abs(self.departure) > self.bound)
        return int(beyond[0]) if len(beyond) else None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Band:
    """At each planned look."""

    centres: Floats
    expected_nats: Floats
    low_sd: Floats
    """Standard deviation of the log of the loss, below the expected one; then above it."""
    high_sd: Floats


def course(
    predicted: PredictedLoss, num_steps: int, steps: Floats, losses: Floats, warmup_steps: int = 0
) -> Course | None:
    """The looks there have been; noise is learned from what lies past the warmup.

    None where the frozen config has no curve, or before the first look is complete.
    """
    if not predicted.curve or not len(steps):
        return None
    band = _band(predicted, num_steps)
    until = _last_steps(band, num_steps)
    means = np.full(len(band.centres), np.nan)
    finite = np.isfinite(losses)
    for i, (centre, end) in enumerate(zip(band.centres, until, strict=True)):
        near = finite & (np.abs(steps - centre) <= WINDOW * centre)
        if steps[-1] >= np.floor(end) and near.any():
            means[i] = losses[near].mean()
    there = np.isfinite(means)
    if not there.any():
        return None
    noise = _noise(band, steps, losses, finite & (steps > warmup_steps))
    logs = np.log(np.maximum(means[there], LEAST_NATS) / band.expected_nats[there])
    sd = np.hypot(np.where(logs < 0, band.low_sd[there], band.high_sd[there]), noise[there])
    return Course(
        looked_at=band.centres[there],
        seen_at=np.floor(until[there]),
        loss_nats=means[there],
        expected_nats=band.expected_nats[there],
        departure=logs / sd,
        bound=_bound(
            predicted, tuple(band.centres), tuple((band.low_sd + band.high_sd) / 2), tuple(noise)
        ),
        final=_new_end(predicted, float(logs[-1]), float(sd[-1])),
    )


def first_look(predicted: PredictedLoss, num_steps: int) -> int:
    """Return the first step at which a run can be compared with the band of a predicted curve."""
    return int(_last_steps(_band(predicted, num_steps), num_steps)[0])


def _last_steps(band: _Band, num_steps: int) -> Floats:
    """Return the last step of each look, [L]."""
    return np.minimum(band.centres * (1 + WINDOW), num_steps)


def _noise(band: _Band, steps: Floats, losses: Floats, past: NDArray[np.bool_]) -> Floats:
    """[F] Standard deviation of the log of the mean near each planned look by the noise of the loss
    alone.

    In steps of a tenth of itself, and none below a quarter of the band's: so the bound is seldom
    drawn anew.
    """
    starts, ends = band.centres * (1 - WINDOW), band.centres * (1 + WINDOW)
    apart = spacing(steps)
    num_lines = np.maximum(np.minimum(ends, band.centres[-1]) - starts, apart) / apart
    sd = np.sqrt(window_variance(steps[past], losses[past], starts, num_lines)) / band.expected_nats
    coarse = np.exp(np.ceil(np.log(np.maximum(sd, LEAST_NATS)) * 10) / 10)
    return np.where(sd < _LEAST_NOISE * band.high_sd, 0.0, coarse)


def _quantile(level: float) -> float:
    """How many standard deviations wide an arm of the band of this level is."""
    return float(stdtrit(FREEDOM, (1 + level) / 2))


def _band(predicted: PredictedLoss, num_steps: int) -> _Band:
    """The frozen points, carried to the planned looks along the log of the step."""
    # of a short run several fall together
    points = {point.step: point for point in predicted.curve if point.step > 0}
    at = np.log2(list(points))
    num_looks = int(np.floor((at[-1] - at[0]) * _LOOKS_PER_OCTAVE)) + 1
    octaves = at[-1] - np.arange(num_looks)[::-1] / _LOOKS_PER_OCTAVE
    loss, low, high = (
        np.array([np.log(getattr(point, name)) for point in points.values()])
        for name in ("loss_nats", "low_nats", "high_nats")
    )
    width = _quantile(predicted.level)
    return _Band(
        centres=np.minimum(2**octaves, num_steps),
        expected_nats=np.exp(np.interp(octaves, at, loss)),
        low_sd=np.interp(octaves, at, loss - low) / width,
        high_sd=np.interp(octaves, at, high - loss) / width,
    )


def end_sd(predicted: PredictedLoss) -> tuple[float, float]:
    """Standard deviation of the log of the predicted end, below and above it."""
    width = _quantile(predicted.level)
    below, above = (
        predicted.loss_nats / predicted.low_nats,
        predicted.high_nats / predicted.loss_nats,
    )
    return float(np.log(below)) / width, float(np.log(above)) / width


@functools.lru_cache(maxsize=16)
def _bound(
    predicted: PredictedLoss,
    centres: tuple[float, ...],
    sds: tuple[float, ...],
    noise: tuple[float, ...],
) -> float:
    """What the largest departure of a healthy run passes with probability `FALSE_ALARMS`."""
    drawn, fresh = _drawn(predicted, centres, sds)
    if any(noise):
        total = np.hypot(sds, noise)
        drawn = drawn * (sds / total).astype(np.float32) + fresh * (noise / total).astype(
            np.float32
        )
    return float(np.quantile(np.abs(drawn).max(axis=1), 1 - FALSE_ALARMS))


@functools.lru_cache(maxsize=1)
def _drawn(
    predicted: PredictedLoss, centres: tuple[float, ...], sds: tuple[float, ...]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Departures of healthy runs without noise, and noise, both in standard deviations."""
    end = np.mean(end_sd(predicted))
    shared = np.minimum(end / np.array(sds), 1.0)
    octaves = np.log2(centres)
    apart = np.abs(octaves[:, None] - octaves)
    memory = predicted.memory_octaves
    alike = np.eye(len(centres)) if memory is None else np.exp(-apart / memory)
    own = np.sqrt(1 - shared**2)
    rng = np.random.default_rng(_SEED)
    # Nearly equal looks: the smallest of eigenvalues may come out below zero by rounding.
    values, vectors = np.linalg.eigh(alike)
    root = vectors * np.sqrt(np.maximum(values, 0))
    curves = rng.standard_normal((_NUM_DRAWS, len(centres))) @ root.T
    drawn = shared * rng.standard_normal((_NUM_DRAWS, 1)) + own * curves
    drawn *= np.sqrt(FREEDOM / rng.chisquare(FREEDOM, _NUM_DRAWS))[:, None]
    return drawn.astype(np.float32), rng.standard_normal(drawn.shape, dtype=np.float32)


def _new_end(predicted: PredictedLoss, departure: float, sd: float) -> tuple[float, float, float]:
    """The end given a departure (of the log) at a look where the band's standard deviation is
    `sd`.
    """
    low_sd, high_sd = end_sd(predicted)
    mine = low_sd if departure < 0 else high_sd
    share = min(1.0, mine / sd) ** 2 if sd > 0 else 1.0
    centre = np.log(predicted.loss_nats) + share * departure
    arms = _quantile(predicted.level) * np.sqrt(1 - share) * np.array([-low_sd, high_sd])
    loss, low, high = (float(np.exp(min(centre + by, _MOST_LOG))) for by in (0.0, *arms))
    return loss, low, high
