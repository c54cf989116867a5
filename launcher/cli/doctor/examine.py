"""All checks of the machine, in order. A check that raises becomes a line of the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from forerun._launcher.cli.doctor.findings import DoctorFinding, warn
from forerun._launcher.cli.doctor.folders import check_folder
from forerun._launcher.cli.doctor.libraries import (
    LibraryCheck,
    find_version,
    judge_library,
    judge_python,
    read_requirements,
    try_imports,
)
from forerun._launcher.cli.doctor.machine import (
    check_machine,
    judge_driver,
    judge_torch,
    run_nvidia_smi,
)

_AGAIN = "fix the lines above, then run `forerun doctor` again"


def examine(study_dir: Path) -> Iterator[DoctorFinding]:
    """Check the machine, and yield every finding as soon as it is made. This takes some seconds,
    mostly for importing torch and Ray in other processes.

    Args:
        study_dir: Folder in which a study would be.
    """
    yield judge_python(sys.version_info[:3], sys.platform)
    yield from _run_guarded("study folder", lambda: [check_folder(study_dir)])
    yield from _run_guarded("machine", check_machine)
    try:
        needs = read_requirements()
    except PackageNotFoundError:
        fact = "forerun itself is not installed: what it needs is not known"
        yield warn(
            "forerun", fact, "pip install forerun, or `pip install -e .` in its source folder"
        )
        needs = {"torch": []}
    missing = LibraryCheck(problem="it is not installed")
    checks = try_imports([name for name in needs if find_version(name)])
    for name, limits in needs.items():
        yield judge_library(name, find_version(name), limits, checks.get(name, missing))
    yield from _run_guarded("devices", lambda: _check_devices(checks.get("torch", missing)))


def _check_devices(torch: LibraryCheck) -> list[DoctorFinding]:
    gpus, problem = run_nvidia_smi()
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None
    return [judge_driver(gpus, problem), judge_torch(find_version("torch"), torch, gpus, is_hidden)]


def _run_guarded(name: str, check: Callable[[], list[DoctorFinding]]) -> list[DoctorFinding]:
    try:
        return check()
    except Exception as error:  # any error: the other lines are still useful
        return [warn(name, f"could not be checked ({type(error).__name__}: {error})", _AGAIN)]
