"""Misses of earlier forecasts, and the scale of the next interval: held against planted
histories.
"""

import math
import random

import pytest
from scipy.special import ndtri, stdtrit

from proxies.core.checks import SpecError
from scaling_fits.forecast.conclusive import PRIOR_RUNS, ForecastOutcome, interval_scale


def foretold(actual, predicted=2.0, low=1.9, high=2.2, level=0.9):
    return ForecastOutcome(
        predicted_nats=predicted, low_nats=low, high_nats=high, level=level, actual_nats=actual
    )


def test_an_end_of_the_interval_is_its_quantile_away():
    quantile = float(ndtri(0.95))
    assert foretold(2.2).z == pytest.approx(quantile)
    assert foretold(1.9).z == pytest.approx(-quantile)
    assert foretold(2.0).z == 0.0
    assert foretold(2.2**2 / 2.0).z == pytest.approx(2 * quantile), (
        "the miss is counted in logs, by its own arm"
    )
    assert foretold(2.2, level=0.5).z == pytest.approx(float(ndtri(0.75)))
    assert [foretold(actual).covered for actual in (1.89, 1.9, 2.2, 2.21)] == [
        False,
        True,
        True,
        False,
    ]


def test_a_forecast_without_an_interval_is_refused_with_its_numbers():
    with pytest.raises(
        SpecError, match=r"predicted_nats = 2.0: must lie between its ends \[2.0, 2.2\]"
    ):
        foretold(2.1, low=2.0)
    with pytest.raises(SpecError) as error:
        foretold(-1.0, level=1.0)
    assert len(error.value.problems) == 2


def test_without_a_history_the_fits_own_interval_stands():
    for level in (0.5, 0.8, 0.9, 0.99):
        assert interval_scale([], level) == pytest.approx(1.0, abs=1e-12)


def test_one_miss_says_little_and_many_say_all():
    assert interval_scale([0.0], 0.9) == pytest.approx(0.929, abs=1e-3)
    assert interval_scale([1.0], 0.9) == pytest.approx(1.0, abs=0.01)
    assert interval_scale([3.0], 0.9) == pytest.approx(1.451, abs=1e-3)
    assert interval_scale([-3.0], 0.9) == interval_scale([3.0], 0.9)
    assert interval_scale([2.0, -2.0] * 2000, 0.9) == pytest.approx(2.0, abs=0.01)
    assert interval_scale([0.5, -0.5] * 2000, 0.9) == pytest.approx(0.5, abs=0.01)
    scales = [interval_scale([2.0] * count, 0.9) for count in range(30)]
    assert scales == sorted(scales)


@pytest.mark.parametrize("num_past", [1, 8])
def test_planted_histories_are_covered_as_often_as_the_level_says(num_past):
    """Families whose intervals are off by a scale drawn from the prior: the next miss lies inside
    at the level.
    """
    rng, level, inside, alone, num_families = random.Random(num_past), 0.9, 0, 0, 20_000
    quantile = float(ndtri((1 + level) / 2))
    prior = quantile / float(stdtrit(PRIOR_RUNS, (1 + level) / 2))
    for _ in range(num_families):
        sd = prior * math.sqrt(PRIOR_RUNS / rng.gammavariate(PRIOR_RUNS / 2, 2))
        *past, following = (rng.gauss(0, sd) for _ in range(num_past + 1))
        inside += abs(following) <= quantile * interval_scale(past, level)
        alone += abs(following) <= quantile
    assert inside / num_families == pytest.approx(level, abs=0.008)
    assert alone / num_families == pytest.approx(level, abs=0.008), (
        "on average over families, as the back-test says"
    )
