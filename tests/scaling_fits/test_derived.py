"""Intervals of what follows from a fit: stretched by the hindcast's factor, on both sides."""

import dataclasses

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, ladder

from scaling_fits.forecast.uncertainty import draw_intervals, exponents, fit_runs


@pytest.fixture(scope="module")
def fitted():
    table = ladder(CHINCHILLA, np.random.default_rng(0), 0.005)
    return dataclasses.replace(fit_runs(table, "chinchilla", bootstrap=100), inflation=1.0)


def test_exponents_are_those_of_the_law_and_their_refits_within_a_level(fitted):
    params, _ = exponents(fitted)
    alpha, beta = fitted.chooser.theta[3:5]
    assert params.value == pytest.approx(beta / (alpha + beta))
    assert params.value == pytest.approx(0.37 / 0.71, abs=0.05)
    shares = fitted.members[0].draws[:, 4] / fitted.members[0].draws[:, 3:5].sum(axis=1)
    low, high = params.interval
    assert np.mean((shares >= low) & (shares <= high)) == pytest.approx(0.9, abs=0.02)


def test_exponents_are_stretched_as_hindcasts_ask_and_end_at_nothing_and_all(fitted):
    """Both of them alike: what tokens gain, parameters lose. The law's own parameters are not stretched."""
    plain, wide, all_ = (exponents(dataclasses.replace(fitted, inflation=x)) for x in (1.0, 2.0, 1e6))
    arms = [np.abs(np.array(params.interval) - params.value) for params, _ in (plain, wide)]
    assert (arms[0] > 0).all() and arms[1] == pytest.approx(2 * arms[0])
    assert all_[0].interval == all_[1].interval == (0.0, 1.0)
    for params, tokens in (plain, wide):
        assert tokens.value == pytest.approx(1 - params.value)
        assert tokens.interval == pytest.approx(tuple(1 - end for end in params.interval[::-1]))
    assert draw_intervals(dataclasses.replace(fitted, inflation=2.0)) == draw_intervals(fitted)
