"""Points spread evenly before anything is known, and seeds. Standard library only."""

from __future__ import annotations

import hashlib

from proxies.core import canon


def quasi_random(study_seed: int, index: int, dimension: int) -> list[float]:
    """Element `index` of the R_d sequence (M. Roberts 2018), shifted by the seed: `dimension` coordinates in [0, 1)."""
    ratio = _positive_root(dimension)
    shifts = [seed_of(study_seed, -1 - axis) / 2**32 for axis in range(dimension)]
    return [(shift + (index + 1) * ratio ** -(axis + 1)) % 1.0 for axis, shift in enumerate(shifts)]


def _positive_root(dimension: int) -> float:
    """The root > 1 of x^(d+1) = x + 1, by the contraction x <- (1 + x)^(1/(d+1))."""
    root = 1.5
    for _ in range(64):
        root = (1 + root) ** (1 / (dimension + 1))
    return root


def seed_of(study_seed: int, index: int) -> int:
    """A 32-bit seed of its own for every (study, index): a sampler re-created with one seed repeats itself."""
    return int.from_bytes(hashlib.sha256(canon.canonical([study_seed, index]).encode()).digest()[:4], "big")
