"""The forecast of the training-loss curve up to its predicted end: the band that a main run is
compared with.

One law is fitted to the training curves of all of the ladder's runs at once,

    L(t) = (E + A N^-alpha + B N^-gamma S(t)^-beta) (1 + K r(t)^p),

with N the parameters, r(t) the learning rate after t steps as a share of its peak, and S(t) the
tokens so far, each weighted by the r that it was trained at. It is the law of learning-rate
annealing (arXiv 2408.11029) with the size added; the noise that the present rate leaves, a share of
the loss, stands in place of its annealing term. No factor rises where the rate does not rise, so
the curve falls; a mean over few batches of one rung, which may lie anywhere, moves it little.
Training loss may differ from validation loss by a constant factor, which is fitted too. The law
gives the shape of the curve: its end is the predicted final loss.

The band has three parts, added in squares:

- Scatter: how far the means of the ladder's runs lie from the law, relative to their own ends.
- Drift: the law is fitted again without the longest runs, and predicts them. Its misses grow with
  the extrapolation as a power of its logarithm does (`_reach`).
- The interval of the final loss.

Scatter and drift are pooled over shares of the run that lie within a factor of two of each other.
Training loss at a share is the mean over the steps within 15 % of it.

A run that is above its curve at a share f is likely above it at 2f too. The departures of the
ladder's runs at shares f and g are correlated as exp(-|log2(f / g)| / m); m is the memory of
departures, in octaves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from proxies.core.schedule import Schedule, lr_multiplier
from proxies.core.spec import Curve
from scaling_fits.laws.law import NEXT_RUNG
from scaling_fits.laws.solver import Floats

SHARES = (0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
MIN_RUNS = 6
"""Fewest runs below the longest, or near a share, from which a band or a memory is measured."""
WINDOW = 0.15
"""Half the window of a mean, as a share of the step at its center."""
_NUM_COEFFICIENTS = 3  # of one share over the runs: its height, and how length and size change it
_SAME_LENGTH = 1.25
_POOLED_RATIO = 2.0
# octaves: from none to beyond the curve's 4.3
_MEMORIES = np.round(np.geomspace(0.1, 20.0, 200), 2)
_MIN_SQUARES = 1e-18  # a smaller sum of squares is rounding
_NUM_IN_WINDOW = 5  # points of the law whose mean stands for a window's
_NUM_GRID_STEPS = 4096  # a longer schedule is summed over so many of its steps
_SCATTER_LINES = 100.0  # the mean of so many lines has as much batch noise as the law has error
_PRIOR_WEIGHT = 0.003  # keeps coefficients near their start where the runs do not determine them

_REACH_POWER = 0.75
"""Power by which departures of curves grow with the log of the extrapolation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """A run that decayed to its end, under the main run's recipe."""

    params: float
    tokens: float
    schedule: Schedule
    final_loss_nats: float
    curve: Curve


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedLoss:
    """Training loss of one new run after a share of its steps: the mean over the steps near it."""

    share: float
    loss_nats: float
    low_nats: float
    high_nats: float


