"""The over-trained choice costs less over its life than any model of its loss, and the saving is counted right."""

import dataclasses
import math

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, COUPLED, ladder, law_loss
from scipy.optimize import brentq

from scaling_fits.allocation.allocate import allocate
from scaling_fits.allocation.serving import serving
from scaling_fits.forecast.uncertainty import fit_runs

SERVED = 3e7


@pytest.fixture(scope="module", params=[CHINCHILLA, COUPLED], ids=["chinchilla", "coupled"])
def exact(request):
    form = "coupled" if "k" in request.param else "chinchilla"
    return request.param, fit_runs(ladder(request.param), form, bootstrap=0)


def test_no_model_of_this_loss_is_cheaper_over_its_life(exact):
    law, fitted = exact
    found = allocate(fitted, 1e13, inference_tokens=SERVED)
    cheapest = math.inf
    for params in found.params * np.geomspace(0.3, 30, 301):
        if law_loss(law, params, 1e30) < found.loss_nats:  # tokens that reach the loss at this size, by the planted law
            log_tokens = brentq(lambda x, n=params: law_loss(law, n, math.exp(x)) - found.loss_nats, 0, 69)
            cheapest = min(cheapest, 6 * params * math.exp(log_tokens) + 2 * params * SERVED)
    assert cheapest == pytest.approx(1e13, rel=2e-3)


def test_the_compute_optimal_model_of_this_loss(exact):
    law, fitted = exact
    found = allocate(fitted, 1e13, inference_tokens=SERVED)
    told = serving(fitted, found)
    alone = allocate(fitted, 6 * told.compute_optimal_params * told.compute_optimal_tokens)
    assert alone.params == pytest.approx(told.compute_optimal_params, rel=1e-4)
    assert law_loss(law, alone.params, alone.tokens) == pytest.approx(found.loss_nats, rel=1e-4)
    life = 6 * alone.params * alone.tokens + 2 * alone.params * SERVED
    assert told.compute_optimal_life_flops.value == pytest.approx(life, rel=1e-4)
    assert told.saved_share.value == pytest.approx(1 - 1e13 / life, rel=1e-3)
    assert told.training_flops + told.serving_flops == pytest.approx(1e13)
    extra = told.training_flops - 6 * alone.params * alone.tokens
    assert told.extra_training_flops.value == pytest.approx(extra, rel=1e-3)
    assert extra > 0 and told.saved_share.value > 0
    assert told.saved_share.interval is None


@pytest.mark.slow
def test_intervals_of_the_saving_hold_the_truth():
    held = 0
    truth = fit_runs(ladder(CHINCHILLA), "chinchilla", bootstrap=0)
    wanted = serving(truth, allocate(truth, 1e13, inference_tokens=SERVED)).saved_share.value
    for seed in range(4):
        fitted = fit_runs(ladder(CHINCHILLA, np.random.default_rng(seed), 0.01), "chinchilla", bootstrap=40)
        told = serving(fitted, allocate(fitted, 1e13, inference_tokens=SERVED))
        low, high = told.saved_share.interval
        assert 0 <= low <= told.saved_share.value <= high < 1
        assert told.extra_training_flops.interval[0] <= told.extra_training_flops.value
        held += low <= wanted <= high
    assert held >= 3


def test_refits_that_all_agree_leave_no_doubt(exact):
    """The refits' own way, without a search, comes to the same numbers as the search."""
    law, _ = exact
    fitted = fit_runs(ladder(law), "coupled" if "k" in law else "chinchilla", bootstrap=5)
    member = fitted.members[0]
    sure = dataclasses.replace(
        fitted, members=(dataclasses.replace(member, draws=np.tile(member.theta, (5, 1))),), inflation=1.0
    )
    told = serving(sure, allocate(sure, 1e13, inference_tokens=SERVED))
    for ranged in (told.compute_optimal_life_flops, told.extra_training_flops, told.saved_share):
        assert ranged.interval == pytest.approx((ranged.value, ranged.value), rel=1e-5)


def test_dearer_serving_is_more_serving(exact):
    _, fitted = exact
    one = allocate(fitted, 1e13, inference_tokens=SERVED, inference_cost=3.0)
    other = allocate(fitted, 1e13, inference_tokens=3 * SERVED)
    assert one.params == pytest.approx(other.params)
    assert serving(fitted, one).serving_flops == pytest.approx(serving(fitted, other).serving_flops)
