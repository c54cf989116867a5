"""The forecast of the training-loss curve up to its predicted end: the band that a main run is
compared with.

One law is fitted to the training curves of all runs of the ladder at once,

    L(t) = (E + A N^-alpha + B N^-gamma S(t)^-beta) (1 + K r(t)^p),

with N the parameters, r(t) the learning rate after t steps as a share of its peak, and S(t) the sum
of the tokens so far, each weighted by the r at which it was trained. It is the law of learning-rate
annealing (arXiv 2408.11029) with the model's size added. Instead of that law's annealing term, the
second factor adds the noise that the present learning rate causes, as a share of the loss. Both
factors fall or stay equal while the learning rate does not rise, so the curve falls too. Training
loss may differ from validation loss by a constant factor, which is fitted too. The law gives only
the shape of the curve, which is scaled so that it ends at the predicted final loss.

The band has three parts, added in squares:

- Scatter: the distance of the ladder's runs from the law. Each run is compared relative to its own
  final loss.
- Drift: the error with which a law fitted without the longest runs predicts the longest ones. The
  drift grows with a power of the log of the extrapolation (`_compute_reach`).
- The interval of the final loss.

Scatter and drift are pooled over shares of the run that lie within `_POOLED_RATIO` of each other.
Training loss at a share is the mean over the steps within `WINDOW` of the share.

A run that is above its curve at a share f is likely above it at 2f too. The departures of the
ladder's runs at shares f and g are correlated as exp(-|log2(f / g)| / m); m is the memory of
departures, in octaves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from forerun._proxies.core.schedule import Schedule, compute_lr_multiplier
from forerun._proxies.core.spec import Curve
from forerun._scaling_fits.laws.law import NEXT_RUNG
from forerun._scaling_fits.laws.solver import Bools, Floats

SHARES = (0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Points of the curve, as shares of a run's steps: 0.5 is after half of them."""
MIN_RUNS = 6
"""Fewest runs below the longest, or near a share, from which a band or a memory is measured."""
WINDOW = 0.15
"""Half the window of a mean, as a share of the step at its center."""
# Coefficients that describe one share over all runs: the height of the curve there, and its changes
# with length and size
_NUM_COEFFICIENTS = 3
_SAME_LENGTH = 1.25  # Ratio of tokens within which runs count as equally long
_POOLED_RATIO = 2.0  # Ratio of shares within which departures are pooled
# Grid of memories in octaves, from almost none to more than the 4.3 octaves between the shares
_MEMORIES = np.round(np.geomspace(0.1, 20.0, 200), 2)
_MIN_SQUARES = 1e-18  # a smaller sum of squares is rounding
_NUM_IN_WINDOW = 5  # points of the law whose mean stands for a window's
_NUM_GRID_STEPS = 4096  # a longer schedule is summed over so many of its steps
_SCATTER_LINES = 100.0  # the mean of so many lines has as much batch noise as the law has error
_PRIOR_WEIGHT = 0.003  # keeps coefficients near their start where the runs do not determine them

_REACH_POWER = 0.75
"""Power by which departures of curves grow with the log of the extrapolation."""


class FinishedRun(NamedTuple):
    """A run that decayed to its end, under the main run's recipe."""

    params: float
    tokens: float
    schedule: Schedule
    final_loss_nats: float
    curve: Curve


class ExpectedLoss(NamedTuple):
    """Training loss of one new run after a share of its steps: the mean over the steps near it."""

    share: float
    loss_nats: float
    low_nats: float
    high_nats: float


