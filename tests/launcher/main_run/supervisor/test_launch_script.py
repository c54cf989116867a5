"""Tests of the sbatch script that `forerun launch --sbatch` writes: its text, and its signals.

SLURM is faked. One slow test uses real torchrun.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from main_run import make_tiny_decision, read_losses
from slurm_fakes import JOB_ID, fake_machine, read_seen, wait_for_seen
from tiny_study import run_forerun, run_json
from waiting import wait_until

from forerun._launcher.main_run import event_log, metrics_file
from forerun._launcher.main_run.frozen.frozen_folder import ATTESTED, write_frozen
from forerun._launcher.main_run.supervisor.slurm import LAUNCH_GRACE_SECONDS, format_launch_script

# The fakes record their calls in files of the folder $SEEN, which `read_seen` reads.
#
# The fake srun drops options and runs the command once per node.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* || $1 =~ ^[0-9]+$ ]]; do echo "$1" >>"$SEEN/srun"; shift; done
trap 'kill -TERM $(jobs -p) 2>/dev/null' TERM
for _ in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & done
code=0
for job in $(jobs -p); do wait "$job" || code=$?; done
exit $code
"""
# The fake supervisor stands for the process of `forerun launch`. It records its arguments and
# environment, takes $STEPS tenths of a second, and exits with $CODE. On SIGTERM it records the
# signal and exits a moment later with $STOP_CODE. The trap is set first, because the test sends
# SIGTERM as soon as a record exists.
SUPERVISOR = """#!/usr/bin/env bash
trap 'echo SIGTERM >>"$SEEN/signals"; sleep 0.3; exit "$STOP_CODE"' TERM
printf '%s\\0' "$@" >"$SEEN/arguments"
umask >"$SEEN/umask"
env -0 >"$SEEN/environment"
for _ in $(seq "$STEPS"); do sleep 0.1; done
exit "$CODE"
"""


@pytest.fixture
def job(tmp_path):
    """Function that starts a script on a machine whose srun, python, and scontrol are fakes.

    Its parameters are the script's text, how the fake supervisor behaves (its duration in tenths of
    a second, `steps`; its exit code; its exit code after SIGTERM), the number of nodes, and whether
    the real python is used instead of the fake supervisor.
    """
    with fake_machine(tmp_path, {"srun": SRUN, "python": SUPERVISOR}) as start:

        def run(text, *, steps=0, code=0, stop_code=130, num_nodes=1, real_python=False):
            if not real_python:
                text = text.replace(sys.executable, str(tmp_path / "bin" / "python"))
            return start(
                text, STEPS=steps, CODE=code, STOP_CODE=stop_code, SLURM_JOB_NUM_NODES=num_nodes
            )

        yield run


def test_supervisor_gets_the_command_and_environment(tmp_path, job, monkeypatch):
    folder = tmp_path / 'it\'s "one" $folder; {x}'
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = format_launch_script(folder / "frozen", ["--out", str(folder / "run")], 1)
    monkeypatch.chdir(tmp_path)
    assert job(text, code=4).wait(timeout=30) == 4, "the supervisor's exit code is the job's"
    arguments = read_seen(tmp_path, "arguments").split("\0")[:-1]
    assert arguments == [
        "-m",
        "forerun",
        "launch",
        str(folder / "frozen"),
        "--out",
        str(folder / "run"),
    ]
    assert "\n#SBATCH --nodes=1\n" in text
    assert f"\n#SBATCH --signal=B:USR1@{LAUNCH_GRACE_SECONDS}\n" in text
    assert (read_seen(tmp_path, "scontrol"), read_seen(tmp_path, "srun")) == ("", "")
    environment = dict(
        pair.split("=", 1) for pair in read_seen(tmp_path, "environment").split("\0") if pair
    )
    assert environment["PWD"] == str(folder), "the folder where `launch` was called"
    assert environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert environment["SRUN_CPUS_PER_TASK"] == environment["SLURM_CPUS_ON_NODE"] == "2"
    assert read_seen(tmp_path, "umask") == "0077\n"


def test_several_nodes_share_one_supervisor_and_endpoint(tmp_path, job):
    text = format_launch_script(tmp_path, [], 4)
    assert job(text, num_nodes=4).wait(timeout=30) == 0
    arguments = read_seen(tmp_path, "arguments").split("\0")[:-1]
    *last_options, endpoint = arguments[-5:]
    assert last_options == ["--nnodes", "4", "--srun", "--rdzv-endpoint"]
    # The script derives the port from the job's id, so that jobs on one node use different ports.
    assert endpoint == f"{os.uname().nodename}:{20000 + int(JOB_ID) % 20000}"
    assert "#SBATCH --nodes=4\n" in text


