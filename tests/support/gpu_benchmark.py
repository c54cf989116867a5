"""Helpers for tests of the GPU benchmarks: their scripts are run on a CPU, and programs of a GPU
machine are replaced by small shell scripts.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MPS_CONTROL = """#!/bin/sh
case "$1" in -d) order=start ;; *) read -r order ;; esac
echo "$order $CUDA_MPS_PIPE_DIRECTORY" >> {log}
case "$order" in
start) {start} ;;
get_server_list) {servers} ;;
esac
"""
"""A control program of MPS that logs its orders.

An order is a line on its standard input, or `-d`, which starts the service. `{start}` and
`{servers}` are the commands with which it answers.
"""


def write_mps_control(folder, start="true", servers="echo 4321"):
    """Create a folder with a fake control program of MPS, and return it and the program's log."""
    folder.mkdir()
    control = folder / "nvidia-cuda-mps-control"
    log = folder / "orders"
    control.write_text(MPS_CONTROL.format(log=log, start=start, servers=servers))
    control.chmod(0o755)
    return folder, log


def read_orders(log):
    """Return the orders that the fake control program received."""
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


def build_command(script, *arguments):
    """Return the command of a script of the GPU benchmarks."""
    return [sys.executable, ROOT / "benchmarks" / "gpu" / script, *map(str, arguments)]


def run_script(script, *arguments, **options):
    """Run a script of the GPU benchmarks to its end."""
    command = build_command(script, *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def list_measured_steps(output):
    """Return the lines that report a measured step."""
    return [line for line in output.splitlines() if line.startswith("measured: ")]
