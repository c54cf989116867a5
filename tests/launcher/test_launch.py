"""The supervisor: what it makes of deaths, silence and signals: of a scripted job, then of torchrun's."""

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
from main_run import losses, tiny_decision
from scripted_job import HEAD

from launcher.base import chronicle, metrics
from launcher.base.watchdog import Limits
from launcher.frozen.launch_file import write_launch
from launcher.supervisor import attempt
from launcher.supervisor import launch as supervisor
from launcher.supervisor.launch import Nodes, launch
from sweeps.store.errors import StudyHeld
from sweeps.store.lock import DriverLock


@pytest.fixture
def scripted(corpus, tmp_path, monkeypatch):
    """Launches with a Python script as the job; the script knows how many attempts came before it, as `count`."""
    monkeypatch.setattr(supervisor, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(attempt, "STACK_SECONDS", 0.5)
    config = write_launch(tmp_path / "config", tiny_decision(corpus))

    def start(text, **kwargs):
        monkeypatch.setattr(supervisor, "torchrun_command", lambda python, *_, **__: [python, "-c", HEAD + text])
        return launch(config, corpus, tmp_path / "run", **kwargs)

    return start


def num_attempts(tmp_path):
    return len(list((tmp_path / "run").glob("began-*")))


def events(tmp_path):
    return [(entry.kind, entry.data.get("cause", "")) for entry in chronicle.entries(tmp_path / "run")]


# Deaths


def test_a_run_that_ends_in_order_is_not_started_again(scripted, tmp_path):
    outcome = scripted("end('aborted', 3, 7)")
    assert (outcome.event, outcome.exit_code, outcome.step, outcome.num_restarts) == ("aborted", 3, 7, 0)
    assert events(tmp_path) == [("launched", ""), ("ended", "")]


def test_a_killed_job_is_started_again_until_it_ends(scripted, tmp_path):
    outcome = scripted("step(count + 1)\nos.kill(os.getpid(), signal.SIGKILL) if count < 2 else end()")
    assert (outcome.event, outcome.num_restarts) == ("finished", 2)
    assert events(tmp_path) == [("launched", ""), ("restarted", "killed"), ("restarted", "killed"), ("ended", "")]
    first = chronicle.entries(tmp_path / "run")[1]
    assert first.digest and "by signal 9" in first.text
    assert (first.data["reached_step"], first.data["attempts_without_progress"]) == (1, 1)


def test_attempts_that_save_nothing_are_bounded(scripted, tmp_path):
    outcome = scripted("step(count + 1)\nos.kill(os.getpid(), signal.SIGKILL)", max_restarts=2)
    assert (outcome.event, outcome.exit_code, outcome.num_restarts, outcome.cause) == ("failed", 130, 2, "killed")
    assert num_attempts(tmp_path) == 3
    assert "3 attempts in a row saved nothing new" in outcome.reason


def test_a_checkpoint_begins_the_count_anew(scripted, tmp_path):
    die = "os.kill(os.getpid(), signal.SIGKILL)"
    outcome = scripted(f"save(4 * count + 4) if count < 6 else end()\n{die}", max_restarts=1)
    assert (outcome.event, outcome.num_restarts) == ("finished", 6)
    restarted = [entry for entry in chronicle.entries(tmp_path / "run") if entry.kind == "restarted"]
    assert restarted[-1].step == 24
    assert {entry.data["attempts_without_progress"] for entry in restarted} == {0}


def test_a_process_that_the_kernel_killed_for_memory_is_told_as_such(scripted, monkeypatch):
    monkeypatch.setattr(attempt, "oom_kills", iter((3, 4)).__next__)
    outcome = scripted("os.kill(os.getpid(), signal.SIGKILL)", max_restarts=0)
    assert (outcome.cause, outcome.exit_code) == ("out_of_memory", 2)


def test_a_death_at_the_same_step_ends_it_where_nothing_was_saved_between(scripted, tmp_path):
    outcome = scripted(
        "save(count + 1) if count < 3 else None\nstep(5)\nraise ValueError('a bad shard')", max_restarts=9
    )
    assert num_attempts(tmp_path) == 4  # three that saved; the last saved nothing, and died where the one before it had
    assert (outcome.event, outcome.exit_code, outcome.cause) == ("failed", 1, "error")
    assert "error after step 5 (ValueError: a bad shard), twice at the same step" in outcome.reason


def test_an_old_ending_is_not_this_attempts(scripted, tmp_path):
    (tmp_path / "run").mkdir()
    metrics.write_ending(tmp_path / "run", metrics.AttemptEnd(event="finished", exit_code=0, step=12))
    assert scripted("raise ValueError('a')", max_restarts=0).event == "failed"


def test_another_machines_supervisor_leaves_the_folder_to_the_first(scripted, tmp_path):
    (tmp_path / "run").mkdir()
    ending = metrics.AttemptEnd(event="finished", exit_code=0, step=12)
    metrics.write_ending(tmp_path / "run", ending)
    second = Nodes(num_nodes=2, rank=1, rendezvous="127.0.0.1:1")
    outcome = scripted("raise ValueError('a')", max_restarts=0, nodes=second)
    assert outcome.event == "failed", "that ending was there before"
    assert metrics.read_ending(tmp_path / "run") == ending
    assert "ValueError: a" in (tmp_path / "run" / "node-1" / "torchrun.log").read_text()
    assert chronicle.entries(tmp_path / "run") == []
    with DriverLock(tmp_path / "run"):
        assert scripted("end('stopped', 0, 3)", nodes=second).event == "stopped"


def test_secrets_reach_no_log(scripted, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "planted-4711-planted")
    outcome = scripted("print(os.environ['MY_API_KEY']); raise ValueError(os.environ['MY_API_KEY'])", max_restarts=1)
    kept = (tmp_path / "run" / chronicle.CHRONICLE_FILE).read_text()
    log = (tmp_path / "run" / "torchrun.log").read_text()
    assert "planted-4711" not in outcome.reason + kept + log
    assert "ValueError: ***" in log
    assert "ValueError: ***" in kept


# Silence


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
"""


def test_a_silent_job_says_where_each_rank_is_and_is_started_again(scripted, tmp_path):
    began = time.monotonic()
    outcome = scripted(TWO_STUCK, limits=Limits(floor_seconds=2))
    assert (outcome.event, outcome.num_restarts) == ("finished", 1)
    assert events(tmp_path)[1] == ("restarted", "hung")
    assert "no line of metrics for" in chronicle.entries(tmp_path / "run")[1].text
    assert time.monotonic() - began < 40
    stacks = (tmp_path / "run" / "torchrun.log").read_text().split("forerun: the stack of process ")[1:]
    assert len(stacks) == 2
    for each in stacks:
        _, called, *lines = each.splitlines()
        assert "most recent call first" in called
        assert [line.split(" in ")[1] for line in lines] == ["stuck"] * 61 + ["<module>"], "its own alone"


def test_srun_is_asked_to_end_for_it_alone_reaches_the_other_machines(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\ntrap 'touch {tmp_path}/asked; exit 143' TERM\nsleep 60 & wait\n")
    srun.chmod(0o755)
    course = attempt.AttemptSpec(
        command=[str(srun)], run_dir=tmp_path, log=tmp_path / "log", limits=Limits(start_seconds=0.5), num_steps=12,
    )  # fmt: skip
    for remote in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attempt.AttemptSpec, "remote", remote)
            assert attempt.attempt(course, attempt.Signals()).cause == "hung"
        assert (tmp_path / "asked").exists() == remote


def test_a_job_that_hangs_after_its_ending_is_taken_at_its_word(scripted, monkeypatch):
    monkeypatch.setattr(attempt, "LEAVE_SECONDS", 0.5)
    text = "import threading; threading.Thread(target=time.sleep, args=(600,)).start()\nend()"
    assert scripted(text).event == "finished"


# Signals


def after_the_first_attempt_began(tmp_path, *numbers):
    """Sends this process each signal in turn, half a second apart, once the script runs."""

    def act():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not num_attempts(tmp_path):
            time.sleep(0.02)
        for number in numbers:
            time.sleep(0.5)
            os.kill(os.getpid(), number)

    threading.Thread(target=act).start()


SAVES_SLOWLY = """
os.environ["LOCAL_RANK"] = "0"
def told(*_):
    step(1), step(2), step(3), time.sleep(float(os.environ["SAVE_SECONDS"])), end("interrupted", 130, 3)
signal.signal(signal.SIGTERM, told)
time.sleep(60)
"""


def test_ctrl_c_twice_ends_it_now(scripted, tmp_path, monkeypatch):
    monkeypatch.setenv("SAVE_SECONDS", "50")
    after_the_first_attempt_began(tmp_path, signal.SIGINT, signal.SIGINT)
    before = time.monotonic()
    outcome = scripted(SAVES_SLOWLY)
    assert (outcome.event, outcome.exit_code, outcome.reason) == ("interrupted", 130, "killed by a second signal")
    assert time.monotonic() - before < 20


def test_a_schedulers_second_sigterm_does_not_cut_the_save_short(scripted, tmp_path, monkeypatch):
    monkeypatch.setenv("SAVE_SECONDS", "1.5")
    after_the_first_attempt_began(tmp_path, signal.SIGTERM, signal.SIGTERM)
    outcome = scripted(SAVES_SLOWLY)
    assert (outcome.event, outcome.step, outcome.reason) == ("interrupted", 3, "")


def test_a_signal_ends_the_pause_between_attempts(scripted, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_SECONDS", 60.0)
    after_the_first_attempt_began(tmp_path, signal.SIGTERM)
    outcome = scripted("raise ValueError('a')")
    assert (outcome.event, outcome.exit_code) == ("interrupted", 130)
    assert num_attempts(tmp_path) == 1


def test_nothing_of_a_job_is_left_behind(scripted, tmp_path):
    child = "import subprocess; p = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    child += "(run / 'child').write_text(str(p.pid))\nend()"
    scripted(child)
    pid = int((tmp_path / "run" / "child").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(50):  # reaped by whoever is its parent now
            os.kill(pid, 0)
            assert Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
            time.sleep(0.1)
        raise ProcessLookupError


# Lines


def test_one_supervisor_a_run(scripted, tmp_path):
    (tmp_path / "run").mkdir()
    entered = []

    @contextlib.contextmanager
    def beside():
        entered.append(tmp_path)
        yield

    with DriverLock(tmp_path / "run"), pytest.raises(StudyHeld):
        scripted("end()", beside=beside())
    assert not entered, "whoever shows the run takes away what was shown before"
    scripted("end()", beside=beside())
    assert entered


# The run's folder is taken away

WAITS_FOR_WORD = """
def told(*_):
    if (run / "began-0").exists(): return
    for number in range(1, 6): step(number)
    save(5), end("interrupted", 130, 5)
signal.signal(signal.SIGTERM, told)
os.environ["LOCAL_RANK"] = "0"
step(1), save(1), (run / "at-it").touch()
deadline = time.monotonic() + 30
while time.monotonic() < deadline: time.sleep(0.02)
"""


def once_at_it(tmp_path, act):
    """Call `act` with the run's folder from another thread, once the job is at work."""

    def wait():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (tmp_path / "run" / "at-it").exists():
            time.sleep(0.02)
        act(tmp_path / "run")

    threading.Thread(target=wait).start()


def empty(folder):
    """`rm -rf` leaves such a folder if another process writes into it at the same time."""
    for path in list(folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("take_away", [shutil.rmtree, empty, lambda run: run.rename(run.with_name("aside"))])
def test_a_run_whose_folder_is_taken_away_saves_again_and_says_what_was_lost(scripted, tmp_path, take_away):
    once_at_it(tmp_path, take_away)
    outcome = scripted(WAITS_FOR_WORD)
    assert (outcome.event, outcome.exit_code, outcome.num_restarts) == ("interrupted", 2, 0)
    assert "removed or emptied" in outcome.reason and "saved again at step 5" in outcome.reason
    (entry,) = chronicle.entries(tmp_path / "run")
    assert entry.kind == "ended" and "removed or emptied" in entry.text


@pytest.mark.parametrize(("then", "event"), [("end()", "finished"), ("sys.exit(1)", "failed")])
def test_a_removed_folder_is_no_success_and_no_reason_to_begin_anew(scripted, tmp_path, then, event):
    text = "import shutil\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nstep(1), shutil.rmtree(run)\n"
    outcome = scripted(f"{text}time.sleep(0.3), run.mkdir(exist_ok=True)\n{then}")
    assert (outcome.event, outcome.exit_code, outcome.num_restarts) == (event, 2, 0)
    assert "nothing could be saved" in outcome.reason


def cut(path):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))


