import math

import numpy as np
import pytest

from transfer.basin.basins import fit_basins
from transfer.basin.noise import SizeRuns, build_noise_grid, choose_noise_growth, reduce_runs

SEEDS, RATES = 3, np.arange(-8.0, -3.0)


def runs(noise_nats=0.0, extra=None):
    rng = np.random.default_rng(0)
    x, group = np.repeat(RATES, SEEDS), np.tile(np.arange(SEEDS), len(RATES))
    loss = (
        2
        + 0.05 * (x + 6) ** 2
        + np.array([0.0, 0.3, -0.2])[group]
        + noise_nats * rng.standard_normal(len(x))
    )
    if extra is not None:
        loss = loss + np.repeat(extra, SEEDS)
    return SizeRuns(log2_value=x, loss_nats=loss, group=group)


def test_the_noise_is_that_of_the_seeds_and_larger_where_no_shape_fits():
    def median(misfit):
        noise = build_noise_grid(56 * 25e-6, 56, misfit, 16, 0.005)
        weight = np.exp(
            noise.log_prior - 0.5 * (16 * np.log(noise.variance) + misfit / noise.variance)
        )
        return np.sqrt(np.interp(0.5, np.cumsum(weight) / weight.sum(), noise.variance))

    assert median(16 * 25e-6) == pytest.approx(0.005, rel=0.1)
    assert median(16 * 400e-6) == pytest.approx(0.02, rel=0.25)


def seeds_of(rng, spread):
    """Four seeds at seven rates about a parabola; `spread`: noise by nats above the minimum."""
    rates = np.arange(-3.0, 4.0)
    height = 0.05 * rates**2
    loss = 2 + height + rng.normal(size=(4, 7)) * [spread(h) for h in height]
    return SizeRuns(
        log2_value=np.tile(rates, 4),
        loss_nats=loss.ravel(),
        group=np.repeat(np.arange(4), 7).astype(np.int64),
    )


def test_noise_that_grows_up_the_valley_is_seen_and_other_noise_is_not():
    rng, found = np.random.default_rng(0), {"even": [], "growing": []}
    for _ in range(40):
        found["even"].append(choose_noise_growth([seeds_of(rng, lambda _: 0.01) for _ in range(3)]))
        found["growing"].append(
            choose_noise_growth(
                [seeds_of(rng, lambda h: 0.005 * (1 + (h / 0.1) ** 2) ** 0.5) for _ in range(3)]
            )
        )
    assert found["even"].count(math.inf) >= 36
    assert found["growing"].count(0.1) >= 34 and math.inf not in found["growing"]


def test_a_chaotic_rate_weighs_little_where_noise_grows():
    rng = np.random.default_rng(1)
    runs = seeds_of(rng, lambda h: 0.3 if h > 0.4 else 0.005)
    plain, weighed = reduce_runs(runs), reduce_runs(runs, 0.1)
    assert weighed.pure_squares < 0.2 * plain.pure_squares
    assert weighed.num_pure == plain.num_pure


def test_the_usual_noise_grows_with_the_loss():
    """A learned vocabulary has 2.4 times the bytes' loss, and 2.4 times their noise."""

    def noise_nats(scale):
        loss = scale * np.array([2.42, 2.335, 2.348, 2.422])
        runs = SizeRuns(
            log2_value=np.arange(4.0), loss_nats=loss, group=np.zeros(4, dtype=np.int64)
        )
        return fit_basins([runs], draws=200, rng=np.random.default_rng(0)).noise_nats

    assert noise_nats(2.4) == pytest.approx(2.4 * noise_nats(1.0), rel=0.15)
