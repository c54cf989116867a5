"""The result file of a benchmark: the options of the script, the machine, and the writing.

Benchmarks import this module; it is not a program.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def make_parser(description: str | None, *, quick: str = "") -> argparse.ArgumentParser:
    """Return a parser of a benchmark's options, with `--json` for its result file.

    Args:
        description: Docstring of the script, which `--help` shows.
        quick: What the script does under `--quick`; empty if it has no such option.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="Result file.")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


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
