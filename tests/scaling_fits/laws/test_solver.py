"""Tests that the derivatives of the fit objective are exact in the coordinates that a form
frees.
"""

import numpy as np
import pytest
from planted_ladders import make_centered_points

from forerun._scaling_fits.laws import search
from forerun._scaling_fits.laws.forms import FORMS


@pytest.mark.parametrize("form", list(FORMS))
def test_derivatives_match_finite_differences(form):
    """The derivatives by the free coordinates leave out the fixed ones."""
    points, rng, spec = make_centered_points(), np.random.default_rng(2), FORMS[form]
    theta = np.array([-0.4, -0.9, -1.1, 0.8, 0.7, 0.6])
    free = theta[spec.free_coordinates] + 0.05 * rng.normal(size=(3, spec.num_free))
    weight = rng.uniform(0.5, 2, size=(3, 12))
    _, gradient, hessian = search._compute_derivatives(free, points, weight, spec, 10.0)
    step = 1e-5
    for i in range(spec.num_free):
        moved = free[None] + step * np.array([1, -1])[:, None, None] * np.eye(spec.num_free)[i]
        ends = [search._compute_derivatives(at, points, weight, spec, 10.0) for at in moved]
        slope, curve = (
            (ends[0][0] - ends[1][0]) / (2 * step),
            (ends[0][1] - ends[1][1]) / (2 * step),
        )
        assert gradient[:, i] == pytest.approx(slope, rel=1e-5, abs=1e-7)
        assert hessian[:, i] == pytest.approx(curve, rel=1e-4, abs=1e-6)
