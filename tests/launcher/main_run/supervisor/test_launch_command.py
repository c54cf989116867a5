"""Tests of the command `forerun launch`: its output, its records, and its end on a signal.

For a config that only another trainer can run, the command prints the command line of that
trainer's export.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from frozen_case import freeze
from main_run import make_tiny_decision
from scripted_job import (
    ENDING_SIGNALS,
    SCRIPT_HEAD,
    list_processes_with_variable,
    signal_once_there,
)
from tiny_study import run_forerun, run_json
from wandb_case import read_run

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.frozen.frozen import Parallelism
from forerun._launcher.main_run.supervisor.hang_detector import SilenceLimits


def make_pipeline_decision(corpus):
    """Return a decision with pipeline parallelism, which the embedded trainer cannot run."""
    layout = Parallelism(data_parallel_shard=1, pipeline=2)
    return dataclasses.replace(make_tiny_decision(corpus), parallelism=layout)


def test_launch_writes_wandb_run_and_logbook(corpus, tmp_path, monkeypatch):
    line = [sys.executable, "-c", SCRIPT_HEAD + "for number in range(1, 13): step(number)\nend()"]
    monkeypatch.setattr(
        "forerun._launcher.main_run.supervisor.launch.build_torchrun_command", lambda *_, **__: line
    )
    folder = freeze(tmp_path / "study", make_tiny_decision(corpus))
    code, body = run_json("launch", folder, "--data", corpus, "--wandb", "offline")
    assert (code, body["event"], body["num_restarts"]) == (0, "finished", 0)
    assert body["wandb"]["whole"]
    lines = [line for line in metrics_file.read_lines(folder / "run") if "train_loss_nats" in line]
    rows = [row for row in read_run(Path(body["wandb"]["path"]))[2] if "train_loss_nats" in row]
    assert {row["step"]: row["train_loss_nats"] for row in rows} == {
        line["step"]: line["train_loss_nats"] for line in lines
    }
    logbook = (tmp_path / "study" / "logbook.md").read_text()
    assert f"**launched** (run {folder.name[:8]}, step 0) launched from step 0 of 12" in logbook
    assert f"**ended** (run {folder.name[:8]}, step 12) finished at step 12" in logbook
    attested = json.loads((folder / "attestations" / "launch.json").read_text())
    assert attested["body"]["outcome"]["event"] == "finished"


def test_launch_passes_its_options_on(corpus, tmp_path, monkeypatch):
    passed = {}

    def start(*arguments, **kwargs):
        passed.update(kwargs, arguments=arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr("forerun._launcher.cli.verbs.launch.start_job", start)
    folder = freeze(tmp_path, make_tiny_decision(corpus, num_ranks=2))
    more_options = (
        "--max-restarts",
        7,
        "--hang-seconds",
        90,
        "--nnodes",
        2,
        "--node-rank",
        1,
        "--rdzv-endpoint",
        "h:29400",
    )
    assert (
        run_json("launch", folder, "--data", corpus, "--wandb", "offline", *more_options)[0] == 130
    )
    assert passed["arguments"][4] == 7
    assert passed["limits"] == SilenceLimits(floor_seconds=90, start_seconds=3600)
    assert (passed["nodes"].num_nodes, passed["nodes"].rank, passed["nodes"].rendezvous) == (
        2,
        1,
        "h:29400",
    )
    assert passed["beside"] is None, "only the first machine mirrors the run to W&B"
    run_json("launch", folder, "--data", corpus, "--hang-seconds", 0)
    assert passed["limits"] == SilenceLimits(floor_seconds=None, start_seconds=None)


def test_dry_run_starts_nothing(corpus, tmp_path):
    folder = freeze(tmp_path, make_tiny_decision(corpus, num_ranks=2))
    code, body = run_json(
        "launch", folder, "--data", corpus, "--dry-run", "--nnodes", 2, "--rdzv-endpoint", "h:29400"
    )
    assert (
        code == 0
        and "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint h:29400"
        in body["line"]
    )
    code, body = run_json(
        "launch",
        folder,
        "--data",
        corpus,
        "--dry-run",
        "--nnodes",
        2,
        "--rdzv-endpoint",
        "h:1",
        "--srun",
    )
    assert code == 0 and body["line"].startswith("srun --nodes 2 --ntasks 2 ")
    assert not (folder / "run").exists()


def test_layout_of_another_trainer_prints_the_line_of_its_export(corpus, tmp_path):
    folder = freeze(tmp_path, make_pipeline_decision(corpus))
    code, body = run_json("launch", folder, "--data", corpus)
    assert code == 2
    assert "pipeline = 2" in body["problems"][0]
    assert "exports beside the config: none; `forerun export" in body["problems"][-1]
    code, out, _ = run_forerun("export", folder, "--to", "megatron-lm", "--allow-lossy")
    assert code == 0, out
    code, body = run_json("launch", folder, "--data", corpus)
    assert (code, body["trainer"]) == (0, "megatron-lm")
    assert "pipeline = 2" in body["why"][0]
    variable, script = shlex.split(body["line"])
    assert variable == f"FORERUN_DATA={corpus.resolve()}"
    subprocess.run(["bash", "-n", script], check=True)
    code, out, _ = run_forerun("launch", folder, "--data", corpus)
    assert body["line"] in out.splitlines()
    other_lines = [line for line in out.splitlines() if line != body["line"]]
    assert all(line.startswith("# ") for line in other_lines), "the output can be pasted"
    assert not (folder / "run").exists(), "no run is started"
    Path(script).write_text("#!/bin/sh\nrm -rf /\n")
    code, body = run_json("launch", folder, "--data", corpus)
    assert (code, body["error"]) == (5, "TamperedError"), "the export was changed after its proof"


def test_export_is_chosen_by_name(corpus, tmp_path):
    folder = freeze(tmp_path, make_tiny_decision(corpus))
    for trainer in ("torchtitan", "huggingface"):
        assert run_forerun("export", folder, "--to", trainer, "--allow-lossy")[0] == 0
    code, body = run_json("launch", folder, "--data", corpus, "--trainer", "huggingface")
    assert (code, body["trainer"], body["why"]) == (0, "huggingface", [])
    assert "/exports/huggingface/run.sh" in body["line"]
    code, body = run_json("launch", folder, "--data", corpus, "--trainer", "megatron-lm")
    assert code == 2 and "--trainer megatron-lm: no such export" in body["problems"]
    assert "huggingface, torchtitan" in body["message"]


def test_option_of_the_embedded_trainer_is_refused_with_trainer(corpus, tmp_path):
    folder = freeze(tmp_path, make_tiny_decision(corpus))
    export = ("--data", corpus, "--trainer", "torchtitan")
    code, _, err = run_forerun("launch", folder, *export, "--steps", 5, "--nnodes", 2)
    assert (code, "--steps, --nnodes: only without --trainer" in err) == (2, True)


# ---- Signals ----
# A signal ends the launch at any moment, with the run's exit code and no process left.

MARKER = "FORERUN_TEST_SIGNALS"
"""Environment variable by which the tests find the processes that they started."""
TRAINS_UNTIL_SIGNAL = """
def note_signal(*_):
    (run / "signals").open("a").write("x")
