import hashlib
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from proxies.data.permutation import permuted


def order(size, seed_and_epoch):
    return permuted(np.arange(size), size, "{}/{}".format(*seed_and_epoch)).tolist()


def one_by_one(index, size, key):
    """The same network in Python's integers, an index at a time."""
    digest = hashlib.sha256(key.encode()).digest()
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(4):
            constant = int.from_bytes(digest[8 * number : 8 * number + 8], "big")
            mixed = ((right + constant) * 0x9E3779B97F4A7C15 + number) % 2**64
            mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) % 2**64
            left, right = right, left ^ ((mixed >> 32) & mask)
        index = left << half | right
        if index < size:
            return index


def test_it_is_the_network_bit_for_bit():
    sizes = (1, 2, 3, 100, 257, 2**20, 10**9 + 7, 2**40 + 3, 2**62)
    for size, key in itertools.product(sizes, ("0/0", "7/3", "7/3/code")):
        indices = np.random.default_rng(0).integers(0, size, 100)
        assert permuted(indices, size, key).tolist() == [
            one_by_one(int(i), size, key) for i in indices
        ]


def test_near_indices_have_the_same_images_as_far_ones():
    """Those of a step's sequences, which are looked up: within a block, over its end, at the end of
    the range.
    """
    size, key = 1500, "7/3"
    for indices in (
        range(8),
        range(505, 530),
        range(1490, 1500),
        [1499, 1100],
        range(0, 1500, 100),
        [],
    ):
        found = permuted(np.array(indices, dtype=np.int64), size, key)
        assert found.tolist() == [one_by_one(index, size, key) for index in indices]


@settings(deadline=None, derandomize=True, database=None, max_examples=20)
@given(st.integers(1, 600), st.integers(0, 2**31), st.integers(0, 50))
def test_it_is_a_permutation_for_any_key(size, seed, epoch):
    assert sorted(order(size, (seed, epoch))) == list(range(size))


def test_seeds_and_epochs_order_differently():
    orders = [tuple(order(200, (seed, epoch))) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16
    assert orders[0] != tuple(range(200))
    assert order(5, (0, 0)) == [3, 1, 4, 2, 0]
