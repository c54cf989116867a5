"""The sbatch script: its text, its behaviour under signals with everything around it faked, and
once with real Ray.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kill_case import num_outcomes
from slurm_fakes import JOB_ID, await_seen, machine, put_fakes, seen
from tiny_study import PLAN, ask, forerun, write_plan

from launcher.supervisor.slurm import study_script

# srun in this place: options away, the rest runs once, and ends with its whole group, as a step
# does.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do echo "$1" >>"$SEEN/srun"; shift; done
setsid "$@" &
child=$!
trap 'kill -KILL -- -$child; exit 143' TERM
wait $child
exit $?
"""
# `ray symmetric-run` does nothing but what comes after `--`; python is the driver.
RAY = (
    '#!/usr/bin/env bash\nenv >"$SEEN/environment"\nwhile [[ $1 != -- ]]; do echo "$1" '
    '>>"$SEEN/ray"; shift; done\n'
)
RAY += 'shift\nexec "$@"\n'
PYTHON = sys.executable
DRIVER = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then exec {python} "$@"; fi
trap 'echo told >>"$SEEN/told"; exit "$TOLD_CODE"' TERM
until [ -s "$FORERUN_JOB/pid" ]; do sleep 0.01; done  # a signal before it would end the whole step
printf '%s\\0' "$@" >"$SEEN/driver"
for _ in $(seq "$STEPS"); do sleep 0.1; done
exit "$CODE"
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Starts a script that `text` is, on a machine of fakes; `seen/` has what they saw."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    with machine(
        tmp_path, {"srun": SRUN, "ray": RAY, "python": DRIVER.format(python=PYTHON)}
    ) as start:
        yield lambda text, *, steps=0, code=0, told=130: start(
            text, STEPS=steps, CODE=code, TOLD_CODE=told
        )


def script(folder, **kwargs):
    given = {"overrides": (), "parent_dir": None, "options": ()} | kwargs
    return study_script(folder / "plan.toml", folder / "study", **given)


def test_the_command_arrives_as_it_was_given(tmp_path, job, monkeypatch):
    folder = tmp_path / 'it\'s "one" $folder; {x}'
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = script(
        folder,
        overrides=('search.sampler="a b"',),
        parent_dir=folder / "old",
        options=("--time=1:00",),
    )
    assert job(text, code=4).wait(timeout=30) == 4, "the driver's exit code is the job's"
    arguments = seen(tmp_path, "driver").split("\0")[:-1]
    assert arguments == [
        "-m",
        "launcher",
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
    assert seen(tmp_path, "srun").split() == [
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=2",
    ]
    assert "\n#SBATCH --time=1:00\n" in text
    assert seen(tmp_path, "scontrol") == ""


def test_the_token_is_in_no_file(tmp_path, job):
    text = script(tmp_path)
    assert job(text).wait(timeout=30) == 0
    environment = dict(
        line.split("=", 1) for line in seen(tmp_path, "environment").splitlines() if "=" in line
    )
    token = environment["RAY_AUTH_TOKEN"]
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert (
        token
        not in seen(tmp_path, "ray") + seen(tmp_path, "srun") + seen(tmp_path, "driver") + text
    )
    assert not Path(environment["FORERUN_JOB"]).exists()
    assert not Path(environment["RAY_TMPDIR"]).exists()


@pytest.mark.parametrize(
    ("number", "requeued"),
    [(signal.SIGUSR1, True), (signal.SIGTERM, False)],
    ids=["time limit", "cancelled"],
)
def test_told_to_stop(tmp_path, job, number, requeued):
    process = job(script(tmp_path), steps=600)
    await_seen(tmp_path, "driver")
    os.kill(process.pid, number)
    assert process.wait(timeout=30) == 130
    assert seen(tmp_path, "told") == "told\n", "the driver, and once"
    assert seen(tmp_path, "scontrol").split() == (["requeue", JOB_ID] if requeued else [])


def test_written_by_run(finished, tmp_path):
    target = tmp_path / "job.sh"
    command = ["run", finished / "plan.toml", "--study", tmp_path / "study", "--sbatch", target]
    code, _, err = forerun(*command)
    assert code == 2 and 'cluster.backend = "ray"' in err, (
        "the job would be refused only after its wait"
    )
    assert not target.exists()
    options = 'cluster.slurm_options=["--nodes=4", "-p gpu"]'
    code, out, _ = forerun(*command, "--set", 'cluster.backend="ray"', "--set", options)
    assert (code, out) == (0, f"wrote {target}\nnext: sbatch {target}\n")
    assert "#SBATCH --nodes=4\n#SBATCH -p gpu\n" in target.read_text()
    subprocess.run(["bash", "-n", str(target)], check=True)
    assert not (tmp_path / "study").exists(), "nothing is run"


def own_pids_allowed():
    """Whether a namespace of processes can be made: `ray stop` ends every Ray that it sees."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    return shutil.which("unshare") is not None and subprocess.call(command) == 0


@pytest.mark.slow
def test_a_job_of_real_ray_hits_its_limit_and_goes_on(tmp_path):
    if not own_pids_allowed():
        pytest.skip("this machine allows no namespace of processes")
    plan = write_plan(tmp_path, PLAN.replace('backend = "inline"', 'backend = "ray"'))
    study, environment = tmp_path / "study", put_fakes(tmp_path, {"srun": SRUN})
    assert forerun("run", plan, "--study", study, "--sbatch", tmp_path / "job.sh")[0] == 0
    said = tmp_path / "said"
    # The signal is sent from inside, where the script's own pid is known.
    watched = (
        f'bash {shlex.quote(str(tmp_path / "job.sh"))} & job=$!; trap "kill -USR1 $job" USR1; '
    )
    watched += "while kill -0 $job 2>/dev/null; do wait $job; code=$?; done; exit $code"
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", watched]
    for limit in (True, False):
        with said.open("w") as file:
            process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        while limit and num_outcomes(study) < 3 and process.poll() is None:
            time.sleep(0.05)
        if limit:
            (inner,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(inner), signal.SIGUSR1)
        assert process.wait(timeout=280) == (130 if limit else 0), said.read_text()
        assert ("continues" in said.read_text()) == limit
    assert seen(tmp_path, "scontrol") == f"requeue {JOB_ID}\n"
    assert ask("status", study)[0] == 0
    assert num_outcomes(study) > 60
