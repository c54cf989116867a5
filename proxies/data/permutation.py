"""A keyed permutation of range(size), computed for any indices without a table.

The order of the data of every recorded run and of every exported trainer comes from this module:
its results must never change. Exports carry a copy of it, so it must use only NumPy and the
standard library.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

_BLOCK_SIZE = 512
"""Number of consecutive indices that are permuted and cached together.

A whole block takes about as much time as the few indices that one step needs.
"""


def permute(index_B: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Return the images of indices under a keyed permutation of range(size).

    The permutation is a four-round Feistel network with cycle walking. It stores no table, so any
    step of any epoch is computed directly, at any corpus size.

    Args:
        index_B: Indices in range(size), [B].
        size: Size of the permuted range, at most 2^62.
        key: Text that determines the permutation.

    Returns:
        Images of the indices, [B].
    """
    if not len(index_B):
        return index_B
    first, last = int(index_B.min()) // _BLOCK_SIZE, int(index_B.max()) // _BLOCK_SIZE
    if last - first > 1:
        return _permute(index_B, size, key)

    # The indices are in one block or in two neighboring blocks, which are cached.
    blocks = [_permute_block(number, size, key) for number in range(first, last + 1)]
    table = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    images_B: NDArray[np.int64] = table[index_B - first * _BLOCK_SIZE]
    return images_B


@functools.lru_cache(maxsize=256)
def _permute_block(number: int, size: int, key: str) -> NDArray[np.int64]:
    """Return the images of one block of indices, up to the end of range(size)."""
    return _permute(
        np.arange(number * _BLOCK_SIZE, min((number + 1) * _BLOCK_SIZE, size), dtype=np.int64),
        size,
        key,
    )


def _permute(index_B: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Return the images of indices, computed without the cache of blocks."""
    # The network permutes 2^(2 * half_bits) numbers, at least `size`.
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    image_B = _apply_rounds(index_B.astype(np.uint64), half_bits, key)
    # Cycle walking: apply the network again to images outside the range.
    while (outside := np.flatnonzero(image_B >= size)).size:
        image_B[outside] = _apply_rounds(image_B[outside], half_bits, key)
    return image_B.astype(np.int64)


def _apply_rounds(index_B: NDArray[np.uint64], half_bits: int, key: str) -> NDArray[np.uint64]:
    """Apply the Feistel network to numbers of 2 * `half_bits` bits.

    Sums and products wrap at 2^64; the constants are those of splitmix64.
    """
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left_B, right_B = index_B >> shift, index_B & mask
    for number, constant in enumerate(_make_round_keys(key)):
        mixed_B = (right_B + constant) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)
        mixed_B ^= mixed_B >> np.uint64(29)
        mixed_B *= np.uint64(0xBF58476D1CE4E5B9)
        left_B, right_B = right_B, left_B ^ (mixed_B >> np.uint64(32) & mask)
    return left_B << shift | right_B


@functools.lru_cache(maxsize=1024)
def _make_round_keys(key: str) -> tuple[np.uint64, ...]:
    """Return four keys of 64 bits, one for each round of the network."""
    digest = hashlib.sha256(key.encode()).digest()
    return tuple(np.uint64(int.from_bytes(digest[i : i + 8], "big")) for i in range(0, 32, 8))
