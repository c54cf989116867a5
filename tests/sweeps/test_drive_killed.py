"""Real kills of a real driver process, then resume: nothing finished runs again, the end is the
same.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from drive_process import NUM_TRIALS, main
from sweep_fakes import executions

from sweeps.store.curves import load_curve
from sweeps.store.errors import StudyMissing
from sweeps.store.ledger import Ledger

SCRIPT = Path(__file__).parent / "drive_process.py"
STEP_SECONDS = 0.02


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an uninterrupted driver leaves."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(folder / "study", folder / "diary", 0.0) == 0
    return Ledger.read(folder / "study")


def outcomes(study):
    try:
        return dict(Ledger.read(study).results())
    except StudyMissing:
        return {}


def start(folder):
    command = [
        sys.executable,
        "-W",
        "error",
        str(SCRIPT),
        str(folder / "study"),
        str(folder / "diary"),
    ]
    return subprocess.Popen([*command, str(STEP_SECONDS)], stderr=subprocess.PIPE, text=True)


def interrupt(folder, num_done, how):
    """Start a driver, and end it once `num_done` results are there (and a little later,
    mid-step).
    """
    process = start(folder)
    deadline = time.monotonic() + 30
    while len(outcomes(folder / "study")) < num_done and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.003 * num_done)
    os.kill(process.pid, how)
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("how", "moments"),
    [(signal.SIGKILL, (0, 1, 4, 5, 9)), (signal.SIGTERM, (2, 7))],
    ids=["SIGKILL", "SIGTERM"],
)
def test_killed_and_resumed(tmp_path, whole, how, moments):
    study, diary = tmp_path / "study", tmp_path / "diary"
    for num_done in moments:
        returncode, errors = interrupt(tmp_path, num_done, how)
        assert returncode == (130 if how == signal.SIGTERM else -signal.SIGKILL), errors
        settled = set(outcomes(study))
        assert num_done <= len(settled) < NUM_TRIALS
        before = executions(diary, "begin")
    assert main(study, diary, 0.0) == 0

    ledger = Ledger.read(study)
    assert dict(ledger.results()) == dict(whole.results())
    suggested = [(record.key, record.text) for record in ledger.records("suggestion")]
    assert suggested == [(record.key, record.text) for record in whole.records("suggestion")]
    assert not settled & set(executions(diary, "begin")[len(before) :]), (
        "a finished run was run again"
    )
    lost = len(moments)  # each kill costs at most the three runs in flight, once
    assert sum(Counter(executions(diary, "begin")).values()) <= NUM_TRIALS + 3 * lost
    for result in ledger.results().values():
        load_curve(study, result)
