import numpy as np
import pytest

from transfer.valley import Runs, fit_valleys, rise


def runs(loss_nats, rates, seeds=1):
    x = np.repeat(np.asarray(rates, dtype=float), seeds)
    group = np.tile(np.arange(seeds), len(rates))
    return Runs(log2_lr=x, loss_nats=np.asarray(loss_nats(x, group), dtype=float), group=group)


def fit(*widths):
    return fit_valleys(list(widths), draws=400, rng=np.random.default_rng(0))


@pytest.mark.parametrize("s", [-0.275, 0.225, 0.625])
def test_a_valley_without_noise_is_found_exactly(s):
    rates = np.arange(-9, -2)
    found = fit(*(runs(lambda x, _, c=c: 2 + rise(x - c, 0.06, s), rates) for c in (-6.3, -5.6)))
    assert found.optimum[0] == pytest.approx([-6.3, -5.6], abs=0.02)
    assert found.curvature[0] == pytest.approx([0.06, 0.06], rel=0.05)
    assert found.minimum_nats == pytest.approx([2, 2], abs=2e-3)
    assert found.asymmetry[0] == pytest.approx(s, abs=1e-6)


def test_a_parabola_is_the_limit_of_no_asymmetry():
    assert rise(np.array([-2.0, 1.5]), 0.1, 1e-3) == pytest.approx([0.2, 0.1125], rel=2e-3)


def test_the_valley_is_steeper_towards_divergence_for_a_positive_asymmetry():
    below, above = rise(np.array([-2.0, 2.0]), 0.1, 0.4)
    assert 0 < below < above


def test_what_a_seed_adds_to_all_its_runs_is_no_noise():
    offsets = np.array([0.0, 0.3, -0.2])
    found = fit(runs(lambda x, g: 2 + rise(x + 6, 0.06, 0.225) + offsets[g], range(-8, -3), seeds=3))
    assert found.noise_nats < 1e-3
    assert found.optimum[0, 0] == pytest.approx(-6, abs=0.02)


def test_a_monotone_or_upturned_loss_has_its_optimum_outside():
    rates = range(-8, -3)
    falling, rising, hill = (
        (lambda x, _: 2 - 0.1 * x),
        (lambda x, _: 2 + 0.1 * x),
        (lambda x, _: -0.05 * (x + 6.4) ** 2),
    )
    found = fit(runs(falling, rates), runs(rising, rates), runs(hill, rates))
    assert found.side[0].tolist() == [1, -1, 1]
    assert (found.optimum >= -9).all() and (found.optimum <= -3).all()


def test_a_shape_the_model_misses_counts_as_noise_however_many_the_seeds():
    few, many = (
        fit(runs(lambda x, g: 2 + 0.06 * np.abs(x + 6) + 1e-4 * np.sin(7 * x + g), range(-8, -3), seeds=n))
        for n in (2, 12)
    )
    assert np.std(many.optimum[1:]) > 0.4 * np.std(few.optimum[1:])


def test_the_same_generator_gives_the_same_draws():
    one = fit(runs(lambda x, _: 2 + rise(x + 6, 0.06, 0.2) + 0.01 * np.sin(9 * x), range(-8, -3)))
    two = fit(runs(lambda x, _: 2 + rise(x + 6, 0.06, 0.2) + 0.01 * np.sin(9 * x), range(-8, -3)))
    assert np.array_equal(one.optimum, two.optimum)
