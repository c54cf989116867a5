"""Tests of the search space: scales, rounding, choices, and hyperparameters that can be off."""

import math

import pytest
from spaces import make_space

from forerun._proxies.core.checks import SpecError
from forerun._sweeps.search.space import Axis

SPACE = make_space((2**-10, 2**-2), (0.0, 0.2), (0.25, 4.0))


def test_corners_and_middle_of_the_space():
    assert (
        SPACE.make_point((0, 0, 0))
        == {"learning_rate": 2**-10, "warmup_fraction": 0.0, "clip_norm": 0.25}
        == SPACE.lowest
    )
    assert (
        SPACE.make_point((1, 1, 1))
        == {"learning_rate": 2**-2, "warmup_fraction": 0.2, "clip_norm": 4.0}
        == SPACE.highest
    )
    middle = SPACE.make_point((0.5, 0.5, 0.5))
    assert middle == {"learning_rate": 2**-6, "warmup_fraction": 0.1, "clip_norm": 1.0}


def test_rounding_stays_within_the_range():
    space = make_space(
        (1e-4, 0.1), (0.1, 0.3), (0.3, 0.7), ranges={"beta2": (0.9, 0.99), "beta1": (0.0, 0.5)}
    )
    for share in (0.0, 1e-17, 1 - 1e-16, 1.0):
        for name, value in space.make_point((share,) * 5).items():
            low, high = space.axis(name).range
            assert low <= value <= high


def test_betas_are_searched_by_their_distance_from_one():
    space = make_space(ranges={"beta2": (0.9, 0.999)})
    assert space.make_point((0, 0, 0, 0.5))["beta2"] == pytest.approx(0.99)
    axis = space.axis("beta2")
    assert axis.value(axis.coordinate(0.95)) == pytest.approx(0.95, abs=1e-15)
    # The complement 0.00051 is rounded, so the result is not 0.999.
    assert axis.round_value(0.99949) == pytest.approx(0.99949)
    assert axis.octaves(0.75) == -2


def test_value_that_can_be_off_has_a_coordinate_for_it():
    space = make_space(can_be_off=("clip_norm",))
    assert space.num_coordinates == 4
    assert space.make_point((0.5, 0.5, 0.5, 0.4))["clip_norm"] == 0.0
    assert space.make_point((0.5, 0.5, 0.5, 0.6))["clip_norm"] == 1.0


def test_choices_are_evenly_likely_and_never_rounded():
    space = make_space(choices={"beta2": (0.9, 0.95, 0.9995)})
    assert [space.make_point((0, 0, 0, share))["beta2"] for share in (0.0, 0.34, 0.67, 1.0)] == [
        0.9,
        0.95,
        0.9995,
        0.9995,
    ]
    assert space.round_point(space.make_point((0, 0, 0, 1)))["beta2"] == 0.9995


def test_every_problem_is_reported_at_once():
    with pytest.raises(SpecError) as caught:
        make_space(
            (0.0, 1.0),
            (0.3, 0.1),
            (1.0, math.nan),
            ranges={"zzz": (1, 2)},
            can_be_off=("learning_rate",),
        )
    assert len(caught.value.problems) == 4
    assert "learning_rate cannot be off" in str(
        caught.value
    ) and "zzz is not a hyperparameter" in str(caught.value)
    with pytest.raises(SpecError, match=r"learning_rate = \[0.0, 1.0\]"):
        make_space((0.0, 1.0))


def test_value_within_the_range_is_its_own_nearest():
    """1 - (1 - value) may differ from the value; then a plan's warm start would be refused."""
    axis = Axis(name="beta1", range=(0.1, 0.95))
    assert all(axis.nearest(i / 1000) == i / 1000 for i in range(100, 951))
    assert (axis.nearest(0.01), axis.nearest(0.99)) == (0.1, 0.95)
