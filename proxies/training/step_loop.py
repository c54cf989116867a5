"""Optimizer steps begun before the last one has reported, so that a device never waits for Python.

The host learns from a step's report, its losses and gradient norms, whether a run goes on. Read at
once, that leaves a GPU idle until the next step is launched; so there a step is begun before the
report of the one before it is read. What holds all the same: curves and ends are those of reading
at once, for the device itself makes no update on what is not finite, and whatever looks at an
engine from outside finds every step that was begun read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from proxies.core.spec import Curve, RunResult

Begun = TypeVar("Begun")
Ended = tuple[int, RunResult, Curve]
"""(slot, result, curve) of a run that ended."""


def default_steps_ahead(device: torch.device) -> int:
    """Steps begun before a report is read: one on a GPU; none on a CPU, which computes in the
    host's own time.
    """
    return 1 if device.type == "cuda" else 0


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """Values [...] of the host as they are copied to `device` without waiting for it: on a GPU out
    of pinned memory.

    The copy must be `non_blocking`; torch keeps the pinned memory until it is done.
    """
    return values.pin_memory() if device.type == "cuda" else values


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy of `values` [...] on the device, behind what it computes; the host does not wait for
    any of that.
    """
    return pinned(values, device).to(device, non_blocking=True)


class StepReport:
    """What a step found, on its way to the host."""

    def __init__(self, values: Tensor) -> None:
        """Begin to copy `values`, of any shape, behind what their device has been asked for
        so far.
        """
        self._values = values.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(values.device))

    def read(self) -> Any:
        """The values, nested as their shape; waits for the copy alone, not for what was begun after
        it.
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
    begin: Callable[[int], Begun],
    settle: Callable[[Begun], list[Ended]],
) -> list[Ended]:
    """Make up to `num_steps` steps; returns early, with the runs that ended, as soon as one has.

    Args:
        num_steps: at most.
        seconds: after which none is begun.
        steps_ahead: steps that may be begun and not yet read while another begins.
        may_begin: whether one may begin while so many are not yet read.
        alone: whether it must wait until all are read.
        begin: begins it, and gives what `settle` needs.
        settle: reads a step; the runs that it ended.

    A step that raises while the one before it, not yet read, ended a run would not have been begun:
    it counts as not begun. Every step that was begun is read on return.
    """
    until = time.monotonic() + seconds
    begun: deque[Begun] = deque()
    ended: list[Ended] = []

    def read_down_to(most: int) -> None:
        while len(begun) > most:
            ended.extend(settle(begun.popleft()))

    for _ in range(num_steps):
        if begun and alone(len(begun)):
            read_down_to(0)
        if ended or not may_begin(len(begun)) or time.monotonic() > until:
            break
        try:
            begun.append(begin(len(begun)))
        except Exception:
            read_down_to(0)
            if not ended:
                raise
            break
        read_down_to(steps_ahead)
    read_down_to(0)
    return ended
