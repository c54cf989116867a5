"""The W&B window: what it shows is the body's, what must stay out stays out, and what fails leaves the last one."""

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
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from example_report import finished_body
from tiny_study import ask, forerun
from wandb_case import RUN_ID, Server, log_one, media, read_run, small_record, small_study

from launcher.base import wandb_calls
from launcher.base.wandb_calls import DashboardError
from launcher.dashboards import runs as dashboard_runs
from launcher.dashboards.records import Logged, pictures, study_record
from launcher.dashboards.runs import proxy_runs
from launcher.dashboards.wandb_writer import LOCK_FILE, Place, log_runs, upload_runs
from launcher.figures import plots
from launcher.figures.panel import svg_of
from launcher.study.opening import recorded_study
from launcher.verbs import dashboards as verb
from proxies.core import canon
from sweeps.store.ledger import Ledger

HERE = Path(__file__).parent
KEY = "5ec7e7" * 6 + "0000"
SCRIPT = """
import sys; sys.path[:0] = [{here!r}, {root!r}]
from pathlib import Path
from wandb_case import log_one, small_record, small_run, small_study
from launcher.dashboards.tensorboard import write_runs
from launcher.dashboards.wandb_writer import log_runs
{before}
print({what})
"""
ALL = "write_runs(Path(sys.argv[2]), small_study()) and log_runs(Path(sys.argv[1]), small_study()).folders[{run!r}]"


def script(before="", record="", what="log_one(Path(sys.argv[1]), small_record({record}))"):
    said = what.format(record=record, run=RUN_ID)
    text = SCRIPT.format(here=str(HERE), root=str(HERE.parents[1]), before=before, what=said)
    return [sys.executable, "-c", text]


@pytest.fixture(scope="module")
def body():
    return finished_body()


@pytest.fixture(scope="module")
def drawn(body):
    return f"<figure>{svg_of(plots.search(body))}</figure><p>text</p>{svg_of(plots.ladder(body))}"


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
    record = study_record(body, drawn)
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
    assert [o["interval_log2/1"] for o in control] == [o["interval_log2"][1] for o in verdict["control"]["optima"]]
    assert len(record.tables["search_trials"].rows) == 12 and len(record.tables["ladder_rungs"].rows) == 16
    assert sorted(record.pictures) == ["scaling", "search"]


def test_the_same_study_is_the_same_run(body, drawn):
    other = {**body, "question": {**body["question"], "data_id": "0" * 64}}
    assert study_record(body, drawn).run_id == study_record({**body, "ledger_head": "f" * 64}, drawn).run_id
    assert study_record(body, drawn).run_id != study_record(other, drawn).run_id


def test_what_a_person_wrote_freely_is_no_setting(body, drawn):
    question = json.loads(json.dumps(body["question"]))
    secret = "hf-planted-secret"
    free = ("command", "factory", "code_path", "metrics_path", "metrics_step_key")
    question["proxy"] |= dict.fromkeys(free, secret) | {"dtype": "float32", "rules": {"depth_alpha": 0.5}}
    question |= {"data": {"path": secret, "external": secret, "weights": {secret: 1.0}}, "unheard_of": secret}
    config = study_record({**body, "question": question}, drawn).config
    assert secret not in json.dumps(config)
    assert config["proxy"]["dtype"] == "float32" and config["proxy"]["rules"] == {"depth_alpha": 0.5}
    assert config["search"]["clip_norm"] == body["question"]["search"]["clip_norm"]
    assert config["data_id"] == body["question"]["data_id"]


@pytest.mark.parametrize("parts", [("transfer",), ("search", "transfer", "ladder", "fit", "choice", "digest")])
def test_a_part_that_has_not_run_is_absent(body, parts):
    record = study_record({**body, **dict.fromkeys(parts)}, "<html></html>")
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
        command = [*script(what=ALL), str(folder / "study"), str(folder / "events"), "--token", "planted-argv"]
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
    assert "100%" in done.stderr and path.name.startswith("offline-run-")


def test_no_secret_reaches_the_disk_and_no_byte_the_network(told):
    folder, _, server, done = told
    written = everything(folder)
    assert any(RUN_ID.encode() in content for content in written.values())  # the search below can find
    for word in (KEY, "planted"):
        assert [name for name, content in written.items() if word.encode() in content or word in name] == []
        assert word not in done.stdout + done.stderr
    assert server.asked == [] and server.put == {}
    # Else wandb looks its own error service up, even offline (seen with strace).
    assert wandb_calls.short_environment(folder, online=False)["WANDB_ERROR_REPORTING"] == "false"


