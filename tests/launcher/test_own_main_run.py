"""The main run of the user's own trainer: frozen, exported, verified, launched, resumed, watched,
concluded.
"""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tiny_study import COMMAND, ask, forerun, plan_with

from launcher.frozen.launch_file import path_of, read_launch
from launcher.supervisor import own_launch
from launcher.supervisor.run_record import UserRunRecord
from proxies.external.metric_files import MetricFiles

# A planted law with little noise. `--die N`: it dies after N steps; `--resume` goes on behind the
# last one logged.
TRAINER = """
import argparse, json, math, os, time
parser = argparse.ArgumentParser()
parser.add_argument("out")
for name, kind in (("lr", float), ("width", int), ("num-steps", int), ("seed", int), ("clip", float), ("warmup", int)):
    parser.add_argument("--" + name, type=kind)
parser.add_argument("--form")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--die", type=int, default=0)
a = parser.parse_args()
steps, lr, path = a.num_steps, math.log2(a.lr), os.path.join(a.out, "metrics.jsonl")
die = int(os.environ.get("DIE_AT", "0")) if not a.resume else 0
if "DIE_ALWAYS" in os.environ: raise SystemExit("planted")
first = sum(1 for _ in open(path)) + 1 if a.resume and os.path.exists(path) else 1
moved = lr + 6 + (0 if a.form == "mup" else math.log2(a.width / 8))
loss = 1 + 40 / (a.width * 16) ** 0.5 + 9 / (steps * 64) ** 0.4 + 0.05 * moved * moved
loss += 3e-3 * math.sin(1000 * a.seed + 77 * lr)
with open(path, "a") as out:
    for step in range(first, steps + 1):
        value = float("nan") if os.environ.get("NAN_AT") == str(step) else loss + 1 / step
        print(json.dumps({"step": step, "train_loss": value}), file=out, flush=True)
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        if step == die:
            os._exit(7)
    print(json.dumps({"step": steps, "val_loss": loss}), file=out)
"""  # noqa: E501
ACCEPTED = ("coordinates", "transfer", "fit", "ladder_tuned", "data")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "trainer.py").write_text(TRAINER)
    more = '\n[launch]\nresume_arguments = "--resume"\n'
    plan = plan_with(folder, COMMAND % sys.executable + more)
    code, body = ask("run", plan, "--study", folder / "study")
    assert code == 0, body
    closed = [gate["name"] for gate in body["gates"] if gate["outcome"] != "passed"]
    accept = [word for name in closed for word in ("--accept", name)]
    code, body = ask("freeze", folder / "study", *accept, "--reason", "a test")
    assert code == 0, body
    return folder / "study" / "frozen" / body["digest"]


@pytest.fixture
def frozen(finished, tmp_path):
    """A copy of the study, to launch in."""
    study = finished.parent.parent
    shutil.copytree(study, tmp_path / "study", ignore=shutil.ignore_patterns("driver.lock"))
    shutil.copy(study.parent / "trainer.py", tmp_path)
    return tmp_path / "study" / "frozen" / finished.name


def test_the_values_are_the_decision(finished):
    own = read_launch(finished).own
    body = json.loads((finished.parent.parent / "report.json").read_text())
    assert own.values["width"] == body["choice"]["shape"]["width"]
    assert own.values["num_steps"] == body["choice"]["num_steps"]
    assert body["digest"] == finished.name
    assert f"--lr {own.values['lr']} " in body["own_run"]["line"]


def test_every_value_says_where_it_came_from(finished):
    code, body = ask("explain", finished, "own.values.lr")
    assert code == 0
    (field,) = body["fields"]
    assert field["value"] == read_launch(finished).own.values["lr"]
    assert ask("explain", finished)[0] == 0


def test_its_export_starts_the_same(frozen, tmp_path):
    assert ask("export", frozen, "--to", "command")[0] == 0
    out = frozen / "exports" / "command"
    own = read_launch(frozen).own
    assert json.loads((out / "run.json").read_text())["values"] == own.values
    assert f"lr={own.values['lr']}" in (out / "overrides.txt").read_text().splitlines()
    run = tmp_path / "by hand"
    run.mkdir()
    subprocess.run([out / "run.sh", run], cwd=tmp_path, check=True)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == own.values["num_steps"]
    code, body = ask("verify", frozen)
    assert code == 0 and any("prove" in open_ for open_ in body["not_proven"])
    code, body = ask("verify", frozen, "--prove")  # this script calls no hook, and runs to its end
    assert code == 2 and "the hook reported nothing" in body["message"]
    (out / "run.sh").write_text("exit 0\n")
    assert ask("verify", frozen)[0] == 5


@pytest.mark.parametrize("trainer", ["native", "torchtitan", "huggingface"])
def test_no_other_trainer_takes_it(frozen, trainer):
    code, body = ask("export", frozen, "--to", trainer)
    assert code == 2 and "--to command" in body["message"]


def test_it_is_launched_watched_and_concluded(frozen):
    code, body = ask("launch", frozen)
    assert (code, body["event"], body["num_restarts"]) == (0, "finished", 0), body
    assert ask("watch", frozen, "--once")[1]["figures"]["step"] == body["step"]
    study, loss = frozen.parent.parent, body["validation_loss_nats"]
    shown = json.loads((study / "report.json").read_text())["main_run"]
    assert shown == {
        "steps": [],
        "train_loss_nats": [],
        "validation_loss_nats": loss,
        "event": "finished",
    }
    assert "Validation loss of the main run" in (study / "report.html").read_text()
    assert forerun("status", study)[1].startswith("the main run has finished: validation loss")
    code, score = ask("watch", frozen, "--conclude")
    assert code == 0 and score["actual_nats"] == loss
    path_of(frozen, "launch").unlink()  # as of a run that another trainer made
    assert ask("report", study)[1]["main_run"] == shown


