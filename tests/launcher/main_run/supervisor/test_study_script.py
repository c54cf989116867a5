"""Tests of the sbatch script that `forerun run --sbatch` writes: its text, and its signals.

SLURM and Ray are faked. One slow test uses real Ray.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kill_case import count_outcomes
from slurm_fakes import JOB_ID, fake_machine, read_seen, wait_for_seen, write_fakes
from tiny_study import PLAN, run_forerun, run_json, write_plan
from waiting import wait_until

from forerun._launcher.main_run.supervisor.slurm import format_study_script

# The fakes record their calls in files of the folder $SEEN, which `read_seen` reads.
#
# The fake srun drops options and runs the command once. On SIGTERM it kills the command's whole
# process group, as a SLURM step does.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do echo "$1" >>"$SEEN/srun"; shift; done
setsid "$@" &
child=$!
trap 'kill -KILL -- -$child; exit 143' TERM
wait $child
exit $?
"""
# The fake `ray symmetric-run` records its options and runs only the command that comes after `--`.
RAY = """#!/usr/bin/env bash
env >"$SEEN/environment"
while [[ $1 != -- ]]; do echo "$1" >>"$SEEN/ray"; shift; done
shift
exec "$@"
"""
PYTHON = sys.executable
# The fake python runs one-line programs with the real python. Otherwise it stands for the driver,
# the process of `forerun run`. The driver takes $STEPS tenths of a second and exits with $CODE. On
# SIGTERM it exits at once with $STOP_CODE.
DRIVER = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then exec {python} "$@"; fi
trap 'echo SIGTERM >>"$SEEN/signals"; exit "$STOP_CODE"' TERM
until [ -s "$FORERUN_JOB/pid" ]; do sleep 0.01; done  # an earlier signal would end the whole step
printf '%s\\0' "$@" >"$SEEN/driver"
for _ in $(seq "$STEPS"); do sleep 0.1; done
exit "$CODE"
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Function that starts a script on a machine whose srun, ray, python, and scontrol are fakes.

    Its parameters are the script's text, and how the fake driver behaves: its duration in tenths of
    a second (`steps`), its exit code, and its exit code after SIGTERM.
    """
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    with fake_machine(
        tmp_path, {"srun": SRUN, "ray": RAY, "python": DRIVER.format(python=PYTHON)}
    ) as start:

        def run(text, *, steps=0, code=0, stop_code=130):
            return start(text, STEPS=steps, CODE=code, STOP_CODE=stop_code)

        yield run


def format_script(folder, **kwargs):
    """Return the script for the plan and the study in a folder, by default without options."""
    arguments = {"overrides": (), "parent_dir": None, "options": ()} | kwargs
    return format_study_script(folder / "plan.toml", folder / "study", **arguments)


def test_driver_gets_the_command(tmp_path, job, monkeypatch):
    folder = tmp_path / 'it\'s "one" $folder; {x}'
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = format_script(
        folder,
        overrides=('search.sampler="a b"',),
        parent_dir=folder / "old",
        options=("--time=1:00",),
    )
    assert job(text, code=4).wait(timeout=30) == 4, "the driver's exit code is the job's"
    arguments = read_seen(tmp_path, "driver").split("\0")[:-1]
    assert arguments == [
        "-m",
        "forerun",
        "run",
        str(folder / "plan.toml"),
        "--study",
        str(folder / "study"),
        "--set",
        'search.sampler="a b"',
        "--set",
        "cluster.address=auto",
        "--fork",
        str(folder / "old"),
    ]
    assert read_seen(tmp_path, "srun").split() == [
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=2",
    ]
    assert "\n#SBATCH --time=1:00\n" in text
    assert read_seen(tmp_path, "scontrol") == ""


def test_ray_token_is_random_and_in_no_file(tmp_path, job):
    text = format_script(tmp_path)
    assert job(text).wait(timeout=30) == 0
    environment = dict(
        line.split("=", 1)
        for line in read_seen(tmp_path, "environment").splitlines()
        if "=" in line
    )
    token = environment["RAY_AUTH_TOKEN"]
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert (
        token
        not in read_seen(tmp_path, "ray")
        + read_seen(tmp_path, "srun")
        + read_seen(tmp_path, "driver")
        + text
    )
    assert not Path(environment["FORERUN_JOB"]).exists()
    assert not Path(environment["RAY_TMPDIR"]).exists()


@pytest.mark.parametrize(
    ("number", "requeued"),
    [(signal.SIGUSR1, True), (signal.SIGTERM, False)],
    ids=["time limit", "cancelled"],
)
def test_time_limit_requeues_the_job_and_cancelling_does_not(tmp_path, job, number, requeued):
    process = job(format_script(tmp_path), steps=600)
    wait_for_seen(tmp_path, "driver")
    os.kill(process.pid, number)
    assert process.wait(timeout=30) == 130
    assert read_seen(tmp_path, "signals") == "SIGTERM\n", "the driver gets one SIGTERM"
    assert read_seen(tmp_path, "scontrol").split() == (["requeue", JOB_ID] if requeued else [])


def test_run_writes_the_script_and_starts_nothing(finished_study_dir, tmp_path):
    target = tmp_path / "job.sh"
    command = [
        "run",
        finished_study_dir / "plan.toml",
        "--study",
        tmp_path / "study",
        "--sbatch",
        target,
    ]
    code, _, err = run_forerun(*command)
    assert code == 2 and 'cluster.backend = "ray"' in err, "refused now, not after the queue"
    assert not target.exists()
    options = 'cluster.slurm_options=["--nodes=4", "-p gpu"]'
    code, out, _ = run_forerun(*command, "--set", 'cluster.backend="ray"', "--set", options)
    assert (code, out) == (0, f"wrote {target}\nnext: sbatch {target}\n")
    assert "#SBATCH --nodes=4\n#SBATCH -p gpu\n" in target.read_text()
    subprocess.run(["bash", "-n", str(target)], check=True)
    assert not (tmp_path / "study").exists(), "no run is started"


MIN_RUNS = 60
"""Lower bound for the number of runs of the complete tiny study, which has about 70."""


def can_make_pid_namespace():
    """Return whether this machine allows a new namespace of process ids.

    The test with real Ray needs one, because `ray stop` ends every Ray process that it sees.
    """
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    return shutil.which("unshare") is not None and subprocess.call(command) == 0


@pytest.mark.slow
def test_job_of_real_ray_hits_its_limit_and_resumes(tmp_path):
    if not can_make_pid_namespace():
        pytest.skip("this machine allows no namespace of processes")
    plan = write_plan(tmp_path, PLAN.replace('backend = "inline"', 'backend = "ray"'))
    study, environment = tmp_path / "study", write_fakes(tmp_path, {"srun": SRUN})
    assert run_forerun("run", plan, "--study", study, "--sbatch", tmp_path / "job.sh")[0] == 0
    output = tmp_path / "output"
    # Only a process inside the namespace knows the script's pid there. So a shell inside it starts
    # the script, and passes on the SIGUSR1 that SLURM would send to the script before the time
    # limit. The signal also ends `wait`, so the shell waits again until the script has ended.
    shell_code = f"""
    bash {shlex.quote(str(tmp_path / "job.sh"))} & job=$!
    trap "kill -USR1 $job" USR1
    while kill -0 $job 2>/dev/null; do wait $job; code=$?; done
    exit $code
    """
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = [*namespace, "bash", "-c", shell_code]
    for hits_limit in (True, False):
        with output.open("w") as file:
            process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        if hits_limit:
            wait_until(lambda: count_outcomes(study) >= 3, 120)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            (shell_pid,) = children.read_text().split()
            os.kill(int(shell_pid), signal.SIGUSR1)
        assert process.wait(timeout=280) == (130 if hits_limit else 0), output.read_text()
        assert ("continues" in output.read_text()) == hits_limit
    assert read_seen(tmp_path, "scontrol") == f"requeue {JOB_ID}\n"
    assert run_json("status", study)[0] == 0
    assert count_outcomes(study) > MIN_RUNS
