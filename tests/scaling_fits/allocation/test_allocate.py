"""Tests of the best size for a budget: it matches the closed form and is better than other sizes,
and budgets that a fit cannot answer are refused or doubted.
"""

import dataclasses
import math

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, COUPLED, compute_law_loss, make_ladder

from forerun._proxies.core.checks import SpecError
from forerun._scaling_fits.allocation.allocate import NoRunError, allocate
from forerun._scaling_fits.allocation.spending import compute_expected_loss
from forerun._scaling_fits.forecast.uncertainty import compute_exponents, fit_runs
from forerun._scaling_fits.laws.law import CannotTellError
from forerun._scaling_fits.laws.table import from_columns
from forerun._scaling_fits.optima.isoflop import fit_isoflop
from forerun._scaling_fits.optima.optima_fit import predict_at

EVEN_GROWTH = {"E": 1.7, "A": 400.0, "B": 1000.0, "alpha": 0.34, "beta": 0.34}
"""A law with equal exponents: at every budget, the best run has 15 tokens per parameter."""
WIDE = {"sizes": np.geomspace(1e5, 1e8, 5), "tokens": np.geomspace(1e6, 1e9, 5)}


@pytest.fixture(scope="module")
def exact_fit():
    """A fit of runs without noise."""
    return fit_runs(make_ladder(CHINCHILLA, **WIDE), "chinchilla", bootstrap=0)


@pytest.fixture(scope="module")
def noisy_fit():
    """A fit of twelve runs with noise."""
    return fit_runs(make_ladder(CHINCHILLA, np.random.default_rng(0), noise=0.01), bootstrap=40)


def test_best_size_matches_the_closed_form(exact_fit):
    flops = 6e17
    alpha, beta = CHINCHILLA["alpha"], CHINCHILLA["beta"]
    g = (alpha * CHINCHILLA["A"] / (beta * CHINCHILLA["B"])) ** (1 / (alpha + beta))
    params = g * (flops / 6) ** (beta / (alpha + beta))
    allocation = allocate(exact_fit, flops)
    assert allocation.params == pytest.approx(params, rel=1e-3)
    assert 6 * allocation.params * allocation.tokens == pytest.approx(flops)
    assert allocation.tokens_per_param == pytest.approx(allocation.tokens / allocation.params)
    assert allocation.loss_nats == pytest.approx(
        compute_law_loss(CHINCHILLA, params, flops / 6 / params), rel=1e-6
    )


def test_best_size_and_its_interval_match_a_planted_law():
    fit = fit_runs(make_ladder(COUPLED, np.random.default_rng(0), noise=0.01), bootstrap=100)
    allocation = allocate(fit, 1e13)
    alpha, beta, flops = COUPLED["alpha"], COUPLED["beta"], 1e13
    g = (alpha * COUPLED["A"] / (beta * COUPLED["B"])) ** (1 / (alpha + beta))
    truth = g * (flops / 6) ** (beta / (alpha + beta))
    assert allocation.params_interval[0] < truth < allocation.params_interval[1]
    assert allocation.params == pytest.approx(truth, rel=0.5)


def test_allocation_and_isoflop_fit_agree_on_the_best_size():
    """Both use the same isoFLOP minima of noisy runs, so they differ by rounding errors only."""
    budgets, ratios = np.geomspace(1e16, 1e19, 5), np.geomspace(0.2, 5, 7)
    # Seven sizes of each budget, about the one with 20 tokens per parameter
    middle_sizes = np.sqrt(budgets / (6 * 20))
    n = np.outer(middle_sizes, ratios).ravel()
    d = np.repeat(budgets, 7) / 6 / n
    loss = compute_law_loss(EVEN_GROWTH, n, d) * np.exp(
        0.002 * np.random.default_rng(1).standard_normal(35)
    )
    table = from_columns(n, d, loss)
    fit = fit_runs(table, bootstrap=60)
    isoflop_prediction = predict_at(fit_isoflop(table, bootstrap=60, flops_from="6nd"), 1e20)
    allocation = allocate(fit, 1e20)
    assert allocation.params == pytest.approx(isoflop_prediction.params, rel=1e-12)
    assert allocation.params_interval == pytest.approx(
        isoflop_prediction.params_interval, rel=1e-12
    )


