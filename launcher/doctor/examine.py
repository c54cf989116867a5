"""All checks of the machine in order. Each is guarded, so that a check that raises becomes a line
of the report.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from launcher.doctor.findings import DoctorFinding, found, judge_names, warn
from launcher.doctor.folders import check_folder
from launcher.doctor.libraries import (
    LibraryCheck,
    judge_library,
    judge_python,
    needed,
    try_imports,
    version_of,
)
from launcher.doctor.machine import ask_smi, check_machine, judge_driver, judge_torch

_AGAIN = "fix the lines above, then run `forerun doctor` again"


def examine(study_dir: Path) -> Iterator[DoctorFinding]:
    """Yield every finding as soon as it is made. This takes some seconds, mostly for importing
    torch and Ray in other processes.

    Args:
        study_dir: Folder in which a study would be.
    """
    yield judge_python(sys.version_info[:3], sys.platform)
    yield from _run_guarded("names", lambda: [judge_names(found(), bool(version_of("sweeps")))])
    yield from _run_guarded("study folder", lambda: [check_folder(study_dir)])
    yield from _run_guarded("machine", check_machine)
    try:
        needs = needed()
    except PackageNotFoundError:
        sentence = "forerun itself is not installed: what it needs is not known"
        yield warn(
            "forerun", sentence, "pip install forerun, or `pip install -e .` in its source folder"
        )
        needs = {"torch": []}
    imported = try_imports([name for name in needs if version_of(name)])
    missing = LibraryCheck(problem="it is not installed")
    for name, limits in needs.items():
        yield judge_library(name, version_of(name), limits, imported.get(name, missing))
    yield from _run_guarded("devices", lambda: _check_devices(imported.get("torch", missing)))


def _check_devices(torch: LibraryCheck) -> list[DoctorFinding]:
    gpus, problem = ask_smi()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None
    return [judge_driver(gpus, problem), judge_torch(version_of("torch"), torch, gpus, hidden)]


def _run_guarded(name: str, check: Callable[[], list[DoctorFinding]]) -> list[DoctorFinding]:
    try:
        return check()
    except Exception as error:  # any error: the other lines are still useful
        return [warn(name, f"could not be checked ({type(error).__name__}: {error})", _AGAIN)]
