"""Tests of the supervisor of a main run, which starts torchrun and restarts it if it dies or hangs.

Most tests replace torchrun by a short Python script (fixture `launch_script`). The last test runs
real torchrun jobs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from main_run import make_tiny_decision, read_losses
from waiting import wait_until

from forerun._launcher.main_run import event_log, metrics_file
from forerun._launcher.main_run.frozen.launch_file import write_launch
from forerun._launcher.main_run.supervisor import attempt
from forerun._launcher.main_run.supervisor import launch as supervisor
from forerun._launcher.main_run.supervisor.hang_detector import SilenceLimits
from forerun._launcher.main_run.supervisor.launch import Nodes, launch
from forerun._launcher.main_run.supervisor.run_folder import RunFolder
from forerun._sweeps.store.errors import StudyHeld
from forerun._sweeps.store.lock import DriverLock


def count_attempts(tmp_path):
    """Return the number of attempts that have begun."""
    return len(list((tmp_path / "run").glob("began-*")))


def list_events(tmp_path):
    """Return kind and cause of each event of the run; the cause is empty if there is none."""
    return [
        (entry.kind, entry.data.get("cause", ""))
        for entry in event_log.read_events(tmp_path / "run")
    ]


# ---- Deaths ----


def test_orderly_end_is_not_restarted(launch_script, tmp_path):
    outcome = launch_script("end('aborted', 3, 7)")
    assert (outcome.event, outcome.exit_code, outcome.step, outcome.num_restarts) == (
        "aborted",
        3,
        7,
        0,
    )
    assert list_events(tmp_path) == [("launched", ""), ("ended", "")]


def test_killed_job_is_restarted_until_it_finishes(launch_script, tmp_path):
    outcome = launch_script(
        "step(count + 1)\nos.kill(os.getpid(), signal.SIGKILL) if count < 2 else end()"
    )
    assert (outcome.event, outcome.num_restarts) == ("finished", 2)
    assert list_events(tmp_path) == [
        ("launched", ""),
        ("restarted", "killed"),
        ("restarted", "killed"),
        ("ended", ""),
    ]
    first = event_log.read_events(tmp_path / "run")[1]
    assert first.digest and "by signal 9" in first.text
    assert (first.data["reached_step"], first.data["attempts_without_progress"]) == (1, 1)


def test_attempts_without_a_new_checkpoint_are_limited(launch_script, tmp_path):
    outcome = launch_script("step(count + 1)\nos.kill(os.getpid(), signal.SIGKILL)", max_restarts=2)
    assert (outcome.event, outcome.exit_code, outcome.num_restarts, outcome.cause) == (
        "failed",
        130,
        2,
        "killed",
    )
    assert count_attempts(tmp_path) == 3
    assert "3 attempts in a row saved nothing new" in outcome.reason


def test_new_checkpoint_resets_the_count_of_attempts(launch_script, tmp_path):
    die = "os.kill(os.getpid(), signal.SIGKILL)"
    outcome = launch_script(f"save(4 * count + 4) if count < 6 else end()\n{die}", max_restarts=1)
    assert (outcome.event, outcome.num_restarts) == ("finished", 6)
    restarted = [
        entry for entry in event_log.read_events(tmp_path / "run") if entry.kind == "restarted"
    ]
    assert restarted[-1].step == 24
    assert {entry.data["attempts_without_progress"] for entry in restarted} == {0}


def test_kernel_oom_kill_is_reported_as_out_of_memory(launch_script, monkeypatch):
    monkeypatch.setattr(attempt, "count_oom_kills", iter((3, 4)).__next__)
    outcome = launch_script("os.kill(os.getpid(), signal.SIGKILL)", max_restarts=0)
    assert (outcome.cause, outcome.exit_code) == ("out_of_memory", 2)


def test_two_errors_at_one_step_without_a_save_end_the_run(launch_script, tmp_path):
    outcome = launch_script(
        "save(count + 1) if count < 3 else None\nstep(5)\nraise ValueError('a bad shard')",
        max_restarts=9,
    )
    # Three attempts saved; the fourth saved nothing and died at the same step as the third.
    assert count_attempts(tmp_path) == 4
    assert (outcome.event, outcome.exit_code, outcome.cause) == ("failed", 1, "error")
    assert "error after step 5 (ValueError: a bad shard), twice at the same step" in outcome.reason


def test_ending_of_an_earlier_launch_is_ignored(launch_script, tmp_path):
    (tmp_path / "run").mkdir()
    metrics_file.write_ending(
        tmp_path / "run", metrics_file.AttemptEnd(event="finished", exit_code=0, step=12)
    )
    assert launch_script("raise ValueError('a')", max_restarts=0).event == "failed"


def test_second_node_writes_only_its_own_log(launch_script, tmp_path):
    (tmp_path / "run").mkdir()
    ending = metrics_file.AttemptEnd(event="finished", exit_code=0, step=12)
    metrics_file.write_ending(tmp_path / "run", ending)
    second = Nodes(num_nodes=2, rank=1, rendezvous="127.0.0.1:1")
    outcome = launch_script("raise ValueError('a')", max_restarts=0, nodes=second)
    assert outcome.event == "failed", "the ending of an earlier launch is ignored"
    assert metrics_file.read_ending(tmp_path / "run") == ending
    assert "ValueError: a" in (tmp_path / "run" / "node-1" / "torchrun.log").read_text()
    assert event_log.read_events(tmp_path / "run") == []
    with DriverLock(tmp_path / "run"):
        assert launch_script("end('stopped', 0, 3)", nodes=second).event == "stopped"


def test_secrets_are_removed_from_logs(launch_script, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "planted-4711-planted")
    outcome = launch_script(
        "print(os.environ['MY_API_KEY']); raise ValueError(os.environ['MY_API_KEY'])",
        max_restarts=1,
    )
    event_log_text = (tmp_path / "run" / event_log.EVENT_LOG_FILE).read_text()
    log = (tmp_path / "run" / "torchrun.log").read_text()
    assert "planted-4711" not in outcome.reason + event_log_text + log
    assert "ValueError: ***" in log
    assert "ValueError: ***" in event_log_text


# ---- Silence ----


# This program has 61 calls of `stuck` on its stack; SIGUSR1 makes it print the stack.
STUCK = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1)
def stuck(left):
    stuck(left - 1) if left else time.sleep(600)
stuck(60)
"""
TWO_STUCK = f"""
import subprocess
if count: end()
for rank in "01":
    subprocess.Popen([sys.executable, "-S", "-c", {STUCK!r}], env={{**os.environ, "LOCAL_RANK": rank}})
step(1), time.sleep(0.5), step(2), time.sleep(600)
"""  # noqa: E501