def replace(path):
    path.with_name("other").write_text('{"step": 3, "train_loss_nats": 2.5}\n')
    path.with_name("other").replace(path)


@pytest.mark.parametrize(
    ("take_away", "lost"), [(Path.unlink, "steps 1 to 3"), (cut, "step 3"), (replace, "steps 1 to 2")]
)
def test_lost_metrics_are_no_success_and_named(scripted, tmp_path, capsys, take_away, lost):
    once_at_it(tmp_path, lambda run: (take_away(run / "metrics.jsonl"), (run / "done").touch()))
    text = "step(1), step(2), step(3), (run / 'at-it').touch()\nwhile not (run / 'done').exists(): time.sleep(0.02)\n"
    outcome = scripted(f"{text}step(4), time.sleep(0.5), end()")
    assert (outcome.event, outcome.exit_code) == ("finished", 2)
    assert f"lacks {lost};" in outcome.reason
    assert f"lacks {lost};" in capsys.readouterr().err, "told as soon as it is seen"
    again = scripted("end()")
    assert (again.exit_code, again.reason) == (0, ""), "the launch before said so"


def test_metrics_that_a_run_cuts_itself_are_not_lost(scripted, tmp_path):
    text = "step(1), step(2), save(2), step(3), step(4), time.sleep(0.3)\n"
    text += (
        "lines = [line for line in (run / 'metrics.jsonl').read_text().splitlines() if json.loads(line)['step'] < 3]\n"
    )
    text += "(run / 'new').write_text(chr(10).join(lines) + chr(10)), (run / 'new').replace(run / 'metrics.jsonl')\n"
    outcome = scripted(f"{text}time.sleep(0.3), step(3), time.sleep(0.3), end()")
    assert (outcome.exit_code, outcome.reason) == (0, "")


