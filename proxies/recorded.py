"""A step recorded once on a GPU and replayed: the same arithmetic without its launches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NUM_WARMUPS = 3
"""Runs before the recording, in which libraries and the compiler make what they keep (torch's notes on CUDA graphs)."""


class NoGpuError(ValueError):
    """Steps are to be recorded, and there is no GPU here: no attempt of this study can mend that."""

    refuses_study = True


class Recorded:
    """A function without arguments, recorded on the current CUDA device.

    It may read and write tensors that stay where they are, must not ask the device for anything, and is run
    `NUM_WARMUPS` times before. What it returns is one tensor, overwritten by every call.
    """

    def __init__(self, step: Callable[[], Tensor]) -> None:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(NUM_WARMUPS):
                step()
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = step()

    def __call__(self) -> Tensor:
        """Replay it."""
        self._graph.replay()
        return self._result
