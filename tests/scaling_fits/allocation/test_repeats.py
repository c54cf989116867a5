"""Tests of repeated tokens, which count for less than fresh ones: the published discount (arXiv
2305.16264), its limits, and its effect on an allocation.
"""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, make_ladder

from forerun._scaling_fits.allocation import repeats
from forerun._scaling_fits.allocation.allocate import allocate
from forerun._scaling_fits.forecast.uncertainty import compute_expected_log_loss, fit_runs
from forerun._scaling_fits.laws.table import from_columns

PUBLIC = (
    Path(__file__).resolve().parents[3].parent / "shared" / "data" / "datablations" / "runs.csv"
)


DECAY = 15.39
"""Published constant R* of the discount: repeats are worth at most this many times the unique
tokens."""


@pytest.fixture(scope="module")
def law_fit():
    """A fit of twelve noisy runs with the planted law `CHINCHILLA`."""
    return fit_runs(make_ladder(CHINCHILLA, np.random.default_rng(0), noise=0.01), bootstrap=40)


@pytest.mark.parametrize("epochs", [1.5, 16.0])
def test_discount_matches_the_published_formula(epochs):
    unique = 1e9
    log_tokens = np.array([math.log(epochs * unique)])
    log_worth, log_slope = repeats.discount_repeats(log_tokens, unique, DECAY)
    expected_tokens = unique + unique * DECAY * (1 - math.exp(-(epochs - 1) / DECAY))
    assert math.exp(log_worth[0]) == pytest.approx(expected_tokens)
    # The slope against a numerical derivative
    step = 1e-6
    log_worth_after, _ = repeats.discount_repeats(log_tokens + step, unique, DECAY)
    derivative = (log_worth_after[0] - log_worth[0]) / step
    assert math.exp(log_slope[0]) == pytest.approx(derivative, rel=1e-4)


def test_fresh_tokens_are_not_discounted_and_repeats_have_a_limit():
    assert repeats.discount_repeats(np.array([5.0]), math.exp(6), DECAY) == (5.0, 0.0)
    assert repeats.discount_repeats(np.array([5.0]), None, DECAY) == (5.0, 0.0)
    log_worth, _ = repeats.discount_repeats(np.array([650.0]), 1e9, DECAY)
    assert math.exp(log_worth[0]) == pytest.approx((1 + DECAY) * 1e9)


def test_binding_limit_of_unique_tokens_raises_the_loss_and_is_warned_about(law_fit):
    losses = []
    for unique in (1e6, 3e5, 3e4):
        allocation = allocate(law_fit, 1e13, unique_tokens=unique)
        limit = allocation.data_limit
        assert limit.epochs == pytest.approx(allocation.tokens / unique)
        assert limit.effective_tokens <= unique * (1 + DECAY)
        losses.append(allocation.loss_nats)
    assert losses[0] < losses[1] < losses[2]
    assert any("borrowed" in warning for warning in allocation.warnings)
    assert any("epochs: beyond 4" in warning for warning in allocation.warnings)


def test_fitting_size_is_the_larger_of_the_fitted_and_the_published_one():
    law = fit_runs(make_ladder(CHINCHILLA), "chinchilla", bootstrap=0)
    # The best run of this law has few tokens per parameter, so the fitted size is the larger one
    best = allocate(law, 1e13)
    assert repeats.compute_fitting_params(law, best.tokens) == pytest.approx(best.params, rel=1e-6)
    token_hungry_law = fit_runs(make_ladder({**CHINCHILLA, "B": 3000.0}), "chinchilla", bootstrap=0)
    best = allocate(token_hungry_law, 1e13)
    published_ratio = 19.5  # tokens per parameter
    assert best.tokens_per_param > published_ratio
    assert repeats.compute_fitting_params(token_hungry_law, best.tokens) == pytest.approx(
        best.tokens / published_ratio
    )


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public runs are not next to the checkout")
def test_discount_slightly_overestimates_losses_of_public_repeated_runs():
    """A law fitted to the runs of one epoch predicts those of up to 15 epochs, and no more."""
    with PUBLIC.open() as file:
        rows = list(csv.DictReader(file))
    n, d, u, loss = (
        np.array([float(row[k]) for row in rows])
        for k in ("params", "tokens", "unique_tokens", "loss")
    )
    once = d <= 1.01 * u
    law_fit = fit_runs(from_columns(n[once], d[once], loss[once]), bootstrap=0)

    def compute_median_error(kept, params, tokens):
        predicted_losses = np.exp(compute_expected_log_loss(law_fit, params[kept], tokens[kept]))
        return np.median(predicted_losses / loss[kept] - 1)

    def discount(counts, limits, decay):
        log_counts = []
        for count, limit in zip(counts, limits, strict=True):
            discounted, _ = repeats.discount_repeats(np.log(np.array([count])), limit, decay)
            log_counts.append(discounted[0])
        return np.exp(log_counts)

    fitting_params = [repeats.compute_fitting_params(law_fit, unique) for unique in u]
    params = discount(n, fitting_params, repeats.PARAMS_DECAY)
    tokens = discount(d, u, repeats.TOKENS_DECAY)
    # These errors are stated in repeats.py.
    for kept, error in (
        (~once & (d <= 5 * u), 0.009),
        ((d > 5 * u) & (d <= 15 * u), 0.021),
        (d > repeats.FORM_EPOCHS * u, 0.11),
    ):
        assert kept.sum() > 50
        assert compute_median_error(kept, params, tokens) == pytest.approx(error, abs=0.002)
