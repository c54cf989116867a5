"""A main run as a SLURM job: the text of its sbatch script. Standard library only.

The script starts one supervisor on the first node of the job. Of one node it starts torchrun itself, of several `srun`
starts one on each, and the supervisor restarts all of it. Some minutes before its time is over, SLURM tells the script,
which tells the supervisor; the ranks save and end, and the job goes back into the queue, to go on where it was.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

GRACE_SECONDS = 300
"""Between SLURM's warning and the end of the job's time: a step, a save, and the end of the processes must fit."""

_OPTION = re.compile(r"(--[a-z][a-z0-9-]*|-[A-Za-z])([= ][ -~]+)?")
_OURS = (
    "--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--signal", "--requeue", "--no-requeue", "--open-mode",
    "--export",
)  # fmt: skip

_HEAD = """#!/usr/bin/env bash
#SBATCH --job-name=forerun-launch
#SBATCH --exclusive
{options}#SBATCH --nodes={num_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@{grace}
#SBATCH --requeue
#SBATCH --open-mode=append
# Written by `forerun launch FROZEN --sbatch FILE`. Submitted again, it goes on where it stopped.
"""

_BODY = """set -uo pipefail
umask 077
cd {folder} || exit 2
export PATH={bin}:"$PATH"
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}}"  # else a task has one core
{meeting}
{command} &
supervisor=$!

told=""
trap 'told=limit; kill -TERM "$supervisor" 2>/dev/null' USR1
trap 'told=ended; kill -TERM "$supervisor" 2>/dev/null' TERM
while kill -0 "$supervisor" 2>/dev/null; do
  sleep 1 &
  wait $!  # a signal ends this wait, and its trap runs
done
wait "$supervisor"
code=$?
if [ "$told" = limit ] && [ "$code" = 130 ]; then  # it was cut short, and resumes
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
_MEETING = 'endpoint="$(hostname):$((20000 + SLURM_JOB_ID % 20000))"  # this is the first node\n'


def option_problems(options: Sequence[str]) -> list[str]:
    """What is wrong with options of sbatch that a user names."""
    problems = []
    for option in options:
        if not _OPTION.fullmatch(option):
            problems.append(f"--slurm {option!r}: one option of sbatch is wanted, as --time=24:00:00")
        elif re.split("[= ]", option)[0] in _OURS:
            problems.append(f"--slurm {option!r} is the script's own to set; --nnodes says how many nodes")
    return problems


def sbatch_script(frozen: Path, arguments: Sequence[str], num_nodes: int, options: Sequence[str]) -> str:
    """The script of `forerun launch` with these arguments; all paths lie on a filesystem that all nodes share.

    Args:
        frozen: the config.
        arguments: of `launch`, without those that say which machines.
        num_nodes: of the job.
        options: of sbatch, each as it is on its command line.
    """
    command = shlex.join([sys.executable, "-m", "launcher", "launch", str(frozen.resolve()), *arguments])
    several = num_nodes > 1
    command += f' --nnodes {num_nodes} --srun --rdzv-endpoint "$endpoint"' if several else ""
    head = _HEAD.format(
        options="".join(f"#SBATCH {option}\n" for option in options), num_nodes=num_nodes, grace=GRACE_SECONDS
    )
    folder, bin_dir = shlex.quote(str(Path.cwd())), shlex.quote(str(Path(sys.executable).parent))
    return head + _BODY.format(folder=folder, bin=bin_dir, command=command, meeting=_MEETING if several else "")
