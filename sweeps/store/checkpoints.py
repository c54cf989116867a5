"""Where the states of unfinished runs lie: `checkpoints/<run id>/`, written by workers, removed by the driver."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shutil
import socket
from collections.abc import Container
from pathlib import Path

from proxies.core.canon import Json
from sweeps.store.curves import checked_id
from sweeps.store.lock import born

# Which machine and which process this is, and what its arithmetic depends on: part of every result. Stdlib only.

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


CHECKPOINTS_DIR = "checkpoints"
_STATE = re.compile(r"step-(\d{8})-[0-9a-f]{64}\.safetensors")  # as `proxies.training.slot_state` names them


def checkpoint_dir(study_dir: Path, run_id: str) -> Path:
    """The folder of a run's states.

    Raises:
        ValueError: `run_id` is not a sha256 in hex (and so could name another place).
    """
    return study_dir / CHECKPOINTS_DIR / checked_id(run_id)


def saved_step(study_dir: Path, run_id: str) -> int:
    """Optimizer steps done in the newest of a run's states, by its name; 0 where there is none."""
    steps = [0]
    with contextlib.suppress(OSError):
        names = [path.name for path in checkpoint_dir(study_dir, run_id).iterdir()]
        steps += [int(found[1]) for name in names if (found := _STATE.fullmatch(name))]
    return max(steps)


def drop_checkpoints(study_dir: Path, run_id: str) -> None:
    """Remove the states of a run that has its outcome, as far as that can be done: they only take room."""
    with contextlib.suppress(OSError):
        shutil.rmtree(checkpoint_dir(study_dir, run_id))


def drop_stale_checkpoints(study_dir: Path, settled: Container[str]) -> None:
    """Remove the states of all runs in `settled`: a driver that was killed, or a worker given up, may leave some."""
    folder = study_dir / CHECKPOINTS_DIR
    for each in list(folder.iterdir()) if folder.is_dir() else []:
        if each.name in settled:
            drop_checkpoints(study_dir, each.name)
