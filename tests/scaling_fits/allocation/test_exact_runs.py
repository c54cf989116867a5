"""An exact count buys other tokens than 6ND, for training and for serving."""

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, ladder, law_loss

from scaling_fits.allocation.allocate import allocate, exact_run
from scaling_fits.allocation.shapes import ShapeRequest, choose_shape
from scaling_fits.forecast.uncertainty import fit_runs

FLOPS = 1e16


@pytest.fixture(scope="module")
def fitted():
    return fit_runs(ladder(CHINCHILLA), "chinchilla", bootstrap=0)


def option(allocation, seq_len=2048):
    return choose_shape(
        ShapeRequest(params=allocation.params, vocab_size=1024, seq_len=seq_len)
    ).option


def test_training_alone(fitted):
    best = allocate(fitted, FLOPS)
    shape = option(best)
    run = exact_run(fitted, best, shape)
    assert run.tokens * shape.flops_per_token == pytest.approx(FLOPS)
    assert run.loss_nats == pytest.approx(law_loss(CHINCHILLA, shape.params, run.tokens), rel=1e-5)
    assert run.interval is None


def test_serving_costs_a_third_a_token(fitted):
    best = allocate(fitted, FLOPS, inference_tokens=3e7)
    shape = option(best)
    run = exact_run(fitted, best, shape)
    assert run.tokens * shape.flops_per_token + 3e7 * shape.flops_per_token / 3 == pytest.approx(
        FLOPS
    )
    assert (
        exact_run(fitted, allocate(fitted, FLOPS, inference_tokens=1e10), option(best, 10**7))
        is None
    )


def test_repeats_count_for_less(fitted):
    best = allocate(fitted, FLOPS, unique_tokens=1e6)
    shape = option(best)
    run = exact_run(fitted, best, shape)
    assert run.loss_nats > law_loss(CHINCHILLA, shape.params, run.tokens)
    assert np.isfinite(run.loss_nats)
