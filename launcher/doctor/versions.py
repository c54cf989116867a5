"""Python and the libraries, held against what forerun asks for and what its tests ran with."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from dataclasses import dataclass

from launcher.doctor.findings import Finding, fail, ok, warn
from launcher.doctor.imports import Imported

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
TESTED = {
    "numpy": "2.4.6", "scipy": "1.17.1", "torch": "2.13.0", "mup": "1.0.0", "optuna": "5.0.0", "cmaes": "0.13.1",
    "ray": "2.60.0", "wandb": "0.31.0", "pyarrow": "26.0.1", "safetensors": "0.8.0", "tokenizers": "0.23.3",
    "click": "8.5.1", "pydantic": "2.14.3", "rich": "15.0.0", "matplotlib": "3.11.2",
}  # fmt: skip
"""What constraints.txt pins, of the libraries that forerun itself imports."""
SLOW_IMPORT_SECONDS = 20.0
"""Every worker pays it; Ray's are given 60 s to start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """One library, as it is here."""

    name: str
    version: str
    """Empty: not installed."""
    wanted: tuple[tuple[str, str], ...]
    """Such as (">=", "2.13")."""
    imported: Imported | None
    """None: not tried."""


def judge_python(version: tuple[int, int, int], platform: str) -> Finding:
    """The interpreter, and the system under it."""
    said = f"{'.'.join(map(str, version))} on {platform}"
    install = "uv venv --python 3.13 .venv && uv pip install forerun"
    if version[:2] < OLDEST_PYTHON:
        return fail("python", f"{said}: 3.11 or newer is wanted", install)
    if not platform.startswith(("linux", "darwin")):
        return fail("python", f"{said}: locks and signals of Linux are wanted", "wsl --install, and forerun there")
    if platform == "darwin":
        mend = "`forerun demo` tries the whole chain; on Linux all of it is tested"
        return warn("python", f"{said}: only Linux is tested", mend)
    if version[:2] > NEWEST_PYTHON:
        return warn("python", f"{said}: newer than any tested", install)
    return ok("python", said)


def judge_library(library: Library) -> Finding:
    """Its version, and whether it can be imported."""
    name, version, tested = library.name, library.version, TESTED.get(library.name, "")
    mend = f"pip install '{name}=={tested}'" if tested else f"pip install '{name}'"
    if not version:
        return fail(name, "not installed", mend)
    unmet = [f"{sign}{limit}" for sign, limit in library.wanted if not _meets(version, sign, limit)]
    if unmet:
        return fail(name, f"{version}: {', '.join(unmet)} is wanted", mend)
    tried = library.imported
    if tried is not None and tried.problem:
        return fail(name, f"{version} cannot be imported: {tried.problem}", f"{mend} --force-reinstall")
    if tried is not None and tried.seconds > SLOW_IMPORT_SECONDS:
        said = f"{version} takes {tried.seconds:.0f} s to import, in every worker"
        return warn(name, said, "put the environment on a local disk: `python -m venv /local/disk/venv`")
    if tested and _numbers(version)[:2] > _numbers(tested)[:2]:
        return warn(name, f"{version} is newer than any tested ({tested})", f"{mend}, if something is odd")
    return ok(name, version if version.startswith(tested) else f"{version} (tested with {tested})")


def look_at_libraries(imported: dict[str, Imported]) -> list[Library]:
    """What forerun's own metadata asks for, as installed; `imported`: those that were tried.

    Raises:
        PackageNotFoundError: forerun is not installed itself.
    """
    found = []
    for line in importlib.metadata.requires("forerun") or []:
        named = re.match(r"[\w.-]+", line)
        if named is None or "extra ==" in line:
            continue
        name = named.group()
        wanted = tuple(re.findall(r"(>=|==|<(?!=))\s*([\w.]+)", line.partition(";")[0]))
        found.append(Library(name=name, version=version_of(name), wanted=wanted, imported=imported.get(name)))
    return found


def version_of(name: str) -> str:
    """Of an installed distribution; empty if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def here() -> tuple[tuple[int, int, int], str]:
    """This interpreter's version and system."""
    return (sys.version_info[0], sys.version_info[1], sys.version_info[2]), sys.platform


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version; what a build adds behind `+` is none of it."""
    found = [int(digits) for digits in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return tuple(found + [0] * (3 - len(found)))


def _meets(version: str, sign: str, limit: str) -> bool:
    have, want = _numbers(version), _numbers(limit)
    return have >= want if sign == ">=" else have < want if sign == "<" else have == want
