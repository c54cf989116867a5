"""Which machine and which process this is, and what its arithmetic depends on: part of every result. Stdlib only."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import socket
from pathlib import Path

from proxies.core.canon import Json
from sweeps.store.lock import born

HOST_VARIABLE = "FORERUN_HOST"
"""In a worker's environment: the machine's name, where its hostname is not that: a container on a machine that has
others, a pod (there, the node's name).
"""


WHERE: dict[str, Json] = {"where": True}
"""A probe (`sweeps.run.pool.HostCall`): on which machine and in which process is this worker?"""


HOST, PROCESS, CPU, RESUMED = "host", "process", "cpu", "resumed_at_step"
"""Keys of a result's `environment`: where it ended, the kind of processor, and the step that it went on from, if it did
not begin there.
"""


def host() -> str:
    """The name of this machine."""
    return os.environ.get(HOST_VARIABLE, "").strip() or socket.gethostname()


def site() -> dict[str, str]:
    """`host`, `process` and `cpu` of this process."""
    return dict(_site(os.getpid()))


@functools.lru_cache(maxsize=1)
def _site(pid: int) -> tuple[tuple[str, str], ...]:
    return (HOST, host()), (PROCESS, f"{pid} {born(pid)}".strip()), (CPU, _cpu(Path("/proc/cpuinfo")))


def _cpu(cpuinfo: Path) -> str:
    """The processor's model with its instructions, by which libraries choose their code; machines of one kind agree."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    pairs = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    first: dict[str, str] = {}
    for name, value in pairs:
        first.setdefault(name, value)
    flags = first.get("flags") or first.get("Features") or ""
    model = first.get("model name") or first.get("CPU part") or platform.machine()
    return f"{model} {hashlib.sha256(' '.join(sorted(flags.split())).encode()).hexdigest()[:8]}"
