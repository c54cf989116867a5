"""The order in which a run draws sequences from the sources of a mixture.

The sources are the leaves of a binary tree. Of the first m sequences that reach a fork,
round(m * a / A) go to the left, where a / A is the left's share as a ratio of integers. This is a
Sturmian sequence, which deviates from its share by at most half a sequence. So the source at any
position is computed without a replay, and in any prefix of a run each source has its share to
within two sequences.

The order of the data of every recorded run and of every exported trainer comes from this module:
its results must never change. Exports carry a copy of it, so it must use only NumPy and the
standard library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESOLUTION = 2**30
"""Number of equal parts that weights are rounded to; its square fits in 64 bits."""


@dataclass(frozen=True, slots=True)
class _Fork:
    """A fork of the tree; each side is another fork, or the number of a source."""

    left: _Fork | int
    right: _Fork | int
    left_parts: int
    """Weight of the sources on the left, in parts of `RESOLUTION`."""
    parts: int
    """Weight of all sources below the fork, in parts of `RESOLUTION`."""


def find_weight_problems(names: Sequence[str], weights: Mapping[str, float]) -> list[str]:
    """Return every problem of the weights of a mixture; empty if there is none.

    Args:
        names: Names of the sources.
        weights: Weight by name, as the user gave it.
    """
    problems = [
        f"no source is named {name!r}: the sources are {', '.join(names)}"
        for name in weights
        if name not in names
    ]
    problems += [
        f"source {name!r} has no weight: give each source one"
        for name in names
        if name not in weights
    ]
    problems += [
        f"weight of {name!r} is {weight!r}: must be a finite number, at least 0"
        for name, weight in weights.items()
        if isinstance(weight, bool)
        or not (isinstance(weight, int | float) and 0 <= weight < math.inf)
    ]
    if not problems and not 0 < math.fsum(weights.values()) < math.inf:
        problems.append(
            "the weights add up to 0 or to infinity: at least one must be above 0, and their sum "
            "finite"
        )
    return problems


class Mixture:
    """The order in which sequences are drawn from sources with the given weights.

    Args:
        weights: Relative weights, finite and not negative, at least one of them above 0. A source
            with weight 0 is never drawn from.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        parts = _round_to_parts(weights)
        self._num_sources = len(weights)
        self._root = _build_tree([(source, part) for source, part in enumerate(parts) if part])

    def count_by_source(self, num_sequences: int) -> list[int]:
        """Return how many of the first `num_sequences` sequences of a run come from each source."""
        counts = [0] * self._num_sources
        pending = [(self._root, num_sequences)]
        while pending:
            node, num_passed = pending.pop()
            if isinstance(node, int):
                counts[node] = num_passed
            else:
                # As `_count_left`, in Python's integers, which cannot overflow
                num_left = (num_passed * node.left_parts + node.parts // 2) // node.parts
                pending += [(node.left, num_left), (node.right, num_passed - num_left)]
        return counts

    def draw(
        self, first_sequence: int, num_sequences: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw consecutive sequences of a run.

        Args:
            first_sequence: Number of sequences of the run before these.
            num_sequences: Number of sequences to draw, B.

        Returns:
            The source of each sequence, [B], and the number of earlier sequences of the run that
            come from the same source, [B].
        """
        source_B = np.empty(num_sequences, dtype=np.int64)
        index_B = np.empty(num_sequences, dtype=np.int64)
        position_B = np.arange(first_sequence, first_sequence + num_sequences, dtype=np.int64)
        # Nodes to visit, each with the rows of the batch that reach it, and for each row the number
        # of earlier sequences of the run that reached it.
        pending: list[tuple[_Fork | int, NDArray[np.int64], NDArray[np.int64]]] = [
            (self._root, np.arange(num_sequences), position_B)
        ]
        while pending:
            node, rows, passed_B = pending.pop()
            if isinstance(node, int):
                source_B[rows], index_B[rows] = node, passed_B
                continue
            num_left_B = _count_left(passed_B, node)
            goes_left_B = _count_left(passed_B + 1, node) > num_left_B
            pending.append((node.left, rows[goes_left_B], num_left_B[goes_left_B]))
            pending.append((node.right, rows[~goes_left_B], (passed_B - num_left_B)[~goes_left_B]))
        return source_B, index_B


def _count_left(passed_B: NDArray[np.int64], fork: _Fork) -> NDArray[np.int64]:
    """Return round(passed * left_parts / parts) with halves rounded up.

    Complete cycles of `parts` sequences are counted separately, so that no product exceeds 64 bits.
    """
    cycles_B, remainder_B = np.divmod(passed_B, fork.parts)
    remainder_left_B = (remainder_B * fork.left_parts + fork.parts // 2) // fork.parts
    quota_B: NDArray[np.int64] = cycles_B * fork.left_parts + remainder_left_B
    return quota_B


def _round_to_parts(weights: Sequence[float]) -> list[int]:
    """Round weights to whole parts of `RESOLUTION`; the largest weight takes the rounding error."""
    total = sum(weights)
    parts = [max(1, round(weight / total * RESOLUTION)) if weight > 0 else 0 for weight in weights]
    parts[parts.index(max(parts))] += RESOLUTION - sum(parts)
    return parts


def _build_tree(leaves: list[tuple[int, int]]) -> _Fork | int:
    """Build the tree of the sources.

    Each fork divides the weights as evenly as the order of the sources allows: the more even the
    forks, the smaller the deviation from the shares.

    Args:
        leaves: Numbers of the sources, with their parts.
    """
    if len(leaves) == 1:
        return leaves[0][0]
    parts = sum(part for _, part in leaves)
    left_parts = [sum(part for _, part in leaves[:cut]) for cut in range(1, len(leaves))]
    cut = min(range(1, len(leaves)), key=lambda cut: abs(2 * left_parts[cut - 1] - parts))
    return _Fork(
        left=_build_tree(leaves[:cut]),
        right=_build_tree(leaves[cut:]),
        left_parts=left_parts[cut - 1],
        parts=parts,
    )
