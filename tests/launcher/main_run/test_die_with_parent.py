"""Tests of `die_with_parent`: a child process ends when its parent is killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

CHILD = """
import time
from forerun._launcher.main_run.process_signals import die_with_parent
die_with_parent()
print("up", flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""  # noqa: E501


def is_alive(pid):
    """Return whether a process exists and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel call is Linux's")
@pytest.mark.parametrize("is_tied", [True, False])
def test_child_ends_with_its_killed_parent_if_tied_to_it(is_tied):
    code = CHILD if is_tied else CHILD.replace("die_with_parent()\n", "")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, code], stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + (5 if is_tied else 0.5)
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert is_alive(pid) != is_tied
    if not is_tied:
        os.kill(pid, signal.SIGKILL)
