"""Tests of loss forecasts for the pruner: intervals cover planted losses at their level, and too
little data gives no forecast.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from forerun._sweeps.search import loss_forecasts
from forerun._sweeps.search.loss_forecasts import forecast_loss


def forecast_planted_loss(seed):
    """Return the forecast of a loss from 30 other runs in a planted noisy basin, and the loss."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (31, 2))
    y = x[:, 0] ** 2 + 0.3 * x[:, 1] + rng.normal(0, 0.05, 31)
    return forecast_loss(x[:30], y[:30], x[30]), y[30]


def measure_coverage(width_factor=1.0):
    """Return the share of 60 intervals of level 90 % that contain the true loss.

    The width of the intervals is multiplied by `width_factor`.
    """
    is_covered = []
    for seed in range(60):
        forecast, true_loss = forecast_planted_loss(seed)
        scaled = dataclasses.replace(forecast, error_nats=width_factor * forecast.error_nats)
        is_covered.append(0.05 < scaled.compute_probability_below(true_loss) < 0.95)
    return np.mean(is_covered)


def test_intervals_cover_planted_losses():
    """The share is expected to be 0.9, with a standard deviation of 0.04 over 60 draws."""
    assert 0.8 <= measure_coverage() <= 1.0


def test_forecast_needs_enough_runs_that_differ():
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (20, 3)), rng.uniform(2, 3, 20)
    assert (
        forecast_loss(x[:7], y[:7], x[19]) is None
        and forecast_loss(x[:8], y[:8], x[19]) is not None
    )
    assert forecast_loss([[1.0, 1.0, 1.0]] * 20, y, [1.0, 1.0, 1.0]) is None
    assert forecast_loss(x, [2.5] * 20, x[0]) is None
    # An axis with a single value carries no information, wherever the new run lies on it.
    fixed = np.c_[x, np.full(20, 7.0)]
    assert forecast_loss(fixed, y, [*x[0], 7.0]).loss_nats == pytest.approx(
        forecast_loss(x, y, x[0]).loss_nats, abs=0.02
    )
    assert forecast_loss([*x, *x], [*y, *y], x[0]).error_nats >= loss_forecasts.MIN_ERROR_NATS


def test_narrow_intervals_do_not_cover():
    """Check that the coverage test can fail: intervals of a third of the width cover too seldom."""
    assert measure_coverage(width_factor=1 / 3) < 0.8
