"""The sbatch scripts of a study and of a main run as SLURM jobs.

The script of a study starts Ray on every node of the job and the driver on the first one (`ray
symmetric-run`, which ends with `ray stop`, so the job takes entire nodes). The script of a main run
starts one supervisor on the first node, which starts torchrun, with `srun` if there are several
nodes. Some minutes before the job's time is over, SLURM signals the script, and the script signals
the driver or the supervisor. That process saves and ends; the job goes back into the queue and
resumes.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

STUDY_GRACE_SECONDS = 120
"""Seconds between SLURM's warning and the end of a study's job."""
LAUNCH_GRACE_SECONDS = 300
"""The same for a main run: a step, a save, and the end of the processes must fit into it."""

_HEAD = """#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --exclusive
{options}#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@{grace}
#SBATCH --requeue
#SBATCH --open-mode=append
# Written by `{written_by} --sbatch FILE`. Submitted again, it resumes where it stopped.
set -uo pipefail
umask 077
cd {folder} || exit 2
export PATH={bin}:"$PATH"
"""

_STUDY = """
# Only processes of this job have the token, and it is in no file. Ray's own files go where no other job's are.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))') || exit 2
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_TMPDIR="/tmp/forerun-$SLURM_JOB_ID"
address="$(hostname -I | cut -d ' ' -f 1):$((20000 + SLURM_JOB_ID % 20000))"
cpus=${{SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}}
export FORERUN_JOB
FORERUN_JOB=$(mktemp -d) || exit 2  # the driver's pid and exit code; the driver is on this node, the job's first

srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$cpus" \\
  bash -c 'mkdir -p "$RAY_TMPDIR" && exec "$@"' _ \\
  ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \\
  --num-cpus "$cpus" --disable-usage-stats -- \\
  bash -c '"$@" & echo $! >"$FORERUN_JOB/pid"; wait $!; code=$?; echo $code >"$FORERUN_JOB/code"; exit $code' _ \\
  {command} &
step=$!

ended_by=""
stop() {{  # the driver saves and stops; before there is one, the whole step ends
  driver=$(cat "$FORERUN_JOB/pid" 2>/dev/null)
  kill -TERM "${{driver:-$step}}" 2>/dev/null
}}
trap 'ended_by=limit; stop' USR1
trap 'ended_by=ended; stop' TERM
# bash runs a trap only between commands, but a signal ends `wait` at once: so it waits for short sleeps
while kill -0 "$step" 2>/dev/null && [ ! -s "$FORERUN_JOB/code" ]; do
  sleep 1 &
  wait $!
done
code=$(cat "$FORERUN_JOB/code" 2>/dev/null || echo 1)
for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$step" 2>/dev/null && sleep 1; done  # up to 10 s: Ray stops on this node
kill -TERM "$step" 2>/dev/null  # then Ray must stop on all nodes
wait "$step" 2>/dev/null
rm -rf "$FORERUN_JOB" "$RAY_TMPDIR"
if [ "$ended_by" = limit ] && [ "$code" != 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""  # noqa: E501

_LAUNCH = """export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}}"  # otherwise a task has one core
{meeting}
{command} &
supervisor=$!

ended_by=""
trap 'ended_by=limit; kill -TERM "$supervisor" 2>/dev/null' USR1
trap 'ended_by=ended; kill -TERM "$supervisor" 2>/dev/null' TERM
while kill -0 "$supervisor" 2>/dev/null; do
  sleep 1 &
  wait $!  # a signal ends this wait, and its trap runs
done
wait "$supervisor"
code=$?
if [ "$ended_by" = limit ] && [ "$code" = 130 ]; then  # it ended early and will resume
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""  # noqa: E501
_MEETING = 'endpoint="$(hostname):$((20000 + SLURM_JOB_ID % 20000))"  # this is the first node\n'


def format_study_script(
    plan_path: Path,
    study_dir: Path,
    overrides: tuple[str, ...],
    parent_dir: Path | None,
    options: Sequence[str],
) -> str:
    """Return the script of `forerun run` with these arguments.

    All paths must be on a file system that all nodes share.

    Args:
        plan_path: The plan.
        study_dir: Folder of the study (`--study`).
        overrides: Overrides of the plan (each `--set`).
        parent_dir: Folder of the parent study (`--fork`); None if there is none.
        options: Options of sbatch, as on its command line.
    """
    command = [
        sys.executable,
        "-m",
        "forerun",
        "run",
        str(plan_path.resolve()),
        "--study",
        str(study_dir.resolve()),
    ]
    # The driver finds the address in Ray's folder of this job. RAY_ADDRESS is not set, because `ray
    # start` would read it too.
    command += [
        part for override in (*overrides, "cluster.address=auto") for part in ("--set", override)
    ]
    command += ["--fork", str(parent_dir.resolve())] if parent_dir is not None else []
    head = _format_head("forerun", "forerun run PLAN", STUDY_GRACE_SECONDS, options)
    return head + _STUDY.format(command=shlex.join(command))


def format_launch_script(frozen: Path, arguments: Sequence[str], num_nodes: int) -> str:
    """Return the script of `forerun launch` with these arguments.

    All paths must be on a file system that all nodes share.

    Args:
        frozen: The config.
        arguments: Arguments of `launch`, without those for machines.
        num_nodes: Number of nodes of the job.
    """
    command = shlex.join(
        [sys.executable, "-m", "forerun", "launch", str(frozen.resolve()), *arguments]
    )
    several = num_nodes > 1
    command += f' --nnodes {num_nodes} --srun --rdzv-endpoint "$endpoint"' if several else ""
    head = _format_head(
        "forerun-launch", "forerun launch FROZEN", LAUNCH_GRACE_SECONDS, [f"--nodes={num_nodes}"]
    )
    return head + _LAUNCH.format(command=command, meeting=_MEETING if several else "")


def _format_head(name: str, written_by: str, grace_seconds: int, options: Sequence[str]) -> str:
    return _HEAD.format(
        name=name,
        written_by=written_by,
        grace=grace_seconds,
        folder=shlex.quote(str(Path.cwd())),
        bin=shlex.quote(str(Path(sys.executable).parent)),
        options="".join(f"#SBATCH {option}\n" for option in options),
    )
