"""A keyed permutation of range(size), computed for any indices at once. numpy and the standard
library only.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

_BLOCK = 512
"""Consecutive indices whose images are kept together: a step's few cost as much time as these."""


def permuted(index_B: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Where the indices [B] go under a keyed permutation of range(size): a four-round Feistel
    network, cycle-walked.

    Nothing is stored, so any step of any epoch is found at once, at any corpus size. Indices lie in
    range(size), and size is at most 2^62.
    """
    first, last = (
        (int(index_B.min()) // _BLOCK, int(index_B.max()) // _BLOCK) if len(index_B) else (0, 2)
    )
    if last - first > 1:
        return _images(index_B, size, key)
    near = [_block_images(number, size, key) for number in range(first, last + 1)]
    table = near[0] if len(near) == 1 else np.concatenate(near)
    images_B: NDArray[np.int64] = table[index_B - first * _BLOCK]
    return images_B


@functools.lru_cache(maxsize=256)
def _block_images(number: int, size: int, key: str) -> NDArray[np.int64]:
    """The images of the block of that number, as many as lie in range(size)."""
    return _images(
        np.arange(number * _BLOCK, min((number + 1) * _BLOCK, size), dtype=np.int64), size, key
    )


def _images(index_B: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
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
