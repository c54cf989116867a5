"""Counted in a process of its own: what it sets cannot be taken back."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from proxies.training.memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    return sum(torch.ones(3_000_000 + 1000 * i).sum() for i in range(8))  # 12 MB each
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc alone")
def test_freed_memory_is_taken_again_without_a_page_fault():
    faults = {
        arm: int(subprocess.run([sys.executable, "-c", SCRIPT, arm], capture_output=True, check=True, text=True).stdout)
        for arm in ("kept", "plain")
    }
    assert faults["kept"] < 1000 < faults["plain"]
