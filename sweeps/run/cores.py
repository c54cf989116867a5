"""Number of CPU cores that this process may keep busy; in a container, fewer than the machine has.
Standard library only.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PROCESS_CGROUP = Path("/proc/self/cgroup")


def count_cores(cgroups: Path = _CGROUPS, process_cgroup: Path = _PROCESS_CGROUP) -> int:
    """Return the number of cores in the process's affinity, or the smallest quota of its control
    groups (version 2), rounded up, if that is lower.

    Args:
        cgroups: folder where control groups are mounted.
        process_cgroup: file that names the control group of this process.
    """
    quotas = (math.ceil(quota) for quota in _iterate_quotas(cgroups, process_cgroup))
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def _iterate_quotas(cgroups: Path, process_cgroup: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of this process's control group and of all groups above it that
    are visible here.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in process_cgroup.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            innermost = cgroups / path.lstrip("/")
            # A line with controllers belongs to version 1
            for group in () if controllers else (innermost, *innermost.parents):
                if group.is_relative_to(cgroups):
                    yield from _read_quota(group)


def _read_quota(group: Path) -> Iterator[float]:
    """Yield the quota of a control group, in cores, if it has one."""
    with contextlib.suppress(OSError, ValueError):  # "max 100000": no quota
        quota, period = (group / "cpu.max").read_text().split()
        yield float(quota) / float(period)
