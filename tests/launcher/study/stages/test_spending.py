"""Tests of the caps on a study's spend, and of the spend that `status` shows while a driver runs:
spend is recorded, also that of a killed driver, and a study continues with a higher cap.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
from tiny_study import PLAN, run_forerun, run_json, write_plan

from forerun._launcher.study.stages.worker_pools import STATE_SECONDS, SpendTracker
from forerun._sweeps.run.budget import compute_spend
from forerun._sweeps.run.caps import BudgetCaps
from forerun._sweeps.store.ledger import Ledger
from forerun._sweeps.store.live_state import RunningRun, StudyState, read_live
from forerun._sweeps.store.lock import is_alive, is_held

# Any state
STATE = StudyState(
    done=0.4,
    stage="sweep",
    number=2,
    num_stages=5,
    left_low_seconds=None,
    left_high_seconds=None,
    best_loss_nats=None,
    best_learning_rate=None,
)


@pytest.fixture
def plan(tmp_path):
    return write_plan(tmp_path)


def test_number_of_runs_is_limited_exactly(plan, tmp_path):
    study = tmp_path / "study"
    code, body = run_json("sweep", plan, "--study", study, "--set", "cluster.max_runs=3")
    assert code == 4 and body["error"] == "BudgetSpent"
    assert body["message"].startswith("cluster.max_runs = 3 is reached: ")
    assert len(Ledger.read(study).get_results()) == 3
    code, _ = run_json("sweep", plan, "--study", study, "--set", "cluster.max_runs=4")
    assert code == 0 and len(Ledger.read(study).get_results()) == 4
    assert compute_spend(Ledger.read(study), BudgetCaps()).hours > 0


def test_status_shows_spend_and_limits(plan, tmp_path):
    study = tmp_path / "study"
    run_json(
        "sweep",
        plan,
        "--study",
        study,
        "--set",
        "cluster.usd_per_device_hour=2.0",
        "--set",
        "cluster.max_runs=100",
    )
    code, body = run_json("status", study, "--brief")
    now = body["now"]
    assert code == 0 and set(body) == {"now"}
    assert now["num_runs"] == {"finished": 4, "diverged": 0, "pruned": 0, "failed": 0}
    assert now["by_width"][0]["width"] == 8 and now["by_width"][0]["best"]["loss_nats"] > 0
    assert (
        now["spent"]["usd"] == pytest.approx(2 * now["spent"]["device_hours"])
        and now["spent"]["usd"] > 0
    )
    assert now["caps"]["num_runs"] == 100
    text = run_forerun("status", study, "--brief")[1]
    assert now["at_work"] is False
    assert "4 runs of 100 (4\u00a0%)" in text
    full_body = run_json("status", study)[1]
    assert full_body["now"]["num_runs"] == now["num_runs"] and "search" in full_body
    assert run_forerun("status", study, "--runs", tmp_path / "runs.csv")[0] == 0
    assert len((tmp_path / "runs.csv").read_text().splitlines()) == 5


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "study", {}, create=True) as ledger:
        yield ledger


def test_status_reads_what_the_driver_last_wrote(ledger, tmp_path):
    tracker = SpendTracker(tmp_path / "study", ledger, BudgetCaps(), {"cpu": 3.0})
    running = (RunningRun(run_id="ab" * 32, worker=1, step=5, num_steps=9),)
    tracker.write_state("search", running, 7, 12.5, lambda: STATE)
    # Less than a second later, nothing is written.
    tracker.write_state("later", (), 0, None, lambda: STATE)
    live = read_live(tmp_path / "study")
    assert (live.stage, live.running, live.num_queued, live.left_seconds) == (
        "search",
        running,
        7,
        12.5,
    )
    assert live.is_at_work is True and live.pid == os.getpid()
    tracker.record_spend()
    tracker.record_spend()
    assert [record.key for record in ledger.read_records("driven")] == ["0/0", "0/1"]


def test_shown_spend_never_sinks_while_the_driver_records_it(ledger, tmp_path, monkeypatch):
    """`status` reads the driver's state and then the ledger. In between, the driver may move spend
    from one to the other.
    """
    study = tmp_path / "study"
    tracker = SpendTracker(study, ledger, BudgetCaps(), {"cpu": 3.0})
    (study / "plan.toml").write_text(PLAN)
    time.sleep(0.05)
    tracker.write_state("search", (), 0, None, lambda: STATE)
    before, read = run_json("status", study, "--brief")[1]["now"]["spent"], Ledger.read

    def read_and_record(folder):
        ledger = read(folder)
        tracker.record_spend()
        tracker._looked -= STATE_SECONDS  # as if it were time to write the state again
        tracker.write_state("transfer", (), 0, None, lambda: STATE)
        return ledger

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "read", read_and_record)
        meanwhile = run_json("status", study, "--brief")[1]["now"]["spent"]
    assert (
        before["device_hours"]
        <= meanwhile["device_hours"]
        <= compute_spend(read(study), BudgetCaps()).device_hours
    )


def test_spend_of_a_killed_driver_is_recorded_by_the_next(plan, tmp_path):
    study = tmp_path / "study"
    command = [sys.executable, "-m", "forerun", "run", plan, "--study", study]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        try:
            deadline = time.monotonic() + 60
            while read_live(study) is None:
                assert time.monotonic() < deadline and driver.poll() is None
                time.sleep(0.05)
            now = json.loads(run_forerun("status", study, "--brief", "--json")[1])["now"]
            assert now["driver"]["at_work"] is True and now["driver"]["stage"] == "search"
        finally:
            driver.kill()  # the end of the block waits for the process
    assert run_json("status", study, "--brief")[1]["now"]["driver"]["at_work"] is False
    live = read_live(study)
    assert run_json("sweep", plan, "--study", study)[0] == 0
    record = Ledger.read(study).find("driven", f"{live.driver}/{live.stretch}")
    assert record is not None and record.body["seconds"] == live.seconds


def test_reused_pid_is_no_driver(ledger, tmp_path):
    tracker = SpendTracker(tmp_path / "study", ledger, BudgetCaps(), {"cpu": 3.0})
    tracker.write_state("search", (), 0, None, lambda: STATE)
    live = read_live(tmp_path / "study")
    assert live.is_at_work and is_held(tmp_path / "study")
    assert dataclasses.replace(live, born="1").is_at_work is False
    assert dataclasses.replace(live, pid=10**30).is_at_work is False
    assert dataclasses.replace(live, host="elsewhere").is_at_work is None
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert is_alive(live.host, ended.pid, "") is False, "a zombie is not alive"
    ledger.close()
    assert is_held(tmp_path / "study") is False