def test_flat_range_ends_where_the_loss_is_three_per_mille_higher(noisy_fit):
    allocation = allocate(noisy_fit, 1e13)
    low, high = allocation.flat_params
    best = math.log(allocation.params)
    assert low < allocation.params < high
    for end in (low, high):
        loss_at_end = compute_expected_loss(noisy_fit, allocation.spending, math.log(end))
        best_loss = compute_expected_loss(noisy_fit, allocation.spending, best)
        assert loss_at_end - best_loss == pytest.approx(math.log(1.003), abs=1e-7)


def test_budget_far_beyond_the_runs_has_a_warning(noisy_fit):
    largest = noisy_fit.span.six_nd[1]
    assert not any("beyond" in warning for warning in allocate(noisy_fit, 20 * largest).warnings)
    far = allocate(noisy_fit, 1000 * largest)
    assert any("FLOPs lie 1,000 times beyond" in warning for warning in far.warnings)


def test_unanswerable_budgets_are_refused(exact_fit):
    one_size = fit_runs(make_ladder(CHINCHILLA, sizes=np.array([1e5])), bootstrap=4)
    with pytest.raises(CannotTellError):
        allocate(one_size, 1e15)
    with pytest.raises(CannotTellError):
        compute_exponents(one_size)
    for bad in (0.0, -1.0, math.nan, math.inf, 1e300, 1e-300):
        with pytest.raises(SpecError, match="flops = "):
            allocate(exact_fit, bad)
    with pytest.raises(NoRunError, match="both must be from 1"):
        allocate(exact_fit, 1e14, inference_tokens=1e20)


@pytest.mark.parametrize(
    "terms", [{"inference_tokens": 3e7}, {"unique_tokens": 3e5, "inference_tokens": 3e6}]
)
def test_no_other_affordable_size_is_better(noisy_fit, terms):
    allocation = allocate(noisy_fit, 1e13, **terms)
    spending = allocation.spending
    sizes = allocation.params * np.geomspace(0.05, 20, 801)
    sizes = sizes[np.log(sizes) < spending.ceiling]
    losses = [compute_expected_loss(noisy_fit, spending, math.log(n)) for n in sizes]
    assert (
        compute_expected_loss(noisy_fit, spending, math.log(allocation.params))
        <= min(losses) + 1e-5
    )
    flops_spent = allocation.training_flops + 2 * allocation.params * terms.get(
        "inference_tokens", 0.0
    )
    assert flops_spent == pytest.approx(1e13)
    assert allocation.params_interval[0] <= allocation.params <= allocation.params_interval[1]
    assert allocation.tokens_interval[0] <= allocation.tokens <= allocation.tokens_interval[1]
    for end in allocation.flat_params:
        best = compute_expected_loss(noisy_fit, spending, math.log(allocation.params))
        assert (
            compute_expected_loss(noisy_fit, spending, math.log(end))
            <= best + math.log(1.003) + 1e-7
        )


def test_intervals_of_the_best_size_grow_with_the_budget(noisy_fit):
    widths = []
    for budget in (1e13, 1e16, 1e20):
        low, high = allocate(noisy_fit, budget).params_interval
        widths.append(math.log(high / low))
    assert widths[0] < widths[1] < widths[2]


def test_implausible_best_run_is_doubted():
    lopsided = fit_runs(
        make_ladder({**CHINCHILLA, "A": 1e6, "alpha": 0.9}, **WIDE), "chinchilla", bootstrap=0
    )
    allocation = allocate(lopsided, 1e15)
    assert not 1 <= allocation.tokens_per_param <= 1e4
    assert any("tokens per parameter" in doubt for doubt in allocation.doubts)


@pytest.mark.parametrize("terms", [{}, {"inference_tokens": 1e9}])
def test_degenerate_law_without_a_finite_best_size_is_refused(noisy_fit, terms):
    """Exponents near zero put the optimum at exp(600000), which must not overflow."""
    theta = np.array([1.0, 600.0, 1.0, 1e-3, 1e-3, 1.0])
    broken = dataclasses.replace(
        noisy_fit.fit, status="degenerate", theta=theta, warnings=("so flat",)
    )
    posterior = dataclasses.replace(
        noisy_fit.posterior, theta=np.tile(theta, (len(noisy_fit.laws), 1))
    )
    fitted = dataclasses.replace(noisy_fit, fit=broken, posterior=posterior)
    with pytest.raises(CannotTellError, match=r"degenerate.*so flat"):
        allocate(fitted, 1e22, **terms)
