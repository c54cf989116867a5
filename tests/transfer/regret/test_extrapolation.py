"""Tests of the extrapolation of optimum and curvature from several sizes to the target.

Intervals have a level of 0.9. The bounds on coverage lie below 0.9, because the share varies by
chance over the planted lines, and more so where the optima scatter.
"""

import numpy as np
import pytest

from forerun._transfer.regret import extrapolation
from forerun._transfer.regret.extrapolation import extend_curvature, extend_line_to_target

LOG2_WIDTH = np.array([5.0, 6.0, 7.0])
NORMAL_95 = 1.645
"""The 95 % quantile of the standard normal distribution."""


def draw_rows(values, sd, num=4000):
    """Return posterior draws of values, with the values themselves in the first row."""
    noise = np.random.default_rng(1).standard_normal((num, len(values))) * sd
    noise[0] = 0
    return np.asarray(values) + noise


def measure_coverage(scatter, sd=0.013, num_lines=300):
    """Return the shares of 90 % intervals that contain the planted slope and the target's own
    optimum, and the median width of the slope's interval over the best possible width. The planted
    optima lie on a flat line, up to `scatter` and an error of `sd` octaves.
    """
    rng, log2_size = np.random.default_rng(0), np.array([5.0, 6.0, 7.0, 8.0])
    squared_distances = np.sum((log2_size - log2_size.mean()) ** 2)
    best_sd = np.hypot(sd, scatter) / np.sqrt(squared_distances)  # of a least-squares slope
    slope_covered, target_covered, ratios = [], [], []
    for seed in range(num_lines):
        optima_off_line = scatter * rng.standard_normal(5)
        optima = optima_off_line[:4] + sd * rng.standard_normal(4)
        line = extend_line_to_target(
            draw_rows(optima, sd, 500),
            log2_size,
            log2_target=10.0,
            log2_base=5.0,
            axis="width",
            rng=np.random.default_rng(seed),
        )
        low, high = np.quantile(line.slope[1:], [0.05, 0.95])
        slope_covered.append(low <= 0 <= high)
        ratios.append((high - low) / (2 * NORMAL_95 * best_sd))
        low, high = np.quantile(line.at_target[1:], [0.05, 0.95])
        target_covered.append(low <= optima_off_line[4] <= high)
    return np.mean(slope_covered), np.mean(target_covered), np.median(ratios)


def test_intervals_cover_planted_lines_with_and_without_scatter():
    slope, target, ratio = measure_coverage(0.0)
    assert slope >= 0.87 and target >= 0.87 and ratio < 2
    slope, target, ratio = measure_coverage(0.05)
    assert slope >= 0.83 and target >= 0.83 and ratio < 2


def test_intervals_miss_the_slope_if_the_prior_excludes_scatter(monkeypatch):
    # The prior probability of each scatter: almost all of it lies on 0
    monkeypatch.setattr(
        extrapolation, "OPTIMUM_SCATTER_PRIOR", np.where(extrapolation.SCATTERS > 0, 1e-9, 1.0)
    )
    assert measure_coverage(0.05)[0] < 0.7


def test_error_that_all_sizes_share_is_not_counted_as_scatter(monkeypatch):
    # Without the random walk beyond the largest size, the target's sd is that of the shared error
    monkeypatch.setitem(
        extrapolation.LINE_PRIORS,
        "width",
        extrapolation.LINE_PRIORS["width"]._replace(walk_octaves=0.0),
    )
    shared_error = np.random.default_rng(2).standard_normal((4000, 1)) * 0.3
    shared_error[0] = 0
    line = extend_line_to_target(
        draw_rows([-6.0, -6.0, -6.0], 0.01) + shared_error,
        LOG2_WIDTH,
        log2_target=9.0,
        log2_base=5.0,
        axis="width",
        rng=np.random.default_rng(0),
    )
    assert np.std(line.slope) < 0.1
    assert np.std(line.at_target) == pytest.approx(0.3, rel=0.2)


def test_curvature_trend_is_shrunk_unless_it_is_clear():
    flat, flat_trend = extend_curvature(
        draw_rows([0.06] * 3, 1e-4), LOG2_WIDTH, log2_target=9.0, rng=np.random.default_rng(0)
    )
    assert flat[0] == pytest.approx(0.06, rel=1e-3)
    assert flat_trend[0] == pytest.approx(0, abs=1e-3)
    noisy, _ = extend_curvature(
        np.exp(draw_rows(np.log([0.03, 0.06, 0.12]), 1.0)),
        LOG2_WIDTH,
        log2_target=9.0,
        rng=np.random.default_rng(0),
    )
    # A straight line without shrinkage doubles twice more: 0.12 * 4 = 0.48.
    assert 0.05 < noisy[0] < 0.2
