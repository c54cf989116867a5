"""How many cores this process may keep busy: in a container fewer than there are. Standard library only."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def num_cores(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Cores of this process's affinity, or as many as the quotas of its control groups (v2) come to, rounded up.

    `cgroups`: where control groups are mounted; `own`: the file that names this process's.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(quota) for quota in _quotas(cgroups, own))]))


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of this process's group and of all above it, as far as they can be seen here."""
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            inner = cgroups / path.lstrip("/")
            for group in () if controllers else (inner, *inner.parents):
                if group.is_relative_to(cgroups):
                    yield from _quota(group)


def _quota(group: Path) -> Iterator[float]:
    with contextlib.suppress(OSError, ValueError):  # "max 100000" is no number
        quota, period = (group / "cpu.max").read_text().split()
        yield float(quota) / float(period)
