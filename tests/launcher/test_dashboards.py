"""The W&B window: what it shows is the body's, what must stay out stays out, and what fails leaves the last one."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from example_report import finished_body
from tiny_study import ask
from wandb_case import RUN_ID, Server, media, read_run, small_record

from launcher import dashboards, figures, figures_fits
from launcher.dashboard_record import pictures, record_of
from launcher.dashboards import DashboardError, log_study
from proxies import canon

HERE = Path(__file__).parent
KEY = "5ec7e7" * 6 + "0000"
SCRIPT = """
import sys; sys.path[:0] = [{here!r}, {root!r}]
from pathlib import Path
from wandb_case import small_record
from launcher.dashboards import log_study
{before}
print(log_study(Path(sys.argv[1]), small_record({record})).path)
"""


def script(before="", record=""):
    text = SCRIPT.format(here=str(HERE), root=str(HERE.parents[1]), before=before, record=record)
    return [sys.executable, "-c", text]


@pytest.fixture(scope="module")
def body():
    return finished_body()


@pytest.fixture(scope="module")
def drawn(body):
    return f"<html><figure>{figures.search(body)}</figure><p>text</p>{figures_fits.laws(body)}</html>"


def everything(folder):
    """Every byte below a folder, with the names."""
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink()}


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


def test_a_record_holds_the_bodys_numbers(body, drawn):
    record = record_of(body, drawn)
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
    runs = record.tables["transfer_runs"]
    assert len(runs.rows) == sum(len(test["runs"]) for test in body["transfer"]["tests"])
    assert dict(zip(runs.columns, runs.rows[0], strict=True)) == {
        "axis": "width", "hyperparameter": "learning_rate", **first["runs"][0]
    }  # fmt: skip
    optima = [dict(zip(record.tables["optima"].columns, row, strict=True)) for row in record.tables["optima"].rows]
    control = [o for o in optima if o["arm"] == "sp"]
    assert [o["log2_value"] for o in control] == [o["log2_value"] for o in verdict["control"]["optima"]]
    assert [o["high_log2"] for o in control] == [o["interval_log2"][1] for o in verdict["control"]["optima"]]
    assert len(record.tables["search_trials"].rows) == 12 and len(record.tables["ladder_rungs"].rows) == 16
    assert sorted(record.pictures) == ["scaling", "search"]


def test_the_same_study_is_the_same_run(body, drawn):
    other = {**body, "question": {**body["question"], "data_id": "0" * 64}}
    assert record_of(body, drawn).run_id == record_of({**body, "ledger_head": "f" * 64}, drawn).run_id
    assert record_of(body, drawn).run_id != record_of(other, drawn).run_id


def test_what_a_person_wrote_freely_is_no_setting(body, drawn):
    question = json.loads(json.dumps(body["question"]))
    secret = "hf-planted-secret"
    free = ("command", "factory", "code_path", "metrics_path", "metrics_step_key")
    question["proxy"] |= dict.fromkeys(free, secret) | {"dtype": "float32", "rules": {"depth_alpha": 0.5}}
    question |= {"data": {"path": secret, "external": secret, "weights": {secret: 1.0}}, "unheard_of": secret}
    config = record_of({**body, "question": question}, drawn).config
    assert secret not in json.dumps(config)
    assert config["proxy"]["dtype"] == "float32" and config["proxy"]["rules"] == {"depth_alpha": 0.5}
    assert config["search"]["clip_norm"] == body["question"]["search"]["clip_norm"]
    assert config["data_id"] == body["question"]["data_id"]


@pytest.mark.parametrize("parts", [("transfer",), ("search", "transfer", "ladder", "fit", "choice", "digest")])
def test_a_part_that_has_not_run_is_absent(body, parts):
    record = record_of({**body, **dict.fromkeys(parts)}, "<html></html>")
    assert not [key for key in record.summary if key.split("/")[0] in {"values", *parts}]
    lacking = {"transfer_runs", "optima", "values"} | (
        {"search_trials", "ladder_rungs"} if "search" in parts else set()
    )
    assert not lacking & set(record.tables)
    assert "gates" in record.tables and record.pictures == {}


def test_a_picture_stands_alone(body, drawn):
    for page in pictures(drawn).values():
        svg = page[page.index("<svg") : page.index("</svg>") + 6]
        title = ET.fromstring(svg).find("{http://www.w3.org/2000/svg}title").text
        assert f"<p>{title}</p>" in page
        assert "background:#fff" in page and "--s0:" in page
        outside = page.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "http" not in outside and "<script" not in outside and "@import" not in outside


# What wandb writes


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A study logged offline by a process with secrets in its command line and environment; and all around it."""
    folder = tmp_path_factory.mktemp("told")
    secrets = {
        "WANDB_API_KEY": KEY, "WANDB_NOTES": "planted-notes", "MY_TOKEN": "planted-token", "WANDB_MODE": "disabled",
        "WANDB_SWEEP_ID": "planted-sweep", "WANDB_TAGS": "planted-tag", "WANDB_RUN_GROUP": "planted-group",
    }  # fmt: skip
    with Server() as server:
        env = {**os.environ, **secrets, "WANDB_BASE_URL": server.url, "HOME": str(folder / "home")}
        (folder / "home").mkdir()
        command = [*script(), str(folder / "study"), "--token", "planted-argv"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder, Path(done.stdout.strip()), server, done


def test_what_was_logged_can_be_read_back(told):
    _, path, _, done = told
    record = small_record()
    config, summary, rows = read_run(path)
    assert config["proxy"] == record.config["proxy"]
    assert summary.items() >= record.summary.items()
    assert len(rows) == 1
    table = json.loads(media(path, rows, "tables/optima"))
    assert table["columns"] == ["size", "log2_value", "status"]
    assert table["data"] == [list(row) for row in record.tables["optima"].rows]
    assert media(path, rows, "pictures/valleys-mup") == record.pictures["valleys-mup"]
    assert done.stderr == "" and path.name.startswith("offline-run-")


def test_no_secret_reaches_the_disk_and_no_byte_the_network(told):
    folder, _, server, done = told
    written = everything(folder)
    assert any(RUN_ID.encode() in content for content in written.values())  # the search below can find
    for word in (KEY, "planted"):
        assert [name for name, content in written.items() if word.encode() in content or word in name] == []
        assert word not in done.stdout + done.stderr
    assert server.asked == [] and server.put == {}
    # Else wandb looks its own error service up, even offline (seen with strace).
    assert dashboards.short_environment(folder, online=False)["WANDB_ERROR_REPORTING"] == "false"


def test_nothing_is_left_outside_the_study_nor_running(told):
    folder, _, _, _ = told
    assert everything(folder / "home") == {}
    assert of_wandb(folder) == []
    assert [path.name for path in folder.iterdir() if path.name not in ("home", "study")] == []
    assert [path.name for path in (folder / "study").iterdir()] == ["wandb"]


def test_logging_again_replaces_what_is_its_own(told, tmp_path):
    study = tmp_path / "study"
    shutil.copytree(told[0] / "study", study, symlinks=True)
    others = ["offline-run-20200101_000000-feedfeed", "run-20200101_000000-feedfeed"]
    for name in others:
        (study / "wandb" / name).mkdir()
    older = set(runs_in(study)) - set(others)
    time.sleep(1.1)  # wandb names a run's folder by the second
    logged = log_study(study, small_record(num_rows=5), project="other")
    assert set(runs_in(study)) == {logged.path.name, *others} and logged.path.name not in older
    assert len(list((study / "wandb").glob("data-*"))) == 1
    assert (logged.num_table_rows, logged.num_pictures, logged.mode, logged.url) == (5, 1, "offline", None)


def test_a_study_with_nothing_to_show_yet_can_be_logged(tmp_path):
    empty = dataclasses.replace(small_record(), tables={}, pictures={})
    logged = log_study(tmp_path / "study", empty)
    assert (logged.num_tables, logged.num_pictures) == (0, 0)
    assert read_run(logged.path)[1].items() >= empty.summary.items()


# What can go wrong


@pytest.fixture
def logged_before(told, tmp_path):
    study = tmp_path / "study"
    shutil.copytree(told[0] / "study", study, symlinks=True)
    yield study
    assert runs_in(study) == runs_in(told[0] / "study")
    assert len(list((study / "wandb").glob("data-*"))) == 1
    assert of_wandb(study) == []


def test_a_full_disk_is_noticed(logged_before):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    command = [*script(limit, "num_values=2000"), str(logged_before)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "DashboardError" in done.stderr and "disk full" in done.stderr


@pytest.fixture
def other_wandb(tmp_path, monkeypatch):
    """Puts a module of one's own where wandb is looked for."""

    def put(text):
        (tmp_path / "wandb").mkdir()
        (tmp_path / "wandb" / "__init__.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return put


def test_wandb_that_cannot_be_imported(logged_before, other_wandb):
    other_wandb("raise ImportError('no such library')")
    with pytest.raises(DashboardError, match="ImportError: no such library"):
        log_study(logged_before, small_record())


def test_wandb_that_dies(logged_before, other_wandb):
    other_wandb("import os; print('{}', flush=True); os._exit(9)")
    with pytest.raises(DashboardError, match="code 9"):
        log_study(logged_before, small_record())


def test_wandb_that_hangs(logged_before, other_wandb, monkeypatch):
    other_wandb("import time; time.sleep(60)")
    monkeypatch.setattr(dashboards, "OFFLINE_SECONDS", 0.5)
    with pytest.raises(DashboardError, match="did not end within"):
        log_study(logged_before, small_record())


def test_online_without_a_login_does_not_ask(logged_before, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DashboardError, match="wandb login"):
        log_study(logged_before, small_record(), online=True)


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
    job = subprocess.Popen([*script(record="num_rows=100_000"), str(study)])
    wait_for(lambda: list(study.glob("wandb/offline-run-*/run-*.wandb")))
    assert len(of_wandb(study)) >= 2  # ours, and wandb's own beside it
    assert kill(job, study / "wandb")
    time.sleep(1.1)
    logged = log_study(study, small_record())
    assert runs_in(study) == [logged.path.name]
    assert len(list((study / "wandb").glob("data-*"))) == 1


def test_a_verb_killed_while_wandb_hangs_leaves_no_process(tmp_path, other_wandb):
    other_wandb("import time; time.sleep(60)")
    job = subprocess.Popen([*script(), str(tmp_path / "study")])
    wait_for(lambda: of_wandb(tmp_path / "study" / "wandb"))
    assert kill(job, tmp_path / "study" / "wandb")


# Online


def test_online_sends_all_of_it_with_the_users_own_login(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        logged = log_study(tmp_path / "study", small_record(), online=True, entity="me")
    assert (logged.mode, logged.url) == ("online", f"{server.url}/me/forerun/runs/{RUN_ID}")
    assert json.loads(server.put["wandb-summary.json"])["transfer/width/learning_rate/outcome"] == "holds"
    (html,) = (content for name, content in server.put.items() if name.endswith(".html"))
    assert html.decode() == small_record().pictures["valleys-mup"]
    assert json.loads(server.put["artifact/tables/optima.table.json"])["nrows"] == 3
    assert "CommitArtifact" in server.asked
    history = [
        s["files"]["wandb-history.jsonl"] for s in server.streamed if "wandb-history.jsonl" in s.get("files", {})
    ]
    assert [part["offset"] for part in history] == [0]  # so that what is sent again overwrites
    assert [name for name, content in everything(tmp_path).items() if KEY.encode() in content] == []


# The verb


def test_the_verb_logs_a_finished_study_and_only_reads_it(finished, copied):
    before = {n: hashlib.sha256(c).hexdigest() for n, c in everything(copied).items()}
    code, found = ask("dashboards", copied)
    assert code == 0
    after = {n: hashlib.sha256(c).hexdigest() for n, c in everything(copied).items() if f"{copied}/wandb/" not in n}
    assert after == before
    report = json.loads((finished / "study" / "report.json").read_text())
    assert found["run_id"] == canon.content_id(report["question"])[:16]
    assert (found["mode"], found["url"], Path(found["path"]).is_dir()) == ("offline", None, True)
    _, summary, rows = read_run(Path(found["path"]))
    assert summary["transfer/together/outcome"] == report["transfer"]["together"]["outcome"]
    trials = json.loads(media(found["path"], rows, "tables/search_trials"))["data"]
    assert len(trials) == len(report["search"]["trials"])
    page = (finished / "study" / "report.html").read_text()
    assert found["logged"]["pictures"] == page.count("<svg") > 3
    assert found["logged"]["tables"] == 6
    machine = str(finished).encode()  # the plan and its corpus lie there
    assert [n for n, c in everything(copied / "wandb").items() if machine in c] == []


def test_the_verb_says_what_is_wrong(copied):
    (copied / "wandb").write_text("in the way")
    code, found = ask("dashboards", copied)
    assert code == 2 and "wandb" in found["message"]
    code, found = ask("dashboards", copied / "nowhere")
    assert code == 2
