"""Windows of `seq_len` tokens over the shards of one source.

Exports carry this module: it uses NumPy and the standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from proxies.data.permutation import permuted


class Windows:
    """Non-overlapping windows of `seq_len` tokens, each followed by its next token.

    No window crosses the end of a shard.

    Args:
        shards: Token ids, one array per shard.
        seq_len: Number of tokens in a window.
        key: Key of this source, so that sources have different orders for the same seed.
    """

    def __init__(self, shards: Sequence[NDArray[np.integer]], seq_len: int, key: str = "") -> None:
        self._shards, self._seq_len, self._key = shards, seq_len, key
        counts = (max(0, (len(tokens) - 1) // seq_len) for tokens in shards)
        # First window of each shard, and the number of windows at the end.
        self._first_window = np.cumsum([0, *counts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._first_window[-1])

    def shuffled(self, index_B: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Return the windows of the source's draws, each window once per epoch.

        Every epoch has another order.

        Args:
            index_B: Numbers of the draws from this source, from 0, [B].
            seed: Seed of the run's data order.

        Returns:
            Numbers of the windows, [B].
        """
        window_B = np.empty_like(index_B)
        if not len(index_B):
            return window_B
        epoch_B, place_B = np.divmod(index_B, len(self))
        for epoch in range(int(epoch_B.min()), int(epoch_B.max()) + 1):
            rows = epoch_B == epoch
            window_B[rows] = permuted(place_B[rows], len(self), f"{seed}/{epoch}{self._key}")
        return window_B

    def copy_into(
        self, batch_BT: NDArray[np.int64], rows: NDArray[np.int64], window_B: NDArray[np.int64]
    ) -> None:
        """Copy windows into rows of a batch.

        One slice per window is faster than one index per token.

        Args:
            batch_BT: Batch to write to, [B, T + 1].
            rows: Rows to write, one per window.
            window_B: Numbers of the windows.
        """
        num_tokens = self._seq_len + 1
        shard_B = np.searchsorted(self._first_window, window_B, side="right") - 1
        start_B = (window_B - self._first_window[shard_B]) * self._seq_len
        for row, shard, start in zip(
            rows.tolist(), shard_B.tolist(), start_B.tolist(), strict=True
        ):
            batch_BT[row] = self._shards[shard][start : start + num_tokens]
