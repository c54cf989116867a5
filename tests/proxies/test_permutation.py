import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxies.permutation import permuted


def order(size, key):
    return [permuted(index, size, key) for index in range(size)]


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 4095, 4097])
def test_every_index_is_met_once(size):
    assert sorted(order(size, (3, 1))) == list(range(size))


@settings(deadline=None, derandomize=True, database=None, max_examples=50)
@given(st.integers(1, 600), st.integers(0, 2**31), st.integers(0, 50))
def test_it_is_a_permutation_for_any_key(size, seed, epoch):
    assert sorted(order(size, (seed, epoch))) == list(range(size))


@settings(deadline=None, derandomize=True, database=None, max_examples=50)
@given(st.integers(1, 2**62), st.data())
def test_it_stays_in_range_at_any_size(size, data):
    index = data.draw(st.integers(0, size - 1))
    assert 0 <= permuted(index, size, (1, 2)) < size


def test_seeds_and_epochs_order_differently():
    orders = [tuple(order(200, (seed, epoch))) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16
    assert orders[0] != tuple(range(200))
    assert order(5, (0, 0)) == [3, 1, 4, 2, 0]


def test_neighbours_are_torn_apart():
    """Across keys a pair's images are as far apart as random ones: a third of the range on average."""
    size = 1000
    gaps = [abs(permuted(10, size, (seed, 0)) - permuted(11, size, (seed, 0))) for seed in range(300)]
    assert sum(gaps) / len(gaps) == pytest.approx(size / 3, rel=0.15)


def test_the_first_window_is_uniform_over_seeds():
    counts = [0] * 10
    for seed in range(2000):
        counts[permuted(0, 10, (seed, 0))] += 1
    chi_squared = sum((count - 200) ** 2 / 200 for count in counts)
    assert chi_squared < 27.9  # 0.1 % of a chi-squared of 9 degrees
