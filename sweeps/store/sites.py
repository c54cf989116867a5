"""The machine, process and device of a run, which are part of every result. The arithmetic of a run
depends on the kind of processor or GPU. This module needs no third-party package.
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

from forerun._proxies.core.canon import Json
from forerun._sweeps.store.lock import get_process_start

HOST_VARIABLE = "FORERUN_HOST"
"""Environment variable of a worker that holds the machine's name. Set it where the hostname is not
the machine's name: in a container on a shared machine, or in a pod (then it is the node's name).
"""


PLACE_PROBE: dict[str, Json] = {"where": True}
"""Probe (`forerun._sweeps.run.pool.HostCall`) that asks a worker for its machine, process and
device.
"""


HOST, PROCESS, CPU, DEVICE, RESUMED = "host", "process", "cpu", "device", "resumed_at_step"
"""Keys of a result's `environment`: the machine on which the run ended, its process, the kind of
processor, the name of the GPU that trained it (or `cpu`), and the step from which it was
resumed, if it did not start there.
"""
SMI_TIMEOUT_SECONDS = 20.0
_QUERY = ("--query-gpu=name", "--format=csv,noheader")


def get_host() -> str:
    """Return the name of this machine."""
    return os.environ.get(HOST_VARIABLE, "").strip() or socket.gethostname()


def get_site() -> dict[str, str]:
    """Return `get_host`, `process` and `cpu` of this process."""
    return dict(_read_site(os.getpid()))


@functools.lru_cache(maxsize=1)
def _read_site(pid: int) -> tuple[tuple[str, str], ...]:
    """Return the items of `get_site`; the cache keeps them until the process forks."""
    return (
        (HOST, get_host()),
        (PROCESS, f"{pid} {get_process_start(pid)}".strip()),
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
    # The file lists every core; the first core stands for all
    core: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        core.setdefault(name.strip(), value.strip())
    # The second name of each is that of ARM processors
    flags = core.get("flags") or core.get("Features") or ""
    model = core.get("model name") or core.get("CPU part") or platform.machine()
    return f"{model} {hashlib.sha256(' '.join(sorted(flags.split())).encode()).hexdigest()[:8]}"


@functools.lru_cache(maxsize=1)
def get_gpu_name() -> str:
    """Return the name of the first GPU that this process may use, from nvidia-smi; `cpu` if there
    is none, empty if nvidia-smi fails.

    This is for workers whose trainer is the user's own command: torch would hold GPU memory that
    the trainer needs, nvidia-smi holds none. On a node with GPUs of several kinds,
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
            timeout=SMI_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0].strip()
