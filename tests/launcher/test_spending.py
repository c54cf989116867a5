"""Caps on a real study, and the status of one that runs: what was paid for is kept, and a higher
cap goes on.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
from tiny_study import PLAN, ask, forerun, write_plan

from launcher.study.stages import Accounts
from sweeps.run.budget import BudgetCaps, spent
from sweeps.store.ledger import Ledger
from sweeps.store.live import RunningRun, StudyState, read_live
from sweeps.store.lock import is_held, lives

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


def test_runs_are_capped_to_the_very_run(plan, tmp_path):
    study = tmp_path / "study"
    code, body = ask("sweep", plan, "--study", study, "--set", "cluster.max_runs=3")
    assert code == 4 and body["error"] == "BudgetSpent"
    assert body["message"].startswith("cluster.max_runs = 3 is reached: ")
    assert len(Ledger.read(study).results()) == 3
    code, _ = ask("sweep", plan, "--study", study, "--set", "cluster.max_runs=4")
    assert code == 0 and len(Ledger.read(study).results()) == 4
    assert spent(Ledger.read(study), BudgetCaps()).hours > 0


def test_a_status_tells_what_is_spent(plan, tmp_path):
    study = tmp_path / "study"
    ask(
        "sweep",
        plan,
        "--study",
        study,
        "--set",
        "cluster.usd_per_device_hour=2.0",
        "--set",
        "cluster.max_runs=100",
    )
    code, body = ask("status", study, "--brief")
    now = body["now"]
    assert code == 0 and set(body) == {"now"}
    assert now["num_runs"] == {"finished": 4, "diverged": 0, "pruned": 0, "failed": 0}
    assert now["by_width"][0]["width"] == 8 and now["by_width"][0]["best"]["loss_nats"] > 0
    assert (
        now["spent"]["usd"] == pytest.approx(2 * now["spent"]["device_hours"])
        and now["spent"]["usd"] > 0
    )
    assert now["caps"]["num_runs"] == 100
    text = forerun("status", study, "--brief")[1]
    assert now["at_work"] is False
    assert "4 runs of 100 (4\u00a0%)" in text
    whole = ask("status", study)[1]
    assert whole["now"]["num_runs"] == now["num_runs"] and "search" in whole
    assert forerun("status", study, "--runs", tmp_path / "runs.csv")[0] == 0
    assert len((tmp_path / "runs.csv").read_text().splitlines()) == 5


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "study", {}, create=True) as ledger:
        yield ledger


def test_a_look_is_what_status_reads(ledger, tmp_path):
    accounts = Accounts(tmp_path / "study", ledger, BudgetCaps(), {"cpu": 3.0})
    running = (RunningRun(run_id="ab" * 32, worker=1, step=5, num_steps=9),)
    accounts.look("search", running, 7, 12.5, lambda: STATE)
    accounts.look("later", (), 0, None, lambda: STATE)  # within the second: not written
    live = read_live(tmp_path / "study")
    assert (live.stage, live.running, live.num_queued, live.left_seconds) == (
        "search",
        running,
        7,
        12.5,
    )
    assert live.at_work is True and live.pid == os.getpid()
    accounts.write_down()
    accounts.write_down()
    assert [record.key for record in ledger.records("driven")] == ["0/0", "0/1"]


def test_what_is_spent_does_not_sink_while_the_driver_records_it(ledger, tmp_path, monkeypatch):
    study, accounts = (
        tmp_path / "study",
        Accounts(tmp_path / "study", ledger, BudgetCaps(), {"cpu": 3.0}),
    )
    (study / "plan.toml").write_text(PLAN)
    time.sleep(0.05)
    accounts.look("search", (), 0, None, lambda: STATE)
    before, read = ask("status", study, "--brief")[1]["now"]["spent"], Ledger.read

    def reading(folder):
        found = read(folder)
        accounts.write_down()
        accounts._looked -= 1.0
        accounts.look("transfer", (), 0, None, lambda: STATE)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "read", reading)
        meanwhile = ask("status", study, "--brief")[1]["now"]["spent"]
    assert (
        before["device_hours"]
        <= meanwhile["device_hours"]
        <= spent(read(study), BudgetCaps()).device_hours
    )


def test_a_killed_driver_is_charged_by_the_next(plan, tmp_path):
    study = tmp_path / "study"
    command = [sys.executable, "-m", "launcher", "run", plan, "--study", study]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        deadline = time.monotonic() + 60
        while read_live(study) is None:
            assert time.monotonic() < deadline and driver.poll() is None
            time.sleep(0.05)
        body = json.loads(forerun("status", study, "--brief", "--json")[1])
        assert (
            body["now"]["driver"]["at_work"] is True and body["now"]["driver"]["stage"] == "search"
        )
        driver.kill()
    assert ask("status", study, "--brief")[1]["now"]["driver"]["at_work"] is False
    last = read_live(study)
    assert ask("sweep", plan, "--study", study)[0] == 0
    recorded = Ledger.read(study).find("driven", f"{last.driver}/{last.stretch}")
    assert recorded is not None and recorded.body["seconds"] == last.seconds


def test_a_pid_that_another_process_got_is_no_driver(ledger, tmp_path):
    accounts = Accounts(tmp_path / "study", ledger, BudgetCaps(), {"cpu": 3.0})
    accounts.look("search", (), 0, None, lambda: STATE)
    live = read_live(tmp_path / "study")
    assert live.at_work and is_held(tmp_path / "study")
    assert dataclasses.replace(live, born="1").at_work is False
    assert dataclasses.replace(live, pid=10**30).at_work is False
    assert dataclasses.replace(live, host="elsewhere").at_work is None
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert lives(live.host, ended.pid, "") is False  # nobody has waited for it yet
    ledger.close()
    assert is_held(tmp_path / "study") is False
