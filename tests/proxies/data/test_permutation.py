"""Tests of the permutation that orders the sequences of training.

The permutation is a Feistel network, keyed by the seed, the epoch, and the source if there are
several.
"""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun._proxies.data import permutation
from forerun._proxies.data.permutation import permute


def compute_order(size, seed, epoch):
    """Return the images of all indices under the permutation of a seed and an epoch."""
    return permute(np.arange(size), size, f"{seed}/{epoch}").tolist()


def permute_index(index, size, key):
    """Permute one index with Python's integers, as a reference for `permute`.

    The constants are those of splitmix64. They and the order of operations are part of stored
    results, so a difference is a mistake in `permute`, not here.
    """
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


def test_permute_matches_the_reference():
    sizes = (1, 2, 3, 100, 257, 2**20, 10**9 + 7, 2**40 + 3, 2**62)
    for size, key in itertools.product(sizes, ("0/0", "7/3", "7/3/code")):
        indices = np.random.default_rng(0).integers(0, size, 100)
        expected = [permute_index(int(i), size, key) for i in indices]
        assert permute(indices, size, key).tolist() == expected


SIZE_OF_THREE_BLOCKS = 3 * permutation._BLOCK_SIZE - 36
"""Size of a permutation whose third block is not full."""


@pytest.mark.parametrize(
    "indices",
    [
        pytest.param(range(8), id="first block"),
        pytest.param(
            range(permutation._BLOCK_SIZE - 7, permutation._BLOCK_SIZE + 18), id="two blocks"
        ),
        pytest.param(range(SIZE_OF_THREE_BLOCKS - 10, SIZE_OF_THREE_BLOCKS), id="last block"),
        pytest.param([SIZE_OF_THREE_BLOCKS - 1, SIZE_OF_THREE_BLOCKS - 400], id="descending"),
        pytest.param(range(0, SIZE_OF_THREE_BLOCKS, 100), id="all blocks"),
        pytest.param([], id="none"),
    ],
)
def test_images_match_the_reference_with_and_without_the_cache_of_blocks(indices):
    """Indices of one block or two neighboring blocks are looked up in cached blocks of images.

    Images of indices that are farther apart are computed without the cache.
    """
    images = permute(np.array(indices, dtype=np.int64), SIZE_OF_THREE_BLOCKS, "7/3")
    assert images.tolist() == [
        permute_index(index, SIZE_OF_THREE_BLOCKS, "7/3") for index in indices
    ]


@settings(deadline=None, derandomize=True, database=None, max_examples=20)
@given(st.integers(1, 600), st.integers(0, 2**31), st.integers(0, 50))
def test_every_key_gives_a_permutation(size, seed, epoch):
    assert sorted(compute_order(size, seed, epoch)) == list(range(size))


def test_seeds_and_epochs_have_different_orders():
    orders = [tuple(compute_order(200, seed, epoch)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16
    assert orders[0] != tuple(range(200))


def test_order_is_pinned():
    """Stored results depend on the order of sequences. Never change the expected values."""
    assert compute_order(5, seed=0, epoch=0) == [3, 1, 4, 2, 0]
