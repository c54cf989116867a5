"""A supervisor process runs a command and ends all of its processes, even if its parent dies.

It is run as an isolated script, on Linux only:

    python -I -S command_supervisor.py GRACE_SECONDS PROGRAM ARGUMENTS...

Standard input is a pipe from the parent. A byte on it asks for an orderly end of the command:
SIGTERM, and SIGKILL after the grace period. If the pipe is closed, the parent has died, and the
command gets SIGKILL at once. Standard error becomes the command's standard output and error. When
all processes of the command have ended, the supervisor writes to standard output how the command
ended: its exit code, -N for signal N, or why it could not be started.

Process groups are not enough, because torchrun starts each rank in its own session. So the
supervisor adopts orphaned descendants of the command (PR_SET_CHILD_SUBREAPER), and ends the whole
tree of processes below itself. It forks to leave the process tree of its parent: Ray kills the
children of a worker with the worker, and a supervisor that is killed cannot end anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_POLL_SECONDS = 0.02
KILL_SECONDS = 30.0
"""Time to wait after SIGKILL; a process may hang in the kernel forever."""
_LIFELINE, _ANSWER, _LOG = 0, 1, 2
"""Standard input, output, and error: the pipe from the parent, the pipe for the answer to it, and
the command's log."""


def main(arguments: list[str]) -> None:
    """Run a command, end what it leaves running, and write how it ended.

    Args:
        arguments: The grace period in seconds, then the program and its arguments.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    supervisor = os.getpid()

    def die_with_supervisor() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # the supervisor was killed before the call above
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        child = subprocess.Popen(
            arguments[1:],
            stdin=subprocess.DEVNULL,
            stdout=_LOG,
            stderr=_LOG,
            start_new_session=True,
            restore_signals=True,
            preexec_fn=die_with_supervisor,  # noqa: PLW1509  (the supervisor has one thread)
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        os.write(_ANSWER, f"could not be started: {error}".encode())
        return
    tree = Tree(child.pid)
    has_grace = tree.wait()
    tree.end(float(arguments[0]) if has_grace else 0.0)
    child.returncode = tree.status if tree.status is not None else -signal.SIGKILL
    with contextlib.suppress(OSError):  # the parent may have died
        os.write(_ANSWER, str(child.returncode).encode())


class Tree:
    """A child process in its own session, with all of its descendants."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self.status: int | None = None
        """Exit code of the child, or minus its signal; None while it runs."""

    def wait(self) -> bool:
        """Wait until the child has ended, or the parent asks for its end or dies.

        Returns:
            Whether the remaining processes get the grace period; False if the parent has died.
        """
        # `select` cannot wait for a child. So Python writes a byte to this pipe when SIGCHLD
        # arrives, and `select` waits for the byte.
        awake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.reap()
        while self.status is None:
            ready, _, _ = select.select([_LIFELINE, awake], [], [])
            if awake in ready:
                os.read(awake, 4096)
            self.reap()
            if _LIFELINE in ready:
                return os.read(_LIFELINE, 1) != b""
        return True

    def end(self, grace_seconds: float) -> None:
        """End all processes of the tree: SIGTERM, and SIGKILL after the grace period.

        Args:
            grace_seconds: Time between SIGTERM and SIGKILL; 0 for SIGKILL at once.
        """
        if grace_seconds and self.signal(signal.SIGTERM):
            deadline = time.monotonic() + grace_seconds
            while self.list_running() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                self.reap()
        deadline = time.monotonic() + KILL_SECONDS
        while self.signal(signal.SIGKILL) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self.reap()

    def signal(self, number: int) -> bool:
        """Send a signal to every process of the tree; return whether there were any."""
        pids = self.list_running()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        return bool(pids)

    def reap(self) -> None:
        """Collect the exit statuses of children that have ended, adopted orphans among them."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.leader:
                    self.status = os.waitstatus_to_exitcode(status)

    def list_running(self) -> list[int]:
        """Return the ids of the descendants of this process that still run."""
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The format is `pid (name) state parent ...`. The name may contain any character,
                # so split after its last bracket.
                state, parent = (
                    (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                )
                if state not in "ZX":
                    parents[int(folder.name)] = int(parent)
        descendants, generation = [], [os.getpid()]
        while generation:
            generation = [pid for pid, parent in parents.items() if parent in generation]
            descendants += generation
        return descendants


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main(sys.argv[1:])