@pytest.mark.parametrize(("then", "left"), [("step(4)", "no checkpoint is left"), ("save(9)", "of step 9")])
def test_a_removed_checkpoint_is_no_success_and_named(scripted, tmp_path, then, left):
    text = "step(1), save(1), step(2), time.sleep(0.3), (run / 'checkpoints' / 'step-00000001').rmdir()\n"
    outcome = scripted(f"{text}time.sleep(0.3), step(3), time.sleep(0.3), {then}, end()")
    assert (outcome.event, outcome.exit_code) == ("finished", 2)
    assert "step-00000001 was removed" in outcome.reason and left in outcome.reason


def test_an_older_checkpoint_that_the_run_keeps_is_watched_too(scripted, tmp_path):
    """The tiny run keeps two; what it removes itself to make room, and what was gone before, is no loss."""
    folder = "(run / 'checkpoints' / 'step-{:08d}').rmdir()"
    text = "step(1), save(1), step(2), save(2), step(3), time.sleep(0.3)\n"
    text += f"(run / 'checkpoints' / 'step-00000004').mkdir(), {folder.format(1)}, time.sleep(0.3), step(4)\n"
    text += "time.sleep(0.3), (run / 'checkpoints' / 'step-00000004').rmdir(), save(4), step(5), time.sleep(0.3)\n"
    outcome = scripted(f"{text}end()")
    assert (outcome.exit_code, outcome.reason) == (0, "")
    text = f"{folder.format(2)}, time.sleep(0.3), step(13), time.sleep(0.3), end(number=13)"
    outcome = scripted(text)
    assert outcome.exit_code == 2 and "step-00000002 was removed" in outcome.reason and "of step 4" in outcome.reason
    assert scripted("step(14), time.sleep(0.3), end(number=14)").exit_code == 0, "the launch before said so"


