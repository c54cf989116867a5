"""Tests of a main run that a user's own training script makes.

The run is frozen, exported, verified, launched, resumed, watched, and concluded.
"""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tiny_study import COMMAND, run_forerun, run_json, write_plan_with
from waiting import wait_until

from forerun._launcher.main_run.frozen.launch_file import get_attestation_path, read_launch
from forerun._launcher.main_run.supervisor import user_launch
from forerun._launcher.main_run.supervisor.record_guard import UserRecordGuard
from forerun._proxies.external.metric_files import MetricFiles

# This training script follows a planted law with little noise. The variables DIE_AT, DIE_ALWAYS,
# NAN_AT and STEP_SECONDS plant faults. `--resume` continues after the last logged step.
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
offset = lr + 6 + (0 if a.form == "mup" else math.log2(a.width / 8))
loss = 1 + 40 / (a.width * 16) ** 0.5 + 9 / (steps * 64) ** 0.4 + 0.05 * offset * offset
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


@pytest.fixture(scope="module")
def frozen_template(tmp_path_factory):
    """Folder of a config that a finished study froze; tests must not change it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "trainer.py").write_text(TRAINER)
    launch_section = '\n[launch]\nresume_arguments = "--resume"\n'
    plan = write_plan_with(folder, COMMAND % sys.executable + launch_section)
    code, body = run_json("run", plan, "--study", folder / "study")
    assert code == 0, body
    # The planted losses do not pass all gates, the checks before a freeze.
    not_passed = [gate["name"] for gate in body["gates"] if gate["outcome"] != "passed"]
    accept = [word for name in not_passed for word in ("--accept", name)]
    code, body = run_json("freeze", folder / "study", *accept, "--reason", "a test")
    assert code == 0, body
    return folder / "study" / "frozen" / body["digest"]


@pytest.fixture
def frozen(frozen_template, tmp_path):
    """Folder of the same config in a copy of the study, where a test may launch."""
    study = frozen_template.parent.parent
    shutil.copytree(study, tmp_path / "study", ignore=shutil.ignore_patterns("driver.lock"))
    shutil.copy(study.parent / "trainer.py", tmp_path)
    return tmp_path / "study" / "frozen" / frozen_template.name


def test_frozen_values_equal_the_choice_of_the_report(frozen_template):
    own = read_launch(frozen_template).own
    body = json.loads((frozen_template.parent.parent / "report.json").read_text())
    assert own.values["width"] == body["choice"]["shape"]["width"]
    assert own.values["num_steps"] == body["choice"]["num_steps"]
    assert body["digest"] == frozen_template.name
    assert f"--lr {own.values['lr']} " in body["own_run"]["line"]


def test_explain_lists_the_origin_of_the_trainers_values(frozen_template):
    code, body = run_json("explain", frozen_template, "own.values.lr")
    assert code == 0
    (field,) = body["fields"]
    assert field["value"] == read_launch(frozen_template).own.values["lr"]
    assert run_json("explain", frozen_template)[0] == 0


def test_export_runs_the_same_command(frozen, tmp_path):
    assert run_json("export", frozen, "--to", "command")[0] == 0
    out = frozen / "exports" / "command"
    own = read_launch(frozen).own
    assert json.loads((out / "run.json").read_text())["values"] == own.values
    assert f"lr={own.values['lr']}" in (out / "overrides.txt").read_text().splitlines()
    run = tmp_path / "by hand"
    run.mkdir()
    subprocess.run([out / "run.sh", run], cwd=tmp_path, check=True)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == own.values["num_steps"]
    code, body = run_json("verify", frozen)
    assert code == 0 and any("prove" in problem for problem in body["not_proven"])
    # The script never calls the hook.
    code, body = run_json("verify", frozen, "--prove")
    assert code == 2 and "the hook reported nothing" in body["message"]
    (out / "run.sh").write_text("exit 0\n")
    assert run_json("verify", frozen)[0] == 5


@pytest.mark.parametrize("trainer", ["native", "torchtitan", "huggingface"])
def test_export_to_another_trainer_is_refused(frozen, trainer):
    code, body = run_json("export", frozen, "--to", trainer)
    assert code == 2 and "--to command" in body["message"]


def test_launched_run_is_watched_and_concluded(frozen):
    code, body = run_json("launch", frozen)
    assert (code, body["event"], body["num_restarts"]) == (0, "finished", 0), body
    assert run_json("watch", frozen, "--once")[1]["figures"]["step"] == body["step"]
    study, loss = frozen.parent.parent, body["validation_loss_nats"]
    shown = json.loads((study / "report.json").read_text())["main_run"]
    assert shown == {
        "steps": [],
        "train_loss_nats": [],
        "validation_loss_nats": loss,
        "event": "finished",
    }
    assert "Validation loss of the main run" in (study / "report.html").read_text()
    assert run_forerun("status", study)[1].startswith("the main run has finished: validation loss")
    code, score = run_json("watch", frozen, "--conclude")
    assert code == 0 and score["actual_nats"] == loss
    get_attestation_path(frozen, "launch").unlink()  # as if another program had started the run
    assert run_json("report", study)[1]["main_run"] == shown


def test_dead_trainer_resumes_with_its_resume_arguments(frozen, monkeypatch):
    monkeypatch.setenv("DIE_AT", "5")
    code, body = run_json("launch", frozen)
    assert (code, body["event"], body["num_restarts"]) == (0, "finished", 1), body
    steps = [
        json.loads(line)["step"]
        for line in (frozen / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[:-1] == list(range(1, body["step"] + 1)), "no step is repeated"


def test_trainer_that_always_dies_is_a_failed_run(frozen, monkeypatch):
    monkeypatch.setenv("DIE_ALWAYS", "1")
    code, body = run_json("launch", frozen)
    assert (code, body["event"], body["exit_code"]) == (2, "failed", 2), body


def cut_to_two_lines(path):
    """Remove all but the first two lines of a file."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))


