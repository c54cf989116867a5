"""The best size of one law, under every way of spending, is the one no other beats."""

import math

import numpy as np
import pytest

from proxies.core.checks import SpecError
from scaling_fits.allocation.spending import Spending, log_best_params
from scaling_fits.laws import law

THETAS = np.array(
    [
        [math.log(1.7), math.log(480), math.log(2100), 0.35, 0.37, 1.0],
        [math.log(1.2), math.log(30), math.log(900), 0.28, 0.45, 0.7],
        [-30.0, math.log(3e3), math.log(1e9), 0.8, 1.0, 0.095],
    ]
)
TERMS = {
    "plain": Spending(flops=1e20),
    "served": Spending(flops=1e20, inference_tokens=2e11),
    "served to the brim": Spending(flops=1e20, inference_tokens=1e14),
    "repeated": Spending(flops=1e20, unique_tokens=1e9, unique_params=3e7),
    "both": Spending(flops=1e20, unique_tokens=1e9, unique_params=3e7, inference_tokens=1e11),
}


@pytest.mark.parametrize("name", TERMS)
def test_no_size_beats_the_best(name):
    terms = TERMS[name]
    best = log_best_params(THETAS, terms)
    for theta, found in zip(THETAS, best, strict=True):
        grid = found + np.linspace(-3, 3, 6001)
        grid = grid[grid < terms.ceiling]
        n, d = terms.discount_sizes(grid)
        losses = law.log_loss(theta[None, :], np.exp(n), np.exp(d))[0]
        assert abs(grid[losses.argmin()] - found) <= 2e-3


def test_the_root_meets_the_closed_form_where_both_exist():
    plain = log_best_params(THETAS, TERMS["plain"])
    np.testing.assert_allclose(plain, law.log_best_params(THETAS, math.log(1e20 / 6)))
    hardly = Spending(flops=1e20, inference_tokens=1e-9)
    np.testing.assert_allclose(log_best_params(THETAS, hardly), plain, atol=1e-9)
    enough = Spending(flops=1e20, unique_tokens=1e29, unique_params=1e29)
    np.testing.assert_allclose(log_best_params(THETAS, enough), plain, atol=1e-9)


def test_everything_wrong_is_said_at_once():
    with pytest.raises(SpecError) as caught:
        Spending(flops=math.nan, inference_tokens=-1, unique_tokens=math.inf)
    assert len(caught.value.problems) == 3
