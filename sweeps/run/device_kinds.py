"""Kinds of devices in one pool: which worker has which kind.

A kind is a device's name, as in a result's `environment` (`forerun._sweeps.store.sites.DEVICE`):
"NVIDIA H100 80GB HBM3", "cpu". Measurements of one kind (rates, memory) are not used for another.
This module does not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from forerun._sweeps.run.pool import Pool, probe_all_workers
from forerun._sweeps.store.sites import DEVICE, PLACE_PROBE

PLACE_TIMEOUT_SECONDS = 300.0
"""Time limit in seconds for workers to report their place: the first call loads torch and opens the
GPU, possibly on many workers at once from a cold disk.
"""


def ask_places(pool: Pool, check: Callable[[], None]) -> dict[int, dict[str, str]]:
    """Ask every worker for its place (`forerun._sweeps.store.sites`).

    Args:
        pool: the pool, idle.
        check: called several times a second; raises to end the wait.

    Returns:
        Answers by worker, without workers that do not answer in time.
    """
    reports = probe_all_workers(pool, PLACE_PROBE, PLACE_TIMEOUT_SECONDS, check)
    return {
        report.worker: {name: str(value) for name, value in report.answer.items()}
        for report in reports
        if report.answer is not None
    }


def ask_device_kinds(pool: Pool, check: Callable[[], None]) -> tuple[str, ...]:
    """Return the kind of every worker's device, empty for a worker that does not answer. Arguments
    as for `ask_places`.
    """
    places = ask_places(pool, check)
    return tuple(places.get(worker, {}).get(DEVICE, "") for worker in range(pool.num_workers))


def format_device_kinds(kinds: Sequence[str]) -> str:
    """Describe how many workers have which device: `4 with NVIDIA H100 80GB HBM3, 2 with NVIDIA
    A100-SXM4-40GB`.
    """
    return ", ".join(
        f"{number} with {kind or 'an unknown device'}"
        for kind, number in Counter(kinds).most_common()
    )