def replace_file(path):
    """Replace a file of metrics by a new one that has step 1 only."""
    path.with_name("other").write_text('{"step": 1, "train_loss": 2.5}\n')
    path.with_name("other").replace(path)


@pytest.mark.parametrize("remove", [Path.unlink, cut_to_two_lines, replace_file])
def test_lost_metrics_are_reported_and_fail_the_launch(frozen, monkeypatch, capsys, remove):
    """The trainer keeps the file open, so it writes on after a gap, or into a removed file."""
    monkeypatch.setenv("STEP_SECONDS", "0.05")
    monkeypatch.setattr(user_launch, "_POLL_SECONDS", 0.02)
    path = frozen / "run" / "metrics.jsonl"

    def wait_and_remove():
        wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") > 4)
        time.sleep(0.1)
        remove(path)

    thread = threading.Thread(target=wait_and_remove)
    thread.start()
    code, out, err = run_forerun("launch", frozen, "--json")
    thread.join()
    body = json.loads(out)
    assert (code, body["num_restarts"]) == (2, 0), body
    assert (
        f"{path.resolve()} was removed, replaced or cut" in body["reason"]
        and "logged step" in body["reason"]
    )
    assert "warning: " in err and "restore it from a copy" in err


def test_log_that_its_trainer_rewrites_is_not_lost(frozen_template, tmp_path, capsys):
    path, record = tmp_path / "metrics.jsonl", UserRecordGuard()

    def write_and_check(*steps, is_over=False):
        path.with_name("new").write_text(
            "".join(f'{{"step": {step}, "train_loss": 2.0}}\n' for step in steps)
        )
        path.with_name("new").replace(path)
        while metrics.read(100):
            pass
        record.check(metrics, is_over=is_over)

    command = read_launch(frozen_template).own.command
    metrics = MetricFiles(command, path)
    record.begin(is_resumed=False)
    # The trainer rewrites the whole file, and the record sees it once while it is empty.
    for steps in ([1], [1, 2], [], [1, 2, 3], [1, 2, 3, 4]):
        write_and_check(*steps)
    metrics = MetricFiles(command, path)
    record.begin(is_resumed=True)
    # The resumed trainer goes on from step 2.
    for steps in ([1, 2, 3, 4], [1, 2], [1, 2, 3], [1, 2, 3, 5]):
        write_and_check(*steps)
    assert record.describe_losses(metrics) == "" and capsys.readouterr().err == ""
    write_and_check(5, 6)
    write_and_check(5, 6, 7)
    assert "it lacks 3 logged steps from 1 to 3" in record.describe_losses(metrics)
    assert capsys.readouterr().err.count("warning: ") == 1
    write_and_check(1, 2, 3, 5, 6, 7, 8, is_over=True)
    assert record.describe_losses(metrics) == "", "the log was restored"
    write_and_check(8, is_over=True)
    assert "it lacks 6 logged steps from 1 to 7" in record.describe_losses(metrics)


def test_nan_loss_aborts_the_run(frozen, monkeypatch):
    monkeypatch.setenv("NAN_AT", "4")
    code, body = run_json("launch", frozen)
    assert (code, body["event"], body["num_restarts"]) == (3, "aborted", 0), body


def test_rehearsal_of_a_users_trainer_passes(frozen, monkeypatch):
    monkeypatch.setenv("STEP_SECONDS", "0.5")
    code, body = run_json(
        "rehearse", frozen, "--only", "own_killed", "--only", "own_cut_log", "--only", "own_run"
    )
    assert code == 0, body
    assert {drill["name"]: drill["outcome"] for drill in body["drills"]} == dict.fromkeys(
        ("own_run", "own_killed", "own_cut_log"), "passed"
    )


def test_rare_log_lines_are_no_hang(monkeypatch):
    # Lines come every 10 s, so a hang is a silence of 20 times 10 s.
    now = 0.0
    monkeypatch.setattr(user_launch.time, "monotonic", lambda: now)
    silence = user_launch._Silence(30.0)
    for now, step, hangs in (
        (3000, None, False),
        (3010, 1, False),
        (3020, 2, False),
        (3030, 3, False),
        (3229, 3, False),
        (3231, 3, True),
    ):
        assert silence.check(step) == hangs, now


def test_options_of_the_embedded_trainer_are_refused(frozen):
    code, body = run_json("launch", frozen, "--steps", "3", "--wandb", "offline")
    assert code == 2
    assert body["problems"][0].startswith("--steps, --wandb: ")
    code, body = run_json("launch", "latest", "--study", frozen.parent.parent, "--dry-run")
    assert code == 0 and "trainer.py" in body["line"], body
    assert (
        run_json("rehearse", frozen, "--full")[0]
        == run_json("rehearse", frozen, "--only", "resume")[0]
        == 2
    )
