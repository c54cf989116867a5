"""A study, or a main run, as a SLURM job: the text of its sbatch script. Standard library only.

Of a study the script starts Ray on every node of the job and the driver on the first (`ray
symmetric-run`, which ends with `ray stop`: the job takes whole nodes). Of a main run it starts one
supervisor on the first node, which starts torchrun itself, or by `srun` on each of several nodes,
and restarts all of it. Some minutes before its time is over SLURM tells the script, which tells
driver or supervisor; what runs saves and ends, and the job goes back into the queue and resumes.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

STUDY_GRACE_SECONDS = 120
"""Between SLURM's warning and the end of the job's time."""
LAUNCH_GRACE_SECONDS = 300
"""The same for a main run: a step, a save, and the end of the processes must fit."""

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
while kill -0 "$step" 2>/dev/null && [ ! -s "$FORERUN_JOB/code" ]; do
  sleep 1 &
  wait $!
done
code=$(cat "$FORERUN_JOB/code" 2>/dev/null || echo 1)
for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$step" 2>/dev/null && sleep 1; done  # Ray stops on this node
kill -TERM "$step" 2>/dev/null  # and now on all
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


def study_script(
    plan_path: Path,
    study_dir: Path,
    overrides: tuple[str, ...],
    parent_dir: Path | None,
    options: Sequence[str],
) -> str:
    """The script of `forerun run` with these arguments; paths lie on a filesystem that all nodes
    share.

    Args:
        plan_path: the plan.
        study_dir: `--study`.
        overrides: each `--set`.
        parent_dir: `--fork`.
        options: of sbatch, each as it is on its command line.
    """
    command = [
        sys.executable,
        "-m",
        "launcher",
        "run",
        str(plan_path.resolve()),
        "--study",
        str(study_dir.resolve()),
    ]
    # The driver finds the address in this job's folder of Ray's: RAY_ADDRESS would be read by `ray
    # start` too.
    command += [
        part for override in (*overrides, "cluster.address=auto") for part in ("--set", override)
    ]
    command += ["--fork", str(parent_dir.resolve())] if parent_dir is not None else []
    head = _head("forerun", "forerun run PLAN", STUDY_GRACE_SECONDS, options)
    return head + _STUDY.format(command=shlex.join(command))


def launch_script(frozen: Path, arguments: Sequence[str], num_nodes: int) -> str:
    """The script of `forerun launch` with these arguments; all paths lie on a filesystem that all
    nodes share.

    Args:
        frozen: the config.
        arguments: of `launch`, without those that say which machines.
        num_nodes: of the job.
    """
    command = shlex.join(
        [sys.executable, "-m", "launcher", "launch", str(frozen.resolve()), *arguments]
    )
    several = num_nodes > 1
    command += f' --nnodes {num_nodes} --srun --rdzv-endpoint "$endpoint"' if several else ""
    head = _head(
        "forerun-launch", "forerun launch FROZEN", LAUNCH_GRACE_SECONDS, [f"--nodes={num_nodes}"]
    )
    return head + _LAUNCH.format(command=command, meeting=_MEETING if several else "")


def _head(name: str, written_by: str, grace_seconds: int, options: Sequence[str]) -> str:
    return _HEAD.format(
        name=name,
        written_by=written_by,
        grace=grace_seconds,
        folder=shlex.quote(str(Path.cwd())),
        bin=shlex.quote(str(Path(sys.executable).parent)),
        options="".join(f"#SBATCH {each}\n" for each in options),
    )
