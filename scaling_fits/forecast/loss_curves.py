"""How training loss will run down to its predicted end: the band a main run is compared with while it trains.

Runs of one recipe trace nearly one curve once loss is taken over its end and steps over their number (arXiv 2507.02119
calls it supercollapse). What is left moves slowly with size, so at each share f of the run

    log(training loss at f / final loss) = a_f + b_f log(D / D*) + c_f log(N / N*) + error,

least squares over the ladder's runs, D* and N* the main run's: a_f is its curve, with a Student interval for one new
run. A line in log D is not the truth either: the longest runs are predicted from the shorter ones, and what that misses
by, about f, grows with the extrapolation as the laws' own error does (`pooling.reach`). It and the interval of the
final loss are added in squares. Training loss at f is a mean over steps within 15 % of f.

A run that is above its curve at f is likely above it at 2f too. How likely is measured on the same lines: the rungs'
departures, each from the lines through the others, are correlated between shares f and g as exp(-|log2(f / g)| / m),
and m is the memory of departures in octaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri, stdtrit

from proxies.core.spec import Curve
from scaling_fits.forecast.pooling import reach
from scaling_fits.laws.solver import Floats

SHARES = (0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LEAST_RUNS = 6  # three coefficients, and as many runs again to know their error
WINDOW = 0.15
_SAME_LENGTH = 1.25
_ABOUT = 2.0  # errors at shares up to twice as early or late are of one size
_MEMORIES = np.round(np.geomspace(0.1, 20.0, 200), 2)  # octaves: from none to beyond the curve's 4.3


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """A run that decayed to its end, under the main run's recipe."""

    params: float
    tokens: float
    num_steps: int
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
    runs: Sequence[FinishedRun], params: float, tokens: float, final_nats: tuple[float, float, float], level: float
) -> tuple[ExpectedLoss, ...]:
    """The main run's training loss at `SHARES` of its steps, given its predicted final loss (centre, low, high).

    Empty where nothing says how curves scatter or drift: fewer than `LEAST_RUNS` runs, or as few that are shorter than
    the longest. Shares that a run has no logged step near are left out of that run's part; a share that too few runs
    reach is left out altogether.
    """
    height_RS, sizes_RQ = _heights(runs), _sizes(runs, params, tokens)
    drift_S = _drift(sizes_RQ, height_RS)
    if drift_S is None:
        return ()
    furthest = reach(np.exp(np.array([max(0.0, *-sizes_RQ[:, 1:].max(axis=0))])))[0]
    ends = np.log(np.array(final_nats[1:]) / final_nats[0])
    found = []
    for share, height_R, drift in zip(SHARES, height_RS.T, drift_S, strict=True):
        there = np.isfinite(height_R)
        if there.sum() < LEAST_RUNS or not np.isfinite(drift):
            continue
        middle, arm = _at_target(sizes_RQ[there], height_R[there], level)
        arms = np.sqrt(arm**2 + (ndtri((1 + level) / 2) * drift * furthest) ** 2 + ends**2)
        loss, low, high = (float(final_nats[0] * np.exp(middle + by)) for by in (0.0, -arms[0], arms[1]))
        found.append(ExpectedLoss(share=share, loss_nats=loss, low_nats=low, high_nats=high))
    return tuple(found)


def memory_octaves(runs: Sequence[FinishedRun]) -> float | None:
    """Over how many doublings of the step departures from the curve are forgotten: to 1/e of them is left.

    None below `LEAST_RUNS` runs, or where they have fewer than two shares of `SHARES` in common.
    """
    if len(runs) < LEAST_RUNS:
        return None
    height_RS, sizes_RQ = _heights(runs), _sizes(runs, runs[0].params, runs[0].tokens)
    common = np.isfinite(height_RS).all(axis=0)
    hat_RR = sizes_RQ @ np.linalg.pinv(sizes_RQ)
    own = 1 - np.diag(hat_RR)
    free = own > 1e-6  # a run that alone holds a coefficient departs from nothing
    left_out_RS = ((height_RS[:, common] - hat_RR @ height_RS[:, common]) / np.maximum(own, 1e-6)[:, None])[free]
    size_S = np.sqrt((left_out_RS**2).mean(axis=0)) if free.any() else np.zeros(int(common.sum()))
    if common.sum() < 2 or free.sum() < LEAST_RUNS or (size_S < 1e-9).any():
        return None
    alike_SS = left_out_RS.T @ left_out_RS / len(left_out_RS) / np.outer(size_S, size_S)
    octaves = np.log2(np.array(SHARES)[common])
    apart_SS = np.abs(octaves[:, None] - octaves)
    missed = [float(((alike_SS - np.exp(-apart_SS / memory)) ** 2).sum()) for memory in _MEMORIES]
    return float(_MEMORIES[int(np.argmin(missed))])


