"""The verb of the main run: what it answers, what it keeps, and whose launch line it prints."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from main_run import tiny_decision
from scripted_job import ENDING_SIGNALS, HEAD, left_behind, signal_once_there
from tiny_study import ask, forerun
from wandb_case import read_run

from launcher.base import metrics
from launcher.base.watchdog import Limits
from launcher.frozen.frozen import Parallelism
from launcher.frozen.frozen_folder import ATTESTED, write_frozen
from sweeps.store.ledger import Ledger


def freeze(study, decision):
    """The folder of a frozen config in a study with a ledger, as freezing leaves it."""
    with Ledger.open(study, {}, create=True):
        pass
    return write_frozen(study / "frozen", decision, {kind: {} for kind in ATTESTED}).parent


def split(corpus):
    layout = Parallelism(data_parallel_shard=1, pipeline=2)
    return dataclasses.replace(tiny_decision(corpus), parallelism=layout)


def test_a_launch_with_its_mirror_and_its_logbook(corpus, tmp_path, monkeypatch):
    line = [sys.executable, "-c", HEAD + "for number in range(1, 13): step(number)\nend()"]
    monkeypatch.setattr("launcher.supervisor.launch.torchrun_command", lambda *_, **__: line)
    folder = freeze(tmp_path / "study", tiny_decision(corpus))
    code, body = ask("launch", folder, "--data", corpus, "--wandb", "offline")
    assert (code, body["event"], body["num_restarts"]) == (0, "finished", 0)
    assert body["wandb"]["whole"]
    lines = [line for line in metrics.read(folder / "run") if "train_loss_nats" in line]
    rows = [row for row in read_run(Path(body["wandb"]["path"]))[2] if "train_loss_nats" in row]
    assert {row["step"]: row["train_loss_nats"] for row in rows} == {
        line["step"]: line["train_loss_nats"] for line in lines
    }
    logbook = (tmp_path / "study" / "logbook.md").read_text()
    assert f"**launched** (run {folder.name[:8]}, step 0) launched from step 0 of 12" in logbook
    assert f"**ended** (run {folder.name[:8]}, step 12) finished at step 12" in logbook
    attested = json.loads((folder / "attestations" / "launch.json").read_text())
    assert attested["body"]["outcome"]["event"] == "finished"


def test_options_arrive(corpus, tmp_path, monkeypatch):
    given = {}

    def start(*arguments, **kwargs):
        given.update(kwargs, arguments=arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.supervisor.launch.launch", start)
    folder = freeze(tmp_path, tiny_decision(corpus, num_ranks=2))
    more = (
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
    assert ask("launch", folder, "--data", corpus, "--wandb", "offline", *more)[0] == 130
    assert given["arguments"][4] == 7
    assert given["limits"] == Limits(floor_seconds=90, start_seconds=3600)
    assert (given["nodes"].num_nodes, given["nodes"].rank, given["nodes"].rendezvous) == (
        2,
        1,
        "h:29400",
    )
    assert given["beside"] is None, "the first machine shows the run"
    ask("launch", folder, "--data", corpus, "--hang-seconds", 0)
    assert given["limits"] == Limits(floor_seconds=None, start_seconds=None)


def test_dry_run_starts_nothing(corpus, tmp_path):
    folder = freeze(tmp_path, tiny_decision(corpus, num_ranks=2))
    code, body = ask(
        "launch", folder, "--data", corpus, "--dry-run", "--nnodes", 2, "--rdzv-endpoint", "h:29400"
    )
    assert (
        code == 0
        and "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint h:29400"
        in body["line"]
    )
    code, body = ask(
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


def test_a_layout_that_is_not_ours_prints_the_line_of_its_export(corpus, tmp_path):
    folder = freeze(tmp_path, split(corpus))
    code, body = ask("launch", folder, "--data", corpus)
    assert code == 2
    assert "pipeline = 2" in body["problems"][0]
    assert "exports beside the config: none; `forerun export" in body["problems"][-1]
    code, out, _ = forerun("export", folder, "--to", "megatron-lm", "--allow-lossy")
    assert code == 0, out
    code, body = ask("launch", folder, "--data", corpus)
    assert (code, body["trainer"]) == (0, "megatron-lm")
    assert "pipeline = 2" in body["why"][0]
    told, script = shlex.split(body["line"])
    assert told == f"FORERUN_DATA={corpus.resolve()}"
    subprocess.run(["bash", "-n", script], check=True)
    code, out, _ = forerun("launch", folder, "--data", corpus)
    assert body["line"] in out.splitlines()
    assert all(line.startswith("# ") for line in out.splitlines() if line != body["line"]), (
        "it can be pasted"
    )
    assert not (folder / "run").exists(), "nothing is run"
    Path(script).write_text("#!/bin/sh\nrm -rf /\n")
    code, body = ask("launch", folder, "--data", corpus)
    assert (code, body["error"]) == (5, "TamperedError"), (
        "an export that was changed is not what was proven"
    )


def test_an_export_is_chosen_by_name(corpus, tmp_path):
    folder = freeze(tmp_path, tiny_decision(corpus))
    for trainer in ("torchtitan", "huggingface"):
        assert forerun("export", folder, "--to", trainer, "--allow-lossy")[0] == 0
    code, body = ask("launch", folder, "--data", corpus, "--trainer", "huggingface")
    assert (code, body["trainer"], body["why"]) == (0, "huggingface", [])
    assert "/exports/huggingface/run.sh" in body["line"]
    code, body = ask("launch", folder, "--data", corpus, "--trainer", "megatron-lm")
    assert code == 2 and "--trainer megatron-lm: no such export" in body["problems"]
    assert "huggingface, torchtitan" in body["message"]


# Signals: one ends it at any moment, with the exit code of what has come of the run and nothing
# left behind

MARKER = "FORERUN_TEST_SIGNALS"
TRAINS = """
def told(*_):
    (run / "told").open("a").write("x")
