"""A keyed permutation of range(size), computed for any indices at once. numpy and the standard library only."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray


def permuted(index_B: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Where the indices [B] go under a keyed permutation of range(size): a four-round Feistel network, cycle-walked.

    Nothing is stored, so any step of any epoch is found at once, at any corpus size. Indices lie in range(size), and
    size is at most 2^62.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    image_B = _rounds(index_B.astype(np.uint64), half, key)
    while (outside := np.flatnonzero(image_B >= size)).size:
        image_B[outside] = _rounds(image_B[outside], half, key)
    return image_B.astype(np.int64)


def _rounds(index_B: NDArray[np.uint64], half: int, key: str) -> NDArray[np.uint64]:
    """The network on numbers of twice `half` bits; sums and products wrap at 2^64."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left_B, right_B = index_B >> shift, index_B & mask
    for number, constant in enumerate(_round_keys(key)):
        mixed_B = (right_B + constant) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)
        mixed_B ^= mixed_B >> np.uint64(29)
        mixed_B *= np.uint64(0xBF58476D1CE4E5B9)  # splitmix64's constants
        left_B, right_B = right_B, left_B ^ (mixed_B >> np.uint64(32) & mask)
    return left_B << shift | right_B


@functools.lru_cache(maxsize=1024)
def _round_keys(key: str) -> tuple[np.uint64, ...]:
    digest = hashlib.sha256(key.encode()).digest()
    return tuple(np.uint64(int.from_bytes(digest[i : i + 8], "big")) for i in range(0, 32, 8))
