"""Libraries imported in another process: one that crashes or hangs there is a line of the report, not its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

IMPORT_SECONDS = 120.0
"""The longest wait for all of them."""
CUDA = "cuda"
"""Not a library: each GPU that torch sees is asked to add two numbers."""
_MARK = "forerun-doctor "
_SCRIPT = """
import importlib, json, sys, time, warnings

def tell(**facts):
    print("\\nforerun-doctor " + json.dumps(facts), flush=True)

def torch_facts():
    import torch
    return {"cuda": torch.version.cuda or "", "hip": getattr(torch.version, "hip", None) or ""}

def cuda_facts():
    import torch
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable, number = [], torch.cuda.device_count() if torch.cuda.is_available() else 0
        for index in range(number):
            try:
                total = torch.ones(2, device=f"cuda:{index}").sum().item()
                usable.append("" if total == 2.0 else f"1 + 1 is {total} there")
            except Exception as error:
                usable.append(f"{type(error).__name__}: {error}")
    return {"devices": usable, "warned": [str(each.message) for each in caught]}

for name in sys.argv[1:]:
    tell(name=name)
    began, error, facts = time.monotonic(), "", {}
    try:
        if name == "cuda":
            facts = cuda_facts()
        else:
            importlib.import_module(name)
            facts = torch_facts() if name == "torch" else {}
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    tell(name=name, error=error, seconds=time.monotonic() - began, facts=facts)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """One library, tried."""

    seconds: float
    problem: str = ""
    """In words; empty if it came."""
    facts: dict[str, object] = field(default_factory=dict)
    """Of torch and its GPUs."""


def try_imports(names: Sequence[str], limit_seconds: float = IMPORT_SECONDS) -> dict[str, Imported]:
    """Import each in turn, as a worker would; the one that ends the process is named, and the rest goes on without it.

    Args:
        names: of modules, or `CUDA`.
        limit_seconds: for each process; what runs then is said to hang.
    """
    found: dict[str, Imported] = {}
    left = list(names)
    while left:
        began = time.monotonic()
        answers, ended = _ask(left, limit_seconds)
        for name, answer in answers.items():
            if answer is not None:
                found[name] = Imported(
                    seconds=answer["seconds"], problem=_first_line(answer["error"]), facts=answer["facts"]
                )
        stuck = next((name for name in left if name not in found), None)
        if stuck is not None:
            found[stuck] = Imported(seconds=time.monotonic() - began, problem=ended)
        left = [name for name in left if name not in found]
    return found


def _ask(names: Sequence[str], limit_seconds: float) -> tuple[dict[str, dict[str, Any] | None], str]:
    """Each name that was begun with its answer, or None; and how the process ended, in words."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # as Ray's workers get it
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(
            [sys.executable, "-P", "-c", _SCRIPT, *names], stdin=subprocess.DEVNULL, stdout=said,
            stderr=subprocess.DEVNULL, env=environment,
        ) as process:  # fmt: skip
            try:
                code = process.wait(limit_seconds)
                ended = f"it ends the interpreter ({_exit(code)})"
            except subprocess.TimeoutExpired:
                process.kill()
                ended = f"no answer in {limit_seconds:g} s"
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    answers: dict[str, dict[str, Any] | None] = {}
    for line in lines:
        if line.startswith(_MARK):
            answer = json.loads(line.removeprefix(_MARK))
            answers[answer["name"]] = answer if "error" in answer else None
    return answers, ended


def _exit(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"exit code {code}"


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""
