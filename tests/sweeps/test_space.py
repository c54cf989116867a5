import math

import pytest

from proxies import canon
from proxies.checks import SpecError
from sweeps.space import SearchSpace

SPACE = SearchSpace(learning_rate=(2**-10, 2**-2), warmup_fraction=(0.0, 0.2), clip_norm=(0.25, 4.0))


def test_corners_and_middle_in_log2():
    assert SPACE.at((0, 0, 0)) == {"learning_rate": 2**-10, "warmup_fraction": 0.0, "clip_norm": 0.25}
    assert SPACE.at((1, 1, 1)) == {"learning_rate": 2**-2, "warmup_fraction": 0.2, "clip_norm": 4.0}
    middle = SPACE.at((0.5, 0.5, 0.5))
    assert middle == {"learning_rate": 2**-6, "warmup_fraction": 0.1, "clip_norm": 1.0}


def test_rounding_never_leaves_the_range():
    space = SearchSpace(learning_rate=(1e-4, 0.1), warmup_fraction=(0.1, 0.3), clip_norm=(0.3, 0.7))
    for share in (0.0, 1e-17, 1 - 1e-16, 1.0):
        for name, value in space.at((share,) * 3).items():
            low, high = getattr(space, name)
            assert low <= value <= high


def test_equal_ends_fix_a_value():
    space = SearchSpace(learning_rate=(0.01, 0.02), warmup_fraction=(0.1, 0.1), clip_norm=(1.0, 1.0))
    assert {space.at((0.3, share, share))["clip_norm"] for share in (0.0, 0.4, 1.0)} == {1.0}


def test_every_problem_at_once():
    with pytest.raises(SpecError) as caught:
        SearchSpace(learning_rate=(0.0, 1.0), warmup_fraction=(0.3, 0.1), clip_norm=(1.0, math.nan))
    assert len(caught.value.problems) == 3
    assert "learning_rate = [0.0, 1.0]" in str(caught.value)


def test_warmup_is_a_share():
    with pytest.raises(SpecError, match="both ends < 1"):
        SearchSpace(learning_rate=(0.1, 1.0), warmup_fraction=(0.1, 1.0), clip_norm=(1.0, 1.0))


@pytest.mark.parametrize("value", [None, (1.0,), (True, 2.0), ("a", "b"), 3.0])
def test_what_is_no_range(value):
    with pytest.raises(SpecError, match="is wanted"):
        SearchSpace(learning_rate=value, warmup_fraction=(0.1, 0.2), clip_norm=(1.0, 1.0))


def test_round_trip_through_json():
    assert canon.decode(SearchSpace, canon.parse(canon.canonical(SPACE))) == SPACE
