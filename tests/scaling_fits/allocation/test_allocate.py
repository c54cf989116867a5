"""The optimum is the closed form's, its range is flat, and its warnings say how far it reaches."""

import dataclasses
import math

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, COUPLED, ladder, law_loss

from proxies.core.checks import SpecError
from scaling_fits.allocation.allocate import NoRunError, allocate
from scaling_fits.allocation.spending import pooled_along
from scaling_fits.forecast.uncertainty import exponents, fit_runs, predict
from scaling_fits.laws.law import CannotTellError

WIDE = {"sizes": np.geomspace(1e5, 1e8, 5), "tokens": np.geomspace(1e6, 1e9, 5)}


@pytest.fixture(scope="module")
def exact():
    return fit_runs(ladder(CHINCHILLA, **WIDE), "chinchilla", bootstrap=0)


@pytest.fixture(scope="module")
def noisy():
    return fit_runs(ladder(CHINCHILLA, np.random.default_rng(0), 0.01), bootstrap=40)


def test_the_optimum_is_the_closed_form(exact):
    flops = 6e17
    alpha, beta = CHINCHILLA["alpha"], CHINCHILLA["beta"]
    g = (alpha * CHINCHILLA["A"] / (beta * CHINCHILLA["B"])) ** (1 / (alpha + beta))
    params = g * (flops / 6) ** (beta / (alpha + beta))
    found = allocate(exact, flops)
    assert found.params == pytest.approx(params, rel=1e-3)
    assert 6 * found.params * found.tokens == pytest.approx(flops)
    assert found.tokens_per_param == pytest.approx(found.tokens / found.params)
    assert found.loss_nats == pytest.approx(law_loss(CHINCHILLA, params, flops / 6 / params), rel=1e-6)


def test_the_pooled_optimum_is_the_least_of_a_dense_grid():
    fit = fit_runs(ladder(COUPLED, np.random.default_rng(0), 0.01), bootstrap=0)
    flops = 1e13
    found = allocate(fit, flops)
    grid = found.params * np.geomspace(0.1, 10, 401)
    losses = [predict(fit, n, flops / 6 / n).loss_nats for n in grid]
    assert found.loss_nats <= min(losses) * (1 + 1e-9)


def test_flat_range_ends_at_three_per_mille(noisy):
    found = allocate(noisy, 1e13)
    low, high = found.flat_params
    assert low < found.params < high
    for end in (low, high):
        assert predict(noisy, end, 1e13 / 6 / end).loss_nats == pytest.approx(1.003 * found.loss_nats, rel=1e-7)


def test_warnings_say_how_far(noisy):
    largest = noisy.span.six_nd[1]
    assert not any("beyond" in warning for warning in allocate(noisy, 20 * largest).warnings)
    far = allocate(noisy, 1000 * largest)
    assert any("FLOPs lie 1,000 times beyond" in warning for warning in far.warnings)


def test_no_number_without_a_law(exact):
    one_size = fit_runs(ladder(CHINCHILLA, sizes=np.array([1e5])), bootstrap=4)
    with pytest.raises(CannotTellError):
        allocate(one_size, 1e15)
    with pytest.raises(CannotTellError):
        exponents(one_size)
    for bad in (0.0, -1.0, math.nan, math.inf, 1e300, 1e-300):
        with pytest.raises(SpecError, match="flops = "):
            allocate(exact, bad)
    with pytest.raises(NoRunError, match="both must be from 1"):
        allocate(exact, 1e14, inference_tokens=1e20)


@pytest.mark.parametrize("terms", [{"inference_tokens": 3e7}, {"unique_tokens": 3e5, "inference_tokens": 3e6}])
def test_under_any_terms_no_size_the_budget_pays_for_is_better(noisy, terms):
    found = allocate(noisy, 1e13, **terms)
    spending = found.spending
    sizes = found.params * np.geomspace(0.05, 20, 801)
    sizes = sizes[np.log(sizes) < spending.ceiling]
    losses = [pooled_along(noisy, spending, math.log(n)) for n in sizes]
    assert math.log(found.loss_nats) <= min(losses) + 1e-9
    paid = found.training_flops + 2 * found.params * terms.get("inference_tokens", 0.0)
    assert paid == pytest.approx(1e13)
    assert found.params_interval[0] <= found.params <= found.params_interval[1]
    assert found.tokens_interval[0] <= found.tokens <= found.tokens_interval[1]
    for end in found.flat_params:
        assert pooled_along(noisy, spending, math.log(end)) <= math.log(1.003 * found.loss_nats) + 1e-7


def test_the_error_that_laws_share_moves_the_best_size(noisy):
    """Refits alone are surer of it; and a size far worse by the laws is never within."""
    still = dataclasses.replace(noisy.cloud, misfit_draws=np.zeros_like(noisy.cloud.misfit_draws))
    with_, without = (allocate(each, 1e13) for each in (noisy, dataclasses.replace(noisy, cloud=still)))
    widths = [math.log(each.params_interval[1] / each.params_interval[0]) for each in (with_, without)]
    assert widths[0] > 1.05 * widths[1]
    for budget in (1e16, 1e20):
        far = allocate(noisy, budget)
        for size in far.params_interval:
            assert predict(noisy, size, budget / 6 / size).loss_nats <= 1.001 * far.interval[1]


def test_a_falling_law_chooses_no_size(noisy):
    heavy = dataclasses.replace(noisy, weights=(0.05, 0.05, 0.9))
    assert heavy.size_weights == pytest.approx((0.5, 0.5, 0.0))
    share = noisy.size_weights[0]
    assert allocate(heavy, 1e13).params == pytest.approx(
        allocate(dataclasses.replace(noisy, weights=(0.5, 0.5, 0.0)), 1e13).params, rel=1e-6
    )
    assert 0 < share < 1


@pytest.mark.parametrize("terms", [{}, {"inference_tokens": 1e9}])
def test_a_degenerate_law_whose_best_size_is_no_size_tells_none(noisy, terms):
    """Exponents of nothing put the optimum at exp(600000): a refusal by name, not an overflow."""
    theta = np.array([1.0, 600.0, 1.0, 1e-3, 1e-3, 1.0])
    broken = dataclasses.replace(noisy.members[0], status="degenerate", theta=theta, warnings=("so flat",))
    fitted = dataclasses.replace(noisy, members=(broken,), weights=(1.0,))
    with pytest.raises(CannotTellError, match=r"degenerate.*so flat"):
        allocate(fitted, 1e22, **terms)
