"""The noise scale's estimator finds planted ones, with intervals that cover as often as they say,
and refuses.
"""

import math

import numpy as np
import pytest

from proxies.core.checks import SpecError
from proxies.core.noise_scale import (
    LAST_LOOK,
    MOST_LOOKS,
    MOST_PASSES,
    SHARE,
    NoiseLook,
    NoisePoint,
    inverse_scale,
    look_passes,
    noise_law,
    noise_scale,
    student_t,
)

SEQ_LEN = 64


def look_of(rng, scale_sequences, num_parts=16, num_sequences=8, heavy=False, step=100):
    """Gradients G + noise of sequences with tr(S) / |G|^2 = `scale_sequences`, the noise uneven
    over directions.
    """
    spectrum = 1.0 / np.arange(1, 201)
    spectrum *= scale_sequences / spectrum.sum()
    true_D = np.sqrt(spectrum) * rng.normal(size=200)  # mostly where the noise is
    true_D /= np.linalg.norm(true_D)
    noise_MBD = rng.normal(size=(num_parts, num_sequences, 200)) * np.sqrt(spectrum)
    if heavy:
        noise_MBD *= np.sqrt(rng.exponential(size=(num_parts, num_sequences, 1)))
    parts_MD = true_D + noise_MBD.mean(axis=1)
    return NoiseLook(
        step=step,
        num_sequences=num_sequences,
        gram=tuple(map(tuple, (parts_MD @ parts_MD.T).tolist())),
    )


@pytest.mark.parametrize("scale_sequences", [4.0, 20.0, 60.0])
@pytest.mark.parametrize("heavy", [False, True])
def test_planted_scales_lie_inside_their_intervals_as_often_as_these_say(scale_sequences, heavy):
    rng, true, inside, inverses = np.random.default_rng(3), scale_sequences * SEQ_LEN, 0, []
    for _ in range(250):
        look = look_of(rng, scale_sequences, heavy=heavy)
        found = noise_scale([look], SEQ_LEN, 0.9)
        inside += found.low <= true <= (found.high or math.inf)
        inverses.append(inverse_scale([look], SEQ_LEN)[0])
    # .9 less three standard errors; the jackknife is wide where noise dominates
    assert 0.86 <= inside / 250 <= 0.99
    assert np.mean(inverses) * true == pytest.approx(1.0, abs=0.12)


def test_looks_together_are_more_precise_than_one():
    rng = np.random.default_rng(0)
    looks = [look_of(rng, 20.0, num_parts=6, step=step) for step in range(12)]
    one, all_of_them = (noise_scale(some, SEQ_LEN) for some in (looks[:1], looks))
    assert all_of_them.low <= 20 * SEQ_LEN <= all_of_them.high
    assert all_of_them.high / all_of_them.low < 0.5 * (one.high or math.inf) / one.low


def test_the_units_are_tokens_of_sequences():
    look = look_of(np.random.default_rng(1), 20.0)
    assert noise_scale([look], 2 * SEQ_LEN).tokens == pytest.approx(
        2 * noise_scale([look], SEQ_LEN).tokens
    )
    # A factor for all of a gradient's entries changes nothing.
    scaled = tuple(tuple(7.0 * value for value in row) for row in look.gram)
    again = NoiseLook(step=100, num_sequences=8, gram=scaled)
    assert noise_scale([again], SEQ_LEN).tokens == pytest.approx(
        noise_scale([look], SEQ_LEN).tokens
    )


def test_noise_alone_has_a_lower_end_and_no_upper_one():
    rng, open_above = np.random.default_rng(5), 0
    for _ in range(100):
        parts = rng.normal(size=(8, 500))
        gram = tuple(map(tuple, (parts @ parts.T).tolist()))
        found = noise_scale([NoiseLook(step=1, num_sequences=8, gram=gram)], SEQ_LEN)
        open_above += found.high is None
    assert open_above >= 90