def expected_curve(
    runs: Sequence[FinishedRun],
    params: float,
    tokens: float,
    schedule: Schedule,
    final_nats: tuple[float, float, float],
    level: float,
) -> tuple[ExpectedLoss, ...]:
    """Predict the main run's training loss at `SHARES` of its steps.

    Args:
        runs: The ladder's runs.
        params: Parameters of the main run.
        tokens: Tokens of the main run.
        schedule: Schedule of the main run.
        final_nats: Predicted final loss of the main run in nats: center, low, and high.
        level: Level of the band and of the final loss's interval.

    Returns:
        The points, by share. A share within the main run's warmup has none, nor has one that no run
        has logged near. Empty where nothing says how curves scatter or drift: fewer than `MIN_RUNS`
        runs are shorter than the longest.
    """
    shorter, longest = _split_by_length(runs)
    if len(shorter) < MIN_RUNS:
        return ()
    target = _Target(params=params, area=_compute_rate_area(schedule, tokens))
    looks = _compute_inputs(params, tokens, schedule, target)
    law = _fit_law(runs, target)
    departures_RS = law.departures(runs)
    scatter_S = _pool_departures(departures_RS) * np.sqrt(
        len(runs) / (len(runs) - _NUM_COEFFICIENTS)
    )
    ratio = min(run.tokens for run in longest) / max(run.tokens for run in shorter)
    drift_S = _pool_departures(_fit_law(shorter, target).departures(longest)) / _compute_reach(
        ratio
    )
    extrapolation = max(
        tokens / max(run.tokens for run in runs), params / max(run.params for run in runs)
    )
    # Student's t, since both are measured on few runs.
    student = float(stdtrit(len(runs) - _NUM_COEFFICIENTS, (1 + level) / 2))
    own_S = student * np.hypot(scatter_S, drift_S * _compute_reach(extrapolation))
    is_known_S = looks.is_past_warmup & np.isfinite(departures_RS).any(axis=0) & np.isfinite(own_S)
    ends = np.log(np.array(final_nats[1:]) / final_nats[0])
    points = []
    for share, height, own, is_known in zip(
        SHARES, law.heights(looks), own_S, is_known_S, strict=True
    ):
        if is_known:
            arms = np.hypot(own, ends)
            loss, low, high = (
                float(final_nats[0] * np.exp(height + by)) for by in (0.0, -arms[0], arms[1])
            )
            points.append(ExpectedLoss(share=share, loss_nats=loss, low_nats=low, high_nats=high))
    return tuple(points)


def memory_octaves(runs: Sequence[FinishedRun]) -> float | None:
    """Estimate over how many doublings of the step a departure from the curve falls to 1/e.

    Returns:
        The memory; None where fewer than two shares were logged by `MIN_RUNS` runs each.
    """
    if len(runs) < MIN_RUNS:
        return None
    target = _Target(
        params=runs[0].params, area=_compute_rate_area(runs[0].schedule, runs[0].tokens)
    )
    departures_RS = _fit_law(runs, target).departures(runs)
    is_common_S = np.isfinite(departures_RS).sum(axis=0) >= MIN_RUNS
    departures_RS, octaves = departures_RS[:, is_common_S], np.log2(np.array(SHARES)[is_common_S])
    is_there_RS, known_RS = np.isfinite(departures_RS), np.nan_to_num(departures_RS)
    squares_SS = (known_RS**2).T @ is_there_RS  # over the runs that have both shares
    if len(octaves) < 2 or (np.diag(squares_SS) < _MIN_SQUARES).any():
        return None
    alike_SS = (
        known_RS.T @ known_RS / np.sqrt(np.maximum(squares_SS * squares_SS.T, _MIN_SQUARES**2))
    )
    apart_SS = np.abs(octaves[:, None] - octaves)
    missed = [float(((alike_SS - np.exp(-apart_SS / memory)) ** 2).sum()) for memory in _MEMORIES]
    return float(_MEMORIES[int(np.argmin(missed))])


