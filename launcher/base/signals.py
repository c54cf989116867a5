"""Signals: a flag that a handler may set, and processes that die with their parent. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import time

# Processes that die with their parent: none may write on where a new attempt writes, or be left alone on a machine.

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel SIGKILL this process when its parent thread ends; elsewhere than on Linux nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_NAP_SECONDS = 0.05


class Flag:
    """As `threading.Event`, for handlers of signals, which run in the midst of the main thread.

    An event has a lock: a handler that sets it while the main thread, in `wait` or in a handler of the signal before,
    holds that lock waits for ever. This has none.
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """From now on it is set."""
        self._set = True

    def is_set(self) -> bool:
        """Whether it has been set."""
        return self._set

    def wait(self, seconds: float) -> bool:
        """Until it is set, and so long at most. Returns whether it is."""
        deadline = time.monotonic() + seconds
        while not self._set and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _NAP_SECONDS))
        return self._set
