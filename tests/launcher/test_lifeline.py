"""A process whose parent is killed does not live on."""

import os
import signal
import subprocess
import sys
import time

import pytest

CHILD = """
import time
from launcher.base.signals import die_with_parent
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


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel call is Linux's")
@pytest.mark.parametrize("line", [True, False])
def test_a_child_dies_with_its_killed_parent(line):
    code = CHILD if line else CHILD.replace("die_with_parent()\n", "")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, code], stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + (5 if line else 0.5)
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive(pid) != line
    if not line:
        os.kill(pid, signal.SIGKILL)