# ---- The law ----


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """The run that sizes and lengths are relative to."""

    params: float
    area: float
    """Tokens, each weighted by its learning rate over the peak."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _LawInputs:
    """The inputs of the law at `SHARES` of a run and at its end, at K points of each window."""

    log_size: float
    """Log of the parameters over the target's."""
    log_area: Floats
    """[S + 1, K] Log of the rate-weighted tokens over the target's."""
    rate: Floats
    """[S + 1, K] Learning rate over its peak."""
    is_past_warmup: NDArray[np.bool_]
    """[S] Whether the window lies behind the warmup."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Law:
    """The law with its coefficients."""

    theta: Floats
    target: _Target

    def heights(self, looks: _LawInputs) -> Floats:
        """[S] Log of the mean training loss over the final validation loss."""
        logs = _compute_log_loss(self.theta, looks.log_size, looks.log_area, looks.rate)
        heights: Floats = logs[:-1] - logs[-1] + self.theta[-1]
        return heights

    def departures(self, runs: Sequence[FinishedRun]) -> Floats:
        """[R, S] Log of the mean training loss over the law's, both relative to the run's end; NaN:
        not logged.
        """
        rows = []
        for run in runs:
            looks = _compute_inputs(run.params, run.tokens, run.schedule, self.target)
            log_means, _ = _compute_window_means(run)
            departures = log_means - np.log(run.final_loss_nats) - self.heights(looks)
            rows.append(np.where(looks.is_past_warmup, departures, np.nan))
        return np.array(rows).reshape(-1, len(SHARES))


# Coefficients in this order: log E, log A, alpha, log B, beta, gamma, log K, p, log of training
# over validation loss.
_START = np.array([0.0, -1.5, 0.3, -1.5, 0.4, 0.0, -2.0, 1.0, 0.0])
_LOW = np.array([-8.0, -12.0, 0.05, -12.0, 0.05, -0.5, -8.0, 0.3, -1.0])
_HIGH = np.array([4.0, 4.0, 1.5, 4.0, 1.5, 0.5, 2.0, 3.0, 1.0])


def _compute_log_loss(
    theta_P: Floats, log_size: Floats | float, log_area: Floats, rate: Floats
) -> Floats:
    """Return the log of the law's loss, its mean taken over the last axis."""
    log_e, log_a, alpha, log_b, beta, gamma, log_k, power, _ = theta_P
    capacity = np.exp(log_a - alpha * log_size)
    learning = np.exp(log_b - gamma * log_size - beta * log_area)
    noise = 1 + np.exp(log_k) * rate**power
    logs: Floats = np.log(((np.exp(log_e) + capacity + learning) * noise).mean(axis=-1))
    return logs


def _fit_law(runs: Sequence[FinishedRun], target: _Target) -> _Law:
    """Fit the law to the logs of the windows' means and of the final losses, by least squares."""
    from scipy.optimize import least_squares  # here: its import takes 0.3 s

    sizes, areas, rates, logs, weights, is_training = [], [], [], [], [], []
    for run in runs:
        looks = _compute_inputs(run.params, run.tokens, run.schedule, target)
        log_means, num_lines = _compute_window_means(run)
        is_known = np.append(looks.is_past_warmup & np.isfinite(log_means), True)
        sizes.append(np.full(np.count_nonzero(is_known), looks.log_size))
        areas.append(looks.log_area[is_known])
        rates.append(looks.rate[is_known])
        logs.append(np.append(log_means, np.log(run.final_loss_nats))[is_known])
        weights.append(1 / np.sqrt(1 + _SCATTER_LINES / np.append(num_lines, np.inf)[is_known]))
        is_training.append((np.arange(len(SHARES) + 1) < len(SHARES))[is_known])
    size, area, rate = np.concatenate(sizes)[:, None], np.concatenate(areas), np.concatenate(rates)
    log, weight, training = (
        np.concatenate(logs),
        np.concatenate(weights),
        np.concatenate(is_training),
    )
    start = _START.copy()
    start[0] = np.clip(np.log(0.6) + log.min(), _LOW[0], _HIGH[0])

    def residuals(theta_P: Floats) -> Floats:
        missed = _compute_log_loss(theta_P, size, area, rate) + training * theta_P[-1] - log
        return np.concatenate([weight * missed, _PRIOR_WEIGHT * (theta_P - start)])

    return _Law(theta=least_squares(residuals, start, bounds=(_LOW, _HIGH)).x, target=target)


# ---- Runs ----


