"""The machine, process and device of a run, and what its arithmetic depends on: part of every
result. Standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path

from proxies.core.canon import Json
from sweeps.store.lock import born

HOST_VARIABLE = "FORERUN_HOST"
"""Environment variable of a worker with the machine's name, for where the hostname is another: in a
container on a shared machine, or in a pod (there the node's name).
"""


WHERE: dict[str, Json] = {"where": True}
"""Probe (`sweeps.run.pool.HostCall`) that asks a worker for its machine, process and device."""


HOST, PROCESS, CPU, DEVICE, RESUMED = "host", "process", "cpu", "device", "resumed_at_step"
"""Keys of a result's `environment`: the machine on which the run ended, its process, the kind of
processor, the name of the GPU that trained it (or `cpu`), and the step from which it was
resumed, if it did not start there.
"""
SMI_SECONDS = 20.0
_QUERY = ("--query-gpu=name", "--format=csv,noheader")


def host() -> str:
    """Return the name of this machine."""
    return os.environ.get(HOST_VARIABLE, "").strip() or socket.gethostname()


def site() -> dict[str, str]:
    """Return `host`, `process` and `cpu` of this process."""
    return dict(_read_site(os.getpid()))


@functools.lru_cache(maxsize=1)
def _read_site(pid: int) -> tuple[tuple[str, str], ...]:
    return (
        (HOST, host()),
        (PROCESS, f"{pid} {born(pid)}".strip()),
        (CPU, _read_cpu(Path("/proc/cpuinfo"))),
    )


def _read_cpu(cpuinfo: Path) -> str:
    """Return the processor's model with a hash of its instruction sets.

    Numerical libraries choose their code by the instruction sets; machines of one kind have equal
    values.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    pairs = [
        (name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)
    ]
    first: dict[str, str] = {}
    for name, value in pairs:
        first.setdefault(name, value)
    flags = first.get("flags") or first.get("Features") or ""
    model = first.get("model name") or first.get("CPU part") or platform.machine()
    return f"{model} {hashlib.sha256(' '.join(sorted(flags.split())).encode()).hexdigest()[:8]}"


@functools.lru_cache(maxsize=1)
def gpu_name() -> str:
    """Return the name of the first GPU that this process may use, from nvidia-smi; `cpu` if there
    is none, empty if nvidia-smi fails.

    This is for workers whose trainer is the user's own command: torch would hold memory on the GPU
    that the trainer needs, nvidia-smi holds none. On a node with GPUs of several kinds,
    CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA number them as nvidia-smi does.
    """
    visible, program = os.environ.get("CUDA_VISIBLE_DEVICES"), shutil.which("nvidia-smi")
    if visible == "" or program is None:
        return "cpu"
    selection = () if visible is None else ("-i", visible.split(",")[0])
    try:
        done = subprocess.run(
            [program, *_QUERY, *selection],
            capture_output=True,
            text=True,
            timeout=SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0].strip()
