"""Fakes of SLURM for tests of sbatch scripts: shell scripts that record in `seen/` how they were
called.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from waiting import wait_until

SCONTROL = '#!/usr/bin/env bash\necho "$@" >>"$SEEN/scontrol"\n'
# Scripts keep files in /tmp under the job's id, so test processes must have different ids.
JOB_ID = f"9{os.getpid()}"


def write_fakes(folder: Path, fakes: Mapping[str, str]) -> dict[str, str]:
    """Write the fake programs and a fake `scontrol`; return the environment of a SLURM job.

    Args:
        folder: Folder in which `bin/` gets the programs, and `seen/` the records of their calls.
        fakes: Text of each program by its name.
    """
    (folder / "bin").mkdir()
    (folder / "seen").mkdir()
    for name, text in {"scontrol": SCONTROL, **fakes}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_CPUS_ON_NODE": "2",
        "OMP_NUM_THREADS": "1",
    }
    return {
        **os.environ,
        **slurm,
        "SEEN": str(folder / "seen"),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }


@contextlib.contextmanager
def fake_machine(
    folder: Path, fakes: Mapping[str, str]
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Write fake programs; yield a function that starts a script with them in its PATH.

    The function takes the script's text and further environment variables. The script's output goes
    to the file `output`. At the end of the block all scripts are killed.
    """
    environment, started = write_fakes(folder, fakes), []

    def start(text: str, **variables: object) -> subprocess.Popen[bytes]:
        script = folder / "job.sh"
        script.write_text(text)
        script_environment = {
            **environment,
            **{name: str(value) for name, value in variables.items()},
        }
        with (folder / "output").open("ab") as output:
            job = subprocess.Popen(
                ["bash", str(script)],
                env=script_environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        started.append(job)
        return job

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_seen(folder: Path, name: str) -> str:
    """Return what a fake recorded; empty if it was not called."""
    path = folder / "seen" / name
    return path.read_text() if path.exists() else ""


def wait_for_seen(folder: Path, name: str) -> None:
    """Wait until a fake has recorded something under this name; raise TimeoutError after 20 s."""
    wait_until(lambda: read_seen(folder, name), 20)
