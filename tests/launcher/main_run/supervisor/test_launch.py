"""Tests of the supervisor of a main run, which starts torchrun and restarts it if it dies or hangs.

Most tests replace torchrun by a short Python script. The last test runs real torchrun jobs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from main_run import make_tiny_decision, read_losses
from scripted_job import SCRIPT_HEAD
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


@pytest.fixture
def launch_script(corpus, tmp_path, monkeypatch):
    """Function that launches a Python script in place of torchrun.

    The script can use the names of `SCRIPT_HEAD`: functions `step`, `save`, and `end`, the number
    of earlier attempts `count`, and the run's folder `run`.
    """
    monkeypatch.setattr(supervisor, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(attempt, "STACK_SECONDS", 0.5)
    config = write_launch(tmp_path / "config", make_tiny_decision(corpus))

    def start(text, **kwargs):
        monkeypatch.setattr(
            supervisor,
            "build_torchrun_command",
            lambda python, *_, **__: [python, "-c", SCRIPT_HEAD + text],
        )
        return launch(config, corpus, tmp_path / "run", **kwargs)

    return start


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


# ---- Removed files ----

# On SIGTERM, this script saves and ends if files of its run folder were removed.
SAVES_IF_FOLDER_IS_GONE = """
def save_and_end(*_):
    if (run / "began-0").exists(): return
    for number in range(1, 6): step(number)
    save(5), end("interrupted", 130, 5)
signal.signal(signal.SIGTERM, save_and_end)
os.environ["LOCAL_RANK"] = "0"
step(1), save(1), (run / "at-it").touch()
deadline = time.monotonic() + 30
while time.monotonic() < deadline: time.sleep(0.02)
"""


def act_once_at_work(tmp_path, act):
    """Call `act` with the run's folder from another thread, once the script makes `at-it` there."""

    def wait_and_act():
        wait_until((tmp_path / "run" / "at-it").exists)
        act(tmp_path / "run")

    threading.Thread(target=wait_and_act).start()


def empty_folder(folder):
    """Empty a folder, as `rm -rf` does while another process writes into it."""
    for path in list(folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    "remove", [shutil.rmtree, empty_folder, lambda run: run.rename(run.with_name("aside"))]
)
def test_removed_run_folder_is_saved_again_and_reported(launch_script, tmp_path, remove):
    act_once_at_work(tmp_path, remove)
    outcome = launch_script(SAVES_IF_FOLDER_IS_GONE)
    assert (outcome.event, outcome.exit_code, outcome.num_restarts) == ("interrupted", 2, 0)
    assert "removed or emptied" in outcome.reason and "saved again at step 5" in outcome.reason
    (entry,) = event_log.read_events(tmp_path / "run")
    assert entry.kind == "ended" and "removed or emptied" in entry.text


@pytest.mark.parametrize(
    ("last_command", "event"), [("end()", "finished"), ("sys.exit(1)", "failed")]
)
def test_launch_without_its_run_folder_fails_and_is_not_restarted(
    launch_script, tmp_path, last_command, event
):
    text = (
        "import shutil\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nstep(1), "
        "shutil.rmtree(run)\n"
    )
    outcome = launch_script(f"{text}time.sleep(0.3), run.mkdir(exist_ok=True)\n{last_command}")
    assert (outcome.event, outcome.exit_code, outcome.num_restarts) == (event, 2, 0)
    assert "nothing could be saved" in outcome.reason


