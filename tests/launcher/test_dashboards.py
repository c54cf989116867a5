"""The W&B window: what it shows is the body's, what must stay out stays out, and what fails leaves
the last one.
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
import time
from pathlib import Path

import pytest
from example_report import finished_body
from tiny_study import ask, forerun
from wandb_case import RUN_ID, Server, log_one, read_run, small_record, small_run, small_study

from launcher.base import wandb_calls
from launcher.base.wandb_calls import DashboardError
from launcher.dashboards import runs as dashboard_runs
from launcher.dashboards.records import study_record
from launcher.dashboards.runs import proxy_runs
from launcher.dashboards.wandb_writer import LOCK_FILE, log_runs
from launcher.study.study_folder import recorded_study
from launcher.verbs.dashboards import describe_runs
from proxies.core import canon
from sweeps.store.ledger import Ledger

HERE = Path(__file__).parent
KEY = "5ec7e7" * 6 + "0000"
SCRIPT = """
import sys; sys.path[:0] = [{here!r}, {root!r}]
from pathlib import Path
from wandb_case import log_one, small_record, small_run, small_study
from launcher.dashboards.wandb_writer import log_runs
{before}
print({what})
"""
ALL = "log_runs(Path(sys.argv[1]), small_study())[0][{run!r}]"


def script(before="", record="", what="log_one(Path(sys.argv[1]), small_record({record}))"):
    said = what.format(record=record, run=RUN_ID)
    text = SCRIPT.format(here=str(HERE), root=str(HERE.parents[1]), before=before, what=said)
    return [sys.executable, "-c", text]


@pytest.fixture(scope="module")
def body():
    return finished_body()


def everything(folder):
    """Every byte below a folder, with the names."""
    return {
        str(p): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and not p.is_symlink()
    }


def runs_in(study):
    return sorted(path.name for path in (study / "wandb").glob("*run-*"))


def of_wandb(folder):
    """Processes that work for a folder's run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if os.fsencode(folder) in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


# What is logged


def test_a_record_holds_the_bodys_numbers(body):
    record = study_record(body)
    first = body["transfer"]["tests"][0]
    verdict = first["verdict"]
    at = "transfer/width/learning_rate"
    assert record.summary[f"{at}/outcome"] == verdict["outcome"]
    assert record.summary[f"{at}/regret_nats/high"] == verdict["regret_nats"]["interval"][1]
    drift = f"{at}/control/drift_octaves_per_doubling"
    assert record.summary[drift] == verdict["control"]["drift_octaves_per_doubling"]["value"]
    assert record.summary["values/clip_norm"] == body["transfer"]["values"][1]["target_value"]
    assert record.summary["gates/transfer"] == "passed"
    assert record.summary["digest"] == body["digest"]
    assert None not in record.summary.values()


def test_what_a_person_wrote_freely_is_no_setting(body):
    question = json.loads(json.dumps(body["question"]))
    secret = "hf-planted-secret"
    free = ("command", "factory", "code_path", "metrics_path", "metrics_step_key")
    question["proxy"] |= dict.fromkeys(free, secret) | {
        "dtype": "float32",
        "rules": {"depth_alpha": 0.5},
    }
    question |= {
        "data": {"path": secret, "external": secret, "weights": {secret: 1.0}},
        "unheard_of": secret,
    }
    config = study_record({**body, "question": question}).config
    assert secret not in json.dumps(config)
    assert config["proxy"]["dtype"] == "float32" and config["proxy"]["rules"] == {
        "depth_alpha": 0.5
    }
    assert config["search"]["clip_norm"] == body["question"]["search"]["clip_norm"]
    assert config["data_id"] == body["question"]["data_id"]


@pytest.mark.parametrize(
    "parts", [("transfer",), ("search", "transfer", "ladder", "fit", "choice", "digest")]
)
def test_a_part_that_has_not_run_is_absent(body, parts):
    record = study_record({**body, **dict.fromkeys(parts)})
    assert not [key for key in record.summary if key.split("/")[0] in {"values", *parts}]
    assert record.summary["gates/data"] == "passed"


