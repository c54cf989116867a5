"""Tests of concluded forecasts: how the errors of earlier ones scale the next interval."""

import math
import random

import pytest
from scipy.special import ndtri, stdtrit

from forerun._proxies.core.checks import SpecError
from forerun._scaling_fits.forecast.conclusive import (
    PRIOR_RUNS,
    ForecastOutcome,
    compute_interval_scale,
)


def make_outcome(actual, low=1.9, level=0.9):
    """Return a forecast of 2.0 nats, between `low` and 2.2 nats, with its outcome."""
    return ForecastOutcome(
        predicted_nats=2.0, low_nats=low, high_nats=2.2, level=level, actual_nats=actual
    )


def test_error_at_an_end_of_the_interval_is_its_quantile():
    quantile = float(ndtri(0.95))
    assert make_outcome(2.2).z == pytest.approx(quantile)
    assert make_outcome(1.9).z == pytest.approx(-quantile)
    assert make_outcome(2.0).z == 0.0
    assert make_outcome(2.2**2 / 2.0).z == pytest.approx(2 * quantile), (
        "the error is measured in logs, in units of its own side of the interval"
    )
    assert make_outcome(2.2, level=0.5).z == pytest.approx(float(ndtri(0.75)))
    assert [make_outcome(actual).covered for actual in (1.89, 1.9, 2.2, 2.21)] == [
        False,
        True,
        True,
        False,
    ]


def test_invalid_interval_is_refused():
    with pytest.raises(
        SpecError, match=r"predicted_nats = 2.0: must lie between its ends \[2.0, 2.2\]"
    ):
        make_outcome(2.1, low=2.0)
    with pytest.raises(SpecError) as error:
        make_outcome(-1.0, level=1.0)
    assert len(error.value.problems) == 2


def test_interval_is_not_scaled_without_a_history():
    for level in (0.5, 0.8, 0.9, 0.99):
        assert compute_interval_scale([], level) == pytest.approx(1.0, abs=1e-12)


def test_scale_follows_one_error_little_and_many_errors_fully():
    assert compute_interval_scale([0.0], 0.9) == pytest.approx(0.929, abs=1e-3)
    assert compute_interval_scale([1.0], 0.9) == pytest.approx(1.0, abs=0.01)
    assert compute_interval_scale([3.0], 0.9) == pytest.approx(1.451, abs=1e-3)
    assert compute_interval_scale([-3.0], 0.9) == compute_interval_scale([3.0], 0.9)
    assert compute_interval_scale([2.0, -2.0] * 2000, 0.9) == pytest.approx(2.0, abs=0.01)
    assert compute_interval_scale([0.5, -0.5] * 2000, 0.9) == pytest.approx(0.5, abs=0.01)
    scales = [compute_interval_scale([2.0] * count, 0.9) for count in range(30)]
    assert scales == sorted(scales)


@pytest.mark.parametrize("num_past", [1, 8])
def test_scaled_intervals_cover_planted_histories_at_their_level(num_past):
    """The intervals of each family are off by a scale drawn from the prior."""
    rng = random.Random(num_past)
    level = 0.9
    num_families = 20_000
    num_scaled_covered = 0
    num_unscaled_covered = 0
    quantile = float(ndtri((1 + level) / 2))
    prior = quantile / float(stdtrit(PRIOR_RUNS, (1 + level) / 2))
    for _ in range(num_families):
        sd = prior * math.sqrt(PRIOR_RUNS / rng.gammavariate(PRIOR_RUNS / 2, 2))
        *past_errors, next_error = (rng.gauss(0, sd) for _ in range(num_past + 1))
        num_scaled_covered += abs(next_error) <= quantile * compute_interval_scale(
            past_errors, level
        )
        num_unscaled_covered += abs(next_error) <= quantile
    assert num_scaled_covered / num_families == pytest.approx(level, abs=0.008)
    assert num_unscaled_covered / num_families == pytest.approx(level, abs=0.008), (
        "over many families, unscaled intervals hold the outcome as often as their level says"
    )
