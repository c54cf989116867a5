"""Tests of the tokens that a budget trains when a shape's exact FLOPs replace 6ND, for training and
for serving.
"""

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, compute_law_loss, make_ladder

from forerun._scaling_fits.allocation.allocate import allocate, compute_exact_run
from forerun._scaling_fits.allocation.shapes import ShapeRequest, choose_shape
from forerun._scaling_fits.forecast.uncertainty import fit_runs

FLOPS = 1e16


@pytest.fixture(scope="module")
def law_fit():
    """A fit of runs without noise."""
    return fit_runs(make_ladder(CHINCHILLA), "chinchilla", bootstrap=0)


def choose_option(allocation, seq_len=2048):
    """Return the shape that is chosen for an allocation."""
    return choose_shape(
        ShapeRequest(params=allocation.params, vocab_size=1024, seq_len=seq_len)
    ).option


def test_tokens_spend_the_budget_on_training(law_fit):
    best = allocate(law_fit, FLOPS)
    shape = choose_option(best)
    run = compute_exact_run(law_fit, best, shape)
    assert run.tokens * shape.flops_per_token == pytest.approx(FLOPS)
    assert run.loss_nats == pytest.approx(
        compute_law_loss(CHINCHILLA, shape.params, run.tokens), rel=1e-5
    )
    assert run.interval is None


def test_serving_a_token_costs_a_third_of_training_it(law_fit):
    best = allocate(law_fit, FLOPS, inference_tokens=3e7)
    shape = choose_option(best)
    run = compute_exact_run(law_fit, best, shape)
    assert run.tokens * shape.flops_per_token + 3e7 * shape.flops_per_token / 3 == pytest.approx(
        FLOPS
    )
    assert (
        compute_exact_run(
            law_fit, allocate(law_fit, FLOPS, inference_tokens=1e10), choose_option(best, 10**7)
        )
        is None
    )


def test_repeated_tokens_give_a_higher_loss(law_fit):
    best = allocate(law_fit, FLOPS, unique_tokens=1e6)
    shape = choose_option(best)
    run = compute_exact_run(law_fit, best, shape)
    assert run.loss_nats > compute_law_loss(CHINCHILLA, shape.params, run.tokens)
    assert np.isfinite(run.loss_nats)
