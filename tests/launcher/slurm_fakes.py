"""A machine for sbatch scripts on which SLURM is shell scripts, fakes that tell in `seen/` what
they saw.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

SCONTROL = '#!/usr/bin/env bash\necho "$@" >>"$SEEN/scontrol"\n'
JOB_ID = f"9{os.getpid()}"


def put_fakes(folder: Path, fakes: Mapping[str, str]) -> dict[str, str]:
    """Write the fakes, `scontrol` among them, by their names; the environment of a job on this
    machine.
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
def machine(
    folder: Path, fakes: Mapping[str, str]
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts scripts, with more variables by name; what they say is in `said`, and none of them
    outlives the block.
    """
    environment, started = put_fakes(folder, fakes), []

    def start(text: str, **more: object) -> subprocess.Popen[bytes]:
        script = folder / "job.sh"
        script.write_text(text)
        given = {**environment, **{name: str(value) for name, value in more.items()}}
        with (folder / "said").open("ab") as said:
            job = subprocess.Popen(
                ["bash", str(script)], env=given, stdout=said, stderr=said, start_new_session=True
            )
        started.append(job)
        return job

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def seen(folder: Path, name: str) -> str:
    """What a fake told; empty if it was not called."""
    path = folder / "seen" / name
    return path.read_text() if path.exists() else ""


def await_seen(folder: Path, name: str) -> None:
    """Until a fake was called."""
    deadline = time.monotonic() + 20
    while not seen(folder, name) and time.monotonic() < deadline:
        time.sleep(0.02)
