"""Tests of the families of loss basin shapes (see `forerun._transfer.basin.shapes`) and of their
prior.
"""

import numpy as np
import pytest

from forerun._transfer.basin.shapes import (
    KIND_INDEX,
    KINDS,
    LOG_PRIOR,
    SLANT,
    compute_rise,
    compute_unit_rises,
)

ALL_SHAPES = np.arange(len(SLANT))


def test_every_shape_has_its_only_minimum_at_zero():
    x = np.linspace(-4, 4, 801)
    rises = compute_unit_rises(x, ALL_SHAPES[::7])
    assert (rises.argmin(axis=1) == 400).all()
    assert np.abs(rises[:, 400]).max() < 1e-12
    assert (np.diff(rises[:, :401], axis=1) < 0).all() and (
        np.diff(rises[:, 400:], axis=1) > 0
    ).all()


def test_prior_sums_to_one_and_favors_basins_that_are_steeper_above_the_optimum():
    prior = np.exp(LOG_PRIOR)
    assert prior.sum() == pytest.approx(1)
    below, above = compute_rise(np.array([[-2.0], [2.0]]), np.array(1.0), ALL_SHAPES)
    assert prior[above > below].sum() > 0.6


def test_families_match_their_formulas():
    def find_nearest(slant, *, family, parameter):
        """Return the shape of this kind whose slant is nearest."""
        is_kind = KINDS.index((family, parameter)) == KIND_INDEX
        return ALL_SHAPES[is_kind][np.abs(SLANT[is_kind] - slant).argmin()]

    curvature = np.array(1.0)
    x = np.array([-2.0, 1.5])

    shape = find_nearest(0.3, family="linex", parameter=0)
    s = SLANT[shape]
    linex = (np.expm1(s * x) - s * x) / s**2
    assert compute_rise(x, curvature, shape) == pytest.approx(linex, rel=0.02)

    shape = find_nearest(0.0, family="powers", parameter=2.0)
    assert compute_rise(x, curvature, shape) == pytest.approx(x**2 / 2, rel=1e-2)
    # With t = 1 / 3 the two sides are as (1 + t) / (1 - t) = 2
    shape = find_nearest(1 / 3, family="powers", parameter=2.0)
    below, above = compute_rise(np.array([-2.0, 2.0]), curvature, shape)
    assert above / below == pytest.approx(2, rel=0.02)

    # Below the minimum a wall is the parabola x^2 / 2; three octaves above, the parabola gives 4.5
    shape = find_nearest(-8, family="walls", parameter=3.0)
    below, above = compute_rise(np.array([-2.0, 3.0]), curvature, shape)
    assert below == pytest.approx(2, rel=0.02) and above > 5

    cliff = (x**2 + np.exp(2.0) * np.maximum(x - 1.25, 0) ** 2) / 2
    shape = find_nearest(2.0, family="cliffs", parameter=1.25)
    assert compute_rise(x, curvature, shape) == pytest.approx(cliff, rel=0.03)

    z = x / 0.7
    quartic = z**2 + 1.2 * z**3 + z**4
    shape = find_nearest(1.2, family="quartics", parameter=0.7)
    rises = compute_rise(x, curvature, shape)
    assert rises[1] / rises[0] == pytest.approx(quartic[1] / quartic[0], rel=0.02)
