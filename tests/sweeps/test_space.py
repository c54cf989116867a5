import math

import pytest
from spaces import usual

from proxies.core.checks import SpecError
from sweeps.search.space import Axis

SPACE = usual((2**-10, 2**-2), (0.0, 0.2), (0.25, 4.0))


def test_corners_and_middle_in_log2():
    assert (
        SPACE.at((0, 0, 0))
        == {"learning_rate": 2**-10, "warmup_fraction": 0.0, "clip_norm": 0.25}
        == SPACE.lowest
    )
    assert (
        SPACE.at((1, 1, 1))
        == {"learning_rate": 2**-2, "warmup_fraction": 0.2, "clip_norm": 4.0}
        == SPACE.highest
    )
    middle = SPACE.at((0.5, 0.5, 0.5))
    assert middle == {"learning_rate": 2**-6, "warmup_fraction": 0.1, "clip_norm": 1.0}


def test_rounding_never_leaves_the_range():
    space = usual(
        (1e-4, 0.1), (0.1, 0.3), (0.3, 0.7), ranges={"beta2": (0.9, 0.99), "beta1": (0.0, 0.5)}
    )
    for share in (0.0, 1e-17, 1 - 1e-16, 1.0):
        for name, value in space.at((share,) * 5).items():
            low, high = space.axis(name).range
            assert low <= value <= high


def test_betas_are_searched_by_what_lacks_to_1():
    space = usual(ranges={"beta2": (0.9, 0.999)})
    assert space.at((0, 0, 0, 0.5))["beta2"] == pytest.approx(0.99)
    axis = space.axis("beta2")
    assert axis.value(axis.coordinate(0.95)) == pytest.approx(0.95, abs=1e-15)
    assert axis.rounded(0.99949) == pytest.approx(0.99949)  # of 0.00051, and not 0.999
    assert axis.octaves(0.75) == -2


def test_a_value_that_can_be_off_has_a_coordinate_for_it():
    space = usual(can_be_off=("clip_norm",))
    assert space.num_coordinates == 4
    assert space.at((0.5, 0.5, 0.5, 0.4))["clip_norm"] == 0.0
    assert space.at((0.5, 0.5, 0.5, 0.6))["clip_norm"] == 1.0


def test_choices_are_evenly_likely_and_never_rounded():
    space = usual(choices={"beta2": (0.9, 0.95, 0.9995)})
    assert [space.at((0, 0, 0, share))["beta2"] for share in (0.0, 0.34, 0.67, 1.0)] == [
        0.9,
        0.95,
        0.9995,
        0.9995,
    ]
    assert space.rounded(space.at((0, 0, 0, 1)))["beta2"] == 0.9995


def test_every_problem_at_once():
    with pytest.raises(SpecError) as caught:
        usual(
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
        usual((0.0, 1.0))


def test_a_value_of_the_range_is_its_own_nearest():
    """Of a complement too, where 1 - (1 - value) may be another number: a plan's warm start would
    be refused.
    """
    axis = Axis(name="beta1", range=(0.1, 0.95))
    assert all(axis.nearest(i / 1000) == i / 1000 for i in range(100, 951))
    assert (axis.nearest(0.01), axis.nearest(0.99)) == (0.1, 0.95)
