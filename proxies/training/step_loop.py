"""The loop that launches optimizer steps ahead of their reports, so that a GPU never waits for
Python.

The report of a step, its losses and gradient norms, tells the host whether a run goes on. Reading
it at once would leave a GPU idle until the next step is launched. So on a GPU, a step is launched
before the report of the step before it is read. The results are the same: the device itself makes
no update when a loss or gradient is not finite, and when the loop returns, the reports of all
launched steps have been read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from proxies.core.spec import Curve, RunResult

Launched = TypeVar("Launched")
Ended = tuple[int, RunResult, Curve]
"""Slot, result and curve of a run that ended."""


def default_steps_ahead(device: torch.device) -> int:
    """Return how many steps are launched before a report is read: 1 on a GPU, 0 on a CPU."""
    return 1 if device.type == "cuda" else 0


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """Return values in memory from which they can be copied to a device without waiting.

    For a GPU this is pinned memory. The copy must be `non_blocking`; torch keeps the pinned memory
    until the copy is done.
    """
    return values.pin_memory() if device.type == "cuda" else values


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to a device without making the host wait."""
    return pinned(values, device).to(device, non_blocking=True)


class StepReport:
    """The losses and gradient norms of a step, which are being copied to the host."""

    def __init__(self, values: Tensor) -> None:
        """Start to copy values of any shape, after the work that their device already has."""
        self._values = values.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(values.device))

    def read(self) -> Any:
        """Return the values as nested lists.

        Waits for the copy only, not for work that was launched after it.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


def run_steps(
    num_steps: int,
    seconds: float,
    steps_ahead: int,
    *,
    may_begin: Callable[[int], bool],
    alone: Callable[[int], bool],
    begin: Callable[[int], Launched],
    settle: Callable[[Launched], list[Ended]],
) -> list[Ended]:
    """Make steps until a run ends, and return the runs that ended.

    All launched steps have been read on return. If launching a step raises an error while an unread
    step before it ended a run, the error is dropped: without steps ahead, that step would not have
    been launched.

    Args:
        num_steps: Maximum number of steps.
        seconds: Time limit for starting new steps, in seconds.
        steps_ahead: Maximum number of unread steps while another one is launched.
        may_begin: Returns whether a step may be launched after a number of unread ones.
        alone: Returns whether all unread steps must be read before the next one is launched.
        begin: Launches a step after a number of unread ones, and returns what `settle` needs.
        settle: Reads a step, and returns the runs that it ended.
    """
    deadline = time.monotonic() + seconds
    unread: deque[Launched] = deque()
    ended: list[Ended] = []

    def read_down_to(max_unread: int) -> None:
        while len(unread) > max_unread:
            ended.extend(settle(unread.popleft()))

    for _ in range(num_steps):
        if unread and alone(len(unread)):
            read_down_to(0)
        if ended or not may_begin(len(unread)) or time.monotonic() > deadline:
            break
        try:
            unread.append(begin(len(unread)))
        except Exception:
            read_down_to(0)
            if not ended:
                raise
            break
        read_down_to(steps_ahead)
    read_down_to(0)
    return ended
