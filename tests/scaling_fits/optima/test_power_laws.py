"""Tests of the regression that fits a power law to points with known and unknown errors."""

import numpy as np
import pytest

from forerun._scaling_fits.optima.power_laws import PowerLawError, fit_power_law

X = np.geomspace(1e17, 1e20, 6)


def test_law_of_exact_points_is_recovered():
    law = fit_power_law({"flops": X}, np.log(0.3 * X**0.52), np.zeros(6))
    assert law.exponents[0] == pytest.approx(0.52, abs=1e-9)
    assert law.coefficient == pytest.approx(0.3, rel=1e-6)
    assert law.compute_value(1e22) == pytest.approx(0.3 * 1e22**0.52, rel=1e-6)


def test_intervals_cover_under_unknown_scatter():
    """The points claim to be exact and scatter by 10 %, which the regression must estimate."""
    exponent_covered, far_covered = [], []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        law = fit_power_law(
            {"flops": X}, np.log(0.3 * X**0.52) + 0.1 * rng.standard_normal(6), np.zeros(6)
        )
        low, high = law.compute_exponent_interval(0, 0.9)
        exponent_covered.append(low <= 0.52 <= high)
        low, high = law.compute_interval_at(1e21, level=0.9)
        far_covered.append(low <= 0.3 * 1e21**0.52 * np.exp(0.1 * rng.standard_normal()) <= high)
    assert 0.85 <= np.mean(exponent_covered) <= 0.96
    assert 0.85 <= np.mean(far_covered) <= 0.96


def test_collinear_inputs_are_refused():
    with pytest.raises(PowerLawError, match="params and tokens do not vary independently"):
        fit_power_law({"params": X, "tokens": 20 * X}, np.log(X), np.zeros(6))
