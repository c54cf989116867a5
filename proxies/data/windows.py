"""Windows of `seq_len` tokens over the shards of one source.

Exports carry copies of this module and of `permutation`. So both must use only NumPy and the
standard library, apart from each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forerun._proxies.data.permutation import permute


class Windows:
    """Non-overlapping windows of `seq_len` tokens, each followed by its next token.

    No window crosses the end of a shard. Numbers of windows count through all shards in order.

    Args:
        shards: Token ids, one array per shard.
        seq_len: Number of tokens in a window.
        key: Text that is different for each source, so that the windows of two sources have
            different orders for the same seed.
    """

    def __init__(self, shards: Sequence[NDArray[np.integer]], seq_len: int, key: str = "") -> None:
        self._shards, self.seq_len, self._key = shards, seq_len, key
        counts = (max(0, (len(tokens) - 1) // seq_len) for tokens in shards)
        # Number of the first window of each shard. The last entry is the number of all windows.
        self._first_window = np.cumsum([0, *counts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._first_window[-1])

    def shuffle(self, index_B: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Return the windows that a run reads at some of its draws from this source.

        Every epoch reads each window once, in a different order from the other epochs.

        Args:
            index_B: Indices of the draws [B]: 0 for the run's first draw from this source.
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
            # This text determines the order of the data. Any change to it, even of the "/",
            # changes the batches of every recorded run and of every exported trainer.
            window_B[rows] = permute(place_B[rows], len(self), f"{seed}/{epoch}{self._key}")
        return window_B

    def copy_into(
        self, batch_BT: NDArray[np.int64], rows: NDArray[np.int64], window_B: NDArray[np.int64]
    ) -> None:
        """Copy windows into rows of a batch.

        One slice per window is faster than one index per token.

        Args:
            batch_BT: Batch to write to, [B, T + 1]: the tokens of a window and the next token.
            rows: Indices of the rows to write, one for each window.
            window_B: Numbers of the windows.
        """
        num_tokens = self.seq_len + 1
        shard_B = np.searchsorted(self._first_window, window_B, side="right") - 1
        start_B = (window_B - self._first_window[shard_B]) * self.seq_len
        for row, shard, start in zip(
            rows.tolist(), shard_B.tolist(), start_B.tolist(), strict=True
        ):
            batch_BT[row] = self._shards[shard][start : start + num_tokens]
