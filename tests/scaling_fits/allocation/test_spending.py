"""Tests that the best size of a law is optimal under every way of spending a budget."""

import math

import numpy as np
import pytest

from forerun._proxies.core.checks import SpecError
from forerun._scaling_fits.allocation.spending import Spending, find_log_best_params
from forerun._scaling_fits.laws import law

# Laws as (log E, log A, log B, alpha, beta, outer exponent)
THETAS = np.array(
    [
        [math.log(1.7), math.log(480), math.log(2100), 0.35, 0.37, 1.0],
        [math.log(1.2), math.log(30), math.log(900), 0.28, 0.45, 0.7],
        [-30.0, math.log(3e3), math.log(1e9), 0.8, 1.0, 0.095],
    ]
)
TERMS = {
    "plain": Spending(flops=1e20),
    "serving": Spending(flops=1e20, inference_tokens=2e11),
    "serving takes nearly all": Spending(flops=1e20, inference_tokens=1e14),
    "repeated tokens": Spending(flops=1e20, unique_tokens=1e9, unique_params=3e7),
    "serving and repeated tokens": Spending(
        flops=1e20, unique_tokens=1e9, unique_params=3e7, inference_tokens=1e11
    ),
}


@pytest.mark.parametrize("name", TERMS)
def test_no_other_size_has_a_lower_loss(name):
    terms = TERMS[name]
    best = find_log_best_params(THETAS, terms)
    for theta, log_params in zip(THETAS, best, strict=True):
        grid = log_params + np.linspace(-3, 3, 6001)
        grid = grid[grid < terms.ceiling]
        n, d = terms.discount_sizes(grid)
        losses = law.compute_log_loss(theta[None, :], np.exp(n), np.exp(d))[0]
        assert abs(grid[losses.argmin()] - log_params) <= 2e-3


def test_solver_matches_the_closed_form_where_both_exist():
    plain_sizes = find_log_best_params(THETAS, TERMS["plain"])
    np.testing.assert_allclose(plain_sizes, law.find_log_best_params(THETAS, math.log(1e20 / 6)))
    almost_no_inference = Spending(flops=1e20, inference_tokens=1e-9)
    np.testing.assert_allclose(
        find_log_best_params(THETAS, almost_no_inference), plain_sizes, atol=1e-9
    )
    ample_tokens = Spending(flops=1e20, unique_tokens=1e29, unique_params=1e29)
    np.testing.assert_allclose(find_log_best_params(THETAS, ample_tokens), plain_sizes, atol=1e-9)


def test_all_invalid_fields_are_reported_at_once():
    with pytest.raises(SpecError) as caught:
        Spending(flops=math.nan, inference_tokens=-1, unique_tokens=math.inf)
    assert len(caught.value.problems) == 3