def test_equal_parts_and_too_few_are_refused():
    with pytest.raises(ValueError, match="no noise"):
        inverse_scale([NoiseLook(step=1, num_sequences=1, gram=((1.0,) * 3,) * 3)], SEQ_LEN)
    with pytest.raises(ValueError, match="three parts"):
        inverse_scale([NoiseLook(step=1, num_sequences=1, gram=((1.0, 0.1), (0.1, 1.0)))], SEQ_LEN)
    with pytest.raises(SpecError, match="square"):
        NoiseLook(step=1, num_sequences=1, gram=((1.0, 0.1), (0.1,)))
    with pytest.raises(SpecError, match="finite"):
        NoiseLook(step=1, num_sequences=1, gram=((1.0, math.nan), (0.1, 1.0)))


@pytest.mark.parametrize(
    ("num_steps", "passes_per_step"), [(200, 1), (600, 1), (1600, 1), (500, 16), (10**6, 4)]
)
def test_looks_take_a_sixtieth_of_the_passes_at_most(num_steps, passes_per_step):
    looks = look_passes(num_steps, passes_per_step)
    assert 0 < sum(looks.values()) <= num_steps * passes_per_step / SHARE
    assert len(looks) <= MOST_LOOKS
    assert max(looks.values()) <= MOST_PASSES
    assert max(looks) == int(LAST_LOOK * num_steps)


def test_a_run_too_short_for_a_look_has_none():
    assert look_passes(179, 1) == {}


def points_of(rng, exponent, error, scatter=0.4):
    tokens = np.repeat([5e4, 1.5e5, 2e5, 4e5], 3)
    errors = np.repeat([2.5 * error, 1.2 * error, error, error], 3)
    scales = 4000 * (tokens / 2e5) ** exponent
    inverses = np.exp(
        scatter * rng.normal(size=12) - scatter**2 / 2
    ) / scales + errors * rng.normal(size=12)
    return [
        NoisePoint(tokens=float(t), inverse=float(i), error=float(e))
        for t, i, e in zip(tokens, inverses, errors, strict=True)
    ]


@pytest.mark.parametrize("exponent", [0.0, 0.4])
@pytest.mark.parametrize("error", [2e-5, 1e-4])
def test_planted_laws_are_found_also_through_points_not_told_from_nothing(exponent, error):
    rng, forecasts, exponents, mean = np.random.default_rng(2), 0, 0, []
    for _ in range(200):
        law = noise_law(points_of(rng, exponent, error), 0.9)
        _, low, high = law.at(4e6)
        forecasts += low <= 4000 * 20**exponent <= high
        exponents += law.exponent_interval[0] <= exponent <= law.exponent_interval[1]
        mean.append(law.exponent)
    assert forecasts / 200 >= 0.84
    assert exponents / 200 >= 0.84
    assert np.mean(mean) == pytest.approx(exponent, abs=0.1)


def test_no_law_of_few_points_or_of_one_length():
    points = points_of(np.random.default_rng(0), 0.3, 2e-5)
    assert noise_law(points) is not None
    assert noise_law(points[:4]) is None
    assert (
        noise_law([NoisePoint(tokens=1e5, inverse=p.inverse, error=p.error) for p in points])
        is None
    )
    assert (
        noise_law([NoisePoint(tokens=p.tokens, inverse=-p.inverse, error=p.error) for p in points])
        is None
    )


def test_students_quantiles():
    assert student_t(0.95, 3) == pytest.approx(2.3534, rel=2e-3)  # tables
    assert student_t(0.95, 15) == pytest.approx(1.7531, rel=1e-4)
    assert student_t(0.975, 7) == pytest.approx(2.3646, rel=1e-3)


def test_beyond_its_last_point_a_law_also_allows_that_nothing_changes():
    law = noise_law(points_of(np.random.default_rng(4), 0.9, 2e-5, scatter=0.1))
    middle, low, high = law.at(4e7)
    assert law.exponent_interval[0] > 0.4
    assert low == law.at(4e5)[1] < middle / 10
    assert high > middle
