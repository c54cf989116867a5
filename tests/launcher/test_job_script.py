"""The sbatch script of a launch: its text, its behaviour under signals with SLURM faked, and once
all else real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from main_run import losses, tiny_decision
from slurm_fakes import JOB_ID, await_seen, machine, seen
from tiny_study import ask, forerun

from launcher.base import chronicle, metrics
from launcher.frozen.frozen_folder import ATTESTED, write_frozen
from launcher.supervisor.slurm import LAUNCH_GRACE_SECONDS, launch_script

# srun in this place: options away; the rest runs once for every node, as on machines of their own.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* || $1 =~ ^[0-9]+$ ]]; do echo "$1" >>"$SEEN/srun"; shift; done
trap 'kill -TERM $(jobs -p) 2>/dev/null' TERM
for _ in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & done
code=0
for job in $(jobs -p); do wait "$job" || code=$?; done
exit $code
"""
# The supervisor in this place: tells what it was given, and when it is told to end does so a moment
# later. It traps first: once it has told anything, it can be told.
SUPERVISOR = """#!/usr/bin/env bash
trap 'echo told >>"$SEEN/told"; sleep 0.3; exit "$WHEN_TOLD"' TERM
printf '%s\\0' "$@" >"$SEEN/given"
umask >"$SEEN/umask"
env -0 >"$SEEN/environment"
for _ in $(seq "$STEPS"); do sleep 0.1; done
exit "$CODE"
"""


@pytest.fixture
def job(tmp_path):
    """Starts a script on a machine of fakes; `seen/` has what they saw."""
    with machine(tmp_path, {"srun": SRUN, "python": SUPERVISOR}) as start:

        def run(text, *, steps=0, code=0, when_told=130, num_nodes=1, own_python=False):
            text = (
                text
                if own_python
                else text.replace(sys.executable, str(tmp_path / "bin" / "python"))
            )
            return start(
                text, STEPS=steps, CODE=code, WHEN_TOLD=when_told, SLURM_JOB_NUM_NODES=num_nodes
            )

        yield run


def test_the_command_arrives_as_it_was_given(tmp_path, job, monkeypatch):
    folder = tmp_path / 'it\'s "one" $folder; {x}'
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = launch_script(folder / "frozen", ["--out", str(folder / "run")], 1)
    monkeypatch.chdir(tmp_path)
    assert job(text, code=4).wait(timeout=30) == 4, "the supervisor's exit code is the job's"
    given = seen(tmp_path, "given").split("\0")[:-1]
    assert given == [
        "-m",
        "launcher",
        "launch",
        str(folder / "frozen"),
        "--out",
        str(folder / "run"),
    ]
    assert "\n#SBATCH --nodes=1\n" in text
    assert f"\n#SBATCH --signal=B:USR1@{LAUNCH_GRACE_SECONDS}\n" in text
    assert (seen(tmp_path, "scontrol"), seen(tmp_path, "srun")) == ("", "")
    environment = dict(
        pair.split("=", 1) for pair in seen(tmp_path, "environment").split("\0") if pair
    )
    assert environment["PWD"] == str(folder), "where `launch` was called"
    assert environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert environment["SRUN_CPUS_PER_TASK"] == environment["SLURM_CPUS_ON_NODE"] == "2"
    assert seen(tmp_path, "umask") == "0077\n"


def test_several_nodes_have_one_supervisor_that_is_told_where_they_meet(tmp_path, job):
    text = launch_script(tmp_path, [], 4)
    assert job(text, num_nodes=4).wait(timeout=30) == 0
    *_, nodes, number, srun, where, endpoint = seen(tmp_path, "given").split("\0")[:-1]
    assert (nodes, number, srun, where) == ("--nnodes", "4", "--srun", "--rdzv-endpoint")
    assert endpoint == f"{os.uname().nodename}:{20000 + int(JOB_ID) % 20000}"
    assert "#SBATCH --nodes=4\n" in text


@pytest.mark.parametrize(
    ("number", "when_told", "requeued"),
    [
        (signal.SIGUSR1, 130, True),
        (signal.SIGUSR1, 0, False),
        (signal.SIGUSR1, 3, False),
        (signal.SIGTERM, 130, False),
    ],
    ids=["time limit", "ended just then", "stopped by its brake just then", "cancelled"],
)
def test_told_to_stop(tmp_path, job, number, when_told, requeued):
    process = job(launch_script(tmp_path, [], 1), steps=600, when_told=when_told)
    await_seen(tmp_path, "given")
    time.sleep(0.2)
    os.kill(process.pid, number)
    assert process.wait(timeout=30) == when_told
    assert seen(tmp_path, "told") == "told\n", "the supervisor, and once"
    assert seen(tmp_path, "scontrol").split() == (["requeue", JOB_ID] if requeued else [])


@pytest.fixture
def config(corpus, tmp_path):
    decision = tiny_decision(corpus, num_ranks=2)
    return write_frozen(tmp_path / "config", decision, {kind: {} for kind in ATTESTED})


def test_written_by_launch(corpus, config, tmp_path):
    target = tmp_path / "job.sh"
    where = ("--data", corpus, "--out", tmp_path / "run")
    more = ("--nnodes", 2, "--wandb", "offline", "--max-restarts", 7)
    code, out, _ = forerun("launch", config, *where, "--sbatch", target, *more)
    assert (code, out) == (0, f"wrote {target}\nnext: sbatch {target}\n")
    subprocess.run(["bash", "-n", str(target)], check=True)
    text = target.read_text()
    assert "--max-restarts 7" in text and "--wandb offline" in text
    assert not (tmp_path / "run").exists(), "nothing is run"
    code, body = ask("launch", config, *where, "--sbatch", target, "--nnodes", 3)
    assert code == 2
    assert body["problems"] == ["--nnodes 3 does not divide the config's 2 ranks"]


@pytest.mark.parametrize(
    ("options", "said"),
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
def test_machines_that_do_not_fit(corpus, config, options, said):
    code, body = ask("launch", config, "--data", corpus, *options)
    assert code == 2 and said in body["message"]


@pytest.mark.slow
def test_a_job_of_two_nodes_hits_its_limit_is_requeued_and_ends_as_if_it_had_not(
    corpus, config, tmp_path, job
):
    """Real supervisor, real torchrun agents and ranks; only SLURM is faked, and both nodes are this
    machine.
    """
    run_dir = tmp_path / "run"
    given = ["--data", str(corpus), "--out", str(run_dir)]
    text = launch_script(config, given, 2)
    process = job(text, num_nodes=2, own_python=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not losses(run_dir) and process.poll() is None:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(timeout=120) == 130, (tmp_path / "said").read_text()
    assert seen(tmp_path, "scontrol").split() == ["requeue", JOB_ID]
    assert metrics.read_ending(run_dir).event == "interrupted"
    assert job(text, num_nodes=2, own_python=True).wait(timeout=120) == 0, (
        tmp_path / "said"
    ).read_text()
    assert forerun("launch", config, "--data", corpus, "--out", tmp_path / "alone")[0] == 0
    assert losses(run_dir) == losses(tmp_path / "alone")
    assert len(losses(run_dir)) == 12
    kinds = [
        entry.kind
        for entry in chronicle.entries(run_dir)
        if entry.kind in ("launched", "restarted", "ended")
    ]
    assert kinds == ["launched", "ended", "launched", "ended"]
