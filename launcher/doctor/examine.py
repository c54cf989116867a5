"""All checks in order, each guarded: one that breaks is a line of the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from launcher.doctor.findings import Finding, warn
from launcher.doctor.folders import check_folder, check_temporary
from launcher.doctor.libraries import TESTED, Imported, judge_library, judge_python, needed, try_imports, version_of
from launcher.doctor.machine import ask_smi, check_machine, judge_driver, judge_torch, usable
from launcher.doctor.names import found, has_wandb_sweeps, judge_names
from launcher.doctor.planned import check_plan

_AGAIN = "mend the lines above, then `forerun doctor` again"


def examine(study_dir: Path, plan_path: Path | None = None, overrides: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Every finding, as it is made; some seconds, most of them for importing torch and Ray elsewhere.

    Args:
        study_dir: where a study would lie.
        plan_path: of a plan, whose needs are checked too.
        overrides: of the plan.
    """
    yield judge_python(sys.version_info[:3], sys.platform)
    yield from _guarded("names", lambda: [judge_names(found(), has_wandb_sweeps())])
    yield from _guarded("temporary folder", lambda: [check_temporary()])
    yield from _guarded("study folder", lambda: check_folder(study_dir))
    yield from _guarded("machine", check_machine)
    imported = try_imports([name for name in TESTED if version_of(name)])
    yield from _guarded("libraries", lambda: _libraries(imported))
    torch = imported.get("torch", Imported(problem="it is not installed"))
    yield from _guarded("devices", lambda: _devices(torch))
    if plan_path is not None:
        plan, num_gpus = plan_path, usable(torch).count("")
        yield from _guarded("plan", lambda: check_plan(plan, study_dir, overrides, num_gpus))


def _libraries(imported: dict[str, Imported]) -> list[Finding]:
    try:
        needs = needed()
    except PackageNotFoundError:
        said = "forerun itself is not installed: what it needs is not known"
        return [warn("forerun", said, "pip install forerun, or `pip install -e .` in its source folder")]
    return [judge_library(name, version_of(name), limits, imported.get(name)) for name, limits in needs.items()]


def _devices(torch: Imported) -> list[Finding]:
    gpus, problem = ask_smi()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None
    return [judge_driver(gpus, problem), judge_torch(version_of("torch"), torch, gpus, hidden)]


def _guarded(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:  # whatever it is: the other lines are worth having
        return [warn(name, f"could not be looked at ({type(error).__name__}: {error})", _AGAIN)]
