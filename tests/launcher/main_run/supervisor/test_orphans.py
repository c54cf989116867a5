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
from waiting import wait_until

from forerun._launcher.main_run.frozen.frozen_folder import ATTESTED, write_frozen
from forerun._launcher.main_run.process_signals import JOB_VARIABLE

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
import os, sys
from pathlib import Path
from forerun._proxies.external.log_file import RedactedLog
from forerun._proxies.external.supervised_command import SupervisedCommand
print("up", flush=True)
SupervisedCommand(
    [sys.executable, "-S", "-c", *sys.argv[1:]], folder=Path.cwd(), environment=dict(os.environ),
    log=RedactedLog(Path("log.txt"), str), grace_seconds=1.0,
).wait(60)
"""


def list_processes():
    """Return the ids of the processes that the test has started and that still run."""
    return list_processes_with_variable(MARKER)


def wait_until_gone():
    """Wait until no process of the test runs; raise TimeoutError if one outlives the limit."""
    wait_until(lambda: not list_processes(), GONE_SECONDS)


@pytest.fixture(autouse=True)
def mark_processes(monkeypatch):
    """Mark all processes that a test starts, and kill those that it leaves behind."""
    monkeypatch.setenv(MARKER, "1")
    yield
    for pid in list_processes():
        os.kill(pid, signal.SIGKILL)


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
        wait_until_gone()


def test_killed_agent_leaves_no_rank_that_has_not_called_die_with_job():
    """A rank that calls `die_with_job` too late has another parent, which lacks the job's token.

    The supervisor gives the token to agent and ranks in `JOB_VARIABLE`; here the test does.
    """
    rank = RANK.replace("PATHS", repr(sys.path))
    environment = {**os.environ, JOB_VARIABLE: "a" * 32}
    with subprocess.Popen([sys.executable, "-S", "-c", AGENT, rank], env=environment) as agent:
        wait_until(lambda: len(list_processes()) == 3)  # the agent and two ranks
        agent.kill()
    wait_until_gone()


def launch_and_kill(command, has_come, seconds_later):
    """Start a launch, and kill its supervisor some seconds after `has_come()` is true."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(has_come, 240)
            time.sleep(seconds_later)
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_real_launch_killed_at_random_moments_leaves_no_process(corpus, tmp_path):
    """Two of three kills come after a checkpoint; the others come while the processes start."""
    rng = random.Random(31)
    decision = make_tiny_decision(corpus, num_ranks=2, every_steps=2)
    folder = write_frozen(tmp_path / "frozen", decision, {kind: {} for kind in ATTESTED}).parent
    launch = [sys.executable, "-m", "forerun", "launch", folder, "--data", corpus, "--out"]

    def has_saved():
        return any(out.glob("checkpoints/step-*[0-9]"))

    def has_started_a_process():
        return len(list_processes()) >= 2

    for number in range(18):
        out = tmp_path / f"run-{number}"
        if number % 3:
            launch_and_kill([*launch, out], has_saved, rng.uniform(0, 0.5))
        else:
            launch_and_kill([*launch, out], has_started_a_process, rng.uniform(0, 8))
        wait_until_gone()
