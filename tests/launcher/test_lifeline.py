"""A process whose parent is killed does not live on."""

import os
import signal
import subprocess
import sys
import time

import pytest

CHILD = """
import time
from launcher.base.lifeline import die_with_parent
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
"""


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
    with subprocess.Popen([sys.executable, "-c", PARENT, code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + (5 if line else 0.5)
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive(pid) != line
    if not line:
        os.kill(pid, signal.SIGKILL)


GROUP = """
import subprocess, sys, time
from contextlib import nullcontext
from launcher.base.lifeline import group_dies_with_us
# A shell of a session of its own, and what the shell starts.
child = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], start_new_session=True, stdout=subprocess.PIPE)
print(int(child.stdout.readline()), flush=True)
with group_dies_with_us(child.pid) if sys.argv[1] == "held" else nullcontext():
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize("held", [True, False])
def test_a_group_dies_with_its_killed_starter(held):
    command = [sys.executable, "-c", GROUP, "held" if held else "free"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        pid = int(starter.stdout.readline())
        starter.stdout.readline()
        starter.send_signal(signal.SIGKILL)
    until = time.monotonic() + (5 if held else 0.5)
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive(pid) != held
    if not held:
        os.kill(pid, signal.SIGKILL)
