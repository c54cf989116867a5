"""Tests of `forerun dashboards`, which logs a study to W&B.

The logged values are those of the study's report, secrets stay out, and a failed upload leaves the
previous one in place.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from example_report import make_finished_body
from tiny_study import run_forerun, run_json
from waiting import wait_until
from wandb_case import (
    RUN_ID,
    Server,
    log_run,
    make_run_record,
    make_study_record,
    make_study_records,
    read_run,
)

from forerun._launcher.cli.verbs.dashboards import describe_runs
from forerun._launcher.main_run import wandb_client
from forerun._launcher.main_run.wandb_client import DashboardError
from forerun._launcher.report.dashboards import runs as dashboard_runs
from forerun._launcher.report.dashboards.run_record import build_study_record
from forerun._launcher.report.dashboards.runs import list_proxy_runs
from forerun._launcher.report.dashboards.wandb_writer import LOCK_FILE, log_runs
from forerun._launcher.report.views.report_model import to_report
from forerun._launcher.study.stages.study_folder import read_recorded_study
from forerun._proxies.core import canon
from forerun._sweeps.store.ledger import Ledger

SUPPORT_DIR = Path(__file__).parents[3] / "support" / "launcher"
WANDB_KEY = "5ec7e7" * 6 + "0000"
"""A fake API key, which must have 40 characters."""
SCRIPT = """
import sys; sys.path[:0] = [{support!r}, {tests!r}]
from pathlib import Path
from wandb_case import log_run, make_study_record, make_run_record, make_study_records
from forerun._launcher.report.dashboards.wandb_writer import log_runs
{setup}
print({expression})
"""
LOG_STUDY = f"log_runs(Path(sys.argv[1]), make_study_records())[0][{RUN_ID!r}]"
"""Expression that logs a small study and gives the folder of its run."""


def build_command(expression, setup=""):
    """Return the command of a process that runs `setup` and prints the value of `expression`."""
    text = SCRIPT.format(
        support=str(SUPPORT_DIR),
        tests=str(SUPPORT_DIR.parents[1]),
        setup=setup,
        expression=expression,
    )
    return [sys.executable, "-c", text]


@pytest.fixture(scope="module")
def body():
    """The report of an invented finished study."""
    return make_finished_body()


def read_all_files(folder):
    """Return the content of every file below a folder, by path."""
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def list_run_folders(study):
    """Return the names of the study's W&B run folders."""
    return sorted(path.name for path in (study / "wandb").glob("*run-*"))


