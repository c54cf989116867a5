"""Which source each sequence of a run comes from: exact quotas, found at any position. numpy and
stdlib only.

The sources are the leaves of a binary tree. At each fork the first m of the sequences that pass it
give round(m * a / A) to the left, where a / A is the left's share in whole numbers: a Sturmian
sequence, which never strays more than a half from its share. So a position is looked up, never
replayed, and any prefix of a run holds each source's share but for two sequences at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESOLUTION = 2**30  # whole parts the weights are rounded to; its square fits 64 bits


@dataclass(frozen=True, slots=True)
class _Fork:
    left: _Fork | int
    right: _Fork | int
    left_parts: int
    parts: int


def weight_problems(names: Sequence[str], weights: Mapping[str, float]) -> list[str]:
    """All that is wrong with weights for the sources of these names."""
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
    """The order in which sources of given weights take turns.

    Args:
        weights: relative weights, finite and not negative, one above zero at least; a source of
            weight zero never has a turn.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        parts = _whole_parts(weights)
        self._num_sources = len(weights)
        self._root = _tree([(source, part) for source, part in enumerate(parts) if part])

    def counts(self, num_sequences: int) -> list[int]:
        """How many of the first `num_sequences` sequences of a run each source gives."""
        counts = [0] * self._num_sources
        todo = [(self._root, num_sequences)]
        while todo:
            node, passed = todo.pop()
            if isinstance(node, int):
                counts[node] = passed
            else:
                to_left = (passed * node.left_parts + node.parts // 2) // node.parts
                todo += [(node.left, to_left), (node.right, passed - to_left)]
        return counts

    def draw(
        self, first_sequence: int, num_sequences: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sequences `first_sequence` and on: the source of each [B], and how many that source gave
        before it [B].
        """
        source_B = np.empty(num_sequences, dtype=np.int64)
        index_B = np.empty(num_sequences, dtype=np.int64)
        position_B = np.arange(first_sequence, first_sequence + num_sequences, dtype=np.int64)
        todo: list[tuple[_Fork | int, NDArray[np.int64], NDArray[np.int64]]] = [
            (self._root, np.arange(num_sequences), position_B)
        ]
        while todo:
            node, rows, passed_B = todo.pop()
            if isinstance(node, int):
                source_B[rows], index_B[rows] = node, passed_B
                continue
            to_left_B = _quota(passed_B, node)
            goes_left_B = _quota(passed_B + 1, node) > to_left_B
            todo.append((node.left, rows[goes_left_B], to_left_B[goes_left_B]))
            todo.append((node.right, rows[~goes_left_B], (passed_B - to_left_B)[~goes_left_B]))
        return source_B, index_B


def _quota(passed_B: NDArray[np.int64], fork: _Fork) -> NDArray[np.int64]:
    """round(passed * left_parts / parts), halves up; whole rounds apart, so that no product leaves
    64 bits.
    """
    rounds_B, rest_B = np.divmod(passed_B, fork.parts)
    quota_B: NDArray[np.int64] = (
        rounds_B * fork.left_parts + (rest_B * fork.left_parts + fork.parts // 2) // fork.parts
    )
    return quota_B


def _whole_parts(weights: Sequence[float]) -> list[int]:
    total = sum(weights)
    parts = [max(1, round(weight / total * RESOLUTION)) if weight > 0 else 0 for weight in weights]
    parts[parts.index(max(parts))] += RESOLUTION - sum(parts)
    return parts


def _tree(leaves: list[tuple[int, int]]) -> _Fork | int:
    """Halves of weights as equal as the order of the sources allows: the more even the forks, the
    smaller the error.
    """
    if len(leaves) == 1:
        return leaves[0][0]
    parts = sum(part for _, part in leaves)
    before = [sum(part for _, part in leaves[:cut]) for cut in range(1, len(leaves))]
    cut = min(range(1, len(leaves)), key=lambda cut: abs(2 * before[cut - 1] - parts))
    return _Fork(
        left=_tree(leaves[:cut]), right=_tree(leaves[cut:]), left_parts=before[cut - 1], parts=parts
    )
