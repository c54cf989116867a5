"""Describe the machine of a benchmark, and write its result file.

Benchmarks import this module; it is not a program.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Return the processor, its load, and the Python version, as a result file records them."""
    info = Path("/proc/cpuinfo").read_text()
    model_name = re.search(r"model name\s*:\s*(.+)", info)
    flags = set((re.search(r"flags\s*:\s*(.+)", info) or ["", ""])[1].split())
    return {
        "cpu": model_name[1] if model_name else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "bfloat16": sorted(flags & {"avx512_bf16", "amx_bf16"}),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def write_result(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result as JSON with sorted keys, or do nothing if no path was given."""
    if path:
        path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
