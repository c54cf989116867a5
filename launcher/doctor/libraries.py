"""Checks of Python and the libraries: their versions, and whether each can be imported.

Imports are tried in other processes, so that a library that crashes or hangs becomes a line of the
report. All libraries but torch share one process, which takes a third of the time; if that process
fails, each library is tried alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from launcher.doctor.findings import DoctorFinding, fail, ok, warn

OLDEST_PYTHON = (3, 11)
IMPORT_SECONDS = 120.0
_MARK = "forerun-doctor "
_TORCH = """
import json, torch, warnings
devices = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            total = torch.ones(2, device=f"cuda:{index}").sum().item()
            devices.append("" if total == 2.0 else f"1 + 1 is {total} there")
        except Exception as error:
            devices.append(f"{type(error).__name__}: {error}")
said = [str(each.message) for each in caught]
print("\\nforerun-doctor " + json.dumps({"cuda": torch.version.cuda or "", "devices": devices, "warned": said}))
"""  # noqa: E501
"""Program that asks each GPU that torch sees to add two numbers."""
_MUP = """
import importlib.util, pathlib, runpy
runpy.run_path(str(pathlib.Path(importlib.util.find_spec("mup").origin).with_name("infshape.py")))
"""
"""Program that imports the part of mup that is used; the whole package would import torch a second
time.
"""
_REACHED = "print('\\nforerun-doctor {\"all\": true}')"
_TRIALS = {"mup": _MUP}


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryCheck:
    """Result of trying to import one library."""

    problem: str = ""
    """The problem in words; empty if the import worked."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that torch reports: its `cuda`, the warnings (`warned`), and for each of its `devices`
    what is wrong, empty if it adds correctly.
    """


def try_imports(
    names: Sequence[str], limit_seconds: float = IMPORT_SECONDS
) -> dict[str, LibraryCheck]:
    """Import torch in its own process and the other libraries in a shared one; if the shared one
    fails, each in its own. The environment is that of a Ray worker.
    """
    light_names = [name for name in names if name != "torch"]
    program = "\n".join([*map(_write_import, light_names), _REACHED])
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        torch = pool.submit(_run_import, _TORCH, limit_seconds) if "torch" in names else None
        if _run_import(program, limit_seconds).facts:  # the last line of the program was reached
            checks = dict.fromkeys(light_names, LibraryCheck())
        else:
            results = pool.map(
                lambda name: _run_import(_write_import(name), limit_seconds), light_names
            )
            checks = dict(zip(light_names, results, strict=True))
        return checks if torch is None else {**checks, "torch": torch.result()}


def _write_import(name: str) -> str:
    return _TRIALS.get(name, f"import {name}")


def _run_import(code: str, limit_seconds: float) -> LibraryCheck:
    # The environment that Ray's workers get
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", code]
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            check=False,
            timeout=limit_seconds,
        )
    except subprocess.TimeoutExpired:
        return LibraryCheck(problem=f"no answer in {limit_seconds:g} s")
    if process.returncode < 0:
        return LibraryCheck(
            problem=f"it ends the interpreter ({signal.Signals(-process.returncode).name})"
        )
    if process.returncode > 0:
        errors = process.stderr.decode(errors="replace").strip().splitlines()
        problem = errors[-1][:300] if errors else f"exit code {process.returncode}"
        return LibraryCheck(problem=problem)
    lines = [
        line
        for line in process.stdout.decode(errors="replace").splitlines()
        if line.startswith(_MARK)
    ]
    return LibraryCheck(facts=json.loads(lines[-1].removeprefix(_MARK)) if lines else {})


def needed() -> dict[str, list[tuple[str, str]]]:
    """Return the requirements in forerun's own metadata: library -> limits, such as (">=", "2.13").

    Raises:
        PackageNotFoundError: forerun itself is not installed.
    """
    requirements = {}
    for line in importlib.metadata.requires("forerun") or []:
        match = re.match(r"[\w.-]+", line)
        if match is not None and "extra ==" not in line:
            requirements[match.group()] = re.findall(
                r"(>=|==|<(?!=))\s*([\w.]+)", line.partition(";")[0]
            )
    return requirements


def version_of(name: str) -> str:
    """Return the version of an installed distribution; empty if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def judge_python(version: tuple[int, ...], platform: str) -> DoctorFinding:
    """Judge the version of Python, and the operating system."""
    sentence = f"{'.'.join(map(str, version))} on {platform}"
    if version[:2] < OLDEST_PYTHON:
        install = "uv venv --python 3.13 .venv && uv pip install forerun"
        return fail("python", f"{sentence}: it must be 3.11 or newer", install)
    if platform != "linux":
        return warn(
            "python",
            f"{sentence}: only Linux is tested",
            "run `forerun demo` to try the whole chain",
        )
    return ok("python", sentence)


def judge_library(
    name: str, version: str, needs: Sequence[tuple[str, str]], tried: LibraryCheck
) -> DoctorFinding:
    """Judge the version of a library, and whether it can be imported."""
    mend = f"pip install '{name}{','.join(sign + limit for sign, limit in needs)}'"
    if not version:
        return fail(name, "not installed", mend)
    unmet = [f"{sign}{limit}" for sign, limit in needs if not _meets_limit(version, sign, limit)]
    if unmet:
        return fail(name, f"{version}: it must be {', '.join(unmet)}", mend)
    if tried.problem:
        return fail(
            name, f"{version} cannot be imported: {tried.problem}", f"{mend} --force-reinstall"
        )
    return ok(name, version)


def _parse_version(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version, without the local part behind `+`."""
    numbers = [int(digits) for digits in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return tuple(numbers + [0] * (3 - len(numbers)))


def _meets_limit(version: str, sign: str, limit: str) -> bool:
    installed, required = _parse_version(version), _parse_version(limit)
    return (
        installed >= required
        if sign == ">="
        else installed < required
        if sign == "<"
        else installed == required
    )