def test_silent_job_logs_each_ranks_stack_and_is_restarted(launch_script, tmp_path):
    began = time.monotonic()
    outcome = launch_script(TWO_STUCK, limits=SilenceLimits(floor_seconds=2))
    assert (outcome.event, outcome.num_restarts) == ("finished", 1)
    assert list_events(tmp_path)[1] == ("restarted", "hung")
    assert "no line of metrics for" in event_log.read_events(tmp_path / "run")[1].text
    assert time.monotonic() - began < 40
    stacks = (
        (tmp_path / "run" / "torchrun.log").read_text().split("forerun: the stack of process ")[1:]
    )
    assert len(stacks) == 2
    for stack in stacks:
        _, header, *frames = stack.splitlines()
        assert "most recent call first" in header
        assert [frame.split(" in ")[1] for frame in frames] == ["stuck"] * 61 + ["<module>"], (
            "the stack has no frames of another process"
        )


@pytest.mark.parametrize("program", ["python", "srun"])
def test_silent_job_gets_sigterm_only_if_it_is_srun(tmp_path, program):
    """Srun passes SIGTERM on to other machines; all other processes get SIGKILL at once."""
    script = tmp_path / program
    script.write_text(f"#!/bin/sh\ntrap 'touch {tmp_path}/asked; exit 143' TERM\nsleep 60 & wait\n")
    script.chmod(0o755)
    log = tmp_path / "log"
    spec = attempt.AttemptSpec(
        command=[str(script)],
        run_dir=tmp_path,
        log=log,
        limits=SilenceLimits(start_seconds=0.5),
        num_steps=12,
    )
    with DriverLock(tmp_path) as lock:
        run_folder = RunFolder(tmp_path, lock, log)
        crash = attempt.run_attempt(spec, attempt.Signals(), run_folder, guard=None)
    assert crash.cause == "hung"
    assert (tmp_path / "asked").exists() == (program == "srun")