def cut_to_two_lines(path):
    """Remove all but the first two lines of a file."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))


def replace_file(path):
    """Replace a file of metrics by a new one that has step 3 only."""
    path.with_name("other").write_text('{"step": 3, "train_loss_nats": 2.5}\n')
    path.with_name("other").replace(path)


@pytest.mark.parametrize(
    ("remove", "lost"),
    [(Path.unlink, "steps 1 to 3"), (cut_to_two_lines, "step 3"), (replace_file, "steps 1 to 2")],
)
def test_lost_metrics_are_reported_and_fail_the_launch(
    launch_script, tmp_path, capsys, remove, lost
):
    act_once_at_work(tmp_path, lambda run: (remove(run / "metrics.jsonl"), (run / "done").touch()))
    text = (
        "step(1), step(2), step(3), (run / 'at-it').touch()\nwhile not (run / 'done').exists(): "
        "time.sleep(0.02)\n"
    )
    outcome = launch_script(f"{text}step(4), time.sleep(0.5), end()")
    assert (outcome.event, outcome.exit_code) == ("finished", 2)
    assert f"lacks {lost};" in outcome.reason
    assert f"lacks {lost};" in capsys.readouterr().err, "the warning comes at once"
    again = launch_script("end()")
    assert (again.exit_code, again.reason) == (0, ""), "each loss is reported once"


def test_metrics_that_the_run_rewinds_are_not_lost(launch_script, tmp_path):
    text = "step(1), step(2), save(2), step(3), step(4), time.sleep(0.3)\n"
    text += (
        "lines = [line for line in (run / 'metrics.jsonl').read_text().splitlines() if "
        "json.loads(line)['step'] < 3]\n"
    )
    text += (
        "(run / 'new').write_text(chr(10).join(lines) + chr(10)), (run / 'new').replace(run / "
        "'metrics.jsonl')\n"
    )
    outcome = launch_script(f"{text}time.sleep(0.3), step(3), time.sleep(0.3), end()")
    assert (outcome.exit_code, outcome.reason) == (0, "")


@pytest.mark.parametrize(
    ("last_command", "expected_words"),
    [("step(4)", "no checkpoint is left"), ("save(9)", "of step 9")],
)
def test_removed_checkpoint_is_reported_and_fails_the_launch(
    launch_script, tmp_path, last_command, expected_words
):
    text = (
        "step(1), save(1), step(2), time.sleep(0.3), (run / 'checkpoints' / "
        "'step-00000001').rmdir()\n"
    )
    outcome = launch_script(
        f"{text}time.sleep(0.3), step(3), time.sleep(0.3), {last_command}, end()"
    )
    assert (outcome.event, outcome.exit_code) == ("finished", 2)
    assert "step-00000001 was removed" in outcome.reason and expected_words in outcome.reason


def test_older_kept_checkpoint_is_watched_too(launch_script, tmp_path):
    """The tiny run keeps two checkpoints. A checkpoint that the run removes itself is no loss.

    A checkpoint that was gone before is no loss either.
    """
    folder = "(run / 'checkpoints' / 'step-{:08d}').rmdir()"
    text = "step(1), save(1), step(2), save(2), step(3), time.sleep(0.3)\n"
    text += (
        f"(run / 'checkpoints' / 'step-00000004').mkdir(), {folder.format(1)}, "
        "time.sleep(0.3), step(4)\n"
    )
    text += (
        "time.sleep(0.3), (run / 'checkpoints' / 'step-00000004').rmdir(), save(4), step(5), "
        "time.sleep(0.3)\n"
    )
    outcome = launch_script(f"{text}end()")
    assert (outcome.exit_code, outcome.reason) == (0, "")
    text = f"{folder.format(2)}, time.sleep(0.3), step(13), time.sleep(0.3), end(number=13)"
    outcome = launch_script(text)
    assert (
        outcome.exit_code == 2
        and "step-00000002 was removed" in outcome.reason
        and "of step 4" in outcome.reason
    )
    assert launch_script("step(14), time.sleep(0.3), end(number=14)").exit_code == 0, (
        "each loss is reported once"
    )


def test_checkpoint_dropped_by_a_rollback_is_not_lost(launch_script, tmp_path):
    text = "step(1), save(1), step(2), save(2), step(3), time.sleep(0.3)\n"
    text += "(run / 'checkpoints' / 'step-00000002').rmdir(), time.sleep(0.3)\n"
    text += "lines = (run / 'metrics.jsonl').read_text().splitlines()[:2]\n"
    text += (
        "(run / 'new').write_text(chr(10).join(lines) + chr(10)), (run / 'new').replace(run / "
        "'metrics.jsonl')\n"
    )
    outcome = launch_script(f"{text}step(2), time.sleep(0.3), end()")
    assert (outcome.exit_code, outcome.reason) == (0, "")


def test_removed_lock_is_taken_again(launch_script, tmp_path):
    text = (
        "(run / 'driver.lock').unlink()\nwhile not (run / 'driver.lock').exists(): "
        "time.sleep(0.02)\n"
    )
    text += "time.sleep(0.2), (run / 'at-it').touch(), time.sleep(0.5), end()"
    refused = []

    def take_lock(run):
        try:
            DriverLock(run)
        except StudyHeld as error:
            refused.append(error)

    act_once_at_work(tmp_path, take_lock)
    assert launch_script(text).exit_code == 0
    assert len(refused) == 1


def test_displaced_supervisor_stops_its_job(launch_script, tmp_path):
    locks = []
    act_once_at_work(
        tmp_path, lambda run: [(run / "driver.lock").unlink(), locks.append(DriverLock(run))]
    )
    with pytest.raises(StudyHeld):
        launch_script("(run / 'at-it').touch(), time.sleep(30)")
    locks[0].close()


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