def test_nothing_is_left_outside_the_study_nor_running(told):
    folder, _, _, _ = told
    assert everything(folder / "home") == {}
    assert of_wandb(folder) == []
    assert [path.name for path in folder.iterdir() if path.name not in ("home", "study", "events")] == []
    assert [path.name for path in (folder / "study").iterdir()] == ["wandb"]


def test_logging_again_replaces_what_is_its_own(told, tmp_path):
    study = tmp_path / "study"
    shutil.copytree(told[0] / "study", study, symlinks=True)
    others = ["offline-run-20200101_000000-feedfeed", "run-20200101_000000-feedfeed"]
    for name in others:
        (study / "wandb" / name).mkdir()
    older = set(runs_in(study)) - set(others)
    logged = log_runs(study, [small_record(num_rows=5), *small_study()[1:]])
    path = logged.folders[RUN_ID]
    assert logged.written == (RUN_ID,), "the proxies are as they were"
    assert set(runs_in(study)) - older == {path.name, *others} and len(older - set(runs_in(study))) == 1
    assert len(list((study / "wandb").glob("data-*"))) == 1
    assert json.loads(media(path, read_run(path)[2], "tables/optima"))["data"][4] == [64, -9.0, "ok"]


def test_what_changed_or_was_moved_is_written_again_and_nothing_else(told, tmp_path):
    study = tmp_path / "study"
    shutil.copytree(told[0] / "study", study, symlinks=True)
    runs = small_study()
    assert log_runs(study, runs).written == (RUN_ID,), "W&B keeps the files of its tables by their full path"
    assert log_runs(study, runs).written == ()
    changed = dataclasses.replace(runs[2], rows_id="other")
    assert log_runs(study, [*runs[:2], changed]).written == (changed.run_id,)
    shutil.rmtree(log_runs(study, runs).folders[runs[1].run_id])
    assert log_runs(study, runs).written == (runs[1].run_id,)
    assert len(list((study / "wandb").glob("data-*"))) == 1 and len(runs_in(study)) == 3


def test_a_study_with_nothing_to_show_yet_can_be_logged(tmp_path):
    empty = dataclasses.replace(small_record(), tables={}, pictures={}, artifacts={})
    _, summary, rows = read_run(log_one(tmp_path / "study", empty))
    assert summary.items() >= empty.summary.items() and rows == []
    assert not list(tmp_path.rglob("data-*"))


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
    command = [*script(limit, what="log_runs(Path(sys.argv[1]), [small_run(9, num_steps=150)])"), str(logged_before)]
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
        log_one(logged_before, small_record(4))


def test_wandb_that_dies(logged_before, other_wandb):
    other_wandb("import os; print('{}', flush=True); os._exit(9)")
    with pytest.raises(DashboardError, match="code 9"):
        log_one(logged_before, small_record(4))


def test_wandb_that_hangs(logged_before, other_wandb, monkeypatch):
    other_wandb("import time; time.sleep(60)")
    monkeypatch.setattr(wandb_calls, "OFFLINE_SECONDS", 0.5)
    with pytest.raises(DashboardError, match="did not end within"):
        log_one(logged_before, small_record(4))


def test_online_without_a_login_does_not_ask(logged_before, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DashboardError, match="wandb login"):
        upload_runs(logged_before, small_study(), Place())


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
    job = subprocess.Popen([*script(record="num_rows=30_000"), str(study)])
    wait_for(lambda: list(study.glob("wandb/offline-run-*/run-*.wandb")))
    assert len(of_wandb(study)) >= 2  # ours, and wandb's own beside it
    assert kill(job, study / "wandb")
    path = log_one(study, small_record())
    assert runs_in(study) == [path.name]
    assert len(list((study / "wandb").glob("data-*"))) == 1


def test_a_verb_killed_while_wandb_hangs_leaves_no_process(tmp_path, other_wandb):
    other_wandb("import time; time.sleep(60)")
    job = subprocess.Popen([*script(), str(tmp_path / "study")])
    wait_for(lambda: of_wandb(tmp_path / "study" / "wandb"))
    assert kill(job, tmp_path / "study" / "wandb")