def _heights(runs: Sequence[FinishedRun]) -> Floats:
    """(R, S)"""
    return np.array([[_height(run, share) for share in SHARES] for run in runs]).reshape(-1, len(SHARES))


def _sizes(runs: Sequence[FinishedRun], params: float, tokens: float) -> Floats:
    """Columns of the lines (R, 3): one, and the logs of tokens and of parameters over the target's."""
    sizes = [[1.0, np.log(run.tokens / tokens), np.log(run.params / params)] for run in runs]
    return np.array(sizes).reshape(-1, 3)


def _height(run: FinishedRun, share: float) -> float:
    """Log of mean training loss near a share of the run, over its final loss; not a number where it logged nothing."""
    steps, losses = np.array(run.curve.steps), np.array(run.curve.train_loss_nats)
    near = np.abs(steps / run.num_steps - share) <= max(WINDOW * share, 0.5 / run.num_steps)
    return float(np.log(losses[near].mean() / run.final_loss_nats)) if near.any() else float("nan")


def _drift(sizes_RQ: Floats, height_RS: Floats) -> Floats | None:
    """Sd at reach 1 of what the lines miss the longest runs by (S,), from the runs shorter than those; None if few."""
    longest = sizes_RQ[:, 1] > sizes_RQ[:, 1].max(initial=-np.inf) - np.log(_SAME_LENGTH)
    below_RQ, below_RS = sizes_RQ[~longest], height_RS[~longest]
    if len(below_RQ) < LEAST_RUNS:
        return None
    squares = []
    for height_R, above_R in zip(below_RS.T, height_RS[longest].T, strict=True):
        there, known = np.isfinite(height_R), np.isfinite(above_R)
        if there.sum() < LEAST_RUNS or not known.any():
            squares.append(float("nan"))
            continue
        line_Q = np.linalg.lstsq(below_RQ[there], height_R[there], rcond=None)[0]
        squares.append(float(np.mean(above_R[known] - sizes_RQ[longest][known] @ line_Q)) ** 2)
    ratio = np.exp(sizes_RQ[:, 1].max() - below_RQ[:, 1].max())
    about = np.abs(np.log(np.divide.outer(SHARES, SHARES))) <= np.log(_ABOUT) + 1e-9
    pooled = [np.nanmean(np.array(squares)[near]) if np.isfinite(squares)[near].any() else np.nan for near in about]
    return np.sqrt(pooled) / reach(np.array([ratio]))


def _at_target(sizes_RQ: Floats, height_R: Floats, level: float) -> tuple[float, float]:
    """Height at the main run's size, and half the length of its interval for one new run.

    Columns that the runs do not vary are dropped by the pseudo-inverse.
    """
    inverse_QQ = np.linalg.pinv(sizes_RQ.T @ sizes_RQ, hermitian=True)
    coefficients_Q = inverse_QQ @ sizes_RQ.T @ height_R
    freedom = len(height_R) - np.linalg.matrix_rank(sizes_RQ)
    variance = float(((height_R - sizes_RQ @ coefficients_Q) ** 2).sum() / freedom)
    arm = float(stdtrit(freedom, (1 + level) / 2)) * np.sqrt(variance * (1 + inverse_QQ[0, 0]))
    return float(coefficients_Q[0]), float(arm)
