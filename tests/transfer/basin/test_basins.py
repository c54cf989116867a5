"""Tests of the loss basins that are fitted to the losses of several sizes at once."""

import numpy as np
import pytest

from forerun._transfer.basin import noise
from forerun._transfer.basin.basins import fit_basins
from forerun._transfer.basin.noise import SizeRuns
from forerun._transfer.basin.shapes import KIND_INDEX, KINDS, SLANT, compute_rise


def find_nearest(slant, *, family, parameter):
    """Return the shape of this kind whose slant is nearest."""
    is_kind = KINDS.index((family, parameter)) == KIND_INDEX
    return np.flatnonzero(is_kind)[np.abs(SLANT[is_kind] - slant).argmin()]


def find_linex(s):
    return find_nearest(s, family="linex", parameter=0.0)


def find_powers(t, p):
    return find_nearest(t, family="powers", parameter=p)


def compute_loss(x, center, shape, curvature=0.06):
    """Return the loss of a basin whose minimum is 2 nats at `center`."""
    return 2 + compute_rise(x - center, np.array(curvature), np.array(shape))


def make_runs(loss_nats, rates, seeds=1):
    """Return the runs of one size, whose losses are a function of rate and seed."""
    x = np.repeat(np.asarray(rates, dtype=float), seeds)
    group = np.tile(np.arange(seeds), len(rates))
    return SizeRuns(
        log2_value=x, loss_nats=np.asarray(loss_nats(x, group), dtype=float), group=group
    )


def fit_sizes(*sizes):
    """Fit the basins of these sizes."""
    return fit_basins(list(sizes), draws=400, rng=np.random.default_rng(0))


@pytest.mark.parametrize("shape", [find_linex(-0.3), find_linex(0.6), find_powers(0.33, 2.0)])
def test_basin_without_noise_is_recovered_exactly(shape):
    rates = np.arange(-9, -2)
    basins = fit_sizes(
        *(make_runs(lambda x, _, c=c: compute_loss(x, c, shape), rates) for c in (-6.3, -5.6))
    )
    assert basins.optimum[0] == pytest.approx([-6.3, -5.6], abs=0.02)
    assert basins.curvature[0] == pytest.approx([0.06, 0.06], rel=0.05)
    assert basins.minimum_nats == pytest.approx([2, 2], abs=2e-3)
    assert KIND_INDEX[basins.shape[0]] == KIND_INDEX[shape]
    assert SLANT[basins.shape[0]] == pytest.approx(SLANT[shape], abs=0.02)


def test_offset_of_a_seed_is_not_counted_as_noise():
    offsets = np.array([0.0, 0.3, -0.2])
    basins = fit_sizes(
        make_runs(
            lambda x, g: compute_loss(x, -6, find_linex(0.225)) + offsets[g], range(-8, -3), seeds=3
        )
    )
    assert basins.noise_nats < 1e-3
    # Many shapes fit five rates, so the optimum is not exact
    assert basins.optimum[0, 0] == pytest.approx(-6, abs=0.1)


def test_monotone_or_concave_loss_has_its_optimum_outside():
    rates = range(-8, -3)
    falling, rising, hill = (
        (lambda x, _: 2 - 0.1 * x),
        (lambda x, _: 2 + 0.1 * x),
        (lambda x, _: -0.05 * (x + 6.4) ** 2),
    )
    basins = fit_sizes(make_runs(falling, rates), make_runs(rising, rates), make_runs(hill, rates))
    assert basins.side[0].tolist()[:2] == [1, -1]
    assert (basins.side[1:] != 0).mean(axis=0).min() > 0.5
    # Minima of the fitted shapes lie at most one octave beyond the rates, up to half a grid cell
    minima = basins.optimum - basins.off_shape[:, None]
    assert (minima >= -9.1).all() and (minima <= -2.9).all()


def measure_narrowing_by_seeds():
    """Fit losses that no shape fits, with two seeds and with twelve.

    Return the standard deviation of an optimum with twelve seeds over that with two, and the fitted
    noise with twelve seeds.
    """
    deviation = np.random.default_rng(3).normal(0, 0.01, (3, 7))

    def make_loss(size):
        return lambda x, g: (
            compute_loss(x, -6, find_linex(0.3))
            + deviation[size, x.astype(int) + 9]
            + 1e-3 * np.sin(9 * x + g)
        )

    few, many = (
        fit_sizes(*(make_runs(make_loss(size), range(-9, -2), seeds=n) for size in range(3)))
        for n in (2, 12)
    )
    sds = [np.std((basins.optimum[:, 0] - basins.off_shape)[1:]) for basins in (many, few)]
    return sds[0] / sds[1], many.noise_nats


def test_misfit_of_all_shapes_counts_as_noise_for_any_number_of_seeds(monkeypatch):
    narrowing, noise_nats = measure_narrowing_by_seeds()
    assert narrowing > 0.5
    # Seeds differ by 1e-3 nats at most
    assert noise_nats > 3e-3
    monkeypatch.setattr(noise, "MISFIT_SHARE", 0.0)
    assert measure_narrowing_by_seeds()[0] < 0.5


def test_high_losses_on_a_wall_do_not_move_the_minimum():
    def compute_wall_loss(x, group):
        return (
            compute_loss(x, -6, find_linex(0.01))
            + np.where(x > -4, 0.4, 0.0)
            + 0.003 * np.sin(5 * x + 3 * group)
        )

    basins = fit_sizes(*(make_runs(compute_wall_loss, range(-9, -2), seeds=3) for _ in range(3)))
    assert basins.optimum[0] == pytest.approx([-6] * 3, abs=0.15)


def test_deviation_from_the_shape_is_shared_by_all_sizes():
    """An optimum deviates from the minimum of a cliff by some hundredths of a step. It deviates by
    less on a finer grid, and less from a slanted linex shape the smaller its slant.
    """

    def measure_deviation(shape, step):
        rates = np.arange(-9, -2, step)
        basins = fit_sizes(
            *(make_runs(lambda x, _, c=c: compute_loss(x, c, shape), rates) for c in (-6.3, -5.6))
        )
        assert basins.off_shape[0] == 0 and basins.optimum.shape == (401, 2)
        return np.std(basins.off_shape)

    cliff = find_nearest(2.0, family="cliffs", parameter=1.25)
    assert 0.04 < measure_deviation(cliff, 1.0) < 0.12
    assert measure_deviation(cliff, 0.5) < 0.7 * measure_deviation(cliff, 1.0)
    assert measure_deviation(find_linex(0.6), 1.0) < 0.6 * measure_deviation(find_linex(1.2), 1.0)


def test_distant_cliff_does_not_lift_the_curve_at_its_minimum():
    """The height of the curve was once the mean of all residuals. The curve then was at 1.094 nats
    at its minimum although a run there had 1.050.
    """
    losses = {-12: 1.412, -11: 1.218, -10: 1.100, -9: 1.050, -8: 1.100, -7: 1.534}
    basins = fit_sizes(make_runs(lambda x, _: [losses[int(rate)] for rate in x], list(losses)))
    rates = np.array([-10, -9, -8])
    curve_losses = basins.minimum_nats[0] + compute_rise(
        rates - basins.optimum[0, 0], basins.curvature[0, :1], basins.shape[:1]
    )
    assert curve_losses == pytest.approx([losses[int(rate)] for rate in rates], abs=0.02)
    assert 1.03 < basins.minimum_nats[0] < 1.06