@pytest.mark.parametrize(
    ("number", "stop_code", "requeued"),
    [
        (signal.SIGUSR1, 130, True),
        (signal.SIGUSR1, 0, False),
        (signal.SIGUSR1, 3, False),
        (signal.SIGTERM, 130, False),
    ],
    ids=["time limit", "finished meanwhile", "aborted meanwhile", "cancelled"],
)
def test_time_limit_requeues_an_unfinished_job_and_cancelling_does_not(
    tmp_path, job, number, stop_code, requeued
):
    process = job(format_launch_script(tmp_path, [], 1), steps=600, stop_code=stop_code)
    wait_for_seen(tmp_path, "arguments")
    time.sleep(0.2)
    os.kill(process.pid, number)
    assert process.wait(timeout=30) == stop_code
    assert read_seen(tmp_path, "signals") == "SIGTERM\n", "the supervisor gets one SIGTERM"
    assert read_seen(tmp_path, "scontrol").split() == (["requeue", JOB_ID] if requeued else [])


@pytest.fixture
def config(corpus, tmp_path):
    """Launch file of a frozen config for two ranks."""
    decision = make_tiny_decision(corpus, num_ranks=2)
    return write_frozen(tmp_path / "config", decision, {kind: {} for kind in ATTESTED})


def test_launch_writes_the_script_and_starts_nothing(corpus, config, tmp_path):
    target = tmp_path / "job.sh"
    options = ("--data", corpus, "--out", tmp_path / "run")
    more_options = ("--nnodes", 2, "--wandb", "offline", "--max-restarts", 7)
    code, out, _ = run_forerun("launch", config, *options, "--sbatch", target, *more_options)
    assert (code, out) == (0, f"wrote {target}\nnext: sbatch {target}\n")
    subprocess.run(["bash", "-n", str(target)], check=True)
    text = target.read_text()
    assert "--max-restarts 7" in text and "--wandb offline" in text
    assert not (tmp_path / "run").exists(), "no run is started"
    code, body = run_json("launch", config, *options, "--sbatch", target, "--nnodes", 3)
    assert code == 2
    assert body["problems"] == ["--nnodes 3 does not divide the config's 2 ranks"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nnodes", 2), "several machines need --rdzv-endpoint HOST:PORT"),
        (
            ("--nnodes", 2, "--rdzv-endpoint", "h:1", "--node-rank", 2),
            "--node-rank 2: of 2 machines the last is 1",
        ),
        (
            ("--nnodes", 2, "--rdzv-endpoint", "h:1", "--node-rank", 1, "--srun"),
            "leave out --node-rank",
        ),
    ],
)
def test_wrong_node_options_are_rejected(corpus, config, options, message):
    code, body = run_json("launch", config, "--data", corpus, *options)
    assert code == 2 and message in body["message"]


@pytest.mark.slow
def test_requeued_job_of_two_nodes_ends_like_an_uninterrupted_run(corpus, config, tmp_path, job):
    """Supervisor, torchrun agents and ranks are real; SLURM is faked, and both nodes are this
    machine.
    """
    run_dir = tmp_path / "run"
    text = format_launch_script(config, ["--data", str(corpus), "--out", str(run_dir)], 2)
    process = job(text, num_nodes=2, real_python=True)
    wait_until(lambda: read_losses(run_dir), 120)
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(timeout=120) == 130, (tmp_path / "output").read_text()
    assert read_seen(tmp_path, "scontrol").split() == ["requeue", JOB_ID]
    assert metrics_file.read_ending(run_dir).event == "interrupted"
    assert job(text, num_nodes=2, real_python=True).wait(timeout=120) == 0, (
        tmp_path / "output"
    ).read_text()
    assert run_forerun("launch", config, "--data", corpus, "--out", tmp_path / "alone")[0] == 0
    assert read_losses(run_dir) == read_losses(tmp_path / "alone")
    assert len(read_losses(run_dir)) == 12
    kinds = [
        entry.kind
        for entry in event_log.read_events(run_dir)
        if entry.kind in ("launched", "restarted", "ended")
    ]
    assert kinds == ["launched", "ended", "launched", "ended"]
