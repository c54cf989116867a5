"""Signal handling: a flag that a handler may set, and processes that end with their parent.

Programs import this module before torch, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

# ---- Processes that end with their parent ----
# An orphaned process must not write where a new attempt writes, nor stay behind on a machine.

JOB_VARIABLE = "FORERUN_ATTEMPT"
"""Environment variable of every process of a job; it holds the token of the attempt."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent thread ends. Does nothing on systems
    other than Linux.

    Args:
        parent: Process id of the parent; None for the current parent. If another process is the
            parent by now, the parent has ended, and this process ends as well.
        number: Signal that the kernel sends.
    """
    expected = os.getppid() if parent is None else parent
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)


def make_child_die_with_us(number: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a `preexec_fn` with which a child process ends when this thread ends."""
    return functools.partial(die_with_parent, os.getpid(), number)


def die_with_job() -> None:
    """Have a rank end when the agent that started it ends. Call it before the import of torch,
    which takes seconds.

    If the agent was killed before this call, the parent is another process, which does not have the
    job's token.
    """
    parent = os.getppid()
    die_with_parent(parent)
    token = os.environ.get(JOB_VARIABLE)
    if token is None or sys.platform != "linux":
        return
    try:
        environment = Path(f"/proc/{parent}/environ").read_bytes()
    except PermissionError:
        if parent != 1:  # the agent hides its environment
            return
        environment = b""
    except OSError:  # the parent has just ended
        environment = b""
    if f"{JOB_VARIABLE}={token}".encode() not in environment.split(b"\0"):
        os.kill(os.getpid(), signal.SIGKILL)


_NAP_SECONDS = 0.05
"""Seconds between two looks at a flag."""


class SignalFlag:
    """A flag like `threading.Event` that signal handlers may set.

    An event has a lock. A handler runs in the middle of the main thread: if it sets an event while
    the main thread holds that lock (in `wait`, or in the handler of an earlier signal), it waits
    forever. This flag has no lock.
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """Set the flag; nothing unsets it."""
        self._set = True

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._set

    def wait(self, seconds: float) -> bool:
        """Wait until the flag is set, for at most `seconds`. Return whether it is set."""
        deadline = time.monotonic() + seconds
        while not self._set and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _NAP_SECONDS))
        return self._set
