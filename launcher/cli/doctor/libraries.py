"""Checks of Python and the libraries: their versions, and whether each can be imported.

Each import is tried in its own process, so that a library that crashes or hangs becomes a line of
the report.
"""

from __future__ import annotations

import importlib.metadata
import json
import operator
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from forerun._launcher.cli.doctor.findings import DoctorFinding, fail, ok, warn

MIN_PYTHON = (3, 11)
IMPORT_SECONDS = 120.0
"""Maximum seconds that the import of a library may take."""
MAX_PROBLEM_CHARS = 300
"""Maximum number of characters that are shown of another program's message."""
_MARK = "forerun-doctor "
"""Beginning of the line with facts that `_TORCH` prints. That program repeats this text."""
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
messages = [str(warning.message) for warning in caught]
facts = {"cuda": torch.version.cuda or "", "devices": devices, "warned": messages}
print("\\nforerun-doctor " + json.dumps(facts))
"""
"""Program that imports torch, and asks each GPU that it sees to add two numbers."""
_MUP = """
import importlib.util, pathlib, runpy
runpy.run_path(str(pathlib.Path(importlib.util.find_spec("mup").origin).with_name("infshape.py")))
"""
"""Program that imports the part of mup that is used; the whole package would import torch again."""
_PROGRAMS = {"torch": _TORCH, "mup": _MUP}


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryCheck:
    """Result of trying to import one library."""

    problem: str = ""
    """The problem in words; empty if the import worked."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that torch reports: the CUDA version that it is built for (`cuda`), its warnings
    (`warned`), and the problem of each GPU (`devices`), which is empty if the GPU adds correctly.
    """


def try_imports(
    names: Sequence[str], limit_seconds: float = IMPORT_SECONDS
) -> dict[str, LibraryCheck]:
    """Import each library in a process of its own, with the environment of a Ray worker."""

    def try_import(name: str) -> LibraryCheck:
        return _run_program(_PROGRAMS.get(name, f"import {name}"), limit_seconds)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(try_import, names), strict=True))


def _run_program(code: str, limit_seconds: float) -> LibraryCheck:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            check=False,
            timeout=limit_seconds,
        )
    except subprocess.TimeoutExpired:
        return LibraryCheck(problem=f"no answer in {limit_seconds:g} s")
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return LibraryCheck(problem=f"it ends the interpreter ({name})")
    if process.returncode > 0:
        errors = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        return LibraryCheck(problem=errors[-1][:MAX_PROBLEM_CHARS])
    facts = process.stdout.rpartition(f"\n{_MARK}")[2] if _MARK in process.stdout else "{}"
    return LibraryCheck(facts=json.loads(facts))


def read_requirements() -> dict[str, list[tuple[str, str]]]:
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


def find_version(name: str) -> str:
    """Return the version of an installed distribution; empty if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def judge_python(version: tuple[int, ...], platform: str) -> DoctorFinding:
    """Judge the version of Python, and the operating system."""
    fact = f"{'.'.join(map(str, version))} on {platform}"
    if version[:2] < MIN_PYTHON:
        fix = "uv venv --python 3.13 .venv && uv pip install forerun"
        oldest = ".".join(map(str, MIN_PYTHON))
        return fail("python", f"{fact}: it must be {oldest} or newer", fix)
    if platform != "linux":
        fix = "run `forerun demo` to try the whole chain"
        return warn("python", f"{fact}: only Linux is tested", fix)
    return ok("python", fact)


def judge_library(
    name: str, version: str, needs: Sequence[tuple[str, str]], check: LibraryCheck
) -> DoctorFinding:
    """Judge the version of a library, and whether it can be imported."""
    fix = f"pip install '{name}{','.join(sign + limit for sign, limit in needs)}'"
    if not version:
        return fail(name, "not installed", fix)
    unmet = [f"{sign}{limit}" for sign, limit in needs if not _meets_limit(version, sign, limit)]
    if unmet:
        return fail(name, f"{version}: it must be {', '.join(unmet)}", fix)
    if check.problem:
        fact = f"{version} cannot be imported: {check.problem}"
        return fail(name, fact, f"{fix} --force-reinstall")
    return ok(name, version)


def _meets_limit(version: str, sign: str, limit: str) -> bool:
    """Return whether a version meets a limit with the sign `>=`, `<` or `==`. The first three
    numbers of the versions are compared.
    """
    installed, required = (
        [*map(int, re.findall(r"\d+", text.partition("+")[0])), 0, 0, 0][:3]
        for text in (version, limit)
    )
    compare = {">=": operator.ge, "<": operator.lt, "==": operator.eq}[sign]
    return bool(compare(installed, required))
