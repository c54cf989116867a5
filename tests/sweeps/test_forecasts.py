"""Forecasts of planted valleys: as sure as they say, and silent where there is nothing to go by."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sweeps.search import forecasts
from sweeps.search.forecasts import forecast


def planted(seed):
    """A forecast in a valley with noise, and what it is of."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (31, 2))
    y = x[:, 0] ** 2 + 0.3 * x[:, 1] + rng.normal(0, 0.05, 31)
    return forecast(x[:30], y[:30], x[30]), y[30]


def held(width=1.0):
    """Share of 90 % intervals, of so many times their width, that hold the truth."""
    both = [planted(seed) for seed in range(60)]
    chances = [
        dataclasses.replace(found, error_nats=width * found.error_nats).chance_below(truth)
        for found, truth in both
    ]
    return np.mean([0.05 < chance < 0.95 for chance in chances])


def test_a_forecast_is_right_as_often_as_it_says():
    """Over planted valleys with a known noise: of 90 % intervals, nine in ten hold the truth."""
    assert 0.8 <= held() <= 1.0


def test_a_forecast_wants_enough_runs_that_differ():
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (20, 3)), rng.uniform(2, 3, 20)
    assert forecast(x[:7], y[:7], x[19]) is None and forecast(x[:8], y[:8], x[19]) is not None
    assert forecast([[1.0, 1.0, 1.0]] * 20, y, [1.0, 1.0, 1.0]) is None
    assert forecast(x, [2.5] * 20, x[0]) is None
    # An axis of one value says nothing, wherever the run in question lies on it.
    fixed = np.c_[x, np.full(20, 7.0)]
    assert forecast(fixed, y, [*x[0], 7.0]).loss_nats == pytest.approx(
        forecast(x, y, x[0]).loss_nats, abs=0.02
    )
    assert forecast([*x, *x], [*y, *y], x[0]).error_nats >= forecasts.LEAST_ERROR_NATS


def test_a_mutant_that_is_too_sure_is_found_out():
    """Intervals of a third of the width hold the truth far too seldom: the test above can fail."""
    assert held(width=1 / 3) < 0.8