def predict_curve(
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
        One point for each share, without shares that lie in the main run's warmup or near which no
        run has logged its loss. There are no points at all if fewer than `MIN_RUNS` runs are
        shorter than the longest ones, because scatter and drift cannot be measured then.
    """
    shorter, longest = _split_by_length(runs)
    if len(shorter) < MIN_RUNS:
        return ()
    target = _Target(params=params, area=_compute_rate_area(schedule, tokens))
    inputs = _compute_inputs(params, tokens, schedule, target)
    law = _fit_law(runs, target)
    departures_RS = law.compute_departures(runs)
    scatter_S = _pool_departures(departures_RS) * np.sqrt(
        len(runs) / (len(runs) - _NUM_COEFFICIENTS)
    )
    ratio = min(run.tokens for run in longest) / max(run.tokens for run in shorter)
    departures_of_longest_RS = _fit_law(shorter, target).compute_departures(longest)
    drift_S = _pool_departures(departures_of_longest_RS) / _compute_reach(ratio)
    extrapolation = max(
        tokens / max(run.tokens for run in runs), params / max(run.params for run in runs)
    )
    # Student's t, since both are measured on few runs.
    student = float(stdtrit(len(runs) - _NUM_COEFFICIENTS, (1 + level) / 2))
    width_S = student * np.hypot(scatter_S, drift_S * _compute_reach(extrapolation))
    is_known_S = (
        inputs.is_past_warmup & np.isfinite(departures_RS).any(axis=0) & np.isfinite(width_S)
    )
    ends = np.log(np.array(final_nats[1:]) / final_nats[0])
    points = []
    for share, height, width, is_known in zip(
        SHARES, law.compute_heights(inputs), width_S, is_known_S, strict=True
    ):
        if is_known:
            arms = np.hypot(width, ends)
            loss, low, high = (
                float(final_nats[0] * np.exp(height + by)) for by in (0.0, -arms[0], arms[1])
            )
            points.append(ExpectedLoss(share=share, loss_nats=loss, low_nats=low, high_nats=high))
    return tuple(points)


def estimate_memory(runs: Sequence[FinishedRun]) -> float | None:
    """Estimate the memory of departures, in octaves: the number of doublings of the step over which
    the correlation of departures from the curve falls to 1/e.

    Returns:
        The memory; None if fewer than two shares were logged by `MIN_RUNS` runs each.
    """
    if len(runs) < MIN_RUNS:
        return None
    target = _Target(
        params=runs[0].params, area=_compute_rate_area(runs[0].schedule, runs[0].tokens)
    )
    departures_RS = _fit_law(runs, target).compute_departures(runs)
    is_common_S = np.isfinite(departures_RS).sum(axis=0) >= MIN_RUNS
    departures_RS, octaves = departures_RS[:, is_common_S], np.log2(np.array(SHARES)[is_common_S])
    is_known_RS, known_RS = np.isfinite(departures_RS), np.nan_to_num(departures_RS)
    squares_SS = (known_RS**2).T @ is_known_RS  # over the runs that have both shares
    if len(octaves) < 2 or (np.diag(squares_SS) < _MIN_SQUARES).any():
        return None
    correlation_SS = (
        known_RS.T @ known_RS / np.sqrt(np.maximum(squares_SS * squares_SS.T, _MIN_SQUARES**2))
    )
    distance_SS = np.abs(octaves[:, None] - octaves)
    misfits = [
        float(((correlation_SS - np.exp(-distance_SS / memory)) ** 2).sum()) for memory in _MEMORIES
    ]
    return float(_MEMORIES[int(np.argmin(misfits))])


# ---- The law ----


class _Target(NamedTuple):
    """The run that sizes and lengths are relative to."""

    params: float
    area: float
    """Tokens, each weighted by its learning rate over the peak."""


class _LawInputs(NamedTuple):
    """The inputs of the law at `SHARES` of a run and at its end, at K points of each window."""

    log_size: float
    """Log of the parameters over the target's."""
    log_area: Floats
    """[S + 1, K] Log of the rate-weighted tokens over the target's."""
    rate: Floats
    """[S + 1, K] Learning rate over its peak."""
    is_past_warmup: Bools
    """[S] Whether the window lies behind the warmup."""


class _Law(NamedTuple):
    """The law with its coefficients."""

    theta: Floats
    target: _Target

    def compute_heights(self, inputs: _LawInputs) -> Floats:
        """[S] Log of the mean training loss over the final validation loss."""
        logs = _compute_log_loss(self.theta, inputs.log_size, inputs.log_area, inputs.rate)
        heights: Floats = logs[:-1] - logs[-1] + self.theta[-1]
        return heights

    def compute_departures(self, runs: Sequence[FinishedRun]) -> Floats:
        """[R, S] Log of the mean training loss over the law's prediction, both relative to the
        run's final loss; NaN where nothing was logged.
        """
        rows = []
        for run in runs:
            inputs = _compute_inputs(run.params, run.tokens, run.schedule, self.target)
            log_means, _ = _compute_window_means(run)
            departures = log_means - np.log(run.final_loss_nats) - self.compute_heights(inputs)
            rows.append(np.where(inputs.is_past_warmup, departures, np.nan))
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
    from scipy.optimize import least_squares  # imported here because the import takes 0.3 s

    sizes, areas, rates, logs, weights, is_training = [], [], [], [], [], []
    for run in runs:
        inputs = _compute_inputs(run.params, run.tokens, run.schedule, target)
        log_means, num_lines = _compute_window_means(run)
        is_known = np.append(inputs.is_past_warmup & np.isfinite(log_means), True)
        sizes.append(np.full(np.count_nonzero(is_known), inputs.log_size))
        areas.append(inputs.log_area[is_known])
        rates.append(inputs.rate[is_known])
        logs.append(np.append(log_means, np.log(run.final_loss_nats))[is_known])
        weights.append(1 / np.sqrt(1 + _SCATTER_LINES / np.append(num_lines, np.inf)[is_known]))
        is_training.append((np.arange(len(SHARES) + 1) < len(SHARES))[is_known])
    size, area, rate = np.concatenate(sizes)[:, None], np.concatenate(areas), np.concatenate(rates)
    log = np.concatenate(logs)
    weight = np.concatenate(weights)
    training = np.concatenate(is_training)
    # Start with an irreducible loss of 0.6 of the lowest loss
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
    """Return numbers of steps, the learning rate of each of these steps over its peak, and the sum
    of the rates up to it.

    During a batch-size warmup, a step counts as its batch's share of a full batch.
    """
    steps = np.unique(
        np.linspace(1, schedule.num_steps, min(schedule.num_steps, _NUM_GRID_STEPS)).round()
    )
    rates = np.array([compute_lr_multiplier(schedule, int(step) - 1) for step in steps])
    batches = np.array([float(schedule.compute_batch_share(int(step) - 1)) for step in steps])
    batches *= schedule.num_steps / float(schedule.num_full_batches)
    areas = np.cumsum(rates * batches * np.diff(steps, prepend=0.0))
    return steps, np.maximum(rates, 0.0), np.maximum(areas, 1e-12)


def _compute_window_means(run: FinishedRun) -> tuple[Floats, Floats]:
    """Return the log of the mean training loss near each share [S], NaN where nothing is logged,
    and the number of log lines there [S].
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
    """Return the root mean square [S] of the departures of all runs at shares within a factor of
    `_POOLED_RATIO`; NaN where there are none.
    """
    near_SS = np.abs(np.log(np.divide.outer(SHARES, SHARES))) <= np.log(_POOLED_RATIO) + 1e-9
    squares_S = np.nansum(departures_RS**2, axis=0)
    num_S = np.isfinite(departures_RS).sum(axis=0)
    with np.errstate(invalid="ignore"):
        pooled: Floats = np.sqrt((near_SS @ squares_S) / (near_SS @ num_S))
    return pooled


def _compute_reach(ratio: float) -> float:
    """Return the effective distance of an extrapolation by the factor `ratio`; a ratio below 1
    counts as 1.
    """
    return float(np.log(NEXT_RUNG * max(ratio, 1.0)) ** _REACH_POWER)
