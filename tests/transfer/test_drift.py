import numpy as np
import pytest

from transfer.regret import drift
from transfer.regret.drift import extend_curvature, extend_line

LOG2_WIDTH = np.array([5.0, 6.0, 7.0])


def rows(values, sd, num=4000):
    noise = np.random.default_rng(1).standard_normal((num, len(values))) * sd
    noise[0] = 0
    return np.asarray(values) + noise


def covered(scatter, sd=0.013, num=300):
    """Share of planted slopes, and of the target's own optimum, within 90 % intervals; width over
    the best possible.
    """
    rng, log2_size = np.random.default_rng(0), np.array([5.0, 6.0, 7.0, 8.0])
    slopes, targets, ratios = [], [], []
    for seed in range(num):
        truth = scatter * rng.standard_normal(5)
        found = truth[:4] + sd * rng.standard_normal(4)
        line = extend_line(
            rows(found, sd, 500), log2_size, 10.0, 5.0, "width", np.random.default_rng(seed)
        )
        low, high = np.quantile(line.slope[1:], [0.05, 0.95])
        slopes.append(low <= 0 <= high)
        ratios.append((high - low) / (2 * 1.645 * np.hypot(sd, scatter) / np.sqrt(5)))
        low, high = np.quantile(line.at_target[1:], [0.05, 0.95])
        targets.append(low <= truth[4] <= high)
    share, ratio = f"{np.mean(slopes):.2f} {np.mean(targets):.2f}", np.median(ratios)
    print(f"scatter {scatter}: {share} covered, {ratio:.2f} times as wide")
    return np.mean(slopes), np.mean(targets), np.median(ratios)


def test_lines_are_covered_with_a_scatter_and_without():
    slope, target, ratio = covered(0.0)
    assert slope >= 0.87 and target >= 0.87 and ratio < 2
    slope, target, ratio = covered(0.05)
    assert slope >= 0.83 and target >= 0.83 and ratio < 2


def test_without_a_prior_on_scatter_a_scattered_line_is_missed(monkeypatch):
    monkeypatch.setattr(drift, "OFF_THE_LINE", np.where(drift.SCATTERS > 0, 1e-9, 1.0))
    assert covered(0.05)[0] < 0.7


def test_what_all_sizes_share_is_no_scatter(monkeypatch):
    monkeypatch.setitem(drift.LINES, "width", drift.LINES["width"]._replace(walk_octaves=0.0))
    common = np.random.default_rng(2).standard_normal((4000, 1)) * 0.3
    common[0] = 0
    line = extend_line(
        rows([-6.0, -6.0, -6.0], 0.01) + common,
        LOG2_WIDTH,
        9.0,
        5.0,
        "width",
        np.random.default_rng(0),
    )
    assert np.std(line.slope) < 0.1
    assert np.std(line.at_target) == pytest.approx(0.3, rel=0.2)


def test_a_curvature_trend_is_shrunk_unless_it_is_seen_clearly():
    flat = extend_curvature(rows([0.06] * 3, 1e-4), LOG2_WIDTH, 9.0, np.random.default_rng(0))
    assert flat.at_target[0] == pytest.approx(0.06, rel=1e-3)
    assert flat.trend[0] == pytest.approx(0, abs=1e-3)
    noisy = extend_curvature(
        np.exp(rows(np.log([0.03, 0.06, 0.12]), 1.0)), LOG2_WIDTH, 9.0, np.random.default_rng(0)
    )
    assert 0.05 < noisy.at_target[0] < 0.2  # the bare line would say 0.48
