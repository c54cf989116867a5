import numpy as np
import pytest

from transfer.drift import extend_curvature, extend_line

LOG2_WIDTH = np.array([5.0, 6.0, 7.0])


def rows(values, sd, num=4000):
    noise = np.random.default_rng(1).standard_normal((num, len(values))) * sd
    noise[0] = 0
    return np.asarray(values) + noise


def extend(values, sd=0.02, target=9.0, log2_width=LOG2_WIDTH):
    return extend_line(rows(values, sd), log2_width, target, np.random.default_rng(0))


def test_optima_on_a_line_are_extended_along_it():
    line = extend([-6.0, -6.5, -7.0])
    assert line.slope[0] == pytest.approx(-0.5)
    assert line.at_target[0] == pytest.approx(-8.0)
    assert line.pull.sum() == pytest.approx(1)


def test_optima_off_the_line_widen_what_is_said_about_the_target():
    straight, bent = extend([-6.0, -6.5, -7.0]), extend([-6.0, -6.9, -7.0])
    assert np.std(bent.at_target) > 2 * np.std(straight.at_target)
    assert bent.scatter_octaves > straight.scatter_octaves


def test_two_widths_leave_the_scatter_to_its_prior():
    line = extend([-6.0, -6.5], log2_width=LOG2_WIDTH[:2])
    naive = 0.02 * np.sqrt(3**2 + 4**2)
    assert line.at_target[0] == pytest.approx(-8.0)
    assert np.std(line.at_target) > naive


def test_further_targets_are_less_certain():
    assert np.std(extend([-6.0, -6.1, -6.0], target=12).at_target) > np.std(extend([-6.0, -6.1, -6.0]).at_target)


def test_a_curvature_trend_is_shrunk_unless_it_is_seen_clearly():
    flat = extend_curvature(rows([0.06] * 3, 1e-4), LOG2_WIDTH, 9.0, np.random.default_rng(0))
    assert flat[0] == pytest.approx(0.06, rel=1e-3)
    noisy = extend_curvature(np.exp(rows(np.log([0.03, 0.06, 0.12]), 1.0)), LOG2_WIDTH, 9.0, np.random.default_rng(0))
    assert 0.05 < noisy[0] < 0.2  # the bare line would say 0.48
