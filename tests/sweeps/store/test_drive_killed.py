"""Tests that kill a real driver process and resume it: no finished run is trained again, and the
results are those of an uninterrupted driver.
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
from sweep_fakes import list_executions
from waiting import wait_until

from forerun._sweeps.store.curves import load_curve
from forerun._sweeps.store.errors import StudyMissing
from forerun._sweeps.store.ledger import Ledger

SCRIPT = Path(__file__).parents[2] / "support" / "sweeps" / "drive_process.py"
STEP_SECONDS = 0.02


@pytest.fixture(scope="module")
def uninterrupted_ledger(tmp_path_factory):
    """Run a driver without interruption, and return its ledger."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(folder / "study", folder / "diary", 0.0) == 0
    return Ledger.read(folder / "study")


def read_results(study):
    try:
        return dict(Ledger.read(study).get_results())
    except StudyMissing:
        return {}


def start_driver(folder):
    command = [
        sys.executable,
        "-W",
        "error",
        str(SCRIPT),
        str(folder / "study"),
        str(folder / "diary"),
    ]
    return subprocess.Popen([*command, str(STEP_SECONDS)], stderr=subprocess.PIPE, text=True)


def interrupt(folder, num_done, signal_number):
    """Start a driver, and send it a signal once `num_done` results are recorded; return its exit
    code and what it wrote on stderr.

    The signal comes a few milliseconds later, at another time for each moment, so that it hits the
    driver in different steps of its work.
    """
    process = start_driver(folder)
    wait_until(lambda: len(read_results(folder / "study")) >= num_done, 30)
    time.sleep(0.003 * num_done)
    os.kill(process.pid, signal_number)
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("signal_number", "moments"),
    [(signal.SIGKILL, (0, 1, 4, 5, 9)), (signal.SIGTERM, (2, 7))],
    ids=["SIGKILL", "SIGTERM"],
)
def test_killed_driver_resumes_without_repeating_finished_runs(
    tmp_path, uninterrupted_ledger, signal_number, moments
):
    study, diary = tmp_path / "study", tmp_path / "diary"
    for num_done in moments:
        returncode, errors = interrupt(tmp_path, num_done, signal_number)
        assert returncode == (130 if signal_number == signal.SIGTERM else -signal.SIGKILL), errors
        finished_before = set(read_results(study))
        assert num_done <= len(finished_before) < NUM_TRIALS
        begun_before = list_executions(diary, "begin")
    assert main(study, diary, 0.0) == 0

    ledger = Ledger.read(study)
    assert dict(ledger.get_results()) == dict(uninterrupted_ledger.get_results())
    suggested = [(record.key, record.text) for record in ledger.read_records("suggestion")]
    assert suggested == [
        (record.key, record.text) for record in uninterrupted_ledger.read_records("suggestion")
    ]
    assert not finished_before & set(list_executions(diary, "begin")[len(begun_before) :]), (
        "a finished run was run again"
    )
    # Each kill costs at most the three runs in flight, once.
    num_kills = len(moments)
    assert sum(Counter(list_executions(diary, "begin")).values()) <= NUM_TRIALS + 3 * num_kills
    for result in ledger.get_results().values():
        load_curve(study, result)
