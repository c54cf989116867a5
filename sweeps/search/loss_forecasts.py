"""Forecasts of a run's final loss in the middle of its training, fitted to finished runs.

A run is described by features: its hyperparameters, and its training loss at the present step,
which is the same step for all runs (`forerun._sweeps.search.pruning` computes them). The model is a
Gaussian process over the features: a linear trend plus a smooth part. The hyperparameters are
included because the loss alone misleads: before the schedule's decay, a run with a high learning
rate, a long warmup or tight clipping has a higher loss, and may end with a lower one.

The forecast is averaged over a grid of the model's two hyperparameters (length scale and noise).
Each pair is weighted by how well it predicts every finished run from the others (leave-one-out in
closed form: Rasmussen and Williams 2006, eq. 5.10 to 5.12). The leave-one-out errors also decide
how wide the forecast is.

Runs that were given up are not fitted, because their final loss is unknown. This causes no
selection bias given the features, since the decision to give a run up depended only on them.

Array names carry their axes: R runs, F features, H pairs of the model's hyperparameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LENGTHS = (0.3, 0.6, 1.0, 2.0)
"""Length scales of the smooth part, in standard deviations of the features."""
NOISES = (1e-4, 1e-3, 1e-2)
"""Variances of the noise that no feature explains, in units of the variance of the final losses."""
MIN_ERROR_NATS = 1e-3
"""Minimum scale of a forecast's error, in nats; rounding alone changes a run by about as much."""
MAX_FITTED_RUNS = 64
"""Maximum number of runs that are fitted: the runs most similar to the one that is forecast. More
runs take more time and improve the forecast little.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A forecast of a final loss: Student's t distribution about `loss_nats`."""

    loss_nats: float
    error_nats: float
    """Scale of the distribution, in nats."""
    degrees_of_freedom: int
    """Degrees of freedom of Student's t."""

    def compute_probability_below(self, loss_nats: float) -> float:
        """Return the probability that the run ends below `loss_nats`."""
        from scipy.special import stdtr  # takes 0.1 s, and only a search that prunes needs it

        return float(stdtr(self.degrees_of_freedom, (loss_nats - self.loss_nats) / self.error_nats))


def count_required_runs(num_features: int) -> int:
    """Return the minimum number of runs for a forecast: two for each coefficient of the trend.

    Args:
        num_features: number of features that vary.
    """
    return 2 * (num_features + 1)


def forecast_loss(
    features: Sequence[Sequence[float]], final_nats: Sequence[float], query: Sequence[float]
) -> Forecast | None:
    """Forecast the final loss of the run with features `query`.

    Args:
        features: features of finished runs, [run][feature], finite.
        final_nats: final losses of these runs in nats, [run], finite.
        query: features of the run that is forecast, [feature].

    Returns:
        None if there are too few runs, or they do not differ.
    """
    x_RF = np.asarray(features, dtype=float)
    y_R = np.asarray(final_nats, dtype=float)
    query_F = np.asarray(query)
    if len(y_R) == 0:
        return None
    std_F = x_RF.std(axis=0)
    varies_F = std_F > 1e-12
    if (
        len(y_R) < count_required_runs(int(varies_F.sum()))
        or not varies_F.any()
        or y_R.std() < 1e-12
    ):
        return None
    x_RF = (x_RF[:, varies_F] - query_F[varies_F]) / std_F[varies_F]  # the query is at 0
    nearest = np.argsort((x_RF**2).sum(axis=1), kind="stable")[:MAX_FITTED_RUNS]
    return _forecast_at_origin(x_RF[nearest], y_R[nearest])


def _forecast_at_origin(x_RF: Floats, y_R: Floats) -> Forecast:
    """Forecast the final loss of the run whose features are all 0.

    Args:
        x_RF: features of finished runs minus those of the run that is forecast, in standard
            deviations.
        y_R: final losses of these runs, in nats.
    """
    # Standardize the losses, and center the features
    mean, spread = float(y_R.mean()), max(float(y_R.std()), 1e-12)
    z_R, center_F = (y_R - mean) / spread, x_RF.mean(axis=0)
    x_RF, query_F = x_RF - center_F, -center_F
    # Mean squared distances, and the linear kernel of the trend
    square_RR = ((x_RF[:, None] - x_RF[None]) ** 2).mean(axis=2)
    square_R = ((x_RF - query_F) ** 2).mean(axis=1)
    trend_RR, trend_R, trend = x_RF @ x_RF.T + 1, x_RF @ query_F + 1, float(query_F @ query_F) + 1
    # Forecast with each pair of hyperparameters
    scores, means, variances = [], [], []
    for length in LENGTHS:
        smooth_RR = np.exp(-square_RR / (2 * length**2))
        smooth_R = np.exp(-square_R / (2 * length**2))
        for noise in NOISES:
            inverse_RR = np.linalg.inv(smooth_RR + trend_RR + noise * np.eye(len(z_R)))
            alpha_R, precision_R = inverse_RR @ z_R, np.diag(inverse_RR)
            # Mean ratio of the squared leave-one-out errors to their expected variances
            error_ratio = float(np.mean(alpha_R**2 / precision_R))
            across_R = smooth_R + trend_R
            scores.append(0.5 * float(np.sum(np.log(precision_R / error_ratio))))
            means.append(float(across_R @ alpha_R))
            variances.append(
                error_ratio
                * max(1 + trend + noise - float(across_R @ inverse_RR @ across_R), noise)
            )
    # Average the forecasts, weighted by their leave-one-out likelihood
    weight_H = np.exp(np.array(scores) - max(scores))
    weight_H /= weight_H.sum()
    center = float(weight_H @ np.array(means))
    variance = float(weight_H @ (np.array(variances) + (np.array(means) - center) ** 2))
    return Forecast(
        loss_nats=mean + spread * center,
        error_nats=max(spread * math.sqrt(variance), MIN_ERROR_NATS),
        degrees_of_freedom=len(z_R) - x_RF.shape[1] - 1,
    )