signal.signal(signal.SIGTERM, told)
os.environ["LOCAL_RANK"] = "0"  # for a child: what a rank starts is its own business
step(1), step(2), (run / "at-it").touch()
while not (run / "told").exists(): time.sleep(0.02)
step(3), save(3), end("interrupted", 130, 3)
"""


@pytest.fixture
def told(corpus, tmp_path, monkeypatch):
    """Launches a scripted job by the verb; code, body, and the run's folder. Nothing may be left
    behind.
    """
    monkeypatch.setenv(MARKER, "1")
    folder = freeze(tmp_path / "study", tiny_decision(corpus))

    def start(script, *options):
        line = [sys.executable, "-c", HEAD + script]
        monkeypatch.setattr("launcher.supervisor.launch.torchrun_command", lambda *_, **__: line)
        code, body = ask("launch", folder, "--data", corpus, *options)
        assert left_behind(MARKER) == []
        return code, body, folder / "run"

    start.run_dir = folder / "run"
    return start


@ENDING_SIGNALS
@pytest.mark.parametrize(
    ("where", "began"),
    [("rehearsal.status.rehearsal_of", False), ("supervisor.launch._newest_step", True)],
)
def test_a_signal_before_the_ranks_start(told, monkeypatch, number, where, began):
    name = f"launcher.{where}"
    module, _, function = name.rpartition(".")
    real = getattr(__import__(module, fromlist=[function]), function)
    monkeypatch.setattr(
        name, lambda *arguments: (os.kill(os.getpid(), number), real(*arguments))[1]
    )
    code, body, run_dir = told("end()")
    assert code == 130
    assert not list(run_dir.glob("began-*")), "no rank was started"
    assert body.get("event") == ("interrupted" if began else None)


@ENDING_SIGNALS
def test_a_signal_while_the_ranks_are_at_it(told, number):
    signal_once_there(told.run_dir / "at-it", number)
    code, body, run_dir = told(TRAINS)
    assert (code, body["event"], body["step"], body["num_restarts"]) == (130, "interrupted", 3, 0)
    assert (run_dir / "told").read_text() == "x", "once"
    assert (run_dir / "checkpoints" / "step-00000003").is_dir(), "and it saved"
