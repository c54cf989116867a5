import numpy as np
import pytest

from transfer.basin.shapes import KIND, KINDS, LOG_PRIOR, SLANT, rise, unit_rises

ALL = np.arange(len(SLANT))


def test_every_shape_has_its_one_minimum_at_nothing():
    x = np.linspace(-4, 4, 801)
    h = unit_rises(x, ALL[::7])
    assert (h.argmin(axis=1) == 400).all()
    assert np.abs(h[:, 400]).max() < 1e-12
    assert (np.diff(h[:, :401], axis=1) < 0).all() and (np.diff(h[:, 400:], axis=1) > 0).all()


def test_the_prior_adds_up_and_leans_to_a_steeper_side_of_divergence():
    prior = np.exp(LOG_PRIOR)
    assert prior.sum() == pytest.approx(1)
    below, above = rise(np.array([[-2.0], [2.0]]), np.array(1.0), ALL)
    assert prior[above > below].sum() > 0.6


def test_the_families_are_what_they_say():
    def nearest(slant, *kind):
        of_kind = KINDS.index(kind) == KIND
        return ALL[of_kind][np.abs(SLANT[of_kind] - slant).argmin()]

    x = np.array([-2.0, 1.5])
    s = SLANT[nearest(0.3, "linex", 0)]
    linex = (np.expm1(s * x) - s * x) / s**2
    assert rise(x, np.array(1.0), nearest(0.3, "linex", 0)) == pytest.approx(linex, rel=0.02)
    assert rise(x, np.array(1.0), nearest(0.0, "powers", 2.0)) == pytest.approx(x**2 / 2, rel=1e-2)
    left, right = rise(np.array([-2.0, 2.0]), np.array(1.0), nearest(1 / 3, "powers", 2.0))
    assert right / left == pytest.approx(2, rel=0.02)
    left, right = rise(np.array([-2.0, 3.0]), np.array(1.0), nearest(-8, "walls", 3.0))
    assert left == pytest.approx(2, rel=0.02) and right > 5
    of_cliff = rise(x, np.array(1.0), nearest(2.0, "cliffs", 1.25))
    assert of_cliff == pytest.approx(
        (x**2 + np.exp(2.0) * np.maximum(x - 1.25, 0) ** 2) / 2, rel=0.03
    )
    z = x / 0.7
    quartic = z**2 + 1.2 * z**3 + z**4
    found = rise(x, np.array(1.0), nearest(1.2, "quartics", 0.7))
    assert found[1] / found[0] == pytest.approx(quartic[1] / quartic[0], rel=0.02)
