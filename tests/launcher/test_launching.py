"""The verb of the main run: what it answers, what it keeps, and whose launch line it prints."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
from pathlib import Path

import pytest
from main_run import tiny_decision
from tiny_study import ask, forerun

from launcher import chronicle, metrics
from launcher.frozen import Parallelism
from launcher.frozen_folder import ATTESTED, write_frozen
from launcher.watchdog import Limits
from proxies.external.event_files import EventFile


def freeze(study, decision):
    """The folder of a frozen config in a study, as freezing leaves it."""
    return write_frozen(study / "frozen", decision, {kind: {} for kind in ATTESTED}).parent


def split(corpus):
    layout = Parallelism(data_parallel_shard=1, pipeline=2)
    return dataclasses.replace(tiny_decision(corpus), parallelism=layout)


def test_a_launch_with_its_windows_and_its_logbook(corpus, tmp_path):
    folder = freeze(tmp_path / "study", tiny_decision(corpus, num_ranks=2))
    windows = ("--wandb", "offline", "--tensorboard", tmp_path / "tb")
    code, body = ask("launch", folder, "--data", corpus, *windows)
    assert (code, body["event"], body["num_restarts"]) == (0, "finished", 0)
    assert [(mirror["name"], mirror["whole"]) for mirror in body["mirrors"]] == [("wandb", True), ("tensorboard", True)]
    lines = [line for line in metrics.read(folder / "run") if "train_loss_nats" in line]
    rows = EventFile(Path(body["mirrors"][1]["path"]), frozenset({"train_loss_nats"}), "step").read(2**30)
    assert {row["step"]: pytest.approx(row["train_loss_nats"], rel=1e-6) for row in rows} == {
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

    monkeypatch.setattr("launcher.launch.launch", start)
    folder = freeze(tmp_path, tiny_decision(corpus, num_ranks=2))
    more = ("--max-restarts", 7, "--hang-seconds", 90, "--nnodes", 2, "--node-rank", 1, "--rdzv-endpoint", "h:29400")
    assert ask("launch", folder, "--data", corpus, *more)[0] == 130
    assert given["arguments"][4] == 7
    assert given["limits"] == Limits(floor_seconds=90, start_seconds=3600)
    assert (given["nodes"].num_nodes, given["nodes"].rank, given["nodes"].rendezvous) == (2, 1, "h:29400")
    ask("launch", folder, "--data", corpus, "--hang-seconds", 0)
    assert given["limits"] == Limits(floor_seconds=None, start_seconds=None)


def test_dry_run_starts_nothing(corpus, tmp_path):
    folder = freeze(tmp_path, tiny_decision(corpus, num_ranks=2))
    code, body = ask("launch", folder, "--data", corpus, "--dry-run", "--nnodes", 2, "--rdzv-endpoint", "h:29400")
    assert code == 0 and "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint h:29400" in body["line"]
    assert not (folder / "run").exists()


def test_a_layout_that_is_not_ours_prints_the_line_of_its_export(corpus, tmp_path):
    folder = freeze(tmp_path, split(corpus))
    code, body = ask("launch", folder, "--data", corpus)
    assert code == 2
    assert "pipeline = 2" in body["problems"][0]
    assert "beside the config lie these exports: none; `forerun export" in body["problems"][-1]
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
    assert all(line.startswith("# ") for line in out.splitlines() if line != body["line"]), "it can be pasted"
    assert not (folder / "run").exists(), "nothing is run"
    Path(script).write_text("#!/bin/sh\nrm -rf /\n")
    code, body = ask("launch", folder, "--data", corpus)
    assert (code, body["error"]) == (5, "TamperedError"), "an export that was changed is not what was proven"


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


def test_a_run_outside_a_study_keeps_no_logbook(corpus, tmp_path, monkeypatch):
    from launcher.launch import LaunchOutcome

    outcome = LaunchOutcome(
        event="failed", exit_code=2, step=3, reason="out of memory after step 3", validation_loss_nats=None,
        num_restarts=1, cause="out_of_memory",
    )  # fmt: skip
    monkeypatch.setattr("launcher.launch.launch", lambda *_, **__: outcome)
    folder = freeze(tmp_path, tiny_decision(corpus)).rename(tmp_path / "config")
    code, body = ask("launch", folder, "--data", corpus, "--out", tmp_path / "out")
    assert (code, body["cause"]) == (2, "out_of_memory")
    assert "failed at step 3 of 12 after 1 restarts: out of memory" in forerun("launch", folder, "--data", corpus)[1]
    assert not list(tmp_path.rglob("logbook.md"))
    assert chronicle.entries(folder / "run") == []
