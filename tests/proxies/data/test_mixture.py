"""Tests of mixtures of sources: which source each sequence of training comes from."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun._proxies.data.mixture import RESOLUTION, Mixture, find_weight_problems

WEIGHTS = st.lists(
    st.one_of(st.floats(1e-6, 1.0), st.just(1.0), st.just(0.0)), min_size=1, max_size=30
).filter(any)
deterministic = settings(deadline=None, derandomize=True, database=None, max_examples=30)


@deterministic
@given(WEIGHTS)
def test_every_prefix_has_each_sources_share_within_two_sequences(weights):
    source_B, _ = Mixture(weights).draw(0, 2000)
    for source, weight in enumerate(weights):
        counts = np.cumsum(source_B == source)
        expected = np.arange(1, 2001) * weight / sum(weights)
        assert np.abs(counts - expected).max() < 2


@deterministic
@given(WEIGHTS, st.integers(0, 2**42), st.integers(1, 200))
def test_draw_may_start_at_any_position(weights, first, num_sequences):
    mixture = Mixture(weights)
    source_B, index_B = mixture.draw(first, num_sequences)
    before, after = mixture.count_by_source(first), mixture.count_by_source(first + num_sequences)
    assert sum(before) == first and sum(after) == first + num_sequences
    for source in range(len(weights)):
        assert index_B[source_B == source].tolist() == list(range(before[source], after[source]))


def test_source_is_drawn_unless_its_weight_is_zero():
    assert Mixture([0.0, 1.0, 0.0]).count_by_source(1000) == [0, 1000, 0]
    assert Mixture([1.0, 1e-300]).count_by_source(2 * RESOLUTION)[1] == 2


def test_all_problems_of_weights_are_listed():
    problems = find_weight_problems(
        ("web", "code"), {"wbe": 1.0, "web": -1.0, "math": float("nan")}
    )
    assert problems == [
        "no source is named 'wbe': the sources are web, code",
        "no source is named 'math': the sources are web, code",
        "source 'code' has no weight: give each source one",
        "weight of 'web' is -1.0: must be a finite number, at least 0",
        "weight of 'math' is nan: must be a finite number, at least 0",
    ]
    assert "add up to 0" in find_weight_problems(("a", "b"), {"a": 0, "b": 0.0})[0]
    assert find_weight_problems(("a", "b"), {"a": 0, "b": 5}) == []
    for value in (True, "1", None, float("inf")):
        assert len(find_weight_problems(("a",), {"a": value})) == 1
