"""Processes that die with their parent: none may write on where a new attempt writes, or be left alone on a machine."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel SIGKILL this process when its parent thread ends; elsewhere than on Linux nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def group_dies_with_us(group_id: int) -> Iterator[None]:
    """Within, a process group is killed, children of its children too, when this process ends in whatever way.

    The kernel tells only children of a parent's end. A shell that waits for the end of a pipe, which comes when we are
    killed too, tells the whole group.
    """
    with subprocess.Popen(
        ["/bin/sh", "-c", 'read _; kill -s KILL -- "-$0"', str(group_id)], stdin=subprocess.PIPE, start_new_session=True
    ) as watch:
        try:
            yield
        finally:
            watch.kill()  # before the pipe closes: the group's number may be another's by then