def test_job_that_hangs_after_its_ending_counts_as_ended(launch_script, monkeypatch):
    monkeypatch.setattr(attempt, "LEAVE_SECONDS", 0.5)
    text = "import threading; threading.Thread(target=time.sleep, args=(600,)).start()\nend()"
    assert launch_script(text).event == "finished"


# ---- Signals ----


def send_signals_after_start(tmp_path, *numbers):
    """Send this process each signal in turn, half a second apart, once the script runs."""

    def wait_and_send():
        wait_until(lambda: count_attempts(tmp_path))
        for number in numbers:
            time.sleep(0.5)
            os.kill(os.getpid(), number)

    threading.Thread(target=wait_and_send).start()


SAVES_SLOWLY = """
os.environ["LOCAL_RANK"] = "0"
def save_and_end(*_):
    step(1), step(2), step(3), time.sleep(float(os.environ["SAVE_SECONDS"])), end("interrupted", 130, 3)
signal.signal(signal.SIGTERM, save_and_end)
time.sleep(60)
"""  # noqa: E501


def test_second_ctrl_c_kills_the_job(launch_script, tmp_path, monkeypatch):
    monkeypatch.setenv("SAVE_SECONDS", "50")
    send_signals_after_start(tmp_path, signal.SIGINT, signal.SIGINT)
    before = time.monotonic()
    outcome = launch_script(SAVES_SLOWLY)
    assert (outcome.event, outcome.exit_code, outcome.reason) == (
        "interrupted",
        130,
        "killed by a second signal",
    )
    assert time.monotonic() - before < 20


def test_second_sigterm_does_not_interrupt_the_save(launch_script, tmp_path, monkeypatch):
    monkeypatch.setenv("SAVE_SECONDS", "1.5")
    send_signals_after_start(tmp_path, signal.SIGTERM, signal.SIGTERM)
    outcome = launch_script(SAVES_SLOWLY)
    assert (outcome.event, outcome.step, outcome.reason) == ("interrupted", 3, "")


def test_signal_ends_the_pause_between_attempts(launch_script, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_SECONDS", 60.0)
    send_signals_after_start(tmp_path, signal.SIGTERM)
    outcome = launch_script("raise ValueError('a')")
    assert (outcome.event, outcome.exit_code) == ("interrupted", 130)
    assert count_attempts(tmp_path) == 1


def test_children_of_the_job_are_killed(launch_script, tmp_path):
    child = "import subprocess; p = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    child += "(run / 'child').write_text(str(p.pid))\nend()"
    launch_script(child)
    pid = int((tmp_path / "run" / "child").read_text())
    # The child is gone, or it is a zombie (state Z) until its new parent reaps it.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"


# ---- Lock ----


def test_second_supervisor_is_refused_before_its_context_is_entered(launch_script, tmp_path):
    (tmp_path / "run").mkdir()
    entered = []

    @contextlib.contextmanager
    def mirror():
        entered.append(tmp_path)
        yield

    with DriverLock(tmp_path / "run"), pytest.raises(StudyHeld):
        launch_script("end()", beside=mirror())
    assert not entered, "the refused supervisor must not touch what the first one shows"
    launch_script("end()", beside=mirror())
    assert entered


# ---- Real jobs ----


@pytest.mark.slow
def test_two_nodes_train_like_two_ranks_of_one_launch(corpus, tmp_path):
    """Two supervisors with one rank each meet at a port of this machine."""
    config = write_launch(tmp_path, make_tiny_decision(corpus, num_ranks=2))
    port = 20000 + os.getpid() % 20000
    code = (
        "import sys; from pathlib import Path; "
        "from forerun._launcher.main_run.supervisor.launch import *;"
        "config, corpus, run_dir = map(Path, sys.argv[1:4]); "
        "nodes = Nodes(num_nodes=2, rank=int(sys.argv[4]), rendezvous=sys.argv[5]); "
        "print(launch(config, corpus, run_dir, nodes=nodes).event)"
    )
    arguments = [str(config), str(corpus), str(tmp_path / "run")]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments, str(rank), f"127.0.0.1:{port}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    assert [job.communicate(timeout=120)[0].strip() for job in jobs] == ["finished", "finished"]
    alone = launch(config, corpus, tmp_path / "alone")
    assert alone.event == "finished"
    assert read_losses(tmp_path / "run") == read_losses(tmp_path / "alone")
    assert [entry.kind for entry in event_log.read_events(tmp_path / "run")].count("launched") == 1
