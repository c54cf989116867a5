"""The final loss of a run, predicted from its losses so far and its point, by runs that finished.

A Gaussian process: a linear trend plus a smooth rest over (point, training loss at this step). The
point is in it as the loss alone misleads: before the schedule's decay a high rate, a long warmup or
tight clipping is behind, and may end ahead. Its two hyperparameters are averaged over a grid,
weighted by how well each foretells every run from the others (leave one out, in closed form:
Rasmussen and Williams 2006, eq. 5.10 to 5.12), and its scale is what those errors say.

Runs given up are not fitted on: nobody knows where they would have ended. As what they were given
up by is all in the model (point and loss), those that remain are no biased sample given these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


LENGTHS = (0.3, 0.6, 1.0, 2.0)
"""Length scales of the smooth part, in standard deviations of the features, all together."""


NOISES = (1e-4, 1e-3, 1e-2)
"""Variances of what no feature explains, in those of the final losses."""


LEAST_ERROR_NATS = 1e-3
"""No forecast is surer than this: rounding alone moves a run by about as much."""


MOST_FITTED = 64
"""Runs that are fitted on, the most similar: more cost time, and tell little more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A final loss as it is expected: Student's t about `loss_nats`."""

    loss_nats: float
    error_nats: float
    """Its scale."""
    num_freedom: int
    """Its degrees of freedom."""

    def chance_below(self, loss_nats: float) -> float:
        """That the run ends below `loss_nats`."""
        from scipy.special import stdtr  # 0.1 s, and only a search that prunes needs it

        return float(stdtr(self.num_freedom, (loss_nats - self.loss_nats) / self.error_nats))


def least_runs(num_features: int) -> int:
    """Runs without which nothing is predicted, by features that differ: two for each number of the
    trend.
    """
    return 2 * (num_features + 1)


def forecast(
    known: Sequence[Sequence[float]], final_nats: Sequence[float], asked: Sequence[float]
) -> Forecast | None:
    """The final loss at features `asked`, from runs of `known` features and final losses.

    Args:
        known: [run][feature], finite.
        final_nats: [run], finite.
        asked: [feature].

    Returns:
        None where there are too few runs, or they do not differ.
    """
    x_RF, y_R, asked_F = (
        np.asarray(known, dtype=float),
        np.asarray(final_nats, dtype=float),
        np.asarray(asked),
    )
    if len(y_R) == 0:
        return None
    scale_F = x_RF.std(axis=0)
    varied = scale_F > 1e-12
    if len(y_R) < least_runs(int(varied.sum())) or not varied.any() or y_R.std() < 1e-12:
        return None
    x_RF = (x_RF[:, varied] - asked_F[varied]) / scale_F[varied]  # the run in question lies at 0
    near = np.argsort((x_RF**2).sum(axis=1), kind="stable")[:MOST_FITTED]
    return _fitted(x_RF[near], y_R[near])


def _fitted(x_RF: Floats, y_R: Floats) -> Forecast:
    """The forecast at the origin."""
    mean, spread = float(y_R.mean()), max(float(y_R.std()), 1e-12)
    z_R, centre_F = (y_R - mean) / spread, x_RF.mean(axis=0)
    x_RF, at_F = x_RF - centre_F, -centre_F
    square_RR = ((x_RF[:, None] - x_RF[None]) ** 2).mean(axis=2)
    square_R = ((x_RF - at_F) ** 2).mean(axis=1)
    trend_RR, trend_R, trend = x_RF @ x_RF.T + 1, x_RF @ at_F + 1, float(at_F @ at_F) + 1
    scores, means, variances = [], [], []
    for length in LENGTHS:
        smooth_RR, smooth_R = (
            np.exp(-square_RR / (2 * length**2)),
            np.exp(-square_R / (2 * length**2)),
        )
        for noise in NOISES:
            inverse_RR = np.linalg.inv(smooth_RR + trend_RR + noise * np.eye(len(z_R)))
            weight_R, left_R = inverse_RR @ z_R, np.diag(inverse_RR)
            # of errors left out, over what they were expected to be
            scale = float(np.mean(weight_R**2 / left_R))
            across_R = smooth_R + trend_R
            scores.append(0.5 * float(np.sum(np.log(left_R / scale))))
            means.append(float(across_R @ weight_R))
            variances.append(
                scale * max(1 + trend + noise - float(across_R @ inverse_RR @ across_R), noise)
            )
    share = np.exp(np.array(scores) - max(scores))
    share /= share.sum()
    centre = float(share @ np.array(means))
    variance = float(share @ (np.array(variances) + (np.array(means) - centre) ** 2))
    return Forecast(
        loss_nats=mean + spread * centre,
        error_nats=max(spread * math.sqrt(variance), LEAST_ERROR_NATS),
        num_freedom=len(z_R) - x_RF.shape[1] - 1,
    )
