"""A keyed permutation of range(size), computed one index at a time. Standard library only."""

from __future__ import annotations

import functools
import hashlib


def permuted(index: int, size: int, key: tuple[int, int]) -> int:
    """Where `index` goes under a keyed permutation of range(size): a four-round Feistel network, cycle-walked.

    Nothing is stored, so any step of any epoch is found at once, at any corpus size.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number, constant in enumerate(_round_keys(key)):
            mixed = ((right + constant) * 0x9E3779B97F4A7C15 + number) & 0xFFFFFFFFFFFFFFFF
            mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF  # splitmix64's constants
            left, right = right, left ^ ((mixed >> 32) & mask)
        index = left << half | right
        if index < size:
            return index


@functools.lru_cache(maxsize=1024)
def _round_keys(key: tuple[int, int]) -> tuple[int, ...]:
    digest = hashlib.sha256(f"{key[0]}/{key[1]}".encode()).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "big") for i in range(0, 32, 8))