def _compute_inputs(
    params: float, tokens: float, schedule: Schedule, target: _Target
) -> _LawInputs:
    num_steps, shares = schedule.num_steps, np.array(SHARES)
    low, high = (np.clip(shares * (1 + by) * num_steps, 1, num_steps) for by in (-WINDOW, WINDOW))
    steps_SK = low[:, None] + (high - low)[:, None] * np.linspace(0, 1, _NUM_IN_WINDOW)
    steps_SK = np.vstack([steps_SK, np.full(_NUM_IN_WINDOW, float(num_steps))])
    steps, rates, areas = _compute_grid(schedule)
    return _LawInputs(
        log_size=float(np.log(params / target.params)),
        log_area=np.log(np.interp(steps_SK, steps, areas) * tokens / num_steps / target.area),
        rate=np.interp(steps_SK, steps, rates),
        is_past_warmup=shares * (1 - WINDOW) * num_steps >= schedule.warmup_steps,
    )


def _compute_rate_area(schedule: Schedule, tokens: float) -> float:
    """Return the run's tokens, each weighted by its learning rate over the peak."""
    return float(_compute_grid(schedule)[2][-1]) * tokens / schedule.num_steps


@functools.lru_cache(maxsize=64)
def _compute_grid(schedule: Schedule) -> tuple[Floats, Floats, Floats]:
    """Return steps done, the learning rate of the last of them over its peak, and the sum of the
    rates so far.

    A batch that warms up counts as the share of the full one that it is.
    """
    steps = np.unique(
        np.linspace(1, schedule.num_steps, min(schedule.num_steps, _NUM_GRID_STEPS)).round()
    )
    rates = np.array([lr_multiplier(schedule, int(step) - 1) for step in steps])
    batches = np.array([float(schedule.batch_share(int(step) - 1)) for step in steps])
    batches *= schedule.num_steps / float(schedule.num_full_batches)
    areas = np.cumsum(rates * batches * np.diff(steps, prepend=0.0))
    return steps, np.maximum(rates, 0.0), np.maximum(areas, 1e-12)


def _compute_window_means(run: FinishedRun) -> tuple[Floats, Floats]:
    """[S] and [S] Log of mean training loss near each share, NaN where nothing is logged; number of
    lines there.
    """
    num_steps = run.schedule.num_steps
    at, losses = np.array(run.curve.steps) / num_steps, np.array(run.curve.train_loss_nats)
    shares = np.array(SHARES)[:, None]
    near = np.abs(at - shares) <= np.maximum(WINDOW * shares, 0.5 / num_steps)
    num_lines = near.sum(axis=1).astype(float)
    means = np.where(num_lines > 0, near @ losses / np.maximum(num_lines, 1), np.nan)
    return np.log(means), num_lines


# ---- The band ----


def _split_by_length(
    runs: Sequence[FinishedRun],
) -> tuple[list[FinishedRun], list[FinishedRun]]:
    """Return the shorter runs, and those that are about as long as the longest."""
    limit = max((run.tokens for run in runs), default=0.0) / _SAME_LENGTH
    return [run for run in runs if run.tokens <= limit], [run for run in runs if run.tokens > limit]


def _pool_departures(departures_RS: Floats) -> Floats:
    """[S] Root mean square over the runs and over the shares that are about as early; NaN where
    there are none.
    """
    near_SS = np.abs(np.log(np.divide.outer(SHARES, SHARES))) <= np.log(_POOLED_RATIO) + 1e-9
    squares_S = np.nansum(departures_RS**2, axis=0)
    num_S = np.isfinite(departures_RS).sum(axis=0)
    with np.errstate(invalid="ignore"):
        pooled: Floats = np.sqrt((near_SS @ squares_S) / (near_SS @ num_S))
    return pooled


def _compute_reach(ratio: float) -> float:
    """Return the effective distance of an extrapolation by the factor `ratio`; below 1 it counts as
    1.
    """
    return float(np.log(NEXT_RUNG * max(ratio, 1.0)) ** _REACH_POWER)
