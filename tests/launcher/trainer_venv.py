"""Interpreters that have other people's trainers, for tests that ask those trainers themselves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from launcher.exporters import proof


def interpreter(name: str) -> Path:
    """The Python of `FORERUN_<NAME>_PYTHON`, or of `.venv-trainers/<name>`; without either the test
    is skipped.
    """
    python = proof.interpreter(name)
    if python is None:
        pytest.skip(f"{name} is not installed: make trainers TRAINERS={name}")
    return python


def in_trainer(
    command: list[str | Path], export_dir: Path, **env: str | Path
) -> subprocess.CompletedProcess[str]:
    """The command in an export's folder, on one thread, with nothing of this environment but PATH
    and HOME.
    """
    bare = {"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(
        command,
        cwd=export_dir,
        env={**bare, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def torchrun(python: Path, num_ranks: int) -> list[str | Path]:
    """The start of a command line: so many ranks of this machine."""
    return [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
    ]