def list_wandb_processes(folder):
    """Return the ids of processes that have the folder in their environment."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if os.fsencode(folder) in path.read_bytes():
                pids.append(path.parent.name)
        except OSError:
            continue
    return pids


# ---- The logged values ----


def test_record_holds_the_values_of_the_report(body):
    record = build_study_record(to_report(body))
    verdict = body["transfer"]["tests"][0]["verdict"]
    prefix = "transfer/width/learning_rate"
    assert record.summary[f"{prefix}/outcome"] == verdict["outcome"]
    assert record.summary[f"{prefix}/regret_nats/high"] == verdict["regret_nats"]["interval"][1]
    drift = f"{prefix}/control/drift_octaves_per_doubling"
    assert record.summary[drift] == verdict["control"]["drift_octaves_per_doubling"]["value"]
    assert record.summary["values/clip_norm"] == body["transfer"]["values"][1]["target_value"]
    assert record.summary["gates/transfer"] == "passed"
    assert record.summary["digest"] == body["digest"]
    assert None not in record.summary.values()


def test_free_text_of_the_plan_is_not_logged(body):
    """The report's `question` holds the plan's values that decide the results of the study."""
    question = json.loads(json.dumps(body["question"]))
    secret = "hf-planted-secret"
    free_text_keys = ("command", "factory", "code_path", "metrics_path", "metrics_step_key")
    question["proxy"] |= dict.fromkeys(free_text_keys, secret) | {
        "dtype": "float32",
        "rules": {"depth_alpha": 0.5},
    }
    question |= {
        "data": {"path": secret, "external": secret, "weights": {secret: 1.0}},
        "unheard_of": secret,
    }
    config = build_study_record(to_report({**body, "question": question})).config
    assert secret not in json.dumps(config)
    assert config["proxy"]["dtype"] == "float32" and config["proxy"]["rules"] == {
        "depth_alpha": 0.5
    }
    assert config["search"]["clip_norm"] == body["question"]["search"]["clip_norm"]
    assert config["data_id"] == body["question"]["data_id"]


@pytest.mark.parametrize(
    "parts", [("transfer",), ("search", "transfer", "ladder", "fit", "choice", "digest")]
)
def test_stage_that_has_not_run_is_absent_from_the_record(body, parts):
    record = build_study_record(to_report({**body, **dict.fromkeys(parts)}))
    assert not [key for key in record.summary if key.split("/")[0] in {"values", *parts}]
    assert record.summary["gates/data"] == "passed"


# ---- The files that wandb writes ----


@pytest.fixture(scope="module")
def offline_log(tmp_path_factory):
    """A study logged offline by a process with secrets in its command line and environment.

    Holds the folder of study and home, the run's folder, the fake server, and the ended process.
    """
    folder = tmp_path_factory.mktemp("logged")
    secrets = {
        "WANDB_API_KEY": WANDB_KEY,
        "WANDB_NOTES": "planted-notes",
        "MY_TOKEN": "planted-token",
        "WANDB_MODE": "disabled",
        "WANDB_SWEEP_ID": "planted-sweep",
        "WANDB_TAGS": "planted-tag",
        "WANDB_RUN_GROUP": "planted-group",
    }
    with Server() as server:
        env = {**os.environ, **secrets, "WANDB_BASE_URL": server.url, "HOME": str(folder / "home")}
        (folder / "home").mkdir()
        command = [*build_command(LOG_STUDY), str(folder / "study"), "--token", "planted-argv"]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    return folder, Path(done.stdout.strip()), server, done


def test_logged_study_can_be_read_back(offline_log):
    _, path, _, done = offline_log
    record = make_study_record()
    config, summary, rows = read_run(path)
    assert config["proxy"] == record.config["proxy"]
    assert summary.items() >= record.summary.items()
    assert rows == []
    assert "100\u00a0%" in done.stderr and path.name.startswith("offline-run-")


def test_no_secret_reaches_the_disk_and_no_byte_the_network(offline_log):
    folder, _, server, done = offline_log
    files = read_all_files(folder)
    assert any(RUN_ID.encode() in content for content in files.values()), "the search works"
    for word in (WANDB_KEY, "planted"):
        leaks = [
            name for name, content in files.items() if word.encode() in content or word in name
        ]
        assert leaks == []
        assert word not in done.stdout + done.stderr
    assert server.asked == [] and server.put == {}
    # Without this, wandb contacts its error service even offline (observed with strace).
    environment = wandb_client.build_wandb_environment(folder, online=False)
    assert environment["WANDB_ERROR_REPORTING"] == "false"


def test_no_file_outside_the_study_and_no_process_is_left(offline_log):
    folder, _, _, _ = offline_log
    assert read_all_files(folder / "home") == {}
    assert list_wandb_processes(folder) == []
    assert [path.name for path in folder.iterdir() if path.name not in ("home", "study")] == []
    assert [path.name for path in (folder / "study").iterdir()] == ["wandb"]


def test_only_changed_runs_are_logged_again(offline_log, tmp_path):
    study = tmp_path / "study"
    shutil.copytree(offline_log[0] / "study", study, symlinks=True)
    runs = make_study_records()
    assert log_runs(study, runs)[1] == []
    changed = dataclasses.replace(runs[2], rows_id="other")
    assert log_runs(study, [*runs[:2], changed])[1] == [changed.run_id]
    shutil.rmtree(log_runs(study, runs)[0][runs[1].run_id])
    assert log_runs(study, runs)[1] == [runs[1].run_id]
    assert len(list_run_folders(study)) == 3


# ---- Failures ----


@pytest.fixture
def logged_study(offline_log, tmp_path):
    """A copy of the logged study, which the test must leave as it was."""
    study = tmp_path / "study"
    shutil.copytree(offline_log[0] / "study", study, symlinks=True)
    yield study
    assert list_run_folders(study) == list_run_folders(offline_log[0] / "study")
    assert list_wandb_processes(study) == []


def test_full_disk_is_reported(logged_study):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    log_large_run = "log_runs(Path(sys.argv[1]), [make_run_record(9, num_steps=150)])"
    command = [*build_command(log_large_run, setup=limit), str(logged_study)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "DashboardError" in done.stderr and "disk is not full" in done.stderr


def test_wandb_that_cannot_be_imported_is_reported(logged_study, tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("raise ImportError('no such library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DashboardError, match="ImportError: no such library"):
        log_run(logged_study, make_run_record(9))


def test_killed_verb_leaves_no_process_and_the_next_one_logs_the_run(tmp_path):
    study = tmp_path / "study"
    log_long_run = "log_run(Path(sys.argv[1]), make_run_record(1, num_steps=1000))"
    job = subprocess.Popen([*build_command(log_long_run), str(study)])
    wait_until(lambda: list(study.glob("wandb/offline-run-*/run-*.wandb")), 60)
    assert len(list_wandb_processes(study)) >= 2, "our process and wandb's"
    job.send_signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    wait_until(lambda: list_wandb_processes(study / "wandb") == [], 15)
    path = log_run(study, make_run_record(1))
    assert list_run_folders(study) == [path.name]
    assert not (study / "wandb" / "scratch").exists()


# ---- The verb ----


def hash_study_files(study):
    """Return hashes of the study's files, except W&B's files and the cache `findings.json`."""
    return {
        name: hashlib.sha256(content).hexdigest()
        for name, content in read_all_files(study).items()
        if f"{study}/wandb/" not in name and name != f"{study}/findings.json"
    }


def test_verb_logs_a_finished_study_and_changes_none_of_its_files(
    finished_study_dir, study_copy, monkeypatch
):
    """Five proxy runs are enough: the test of secrets logs all of them."""
    proxy_runs = list_proxy_runs(read_recorded_study(study_copy), Ledger.read(study_copy))[:5]
    monkeypatch.setattr(dashboard_runs, "list_proxy_runs", lambda *_: proxy_runs)
    before = hash_study_files(study_copy)
    code, body = run_json("dashboards", study_copy)
    assert code == 0
    assert hash_study_files(study_copy) == before

    # The answer names what was logged.
    report = json.loads((finished_study_dir / "study" / "report.json").read_text())
    assert body["run_id"] == canon.compute_content_id(report["question"])[:16]
    assert body["runs"] == {"num": 6, "num_written": 6}
    assert (body["mode"], body["url"], Path(body["path"]).is_dir()) == ("offline", None, True)
    assert len(list_run_folders(study_copy)) == 6 and Path(body["workspace"]["path"]).is_file()
    sentence = "W&B: 6 runs (5 proxy runs, and one for the study itself) in"
    assert sentence in run_forerun("dashboards", study_copy)[1]

    # The logged files hold the report's numbers and no path of this machine.
    _, summary, _ = read_run(Path(body["path"]))
    assert summary["transfer/together/outcome"] == report["transfer"]["together"]["outcome"]
    machine_path = str(finished_study_dir).encode()
    files = read_all_files(study_copy / "wandb")
    assert [name for name, content in files.items() if machine_path in content] == []


def test_main_runs_are_counted_apart_from_proxy_runs():
    proxy_run = make_run_record(1)
    main_run = dataclasses.replace(proxy_run, group="main run")
    runs = [*make_study_records()[:1], *[proxy_run] * 4, main_run, main_run]
    assert describe_runs(runs) == "7 runs (4 proxy runs, 2 main runs, and one for the study itself)"


def test_second_process_is_refused_while_one_logs(tmp_path):
    (tmp_path / "wandb").mkdir()
    with (tmp_path / "wandb" / LOCK_FILE).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DashboardError, match="another process is logging this study"):
            log_run(tmp_path, make_study_record())