signal.signal(signal.SIGTERM, note_signal)
os.environ["LOCAL_RANK"] = "0"  # the children of a rank are not the supervisor's to end
step(1), step(2), (run / "at-it").touch()
wait_for(run / "signals")
step(3), save(3), end("interrupted", 130, 3)
"""


@pytest.fixture
def launch_job(corpus, tmp_path, monkeypatch):
    """Function that runs `forerun launch` with a scripted job.

    It asserts that no process is left, and returns exit code, JSON, and the run's folder.
    """
    monkeypatch.setenv(MARKER, "1")
    folder = freeze(tmp_path / "study", make_tiny_decision(corpus))

    def start(script, *options):
        line = [sys.executable, "-c", SCRIPT_HEAD + script]
        monkeypatch.setattr(
            "forerun._launcher.main_run.supervisor.launch.build_torchrun_command",
            lambda *_, **__: line,
        )
        code, body = run_json("launch", folder, "--data", corpus, *options)
        assert list_processes_with_variable(MARKER) == []
        return code, body, folder / "run"

    start.run_dir = folder / "run"
    return start


@ENDING_SIGNALS
@pytest.mark.parametrize(
    ("function_name", "is_begun"),
    [
        ("cli.verbs.launch.read_rehearsal_status", False),
        ("main_run.supervisor.launch._find_newest_step", True),
    ],
)
def test_signal_before_the_ranks_start_ends_the_launch(
    launch_job, monkeypatch, number, function_name, is_begun
):
    name = f"forerun._launcher.{function_name}"
    module, _, function = name.rpartition(".")
    original = getattr(importlib.import_module(module), function)

    def send_signal_and_call(*arguments):
        os.kill(os.getpid(), number)
        return original(*arguments)

    monkeypatch.setattr(name, send_signal_and_call)
    code, body, run_dir = launch_job("end()")
    assert code == 130
    assert not list(run_dir.glob("began-*")), "no rank was started"
    assert body.get("event") == ("interrupted" if is_begun else None)


@ENDING_SIGNALS
def test_signal_while_the_ranks_train_saves_and_ends(launch_job, number):
    signal_once_there(launch_job.run_dir / "at-it", number)
    code, body, run_dir = launch_job(TRAINS_UNTIL_SIGNAL)
    assert (code, body["event"], body["step"], body["num_restarts"]) == (130, "interrupted", 3, 0)
    assert (run_dir / "signals").read_text() == "x", "the job gets one signal"
    assert (run_dir / "checkpoints" / "step-00000003").is_dir(), "the job saves before it ends"
