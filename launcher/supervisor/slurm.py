"""A study as a SLURM job: the text of its sbatch script. Standard library only.

The script starts Ray on every node of the job and the driver on the first (`ray symmetric-run`, which ends with `ray
stop`: the job takes whole nodes). Two minutes before its time is over, SLURM tells the script, which tells the driver;
the driver saves and stops, and the job goes back into the queue, to go on where it was.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

GRACE_SECONDS = 120
"""Between SLURM's warning and the end of the job's time."""

_HEAD = """#!/usr/bin/env bash
#SBATCH --job-name=forerun
#SBATCH --exclusive
{options}#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@{grace}
#SBATCH --requeue
#SBATCH --open-mode=append
# Written by `forerun run PLAN --sbatch FILE`. Submitted again, it goes on where it stopped.
"""

_BODY = """set -uo pipefail
umask 077
cd {folder} || exit 2
export PATH={bin}:"$PATH"

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

told=""
stop() {{  # the driver saves and stops; before there is one, the whole step ends
  driver=$(cat "$FORERUN_JOB/pid" 2>/dev/null)
  kill -TERM "${{driver:-$step}}" 2>/dev/null
}}
trap 'told=limit; stop' USR1
trap 'told=ended; stop' TERM
while kill -0 "$step" 2>/dev/null && [ ! -s "$FORERUN_JOB/code" ]; do
  sleep 1 &
  wait $!
done
code=$(cat "$FORERUN_JOB/code" 2>/dev/null || echo 1)
for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$step" 2>/dev/null && sleep 1; done  # Ray stops on this node
kill -TERM "$step" 2>/dev/null  # and now on all
wait "$step" 2>/dev/null
rm -rf "$FORERUN_JOB" "$RAY_TMPDIR"
if [ "$told" = limit ] && [ "$code" != 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def sbatch_script(
    plan_path: Path, study_dir: Path, overrides: tuple[str, ...], parent_dir: Path | None, options: tuple[str, ...]
) -> str:
    """The script of `forerun run` with these arguments; paths lie on a filesystem that all nodes share.

    Args:
        plan_path: the plan.
        study_dir: `--study`.
        overrides: each `--set`.
        parent_dir: `--fork`.
        options: of sbatch, each as it is on its command line.
    """
    command = [sys.executable, "-m", "launcher", "run", str(plan_path.resolve()), "--study", str(study_dir.resolve())]
    # The driver finds the address in this job's folder of Ray's: RAY_ADDRESS would be read by `ray start` too.
    command += [part for override in (*overrides, "cluster.address=auto") for part in ("--set", override)]
    command += ["--fork", str(parent_dir.resolve())] if parent_dir is not None else []
    head = _HEAD.format(options="".join(f"#SBATCH {option}\n" for option in options), grace=GRACE_SECONDS)
    folder, bin_dir = shlex.quote(str(Path.cwd())), shlex.quote(str(Path(sys.executable).parent))
    return head + _BODY.format(folder=folder, bin=bin_dir, command=shlex.join(command))