# The verb


def test_the_verb_logs_a_finished_study_and_only_reads_it(finished, copied, monkeypatch):
    """With five of its proxies: the test of secrets logs them all."""
    some = proxy_runs(recorded_study(copied), Ledger.read(copied))[:5]
    monkeypatch.setattr(dashboard_runs, "proxy_runs", lambda *_: some)
    before = {n: hashlib.sha256(c).hexdigest() for n, c in everything(copied).items()}
    code, found = ask("dashboards", copied)
    assert code == 0
    after = {n: hashlib.sha256(c).hexdigest() for n, c in everything(copied).items() if f"{copied}/wandb/" not in n}
    assert after == before
    report = json.loads((finished / "study" / "report.json").read_text())
    assert found["run_id"] == canon.content_id(report["question"])[:16]
    assert found["runs"] == {"num": 6, "num_written": 6, "damaged": []}
    assert len(runs_in(copied)) == 6 and Path(found["workspace"]["path"]).is_file()
    assert (found["mode"], found["url"], Path(found["path"]).is_dir()) == ("offline", None, True)
    _, summary, rows = read_run(Path(found["path"]))
    assert summary["transfer/together/outcome"] == report["transfer"]["together"]["outcome"]
    trials = json.loads(media(found["path"], rows, "tables/search_trials"))["data"]
    assert len(trials) == len(report["search"]["trials"])
    page = (finished / "study" / "report.html").read_text()
    assert found["logged"]["pictures"] == page.count("<svg") > 3
    assert {name.split("-")[0] for name in found["logged"]["artifacts"]} == {"transfer", "fit", "gates", "choice"}
    machine = str(finished).encode()  # the plan and its corpus lie there
    assert [n for n, c in everything(copied / "wandb").items() if machine in c] == []


@pytest.fixture
def small(monkeypatch):
    """A study of two proxies in place of any other."""
    monkeypatch.setattr(dashboard_runs, "study_runs", lambda _: small_study())


def test_disabled_is_tensorboard_alone(tmp_path, small):
    code, found = ask("dashboards", tmp_path, "--mode", "disabled", "--tensorboard", tmp_path / "events")
    assert (code, found["runs"], found["workspace"], found["mode"]) == (0, None, None, "disabled")
    assert found["tensorboard"]["num_written"] == 3 and [path.name for path in tmp_path.iterdir()] == ["events"]
    code, found = ask("dashboards", tmp_path, "--sync", "--online")
    assert code == 2 and "not with --mode online" in found["message"]


def test_a_study_at_work_is_followed_to_its_end_through_failures(finished, small, monkeypatch):
    passes, at_work = [], [True, True, True, False]

    def fails_once(*_, **__):
        passes.append(None)
        if len(passes) == 2:
            raise DashboardError("no answer")
        return Logged(folders={}, written=("run",) * len(passes), damaged=())

    monkeypatch.setattr(verb, "FOLLOW_SECONDS", 0.0)
    monkeypatch.setattr(verb, "IDLE_PER_PASS", 0.0)
    monkeypatch.setattr("launcher.views.now.now_body", lambda *_: {"at_work": at_work[len(passes)]})
    monkeypatch.setattr("launcher.dashboards.tensorboard.write_runs", fails_once)
    where = ("--mode", "disabled", "--tensorboard", "events")
    code, out, err = forerun("dashboards", finished / "study", "--follow", *where)
    assert code == 0 and len(passes) == 4 and "4 written now" in out
    assert "no answer; once more later" in err and err.count("following the study") == 2


def test_two_at_once_are_refused(tmp_path):
    (tmp_path / "wandb").mkdir()
    with (tmp_path / "wandb" / LOCK_FILE).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DashboardError, match="another process logs this study"):
            log_one(tmp_path, small_record())


def test_a_file_in_the_way_is_named(tmp_path, small):
    (tmp_path / "wandb").write_text("in the way")
    code, found = ask("dashboards", tmp_path)
    assert code == 2 and str(tmp_path / "wandb") in found["message"]


def test_where_there_is_no_study_it_is_said_and_nothing_is_made(tmp_path):
    code, found = ask("dashboards", tmp_path / "nowhere")
    assert code == 2 and "nowhere" in found["message"]
    assert list(tmp_path.iterdir()) == []
