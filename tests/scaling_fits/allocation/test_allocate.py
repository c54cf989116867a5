"""The optimum is the closed form's, its range is flat, and its warnings say how far it reaches."""

import dataclasses
import math

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, COUPLED, ladder, law_loss

from proxies.core.checks import SpecError
from scaling_fits.allocation.allocate import NoRunError, allocate
from scaling_fits.allocation.spending import expected_along
from scaling_fits.compute.isoflop import fit_isoflop
from scaling_fits.compute.optima import predict_at
from scaling_fits.forecast.uncertainty import exponents, fit_runs
from scaling_fits.laws.law import CannotTellError
from scaling_fits.laws.table import from_columns

LARGE = {"E": 1.7, "A": 400.0, "B": 1000.0, "alpha": 0.34, "beta": 0.34}
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
    assert found.loss_nats == pytest.approx(
        law_loss(CHINCHILLA, params, flops / 6 / params), rel=1e-6
    )


def test_the_best_size_is_the_middle_of_the_draws_own():
    fit = fit_runs(ladder(COUPLED, np.random.default_rng(0), 0.01), bootstrap=100)
    found = allocate(fit, 1e13)
    alpha, beta, flops = COUPLED["alpha"], COUPLED["beta"], 1e13
    g = (alpha * COUPLED["A"] / (beta * COUPLED["B"])) ** (1 / (alpha + beta))
    truth = g * (flops / 6) ** (beta / (alpha + beta))
    assert found.params_interval[0] < truth < found.params_interval[1]
    assert found.params == pytest.approx(truth, rel=0.5)


def test_runs_with_isoflop_minima_have_one_answer_for_the_best_size():
    """The law of loss and the law of optima are asked the same question."""
    sizes, budgets = np.geomspace(0.2, 5, 7), np.geomspace(1e16, 1e19, 5)
    n = np.concatenate([sizes * math.sqrt(budget / 120) for budget in budgets])
    d = np.repeat(budgets, 7) / 6 / n
    loss = law_loss(LARGE, n, d) * np.exp(0.002 * np.random.default_rng(1).standard_normal(35))
    table = from_columns(n, d, loss)
    fit = fit_runs(table, bootstrap=60)
    alone = predict_at(fit_isoflop(table, bootstrap=60, flops_from="6nd"), 1e20)
    found = allocate(fit, 1e20)
    assert found.params == pytest.approx(alone.params)
    assert found.params_interval == pytest.approx(alone.params_interval)


def test_flat_range_ends_at_three_per_mille(noisy):
    found = allocate(noisy, 1e13)
    low, high = found.flat_params
    best = math.log(found.params)
    assert low < found.params < high
    for end in (low, high):
        more = expected_along(noisy, found.spending, math.log(end)) - expected_along(
            noisy, found.spending, best
        )
        assert more == pytest.approx(math.log(1.003), abs=1e-7)


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


@pytest.mark.parametrize(
    "terms", [{"inference_tokens": 3e7}, {"unique_tokens": 3e5, "inference_tokens": 3e6}]
)
def test_under_any_terms_no_size_the_budget_pays_for_is_better(noisy, terms):
    found = allocate(noisy, 1e13, **terms)
    spending = found.spending
    sizes = found.params * np.geomspace(0.05, 20, 801)
    sizes = sizes[np.log(sizes) < spending.ceiling]
    losses = [expected_along(noisy, spending, math.log(n)) for n in sizes]
    assert expected_along(noisy, spending, math.log(found.params)) <= min(losses) + 1e-5
    paid = found.training_flops + 2 * found.params * terms.get("inference_tokens", 0.0)
    assert paid == pytest.approx(1e13)
    assert found.params_interval[0] <= found.params <= found.params_interval[1]
    assert found.tokens_interval[0] <= found.tokens <= found.tokens_interval[1]
    for end in found.flat_params:
        best = expected_along(noisy, spending, math.log(found.params))
        assert expected_along(noisy, spending, math.log(end)) <= best + math.log(1.003) + 1e-7


def test_intervals_of_the_best_size_grow_with_the_reach(noisy):
    widths = []
    for budget in (1e13, 1e16, 1e20):
        low, high = allocate(noisy, budget).params_interval
        widths.append(math.log(high / low))
    assert widths[0] < widths[1] < widths[2]


def test_a_best_run_that_nobody_would_build_is_doubted(noisy):
    lopsided = fit_runs(
        ladder({**CHINCHILLA, "A": 1e6, "alpha": 0.9}, **WIDE), "chinchilla", bootstrap=0
    )
    found = allocate(lopsided, 1e15)
    assert not 1 <= found.tokens_per_param <= 1e4
    assert any("tokens per parameter" in doubt for doubt in found.doubts)


@pytest.mark.parametrize("terms", [{}, {"inference_tokens": 1e9}])
def test_a_degenerate_law_whose_best_size_is_no_size_tells_none(noisy, terms):
    """Exponents of nothing put the optimum at exp(600000): a refusal by name, not an overflow."""
    theta = np.array([1.0, 600.0, 1.0, 1e-3, 1e-3, 1.0])
    broken = dataclasses.replace(noisy.fit, status="degenerate", theta=theta, warnings=("so flat",))
    posterior = dataclasses.replace(noisy.posterior, theta=np.tile(theta, (len(noisy.laws), 1)))
    fitted = dataclasses.replace(noisy, fit=broken, posterior=posterior)
    with pytest.raises(CannotTellError, match=r"degenerate.*so flat"):
        allocate(fitted, 1e22, **terms)
