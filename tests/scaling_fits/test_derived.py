"""Intervals of what follows from a fit are those of its draws."""

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, ladder

from scaling_fits.forecast.uncertainty import draw_intervals, exponents, fit_runs


@pytest.fixture(scope="module", params=["auto", "chinchilla"])
def fitted(request):
    return fit_runs(
        ladder(CHINCHILLA, np.random.default_rng(0), 0.005), request.param, bootstrap=1000
    )


def test_exponents_are_those_of_the_law_and_their_draws_within_a_level(fitted):
    params, tokens = exponents(fitted)
    alpha, beta = fitted.fit.theta[3:5]
    assert params.value == pytest.approx(beta / (alpha + beta))
    assert params.value == pytest.approx(0.37 / 0.71, abs=0.07)
    shares = fitted.laws[:, 4] / fitted.laws[:, 3:5].sum(axis=1)
    low, high = params.interval
    assert np.mean((shares >= low) & (shares <= high)) == pytest.approx(0.9, abs=0.02)
    assert tokens.value == pytest.approx(1 - params.value)
    assert tokens.interval == pytest.approx(tuple(1 - end for end in params.interval[::-1]))


def test_parameters_have_intervals_by_name(fitted):
    intervals = draw_intervals(fitted)
    assert list(intervals) == list(fitted.fit.parameters)
    assert all(low < high for low, high in intervals.values())
