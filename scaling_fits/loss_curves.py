"""How training loss will run down to its predicted end: the band a main run is held against while it trains.

Runs of one recipe trace nearly one curve once loss is taken over its end and steps over their number (arXiv 2507.02119
calls it supercollapse). What is left moves slowly with size, so at each share f of the run

    log(training loss at f / final loss) = a_f + b_f log(D / D*) + c_f log(N / N*) + error,

least squares over the ladder's runs, D* and N* the main run's: a_f is its curve, with a Student interval for one new
run. The interval of the final loss is added in squares. Training loss at f is a mean over steps within 7 % of f.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from proxies.spec import Curve
from scaling_fits.solver import Floats

SHARES = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LEAST_RUNS = 6  # three coefficients, and as many runs again to know their error
_WINDOW = 0.07


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

    Empty with fewer than `LEAST_RUNS` runs: nothing says how far curves scatter. Shares that a run has no logged
    step near are left out of that run's part; a share that too few runs reach is left out altogether.
    """
    found = []
    logs_RQ = np.array([[1.0, np.log(run.tokens / tokens), np.log(run.params / params)] for run in runs]).reshape(-1, 3)
    arms = np.log(np.array(final_nats[1:]) / final_nats[0])
    for share in SHARES:
        height_R = np.array([_height(run, share) for run in runs])
        there = np.isfinite(height_R)
        if there.sum() < LEAST_RUNS:
            continue
        middle, arm = _at_target(logs_RQ[there], height_R[there], level)
        low, high = middle - np.hypot(arm, arms[0]), middle + np.hypot(arm, arms[1])
        loss, low, high = (float(final_nats[0] * np.exp(value)) for value in (middle, low, high))
        found.append(ExpectedLoss(share=share, loss_nats=loss, low_nats=low, high_nats=high))
    return tuple(found)


def _height(run: FinishedRun, share: float) -> float:
    """Log of mean training loss near a share of the run, over its final loss; not a number where it logged nothing."""
    steps, losses = np.array(run.curve.steps), np.array(run.curve.train_loss_nats)
    near = np.abs(steps / run.num_steps - share) <= max(_WINDOW * share, 0.5 / run.num_steps)
    return float(np.log(losses[near].mean() / run.final_loss_nats)) if near.any() else float("nan")


def _at_target(logs_RQ: Floats, height_R: Floats, level: float) -> tuple[float, float]:
    """Height at the main run's size, and half the length of its interval for one new run.

    Columns that the runs do not vary are dropped by the pseudo-inverse.
    """
    inverse_QQ = np.linalg.pinv(logs_RQ.T @ logs_RQ, hermitian=True)
    rank = np.linalg.matrix_rank(logs_RQ)
    coefficients_Q = inverse_QQ @ logs_RQ.T @ height_R
    freedom = len(height_R) - rank
    variance = float(((height_R - logs_RQ @ coefficients_Q) ** 2).sum() / freedom)
    arm = float(stdtrit(freedom, (1 + level) / 2)) * np.sqrt(variance * (1 + inverse_QQ[0, 0]))
    return float(coefficients_Q[0]), float(arm)