def test_a_trainer_that_dies_goes_on_by_its_own_option(frozen, monkeypatch):
    monkeypatch.setenv("DIE_AT", "5")
    code, body = ask("launch", frozen)
    assert (code, body["event"], body["num_restarts"]) == (0, "finished", 1), body
    steps = [
        json.loads(line)["step"]
        for line in (frozen / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[:-1] == list(range(1, body["step"] + 1))  # no step twice


def test_a_trainer_that_dies_each_time_is_no_bug_of_forerun(frozen, monkeypatch):
    monkeypatch.setenv("DIE_ALWAYS", "1")
    code, body = ask("launch", frozen)
    assert (code, body["event"], body["exit_code"]) == (2, "failed", 2), body


def cut(path):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))


def replace(path):
    path.with_name("other").write_text('{"step": 1, "train_loss": 2.5}\n')
    path.with_name("other").replace(path)


@pytest.mark.parametrize("take_away", [Path.unlink, cut, replace])
def test_lost_metrics_are_no_success_and_named(frozen, monkeypatch, capsys, take_away):
    """The trainer holds the file open and goes on: behind a gap, or where nobody reads it."""
    monkeypatch.setenv("STEP_SECONDS", "0.05")
    monkeypatch.setattr(own_launch, "_POLL_SECONDS", 0.02)
    path = frozen / "run" / "metrics.jsonl"

    def act():
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not (
            path.exists() and path.read_bytes().count(b"\n") > 4
        ):
            time.sleep(0.01)
        time.sleep(0.1)
        take_away(path)

    (thread := threading.Thread(target=act)).start()
    code, out, err = forerun("launch", frozen, "--json")
    thread.join()
    body = json.loads(out)
    assert (code, body["num_restarts"]) == (2, 0), body
    assert (
        f"{path.resolve()} was removed, replaced or cut" in body["reason"]
        and "logged step" in body["reason"]
    )
    assert "warning: " in err and "restore it from a copy" in err, "told as soon as it is seen"


def test_a_log_that_its_trainer_cuts_or_writes_anew_is_not_lost(finished, tmp_path, capsys):
    path, record = tmp_path / "metrics.jsonl", UserRunRecord()

    def look(*steps, is_over=False):
        path.with_name("new").write_text(
            "".join(f'{{"step": {step}, "train_loss": 2.0}}\n' for step in steps)
        )
        path.with_name("new").replace(path)
        while metrics.read(100):
            pass
        record.check(metrics, is_over=is_over)

    command = read_launch(finished).own.command
    metrics = MetricFiles(command, path)
    record.begin(is_resumed=False)
    # written anew: once it was seen half way
    for steps in ([1], [1, 2], [], [1, 2, 3], [1, 2, 3, 4]):
        look(*steps)
    metrics = MetricFiles(command, path)
    record.begin(is_resumed=True)
    for steps in ([1, 2, 3, 4], [1, 2], [1, 2, 3], [1, 2, 3, 5]):  # it resumed from step 2
        look(*steps)
    assert record.describe_losses(metrics) == "" and capsys.readouterr().err == ""
    look(5, 6)
    look(5, 6, 7)
    assert "it lacks 3 logged steps from 1 to 3" in record.describe_losses(metrics)
    assert capsys.readouterr().err.count("warning: ") == 1
    look(1, 2, 3, 5, 6, 7, 8, is_over=True)
    assert record.describe_losses(metrics) == "", "it was restored"
    look(8, is_over=True)
    assert "it lacks 6 logged steps from 1 to 7" in record.describe_losses(metrics)


def test_a_loss_that_is_no_number_ends_it(frozen, monkeypatch):
    monkeypatch.setenv("NAN_AT", "4")
    code, body = ask("launch", frozen)
    assert (code, body["event"], body["num_restarts"]) == (3, "aborted", 0), body


def test_it_is_rehearsed(frozen, monkeypatch):
    monkeypatch.setenv("STEP_SECONDS", "0.5")
    code, body = ask(
        "rehearse", frozen, "--only", "own_killed", "--only", "own_cut_log", "--only", "own_run"
    )
    assert code == 0, body
    assert {drill["name"]: drill["outcome"] for drill in body["drills"]} == dict.fromkeys(
        ("own_run", "own_killed", "own_cut_log"), "passed"
    )


def test_a_log_that_is_written_seldom_is_no_hang(monkeypatch):
    now = 0.0
    monkeypatch.setattr(own_launch.time, "monotonic", lambda: now)
    silence = own_launch._Silence(30.0)
    for now, step, hangs in (
        (3000, None, False),
        (3010, 1, False),
        (3020, 2, False),
        (3030, 3, False),
        (3229, 3, False),
        (3231, 3, True),
    ):
        assert silence.hangs(step) == hangs, now


def test_what_is_of_the_embedded_trainer_is_refused(frozen):
    code, body = ask("launch", frozen, "--steps", "3", "--wandb", "offline")
    assert code == 2 and {"--steps", "--wandb"} <= {
        problem.split(":")[0] for problem in body["problems"]
    }
    assert (
        ask("rehearse", frozen, "--full")[0] == ask("rehearse", frozen, "--only", "resume")[0] == 2
    )
