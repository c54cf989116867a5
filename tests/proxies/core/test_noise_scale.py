"""Tests of the gradient noise scale: its estimate, its growth during training, and its schedule.

A look measures the gradients of several parts of a batch at one step of a run. It keeps the product
of each pair of these gradients (the Gram matrix). Gradients and laws with known scales are planted.
The estimators must recover them, with intervals that contain the truth as often as their level
states. Suffixes of arrays name their dimensions: M parts, B sequences, and D entries of a gradient.
"""

import dataclasses
import math

import numpy as np
import pytest

from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.noise_scale import (
    LAST_LOOK,
    MAX_LOOKS,
    MAX_PASSES,
    MIN_PASSES,
    RUN_PASSES_PER_LOOK_PASS,
    NoiseLook,
    NoisePoint,
    compute_t_quantile,
    estimate_inverse_scale,
    estimate_noise_scale,
    fit_noise_law,
    plan_looks,
)

SEQ_LEN = 64
NUM_SEQUENCES = 8
"""Sequences of each part of a look."""


def make_look(rng, scale_sequences, num_parts=16, heavy=False, step=100):
    """Return a look at random gradients with a planted noise scale.

    Each sequence's gradient is G + noise with tr(S) / |G|^2 = `scale_sequences`, where S is the
    covariance of the noise. The noise is uneven over directions.

    Args:
        heavy: Whether the noise has heavy tails.
    """
    spectrum = 1.0 / np.arange(1, 201)
    spectrum *= scale_sequences / spectrum.sum()
    true_D = np.sqrt(spectrum) * rng.normal(size=200)  # mostly in the directions of the noise
    true_D /= np.linalg.norm(true_D)
    noise_MBD = rng.normal(size=(num_parts, NUM_SEQUENCES, 200)) * np.sqrt(spectrum)
    if heavy:
        noise_MBD *= np.sqrt(rng.exponential(size=(num_parts, NUM_SEQUENCES, 1)))
    parts_MD = true_D + noise_MBD.mean(axis=1)
    return NoiseLook(
        step=step,
        num_sequences=NUM_SEQUENCES,
        gram=tuple(map(tuple, (parts_MD @ parts_MD.T).tolist())),
    )


@pytest.mark.parametrize("scale_sequences", [4.0, 20.0, 60.0])
@pytest.mark.parametrize("heavy", [False, True])
def test_intervals_contain_planted_scales_at_their_level(scale_sequences, heavy):
    rng, true_tokens = np.random.default_rng(3), scale_sequences * SEQ_LEN
    num_covered, inverses = 0, []
    for _ in range(250):
        look = make_look(rng, scale_sequences, heavy=heavy)
        scale = estimate_noise_scale([look], SEQ_LEN, 0.9)
        num_covered += scale.low <= true_tokens <= (scale.high or math.inf)
        inverses.append(estimate_inverse_scale([look], SEQ_LEN)[0])
    # The lower bound is 0.9 less two standard errors. The jackknife is wide where noise dominates.
    assert 0.86 <= num_covered / 250 <= 0.99
    assert np.mean(inverses) * true_tokens == pytest.approx(1.0, abs=0.12)


def test_several_looks_are_more_precise_than_a_single_one():
    rng = np.random.default_rng(0)
    looks = [make_look(rng, 20.0, num_parts=6, step=step) for step in range(12)]
    single = estimate_noise_scale(looks[:1], SEQ_LEN)
    pooled = estimate_noise_scale(looks, SEQ_LEN)
    assert pooled.low <= 20 * SEQ_LEN <= pooled.high
    assert pooled.high / pooled.low < 0.5 * (single.high or math.inf) / single.low


def test_scale_is_in_tokens_and_independent_of_the_unit_of_gradients():
    look = make_look(np.random.default_rng(1), 20.0)
    scale = estimate_noise_scale([look], SEQ_LEN)
    doubled = estimate_noise_scale([look], 2 * SEQ_LEN)
    assert doubled.tokens == pytest.approx(2 * scale.tokens)
    scaled_gram = tuple(tuple(7.0 * value for value in row) for row in look.gram)
    scaled_look = dataclasses.replace(look, gram=scaled_gram)
    assert estimate_noise_scale([scaled_look], SEQ_LEN).tokens == pytest.approx(scale.tokens)


def test_pure_noise_has_an_interval_without_upper_end():
    rng, num_open = np.random.default_rng(5), 0
    for _ in range(100):
        parts = rng.normal(size=(8, 500))
        gram = tuple(map(tuple, (parts @ parts.T).tolist()))
        scale = estimate_noise_scale([NoiseLook(step=1, num_sequences=8, gram=gram)], SEQ_LEN)
        num_open += scale.high is None
    assert num_open >= 90


