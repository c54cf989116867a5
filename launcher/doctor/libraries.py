"""Python and the libraries: their versions, and whether each can be imported, in a process of its
own.

So one that crashes or hangs is a line of the report, not its end. All but torch share one process,
which costs a third of the time; where that fails, each is tried alone.
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
"""Each GPU that torch sees is asked to add two numbers."""
_MUP = """
import importlib.util, pathlib, runpy
runpy.run_path(str(pathlib.Path(importlib.util.find_spec("mup").origin).with_name("infshape.py")))
"""
"""The part of mup that is used; the whole of it would import torch a second time."""
_REACHED = "print('\\nforerun-doctor {\"all\": true}')"
_TRIALS = {"mup": _MUP}


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryCheck:
    """One library, tried."""

    problem: str = ""
    """In words; empty if it came."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What torch says: its `cuda`, what it `warned`, and what is wrong with each of its `devices`,
    empty if it adds."""


def try_imports(
    names: Sequence[str], limit_seconds: float = IMPORT_SECONDS
) -> dict[str, LibraryCheck]:
    """Import torch in a process of its own, the others in one, or each in its own if that fails, as
    a worker would.
    """
    others = [name for name in names if name != "torch"]
    together = "\n".join([*map(_trial, others), _REACHED])
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        torch = pool.submit(_tried, _TORCH, limit_seconds) if "torch" in names else None
        if _tried(together, limit_seconds).facts:  # the last line was reached
            found = dict.fromkeys(others, LibraryCheck())
        else:
            tried = pool.map(lambda name: _tried(_trial(name), limit_seconds), others)
            found = dict(zip(others, tried, strict=True))
        return found if torch is None else {**found, "torch": torch.result()}


def _trial(name: str) -> str:
    return _TRIALS.get(name, f"import {name}")


def _tried(code: str, limit_seconds: float) -> LibraryCheck:
    # as Ray's workers get it
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", code]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            check=False,
            timeout=limit_seconds,
        )
    except subprocess.TimeoutExpired:
        return LibraryCheck(problem=f"no answer in {limit_seconds:g} s")
    if done.returncode < 0:
        return LibraryCheck(
            problem=f"it ends the interpreter ({signal.Signals(-done.returncode).name})"
        )
    if done.returncode > 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return LibraryCheck(problem=said[-1][:300] if said else f"exit code {done.returncode}")
    lines = [
        line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith(_MARK)
    ]
    return LibraryCheck(facts=json.loads(lines[-1].removeprefix(_MARK)) if lines else {})


def needed() -> dict[str, list[tuple[str, str]]]:
    """What forerun's own metadata asks for: library -> such as (">=", "2.13").

    Raises:
        PackageNotFoundError: forerun is not installed itself.
    """
    found = {}
    for line in importlib.metadata.requires("forerun") or []:
        named = re.match(r"[\w.-]+", line)
        if named is not None and "extra ==" not in line:
            found[named.group()] = re.findall(r"(>=|==|<(?!=))\s*([\w.]+)", line.partition(";")[0])
    return found


def version_of(name: str) -> str:
    """Return the version of an installed distribution; empty if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def judge_python(version: tuple[int, ...], platform: str) -> DoctorFinding:
    """The interpreter, and the system under it."""
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
    """Its version, and whether it can be imported."""
    mend = f"pip install '{name}{','.join(sign + limit for sign, limit in needs)}'"
    if not version:
        return fail(name, "not installed", mend)
    unmet = [f"{sign}{limit}" for sign, limit in needs if not _meets(version, sign, limit)]
    if unmet:
        return fail(name, f"{version}: it must be {', '.join(unmet)}", mend)
    if tried.problem:
        return fail(
            name, f"{version} cannot be imported: {tried.problem}", f"{mend} --force-reinstall"
        )
    return ok(name, version)


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version; what a build adds behind `+` is none of it."""
    found = [int(digits) for digits in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return tuple(found + [0] * (3 - len(found)))


def _meets(version: str, sign: str, limit: str) -> bool:
    have, want = _numbers(version), _numbers(limit)
    return have >= want if sign == ">=" else have < want if sign == "<" else have == want
