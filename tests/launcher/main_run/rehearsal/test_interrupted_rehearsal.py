"""Tests of `forerun rehearse` in real processes under torchrun.

A rehearsal that a signal ends during a drill leaves no process behind. A complete one passes every
drill.
"""

import json
import os
import signal
import subprocess
import sys
import uuid

import pytest
from main_run import make_tiny_decision, write_attested
from scripted_job import list_processes_with_variable
from tiny_study import run_forerun
from waiting import wait_until

from forerun._launcher.main_run.rehearsal.registry import DRILLS
from forerun._launcher.main_run.rehearsal.status import read_rehearsal_status

pytestmark = pytest.mark.slow


@pytest.fixture
def frozen(corpus, tmp_path):
    """The folder of a frozen config for two ranks, its corpus, and its decision."""
    decision = make_tiny_decision(corpus, num_ranks=2)
    return write_attested(tmp_path / "alone", decision).parent, corpus, decision


class RehearsalProcess:
    """A `forerun rehearse` process; its descendants are known by a mark in their environment."""

    def __init__(self, folder, corpus, *options):
        self.mark = f"FORERUN_TEST_{uuid.uuid4().hex}"
        command = [
            sys.executable,
            "-m",
            "forerun",
            "rehearse",
            str(folder),
            "--data",
            str(corpus),
            *options,
        ]
        environment = {**os.environ, self.mark: "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def list_processes(self):
        """Return the ids of the processes of the rehearsal that still run."""
        return list_processes_with_variable(self.mark)

    def wait_until_gone(self):
        """Wait until no process of the rehearsal runs; raise TimeoutError after 10 s."""
        wait_until(lambda: not self.list_processes(), 10)


INTERRUPTIONS = [
    ("killed_rank", "killed-rank/struck-kill", signal.SIGTERM, 130),
    ("hang", "hang/struck-hang", signal.SIGINT, 130),
    ("hang", "hang/struck-hang", signal.SIGKILL, -9),
    ("sigterm", "sigterm/struck-sigterm", signal.SIGTERM, 130),
    ("disk_full", "disk-full/torchrun.log", signal.SIGHUP, 130),
]
"""Interruptions: a drill, the file whose appearance triggers the signal, the signal, and the exit
code of the rehearsal."""


@pytest.mark.parametrize(("drill", "file", "number", "code"), INTERRUPTIONS)
def test_ended_rehearsal_leaves_no_process_and_no_result(frozen, drill, file, number, code):
    folder, corpus, decision = frozen
    rehearsal = RehearsalProcess(folder, corpus, "--only", drill)
    wait_until((folder / "rehearsal" / file).exists, 200)
    assert rehearsal.list_processes()
    rehearsal.process.send_signal(number)
    _, err = rehearsal.process.communicate(timeout=90)
    assert rehearsal.process.returncode == code, err
    rehearsal.wait_until_gone()
    assert read_rehearsal_status(folder, decision.digest).body is None


@pytest.mark.timeout(600)
def test_every_drill_passes_and_a_second_rehearsal_is_refused(frozen):
    folder, corpus, decision = frozen
    first = RehearsalProcess(folder, corpus, "--json")
    wait_until((folder / "rehearsal" / "reference").exists, 200)
    code, _, err = run_forerun("rehearse", folder, "--data", corpus)
    assert code == 75, err  # another process rehearses this config
    assert f"pid {first.process.pid}" in err
    out, _ = first.process.communicate(timeout=500)
    assert first.process.returncode == 0, out[-3000:]
    first.wait_until_gone()
    assert {
        drill["name"]: drill["outcome"] for drill in json.loads(out)["drills"]
    } == dict.fromkeys(DRILLS, "passed")
    status = read_rehearsal_status(folder, decision.digest)
    assert status.rehearsed, status.sentence
    line = run_forerun("launch", folder, "--data", corpus, "--dry-run", "--json")
    assert json.loads(line[1])["rehearsed"]["outcome"] == "passed"
    assert [path.name for path in (folder / "attestations").iterdir()] == ["rehearsal.json"]