def test_looks_without_noise_or_with_too_few_parts_are_refused():
    with pytest.raises(ValueError, match="no noise"):
        estimate_inverse_scale(
            [NoiseLook(step=1, num_sequences=1, gram=((1.0,) * 3,) * 3)], SEQ_LEN
        )
    with pytest.raises(ValueError, match="three parts"):
        estimate_inverse_scale(
            [NoiseLook(step=1, num_sequences=1, gram=((1.0, 0.1), (0.1, 1.0)))], SEQ_LEN
        )
    with pytest.raises(SpecError, match="square"):
        NoiseLook(step=1, num_sequences=1, gram=((1.0, 0.1), (0.1,)))
    with pytest.raises(SpecError, match="finite"):
        NoiseLook(step=1, num_sequences=1, gram=((1.0, math.nan), (0.1, 1.0)))


@pytest.mark.parametrize(
    ("num_steps", "passes_per_step"), [(200, 1), (600, 1), (1600, 1), (500, 16), (10**6, 4)]
)
def test_planned_looks_stay_within_their_share_of_the_passes(num_steps, passes_per_step):
    looks = plan_looks(num_steps, passes_per_step)
    assert 0 < sum(looks.values()) <= num_steps * passes_per_step / RUN_PASSES_PER_LOOK_PASS
    assert len(looks) <= MAX_LOOKS
    assert max(looks.values()) <= MAX_PASSES
    assert max(looks) == int(LAST_LOOK * num_steps)


def test_short_run_has_no_look():
    # The shortest look takes MIN_PASSES passes; at most one pass in RUN_PASSES_PER_LOOK_PASS of
    # the run may be spent on it.
    min_steps = MIN_PASSES * RUN_PASSES_PER_LOOK_PASS
    assert plan_looks(min_steps - 1, 1) == {}
    assert plan_looks(min_steps, 1) != {}


LAST_TOKENS = 4e5
"""Training tokens of the longest runs that a law is fitted to."""


def compute_planted_scale(tokens, exponent):
    """Return the planted noise scale in tokens, which is 4,000 after 200,000 training tokens."""
    return 4000 * (tokens / 2e5) ** exponent


def make_points(rng, exponent, error, scatter=0.4):
    """Return inverse scales at four training lengths, under a planted law of noise scale.

    The scale grows with a power of the training tokens. The inverse scales of shorter runs have
    larger errors.

    Args:
        exponent: Power of the law.
        error: Standard error of an inverse scale at the longest training.
        scatter: Standard deviation of the log of the true scale between runs.
    """
    tokens = np.repeat([5e4, 1.5e5, 2e5, LAST_TOKENS], 3)
    errors = np.repeat([2.5 * error, 1.2 * error, error, error], 3)
    scales = compute_planted_scale(tokens, exponent)
    run_factors = np.exp(scatter * rng.normal(size=12) - scatter**2 / 2)
    inverses = run_factors / scales + errors * rng.normal(size=12)
    return [
        NoisePoint(tokens=float(t), inverse=float(i), error=float(e))
        for t, i, e in zip(tokens, inverses, errors, strict=True)
    ]


@pytest.mark.parametrize("exponent", [0.0, 0.4])
@pytest.mark.parametrize("error", [2e-5, 1e-4])
def test_intervals_of_a_law_contain_the_planted_law_at_their_level(exponent, error):
    """A single point with the larger error is compatible with an inverse scale of zero."""
    rng, exponents = np.random.default_rng(2), []
    num_forecasts_covered = num_exponents_covered = 0
    for _ in range(200):
        law = fit_noise_law(make_points(rng, exponent, error), 0.9)
        forecast_tokens = 10 * LAST_TOKENS
        _, low, high = law.at(forecast_tokens)
        num_forecasts_covered += low <= compute_planted_scale(forecast_tokens, exponent) <= high
        num_exponents_covered += law.exponent_interval[0] <= exponent <= law.exponent_interval[1]
        exponents.append(law.exponent)
    # Both bounds are 0.9 less nearly three standard errors.
    assert num_forecasts_covered / 200 >= 0.84
    assert num_exponents_covered / 200 >= 0.84
    assert np.mean(exponents) == pytest.approx(exponent, abs=0.1)


def test_no_law_is_fitted_to_few_points_a_single_length_or_negative_scales():
    points = make_points(np.random.default_rng(0), 0.3, 2e-5)
    assert fit_noise_law(points) is not None
    assert fit_noise_law(points[:4]) is None
    same_length = [dataclasses.replace(point, tokens=1e5) for point in points]
    assert fit_noise_law(same_length) is None
    negative = [dataclasses.replace(point, inverse=-point.inverse) for point in points]
    assert fit_noise_law(negative) is None


def test_t_quantiles_match_published_tables():
    assert compute_t_quantile(0.95, 3) == pytest.approx(2.3534, rel=2e-3)
    assert compute_t_quantile(0.95, 15) == pytest.approx(1.7531, rel=1e-4)
    assert compute_t_quantile(0.975, 7) == pytest.approx(2.3646, rel=1e-3)


def test_forecast_beyond_the_last_point_includes_a_scale_that_stays_constant():
    law = fit_noise_law(make_points(np.random.default_rng(4), 0.9, 2e-5, scatter=0.1))
    assert law.exponent_interval[0] > 0.4, "the fitted scale surely grows"
    _, last_low, _ = law.at(LAST_TOKENS)
    middle, low, high = law.at(100 * LAST_TOKENS)
    assert low == last_low
    assert low < middle / 10
    assert high > middle