def test_a_checkpoint_that_a_run_leaves_when_it_goes_back_is_not_lost(scripted, tmp_path):
    text = "step(1), save(1), step(2), save(2), step(3), time.sleep(0.3)\n"
    text += "(run / 'checkpoints' / 'step-00000002').rmdir(), time.sleep(0.3)\n"
    text += "lines = (run / 'metrics.jsonl').read_text().splitlines()[:2]\n"
    text += "(run / 'new').write_text(chr(10).join(lines) + chr(10)), (run / 'new').replace(run / 'metrics.jsonl')\n"
    outcome = scripted(f"{text}step(2), time.sleep(0.3), end()")
    assert (outcome.exit_code, outcome.reason) == (0, "")


def test_a_removed_lock_is_taken_again(scripted, tmp_path):
    text = "(run / 'driver.lock').unlink()\nwhile not (run / 'driver.lock').exists(): time.sleep(0.02)\n"
    text += "time.sleep(0.2), (run / 'at-it').touch(), time.sleep(0.5), end()"
    refused = []

    def second(run):
        try:
            DriverLock(run)
        except StudyHeld as error:
            refused.append(error)

    once_at_it(tmp_path, second)
    assert scripted(text).exit_code == 0
    assert len(refused) == 1


def test_a_supervisor_that_was_displaced_stops_its_job(scripted, tmp_path):
    locks = []
    once_at_it(tmp_path, lambda run: [(run / "driver.lock").unlink(), locks.append(DriverLock(run))])
    with pytest.raises(StudyHeld):
        scripted("(run / 'at-it').touch(), time.sleep(30)")
    locks[0].close()


# The real thing


@pytest.mark.slow
def test_two_machines_that_are_one_train_as_two_ranks_alone(corpus, tmp_path):
    """Two supervisors, two agents, one rank each; they meet at a port of this machine."""
    config = write_launch(tmp_path, tiny_decision(corpus, num_ranks=2))
    port = 20000 + os.getpid() % 20000
    code = (
        "import sys; from pathlib import Path; from launcher.supervisor.launch import *;"
        "c, d, o = map(Path, sys.argv[1:4]); n = Nodes(num_nodes=2, rank=int(sys.argv[4]), rendezvous=sys.argv[5]);"
        "print(launch(c, d, o, nodes=n).event)"
    )
    where = [str(config), str(corpus), str(tmp_path / "run")]
    jobs = [
        subprocess.Popen([sys.executable, "-c", code, *where, str(rank), f"127.0.0.1:{port}"],
                         stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]  # fmt: skip
    assert [job.communicate(timeout=120)[0].strip() for job in jobs] == ["finished", "finished"]
    alone = launch(config, corpus, tmp_path / "alone")
    assert alone.event == "finished"
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")
    assert [entry.kind for entry in chronicle.entries(tmp_path / "run")].count("launched") == 1
