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


GIVEN_BACK = """
import torch
from pathlib import Path
from proxies.training.memory import give_back_memory, keep_freed_memory
def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20
keep_freed_memory()
before = resident_mib()
many = [torch.ones(250_000) for _ in range(200)]  # 1 MB each
kept = torch.ones(10)
del many
print(before, resident_mib(), end=" ")
give_back_memory()
print(resident_mib())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc alone")
def test_what_is_kept_can_be_given_back():
    run = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, check=True, text=True)
    before, held, after = map(int, run.stdout.split())
    assert held > before + 150 > after + 100
