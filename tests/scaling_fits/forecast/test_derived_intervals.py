"""Tests of the intervals of quantities that follow from a fit: exponents and parameters."""

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, make_ladder

from forerun._scaling_fits.forecast.uncertainty import compute_exponents, draw_intervals, fit_runs


@pytest.fixture(scope="module", params=["auto", "chinchilla"])
def law_fit(request):
    """A fit with intervals, of the form that is chosen automatically and of a given one."""
    return fit_runs(
        make_ladder(CHINCHILLA, np.random.default_rng(0), noise=0.005),
        request.param,
        bootstrap=1000,
    )


def test_exponents_follow_from_the_law_and_their_intervals_from_its_draws(law_fit):
    (params, params_ends), (tokens, tokens_ends) = compute_exponents(law_fit)
    alpha, beta = law_fit.fit.theta[3:5]
    assert params == pytest.approx(beta / (alpha + beta))
    assert params == pytest.approx(0.37 / 0.71, abs=0.07)
    shares = law_fit.laws[:, 4] / law_fit.laws[:, 3:5].sum(axis=1)
    low, high = params_ends
    assert np.mean((shares >= low) & (shares <= high)) == pytest.approx(0.9, abs=0.02)
    assert tokens == pytest.approx(1 - params)
    assert tokens_ends == pytest.approx(tuple(1 - end for end in params_ends[::-1]))


def test_every_parameter_has_an_interval(law_fit):
    intervals = draw_intervals(law_fit)
    assert list(intervals) == list(law_fit.fit.parameters)
    assert all(low < high for low, high in intervals.values())
