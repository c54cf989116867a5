"""Tests of the noise of losses, estimated from seeds and from the misfit of loss basins."""

import math

import numpy as np
import pytest

from forerun._transfer.basin.basins import fit_basins
from forerun._transfer.basin.noise import (
    SizeRuns,
    build_noise_grid,
    choose_noise_growth,
    reduce_runs,
)


def test_noise_is_that_of_the_seeds_and_larger_where_no_shape_fits():
    """Seeds differ by 0.005 nats, with 56 degrees of freedom. The misfit of the best shape has 16
    degrees of freedom. It is as large as the noise of the seeds, or four times as large.
    """
    num_pure, num_misfit = 56, 16
    pure_squares = num_pure * 0.005**2

    def estimate_median_noise(misfit_nats):
        misfit = num_misfit * misfit_nats**2
        noise = build_noise_grid(pure_squares, num_pure, misfit, num_misfit, 0.005)
        log_likelihood = -0.5 * (num_misfit * np.log(noise.variance) + misfit / noise.variance)
        weight = np.exp(noise.log_prior + log_likelihood)
        return np.sqrt(np.interp(0.5, np.cumsum(weight) / weight.sum(), noise.variance))

    assert estimate_median_noise(0.005) == pytest.approx(0.005, rel=0.1)
    assert estimate_median_noise(0.02) == pytest.approx(0.02, rel=0.25)


def draw_runs(rng, noise_at):
    """Draw the losses of four seeds at seven rates about a parabola.

    `noise_at` returns the standard deviation of the noise for a loss above the minimum, in nats.
    """
    rates = np.arange(-3.0, 4.0)
    rises = 0.05 * rates**2
    loss = 2 + rises + rng.normal(size=(4, 7)) * [noise_at(rise) for rise in rises]
    return SizeRuns(
        log2_value=np.tile(rates, 4),
        loss_nats=loss.ravel(),
        group=np.repeat(np.arange(4), 7).astype(np.int64),
    )


def test_noise_that_grows_with_the_loss_is_told_from_even_noise():
    rng = np.random.default_rng(0)
    growths = {"even": [], "growing": []}
    for _ in range(40):
        growths["even"].append(
            choose_noise_growth([draw_runs(rng, lambda _: 0.01) for _ in range(3)])
        )
        growths["growing"].append(
            choose_noise_growth(
                [
                    draw_runs(rng, lambda rise: 0.005 * (1 + (rise / 0.1) ** 2) ** 0.5)
                    for _ in range(3)
                ]
            )
        )
    assert growths["even"].count(math.inf) >= 36
    assert growths["growing"].count(0.1) >= 34 and math.inf not in growths["growing"]


def test_rate_with_much_noise_has_little_weight_where_noise_grows():
    rng = np.random.default_rng(1)
    runs = draw_runs(rng, lambda rise: 0.3 if rise > 0.4 else 0.005)
    growth_nats = 0.1  # rise at which the noise variance has doubled
    plain, weighted = reduce_runs(runs), reduce_runs(runs, growth_nats)
    assert weighted.pure_squares < 0.2 * plain.pure_squares
    assert weighted.num_pure == plain.num_pure


def test_prior_noise_scales_with_the_loss():
    """A model with a learned vocabulary has 2.4 times the loss of a byte model, and 2.4 times its
    noise.
    """

    def fit_noise_nats(scale):
        loss = scale * np.array([2.42, 2.335, 2.348, 2.422])
        runs = SizeRuns(
            log2_value=np.arange(4.0), loss_nats=loss, group=np.zeros(4, dtype=np.int64)
        )
        return fit_basins([runs], draws=200, rng=np.random.default_rng(0)).noise_nats

    assert fit_noise_nats(2.4) == pytest.approx(2.4 * fit_noise_nats(1.0), rel=0.15)
