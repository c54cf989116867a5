import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from proxies.data.mixture import RESOLUTION, Mixture, weight_problems

WEIGHTS = st.lists(
    st.one_of(st.floats(1e-6, 1.0), st.just(1.0), st.just(0.0)), min_size=1, max_size=30
).filter(any)
thorough = settings(deadline=None, derandomize=True, database=None, max_examples=30)


@thorough
@given(WEIGHTS)
def test_every_prefix_holds_each_sources_share_but_for_two(weights):
    source_B, _ = Mixture(weights).draw(0, 2000)
    for source, weight in enumerate(weights):
        had = np.cumsum(source_B == source)
        wanted = np.arange(1, 2001) * weight / sum(weights)
        assert np.abs(had - wanted).max() < 2


@thorough
@given(WEIGHTS, st.integers(0, 2**42), st.integers(1, 200))
def test_any_position_is_found_without_the_ones_before(weights, first, num_sequences):
    mixture = Mixture(weights)
    source_B, index_B = mixture.draw(first, num_sequences)
    before, after = mixture.counts(first), mixture.counts(first + num_sequences)
    assert sum(before) == first and sum(after) == first + num_sequences
    for source in range(len(weights)):
        assert index_B[source_B == source].tolist() == list(range(before[source], after[source]))


def test_weight_zero_has_no_turn_and_the_smallest_has():
    assert Mixture([0.0, 1.0, 0.0]).counts(1000) == [0, 1000, 0]
    assert Mixture([1.0, 1e-300]).counts(2 * RESOLUTION)[1] == 2


def test_every_problem_of_weights_is_said_at_once():
    problems = weight_problems(("web", "code"), {"wbe": 1.0, "web": -1.0, "math": float("nan")})
    assert problems == [
        "no source is named 'wbe': the sources are web, code",
        "no source is named 'math': the sources are web, code",
        "source 'code' has no weight: give each source one",
        "weight of 'web' is -1.0: must be a finite number, at least 0",
        "weight of 'math' is nan: must be a finite number, at least 0",
    ]
    assert "add up to 0" in weight_problems(("a", "b"), {"a": 0, "b": 0.0})[0]
    assert weight_problems(("a", "b"), {"a": 0, "b": 5}) == []
    for odd in (True, "1", None, float("inf")):
        assert len(weight_problems(("a",), {"a": odd})) == 1
