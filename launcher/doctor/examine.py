"""All checks in order, each guarded: one that breaks is a line of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from launcher.doctor.devices import judge_driver, judge_torch_devices, judge_torchvision, look_at_devices
from launcher.doctor.findings import Finding, warn
from launcher.doctor.folders import judge_folder, judge_temporary, look_at_folder, look_at_temporary
from launcher.doctor.imports import CUDA, Imported, try_imports
from launcher.doctor.machine import judge_machine, look_at_machine
from launcher.doctor.names import judge_names, look_at_names
from launcher.doctor.network import judge_network, look_at_network
from launcher.doctor.planned import judge_plan, look_at_plan
from launcher.doctor.versions import TESTED, here, judge_library, judge_python, look_at_libraries, version_of

_AGAIN = "mend the lines above, then `forerun doctor` again"


def examine(study_dir: Path, plan_path: Path | None = None, overrides: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Every finding, as it is made; some seconds, most of them for importing torch and Ray elsewhere.

    Args:
        study_dir: where a study would lie.
        plan_path: whose wants are looked at too.
        overrides: of the plan.
    """
    yield judge_python(*here())
    yield from _guarded("names", lambda: [judge_names(look_at_names(Path.cwd()))])
    yield from _guarded("temporary folder", lambda: judge_temporary(look_at_temporary()))
    yield from _guarded("study folder", lambda: judge_folder(look_at_folder(study_dir)))
    yield from _guarded("machine", lambda: judge_machine(look_at_machine()))
    yield from _guarded("network", lambda: judge_network(look_at_network()))
    imported = try_imports([*_installed(), CUDA])
    yield from _guarded("libraries", lambda: _libraries(imported))
    yield from _guarded("devices", lambda: _devices(imported))
    devices = imported[CUDA].facts.get("devices")
    num_gpus = devices.count("") if isinstance(devices, list) else 0
    if plan_path is not None:
        wanted = plan_path
        yield from _guarded("plan", lambda: judge_plan(look_at_plan(wanted, study_dir, overrides, num_gpus)))


def _installed() -> list[str]:
    """What is worth importing: a library that is not there is told as such."""
    return [name for name in (*TESTED, "torchvision") if version_of(name)]


def _libraries(imported: dict[str, Imported]) -> list[Finding]:
    try:
        return [judge_library(library) for library in look_at_libraries(imported)]
    except PackageNotFoundError:
        said = "forerun itself is not installed: what it needs is not known"
        return [warn("forerun", said, "pip install forerun, or `pip install -e .` in its source folder")]


def _devices(imported: dict[str, Imported]) -> list[Finding]:
    missing = Imported(seconds=0.0, problem="it is not installed")
    facts = look_at_devices(imported.get("torch", missing), imported[CUDA], version_of("torch"))
    torchvision = judge_torchvision(version_of("torchvision"), imported.get("torchvision"))
    return [judge_driver(facts), judge_torch_devices(facts), torchvision]


def _guarded(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:  # whatever it is: the other lines are worth having
        return [warn(name, f"could not be looked at ({type(error).__name__}: {error})", _AGAIN)]
