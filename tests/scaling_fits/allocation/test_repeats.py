"""What repeats are worth: the published curve, its limits, and what a limit on data does to a
choice.
"""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, ladder

from scaling_fits.allocation import repeats
from scaling_fits.allocation.allocate import allocate
from scaling_fits.forecast.uncertainty import expected_log_loss, fit_runs
from scaling_fits.laws.table import from_columns

PUBLIC = (
    Path(__file__).resolve().parents[3].parent / "shared" / "data" / "datablations" / "runs.csv"
)


@pytest.fixture(scope="module")
def fitted():
    return fit_runs(ladder(CHINCHILLA, np.random.default_rng(0), 0.01), bootstrap=40)


@pytest.mark.parametrize("epochs", [1.5, 16.0])
def test_the_published_formula(epochs):
    unique = 1e9
    worth, slope = repeats.discount_repeats(np.array([math.log(epochs * unique)]), unique, 15.39)
    wanted = unique + unique * 15.39 * (1 - math.exp(-(epochs - 1) / 15.39))
    assert math.exp(worth[0]) == pytest.approx(wanted)
    step = 1e-6
    more, _ = repeats.discount_repeats(np.array([math.log(epochs * unique) + step]), unique, 15.39)
    assert math.exp(slope[0]) == pytest.approx((more[0] - worth[0]) / step, rel=1e-4)


def test_fresh_data_and_endless_repeats():
    assert repeats.discount_repeats(np.array([5.0]), math.exp(6), 15.39) == (5.0, 0.0)
    assert repeats.discount_repeats(np.array([5.0]), None, 15.39) == (5.0, 0.0)
    worth, _ = repeats.discount_repeats(np.array([650.0]), 1e9, 15.39)
    assert math.exp(worth[0]) == pytest.approx(16.39e9)


def test_a_limit_that_binds_costs_and_is_warned_of(fitted):
    losses = []
    for unique in (1e6, 3e5, 3e4):
        found = allocate(fitted, 1e13, unique_tokens=unique)
        limit = found.data_limit
        assert limit.epochs == pytest.approx(found.tokens / unique)
        assert limit.effective_tokens <= unique * 16.39
        losses.append(found.loss_nats)
    assert losses[0] < losses[1] < losses[2]
    assert any("borrowed" in warning for warning in found.warnings)
    assert any("epochs: beyond 4" in warning for warning in found.warnings)


def test_the_size_the_unique_tokens_fill_is_the_larger_of_the_fits_and_the_papers():
    law = fit_runs(ladder(CHINCHILLA), "chinchilla", bootstrap=0)
    best = allocate(law, 1e13)  # of few tokens per parameter
    assert repeats.compute_fitting_params(law, best.tokens) == pytest.approx(best.params, rel=1e-6)
    spare = fit_runs(ladder({**CHINCHILLA, "B": 3000.0}), "chinchilla", bootstrap=0)
    best = allocate(spare, 1e13)
    assert best.tokens_per_param > 19.5
    assert repeats.compute_fitting_params(spare, best.tokens) == pytest.approx(best.tokens / 19.5)


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public runs are not beside the checkout")
def test_on_public_repeated_runs_it_is_on_the_safe_side():
    """Laws of the runs of one epoch, asked for those of up to 15."""
    with PUBLIC.open() as file:
        rows = list(csv.DictReader(file))
    n, d, u, loss = (
        np.array([float(row[k]) for row in rows])
        for k in ("params", "tokens", "unique_tokens", "loss")
    )
    once = d <= 1.01 * u
    fitted = fit_runs(from_columns(n[once], d[once], loss[once]), bootstrap=0)

    def median_error(kept, params, tokens):
        said = np.exp(expected_log_loss(fitted, params[kept], tokens[kept]))
        return np.median(said / loss[kept] - 1)

    fill = [repeats.compute_fitting_params(fitted, unique) for unique in u]
    counted = [
        np.exp(
            [
                repeats.discount_repeats(np.log(np.array([x])), limit, half)[0][0]
                for x, limit in zip(of, limits, strict=True)
            ]
        )
        for of, limits, half in ((n, fill, repeats.PARAMS_HALF), (d, u, repeats.TOKENS_HALF))
    ]
    for kept in (~once & (d <= 5 * u), (d > 5 * u) & (d <= 15 * u)):
        assert kept.sum() > 50
        assert 0 < median_error(kept, *counted) < 0.05
