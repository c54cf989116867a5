"""The copy in another trainer's hands: made-up ones that err, hang or hold on, and olmo-core itself where it is."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from main_run import tiny_decision
from stage_case import here
from trainer_venv import interpreter

from launcher.exporters import proof
from launcher.exporters.writing import template
from launcher.rehearsal import drill_export
from launcher.rehearsal.drill_export import export

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:torch", "ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"
)


@pytest.fixture(scope="module")
def stage(one_rank, corpus, tmp_path_factory):
    """A stage with its uninterrupted run."""
    stage = here(tmp_path_factory.mktemp("frozen"), tiny_decision(corpus), corpus)
    stage.reference()
    return stage


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Stands a shell script in for the trainer's Python; it finds `here` in its own folder's name."""

    def stand_in(text):
        script = tmp_path / "trainer"
        script.write_text(f"#!/bin/sh\nhere={tmp_path}\n{text}\n")
        script.chmod(0o755)
        monkeypatch.setattr(proof, "interpreter", lambda trainer: script)

    return stand_in


def runs(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


def told(path, seconds=20.0):
    """The number that a process writes there."""
    until = time.monotonic() + seconds
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < until
        time.sleep(0.05)
    return int(path.read_text())


def gone(pid, seconds=5.0):
    until = time.monotonic() + seconds
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not runs(pid)


def test_without_its_trainer_it_is_skipped_with_the_command(stage, monkeypatch):
    monkeypatch.setattr(proof, "interpreter", lambda trainer: None)
    found = export(stage)
    assert (found.outcome, found.needed) == ("skipped", False)
    assert "make trainers TRAINERS=olmo-core" in found.advice and "FORERUN_OLMO_CORE_PYTHON" in found.advice


DEAF_RANK = """
setsid sh -c 'trap "" TERM INT HUP; echo $$ > '$here/pid'; while :; do sleep 1; done' &
sleep 1000
"""


def test_a_trainer_that_hangs_is_ended_with_its_deaf_ranks(stage, made_up, tmp_path, monkeypatch):
    """A rank in a session of its own, deaf to SIGTERM, as torchrun's are: none outlives the drill."""
    made_up(DEAF_RANK)
    monkeypatch.setattr(drill_export, "LIMIT_SECONDS", 1.5)
    found = export(stage)
    pid = told(tmp_path / "pid")
    try:
        assert gone(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert found.outcome == "failed"
    assert "trained 0 of 16 steps" in found.said
    assert "no end within 1.5 s, and was killed" in found.said


def test_interrupted_it_leaves_no_rank(stage, made_up, tmp_path):
    made_up(DEAF_RANK)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            export(stage)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert gone(told(tmp_path / "pid"))


def test_a_rank_ends_with_a_parent_that_was_killed(tmp_path):
    """torchrun, killed with the rehearsal, would leave them: they are in sessions of their own."""
    (tmp_path / "rank.py").write_text(template("rank_of_export.py"))
    (tmp_path / "train.py").write_text(
        "import os, pathlib, time\n"
        "assert __name__ == '__main__'\n"
        "pathlib.Path('pid').write_text(f'{os.getpid()}\\n')\n"
        "time.sleep(1000)\n"
    )
    agent = "import subprocess, sys; subprocess.run([sys.executable, 'rank.py'], start_new_session=True)"
    with subprocess.Popen([sys.executable, "-c", agent], cwd=tmp_path) as parent:
        pid = told(tmp_path / "pid")
        assert runs(pid)
        parent.kill()
    assert gone(pid)


def losses_file(stage, shift=0.0, most=16):
    rows = [{"step": step, "train_loss_nats": loss + shift} for step, loss in stage.losses("reference").items()]
    return "".join(json.dumps(row) + "\n" for row in rows[:most])


@pytest.mark.parametrize(
    ("shift", "most", "code", "words"),
    [
        (0.0, 16, 0, ["trained 16 of 16 steps", "within 0 nats"]),
        (5e-5, 16, 0, ["within 5e-05 nats"]),
        (2e-4, 16, 0, ["within 0.0002 nats"]),
        (0.0, 15, 0, ["trained 15 of 16 steps"]),
        (0.0, 16, 1, ["ValueError: no", "exit 1"]),
    ],
)
def test_its_losses_are_held_against_ours(stage, made_up, tmp_path, shift, most, code, words):
    (tmp_path / "losses").write_text(losses_file(stage, shift, most))
    made_up(
        f"mkdir -p outputs/one && cp $here/losses outputs/one/metrics.jsonl && echo 'ValueError: no' >&2 && exit {code}"
    )
    found = export(stage)
    assert found.outcome == ("passed" if shift < 1e-4 and most == 16 and code == 0 else "failed"), found.said
    for word in words:
        assert word in found.said


@pytest.mark.slow
def test_olmo_core_trains_the_embedded_trainers_run(stage, monkeypatch):
    """On two ranks; ours here is on one."""
    python = interpreter("olmo-core")
    monkeypatch.setattr(proof, "interpreter", lambda trainer: python)
    found = export(stage)
    assert found.outcome == "passed", found.said
    assert found.seen["num_steps"] == 16
    assert found.seen["worst_apart_nats"] < 1e-4
    shutil.rmtree(stage.path("export-olmo-core"))
