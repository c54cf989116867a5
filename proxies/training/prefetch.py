"""The next batch of a run, read while the device computes the present one.

One background thread, and every batch a function of its step alone: what is read ahead changes when, never what.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from proxies.core.spec import RunSpec
from proxies.data.tokens import TokenStore


class Prefetch:
    """Batches of one run, on their device."""

    def __init__(self, store: TokenStore, spec: RunSpec, device: torch.device) -> None:
        self._store, self._spec, self._device = store, spec, device
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._ahead: tuple[int, Future[Tensor]] | None = None
        self.seconds_waited = 0.0
        """In all, for batches that were not there when asked for."""

    def take(self, step: int) -> Tensor:
        """The batch of update `step`: ids [B, T + 1]; reading of the next one begins.

        Raises:
            DataError: the training split holds no window of that length.
        """
        started = time.perf_counter()
        ahead = self._ahead if self._ahead and self._ahead[0] == step else None
        ids_BT = ahead[1].result() if ahead else self._read(step)
        self.seconds_waited += time.perf_counter() - started
        if step + 1 < self._spec.schedule.num_steps:
            self._ahead = (step + 1, self._reader.submit(self._read, step + 1))
        return ids_BT.to(self._device, non_blocking=True)

    def _read(self, step: int) -> Tensor:
        ids_BT = batch_of(self._store, self._spec, step)
        return ids_BT.pin_memory() if self._device.type == "cuda" else ids_BT


def batch_of(store: TokenStore, spec: RunSpec, step: int) -> Tensor:
    """The batch of update `step` of a run: ids [B, T + 1], on the CPU.

    Raises:
        DataError: the training split holds no window of that length.
    """
    first, count = spec.schedule.sequences(step, spec.batch_sequences)
    batch_BT = store.train_batch(seed=spec.seed, first_sequence=first, num_sequences=count, seq_len=spec.shape.seq_len)
    return torch.from_numpy(batch_BT)
