"""Tests that no process outlives its job.

Supervisors are killed at many moments, and their processes must end.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from main_run import make_tiny_decision
from scripted_job import list_processes_with_variable

from forerun._launcher.main_run.frozen.frozen_folder import ATTESTED, write_frozen

MARKER = "FORERUN_TEST_ORPHANS"
"""Environment variable by which the tests find the processes that they started."""
GONE_SECONDS = 5.0
"""Time limit for the end of processes: the kernel signals at once, but the machine may be busy."""
# The programs stand for the processes of a launch. A supervisor starts an agent, as torchrun is,
# and the agent starts two ranks.
RANK = """
import sys, time
sys.path[:0] = PATHS
time.sleep(0.1 * float(sys.argv[1]))  # stands for the start of the interpreter
from forerun._launcher.main_run.process_signals import die_with_job
die_with_job()
time.sleep(60)
"""
AGENT = """
import subprocess, sys, time
time.sleep(0.1)
for n in "12":
    subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1], n], start_new_session=True)
time.sleep(60)
"""
SUPERVISOR = """
import os, sys
from forerun._launcher.main_run.supervisor.attempt import ProcessSession
job = ProcessSession([sys.executable, "-S", "-c", *sys.argv[1:]], os.open(os.devnull, os.O_WRONLY))
print("up", flush=True)
job.process.wait()
"""
TRAINER_SUPERVISOR = """
import sys
from pathlib import Path
from forerun._proxies.external.log_file import RedactedLog
from forerun._proxies.external.supervised_command import SupervisedCommand
print("up", flush=True)
SupervisedCommand(
    [sys.executable, "-S", "-c", *sys.argv[1:]], folder=Path.cwd(), environment=dict(__import__("os").environ),
    log=RedactedLog(Path("log.txt"), str), grace_seconds=1.0,
).wait(60)
"""  # noqa: E501


def wait_until_gone(seconds):
    """Return the marked processes that still run after the limit, and kill them."""
    until = time.monotonic() + seconds
    while pids := list_processes_with_variable(MARKER):
        if time.monotonic() > until:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            return pids
        time.sleep(0.02)
    return []


@pytest.fixture(autouse=True)
def mark_processes(monkeypatch):
    """Mark all processes that a test starts, and kill those that it leaves behind."""
    monkeypatch.setenv(MARKER, "1")
    yield
    wait_until_gone(0)


@pytest.mark.parametrize(
    "supervisor", [SUPERVISOR, TRAINER_SUPERVISOR], ids=["ranks", "user's trainer"]
)
def test_killed_supervisor_leaves_neither_agent_nor_ranks(supervisor, tmp_path):
    """The supervisor is killed before the agent runs, while ranks start, and after their start.

    A rank that has started has called `die_with_job`: the kernel kills it when its parent dies.
    """
    rank = RANK.replace("PATHS", repr(sys.path))
    for delay in (0.0, 0.05, 0.15, 0.2, 0.3, 0.45):
        command = [sys.executable, "-c", supervisor, AGENT, rank]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as process:
            process.stdout.readline()
            time.sleep(delay)
            process.kill()
        assert wait_until_gone(GONE_SECONDS) == [], f"killed {delay} s after the job began"


def test_killed_agent_leaves_no_rank_that_has_not_called_die_with_job(tmp_path):
    rank = RANK.replace("PATHS", repr(sys.path))
    environment = {**os.environ, "FORERUN_ATTEMPT": "a" * 32}
    with subprocess.Popen([sys.executable, "-S", "-c", AGENT, rank], env=environment) as agent:
        while len(list_processes_with_variable(MARKER)) < 3:
            time.sleep(0.01)
        agent.kill()
    assert wait_until_gone(GONE_SECONDS) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_real_launch_killed_at_random_moments_leaves_no_process(corpus, tmp_path):
    """Two of three kills come after a checkpoint; the others come while the processes start."""
    rng = random.Random(31)
    decision = make_tiny_decision(corpus, num_ranks=2, every_steps=2)
    folder = write_frozen(tmp_path / "frozen", decision, {kind: {} for kind in ATTESTED}).parent
    num_saved = 0
    for number in range(18):
        out = tmp_path / f"run-{number}"
        command = [
            sys.executable,
            "-m",
            "forerun",
            "launch",
            folder,
            "--data",
            corpus,
            "--out",
            out,
        ]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            if number % 3:
                until = time.monotonic() + 120
                while not list(out.glob("checkpoints/step-*[0-9]")) and time.monotonic() < until:
                    time.sleep(0.01)
                num_saved += 1
                time.sleep(rng.uniform(0, 0.5))
            else:
                while len(list_processes_with_variable(MARKER)) < 2:
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, 8))
            process.kill()
        assert wait_until_gone(GONE_SECONDS) == [], f"kill {number}"
    assert num_saved == 12
