"""Interpreters with other projects' trainers, for tests that run those trainers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from forerun._launcher.main_run.exporters import proof


def require_interpreter(name: str) -> Path:
    """Return the interpreter that has a trainer; skip the test if there is none.

    See `proof.find_interpreter` for the places that are searched.
    """
    python = proof.find_interpreter(name)
    if python is None:
        pytest.skip(f"{name} is not installed: make trainers TRAINERS={name}")
    return python


def run_in_trainer(
    command: list[str | Path], export_dir: Path, **env: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run a command in an export's folder, on one thread.

    From the environment, the command gets only PATH and HOME.
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


def build_torchrun_command(python: Path, num_ranks: int) -> list[str | Path]:
    """Return the start of a command line that runs `num_ranks` ranks on this machine."""
    return [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
    ]
