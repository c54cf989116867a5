"""Which machine, process and device this is, and what its arithmetic depends on: part of every
result. Stdlib only.
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
"""In a worker's environment: the machine's name, where its hostname is not that: a container on a
machine that has others, a pod (there, the node's name).
"""


WHERE: dict[str, Json] = {"where": True}
"""A probe (`sweeps.run.pool.HostCall`): on which machine, in which process and with which device is
this worker?"""


HOST, PROCESS, CPU, DEVICE, RESUMED = "host", "process", "cpu", "device", "resumed_at_step"
"""Keys of a result's `environment`: where it ended, the kind of processor, the name of the GPU that
trained it (or `cpu`), and the step that it went on from, if it did not begin there.
"""
SMI_SECONDS = 20.0
_QUERY = ("--query-gpu=name", "--format=csv,noheader")


def host() -> str:
    """The name of this machine."""
    return os.environ.get(HOST_VARIABLE, "").strip() or socket.gethostname()


def site() -> dict[str, str]:
    """`host`, `process` and `cpu` of this process."""
    return dict(_site(os.getpid()))


@functools.lru_cache(maxsize=1)
def _site(pid: int) -> tuple[tuple[str, str], ...]:
    return (
        (HOST, host()),
        (PROCESS, f"{pid} {born(pid)}".strip()),
        (CPU, _cpu(Path("/proc/cpuinfo"))),
    )


def _cpu(cpuinfo: Path) -> str:
    """The processor's model with its instructions, by which libraries choose their code; machines
    of one kind agree.
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
    """The first GPU that this process may use by nvidia-smi, which takes nothing of it; `cpu` where
    there is none.

    For workers whose trainer is the user's own: torch would hold memory on the GPU that their
    trainer needs. On a node with GPUs of several kinds, CUDA_DEVICE_ORDER=PCI_BUS_ID has CUDA count
    them as nvidia-smi does.
    """
    visible, program = os.environ.get("CUDA_VISIBLE_DEVICES"), shutil.which("nvidia-smi")
    if visible == "" or program is None:
        return "cpu"
    which = () if visible is None else ("-i", visible.split(",")[0])
    try:
        done = subprocess.run(
            [program, *_QUERY, *which],
            capture_output=True,
            text=True,
            timeout=SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0].strip()
