"""Runs a command and leaves nothing of it behind, whatever happens to the one who asked. Run as a
script, isolated.

    python -I -S keeper.py GRACE_SECONDS PROGRAM ARGUMENTS...

Standard input is the asker's lifeline: a byte asks for an end in order (SIGTERM, after the grace
SIGKILL), its end says that the asker is gone (SIGKILL at once). Standard error becomes the
command's output and error. When the command and everything it started are gone, standard output
says how it ended: an exit code, -N for signal N, or why it could not begin.

Process groups are not enough: torchrun gives every rank a session of its own. So the keeper adopts
whatever the command's children leave behind (PR_SET_CHILD_SUBREAPER), and ends the whole tree below
itself. It leaves its asker's own tree by a second fork: Ray kills a worker's children with it, and
a killed keeper keeps nothing. Linux alone.
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
_KILL_SECONDS = 30.0  # after SIGKILL, a process may hang in the kernel for ever: give up on it
_LIFELINE, _ANSWER, _LOG = 0, 1, 2


def main(arguments: list[str]) -> None:
    """Begin, wait, end, answer."""
    if os.fork():
        os._exit(0)
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    keeper = os.getpid()

    def die_with_keeper() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it was killed before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        child = subprocess.Popen(
            arguments[1:],
            stdin=subprocess.DEVNULL,
            stdout=_LOG,
            stderr=_LOG,
            start_new_session=True,
            restore_signals=True,
            preexec_fn=die_with_keeper,  # noqa: PLW1509  (one thread here)
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        os.write(_ANSWER, f"could not be started: {error}".encode())
        return
    tree = Tree(child.pid)
    in_order = tree.wait()
    tree.end(float(arguments[0]) if in_order else 0.0)
    child.returncode = tree.status if tree.status is not None else -signal.SIGKILL
    with contextlib.suppress(OSError):  # nobody may be left to read it
        os.write(_ANSWER, str(child.returncode).encode())


class Tree:
    """A child in a session of its own, and everything that descends from it."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self.status: int | None = None
        """Its exit code or minus its signal; None while it runs."""

    def wait(self) -> bool:
        """Until the leader has ended or the asker wants it to; whether what is left may end in
        order.
        """
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
        """SIGTERM for all, and after the grace SIGKILL until none is left."""
        if grace_seconds and self.signal(signal.SIGTERM):
            until = time.monotonic() + grace_seconds
            while self.alive() and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
                self.reap()
        until = time.monotonic() + _KILL_SECONDS
        while self.signal(signal.SIGKILL) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            self.reap()

    def signal(self, number: int) -> bool:
        """Send it to every process of the tree; whether there was any."""
        alive = self.alive()
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        return bool(alive)

    def reap(self) -> None:
        """Collect whatever has ended; orphans of the command are ours by now."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.leader:
                    self.status = os.waitstatus_to_exitcode(status)

    def alive(self) -> list[int]:
        """The processes below this one that still run."""
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                # pid (name) state parent ...: the name may hold anything, so count from its last
                # bracket.
                state, parent = (
                    (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                )
                if state not in "ZX":
                    parents[int(folder.name)] = int(parent)
        found, layer = [], [os.getpid()]
        while layer:
            layer = [pid for pid, parent in parents.items() if parent in layer]
            found += layer
        return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main(sys.argv[1:])