# What wandb writes


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A study logged offline by a process with secrets in its command line and environment; and all
    around it.
    """
    folder = tmp_path_factory.mktemp("told")
    secrets = {
        "WANDB_API_KEY": KEY,
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
        command = [*script(what=ALL), str(folder / "study"), "--token", "planted-argv"]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    return folder, Path(done.stdout.strip()), server, done


def test_what_was_logged_can_be_read_back(told):
    _, path, _, done = told
    record = small_record()
    config, summary, rows = read_run(path)
    assert config["proxy"] == record.config["proxy"]
    assert summary.items() >= record.summary.items()
    assert rows == []
    assert "100\u00a0%" in done.stderr and path.name.startswith("offline-run-")


def test_no_secret_reaches_the_disk_and_no_byte_the_network(told):
    folder, _, server, done = told
    written = everything(folder)
    # the search below can find
    assert any(RUN_ID.encode() in content for content in written.values())
    for word in (KEY, "planted"):
        assert [
            name for name, content in written.items() if word.encode() in content or word in name
        ] == []
        assert word not in done.stdout + done.stderr
    assert server.asked == [] and server.put == {}
    # Else wandb looks its own error service up, even offline (seen with strace).
    assert wandb_calls.short_environment(folder, online=False)["WANDB_ERROR_REPORTING"] == "false"


def test_nothing_is_left_outside_the_study_nor_running(told):
    folder, _, _, _ = told
    assert everything(folder / "home") == {}
    assert of_wandb(folder) == []
    assert [path.name for path in folder.iterdir() if path.name not in ("home", "study")] == []
    assert [path.name for path in (folder / "study").iterdir()] == ["wandb"]


def test_what_changed_is_written_again_and_nothing_else(told, tmp_path):
    study = tmp_path / "study"
    shutil.copytree(told[0] / "study", study, symlinks=True)
    runs = small_study()
    assert log_runs(study, runs)[1] == []
    changed = dataclasses.replace(runs[2], rows_id="other")
    assert log_runs(study, [*runs[:2], changed])[1] == [changed.run_id]
    shutil.rmtree(log_runs(study, runs)[0][runs[1].run_id])
    assert log_runs(study, runs)[1] == [runs[1].run_id]
    assert len(runs_in(study)) == 3


# What can go wrong


@pytest.fixture
def logged_before(told, tmp_path):
    study = tmp_path / "study"
    shutil.copytree(told[0] / "study", study, symlinks=True)
    yield study
    assert runs_in(study) == runs_in(told[0] / "study")
    assert of_wandb(study) == []


def test_a_full_disk_is_noticed(logged_before):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    command = [
        *script(limit, what="log_runs(Path(sys.argv[1]), [small_run(9, num_steps=150)])"),
        str(logged_before),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "DashboardError" in done.stderr and "disk is not full" in done.stderr


def test_wandb_that_cannot_be_imported(logged_before, tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("raise ImportError('no such library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DashboardError, match="ImportError: no such library"):
        log_one(logged_before, small_run(9))


def kill(job, folder):
    """SIGKILL, and whether all that worked for it ends soon."""
    job.send_signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    until = time.monotonic() + 15
    while of_wandb(folder) and time.monotonic() < until:
        time.sleep(0.05)
    return of_wandb(folder) == []


def wait_for(found):
    until = time.monotonic() + 60
    while not found() and time.monotonic() < until:
        time.sleep(0.01)
    assert found()


def test_a_killed_verb_leaves_no_process_and_is_made_good(tmp_path):
    study = tmp_path / "study"
    job = subprocess.Popen(
        [*script(what="log_one(Path(sys.argv[1]), small_run(1, num_steps=1000))"), str(study)]
    )
    wait_for(lambda: list(study.glob("wandb/offline-run-*/run-*.wandb")))
    assert len(of_wandb(study)) >= 2  # ours, and wandb's own beside it
    assert kill(job, study / "wandb")
    path = log_one(study, small_run(1))
    assert runs_in(study) == [path.name]
    assert not (study / "wandb" / "scratch").exists()


# The verb


def test_the_verb_logs_a_finished_study_and_only_reads_it(finished, copied, monkeypatch):
    """With five of its proxies: the test of secrets logs them all."""
    some = proxy_runs(recorded_study(copied), Ledger.read(copied))[:5]
    monkeypatch.setattr(dashboard_runs, "proxy_runs", lambda *_: some)
    before = {n: hashlib.sha256(c).hexdigest() for n, c in everything(copied).items()}
    code, found = ask("dashboards", copied)
    assert code == 0
    after = {
        n: hashlib.sha256(c).hexdigest()
        for n, c in everything(copied).items()
        if f"{copied}/wandb/" not in n
    }
    for found_before in (before, after):
        found_before.pop(f"{copied}/findings.json", None)  # a cache
    assert after == before
    report = json.loads((finished / "study" / "report.json").read_text())
    assert found["run_id"] == canon.content_id(report["question"])[:16]
    assert found["runs"] == {"num": 6, "num_written": 6}
    assert len(runs_in(copied)) == 6 and Path(found["workspace"]["path"]).is_file()
    assert (
        "W&B: 6 runs (5 proxy runs, and one for the study itself) in"
        in forerun("dashboards", copied)[1]
    )
    main = dataclasses.replace(some[0], group="main run")
    assert (
        describe_runs([*some, main, main])
        == "7 runs (4 proxy runs, 2 main runs, and one for the study itself)"
    )
    assert (found["mode"], found["url"], Path(found["path"]).is_dir()) == ("offline", None, True)
    _, summary, _ = read_run(Path(found["path"]))
    assert summary["transfer/together/outcome"] == report["transfer"]["together"]["outcome"]
    machine = str(finished).encode()  # the plan and its corpus lie there
    assert [n for n, c in everything(copied / "wandb").items() if machine in c] == []


def test_two_at_once_are_refused(tmp_path):
    (tmp_path / "wandb").mkdir()
    with (tmp_path / "wandb" / LOCK_FILE).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DashboardError, match="another process is logging this study"):
            log_one(tmp_path, small_record())
