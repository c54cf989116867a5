"""The whole rehearsal under torchrun, ended from outside at one drill and another: no process
stays.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest
from main_run import tiny_decision, write_attested
from scripted_job import left_behind
from tiny_study import forerun

from launcher.rehearsal.registry import DRILLS
from launcher.rehearsal.status import rehearsal_of

pytestmark = pytest.mark.slow


@pytest.fixture
def frozen(corpus, tmp_path):
    decision = tiny_decision(corpus, num_ranks=2)
    return write_attested(tmp_path / "alone", decision).parent, corpus, decision


class Started:
    """A rehearsal in a process of its own, whose descendants are known by a mark in their
    environment.
    """

    def __init__(self, folder, corpus, *options):
        self.mark = f"FORERUN_TEST_{uuid.uuid4().hex}"
        command = [
            sys.executable,
            "-m",
            "launcher",
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

    def left(self, seconds=10.0):
        """Its processes that still run, once that time has passed or none is left."""
        until = time.monotonic() + seconds
        while (found := left_behind(self.mark)) and time.monotonic() < until:
            time.sleep(0.1)
        return found


def wait_for(path, seconds=200.0):
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.05)


ENDS = [
    ("killed_rank", "killed-rank/struck-kill", signal.SIGTERM, 130),
    ("hang", "hang/struck-hang", signal.SIGINT, 130),
    ("hang", "hang/struck-hang", signal.SIGKILL, -9),
    ("sigterm", "sigterm/struck-sigterm", signal.SIGTERM, 130),
    ("disk_full", "disk-full/torchrun.log", signal.SIGHUP, 130),
]


@pytest.mark.parametrize(("drill", "moment", "number", "code"), ENDS)
def test_ended_from_outside_it_leaves_no_process_and_no_result(frozen, drill, moment, number, code):
    folder, corpus, decision = frozen
    began = Started(folder, corpus, "--only", drill)
    wait_for(folder / "rehearsal" / moment)
    assert began.left(0.0)
    began.process.send_signal(number)
    _, err = began.process.communicate(timeout=90)
    assert began.process.returncode == code, err
    assert began.left() == []
    assert rehearsal_of(folder, decision.digest).body is None


@pytest.mark.timeout(600)
def test_every_drill_passes_and_a_second_rehearsal_meanwhile_is_refused(frozen):
    folder, corpus, decision = frozen
    first = Started(folder, corpus, "--json")
    wait_for(folder / "rehearsal" / "reference")
    code, _, err = forerun("rehearse", folder, "--data", corpus)
    assert code == 75, err
    assert f"pid {first.process.pid}" in err
    out, _ = first.process.communicate(timeout=500)
    assert first.process.returncode == 0, out[-3000:]
    assert first.left() == []
    assert {
        drill["name"]: drill["outcome"] for drill in json.loads(out)["drills"]
    } == dict.fromkeys(DRILLS, "passed")
    standing = rehearsal_of(folder, decision.digest)
    assert standing.rehearsed, standing.sentence
    line = forerun("launch", folder, "--data", corpus, "--dry-run", "--json")
    assert json.loads(line[1])["rehearsed"]["outcome"] == "passed"
    assert [path.name for path in (folder / "attestations").iterdir()] == ["rehearsal.json"]
