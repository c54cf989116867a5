"""Kinds of devices in one pool: which worker has which kind, and what an hour of each costs.

A kind is a device's name, as in a result's `environment` (`sweeps.store.sites.DEVICE`): "NVIDIA
H100 80GB HBM3", "cpu". Measurements of one kind (rates, memory) are not used for another. This
module does not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sweeps.run.pool import Pool, ask_all
from sweeps.store.sites import DEVICE, WHERE

WHERE_SECONDS = 300.0
"""Time limit in seconds for workers to report their place: the first call loads torch and opens the
GPU, possibly on many workers at once from a cold disk.
"""


def where(pool: Pool, check: Callable[[], None]) -> dict[int, dict[str, str]]:
    """Ask every worker for its place (`sweeps.store.sites`).

    Args:
        pool: the pool, idle.
        check: called several times a second; raises to end the wait.

    Returns:
        Answers by worker, without workers that do not answer in time.
    """
    reports = ask_all(pool, WHERE, WHERE_SECONDS, check)
    return {
        report.worker: {name: str(value) for name, value in report.answer.items()}
        for report in reports
        if report.answer is not None
    }


def kinds_of(pool: Pool, check: Callable[[], None]) -> tuple[str, ...]:
    """Return the kind of every worker's device, empty for a worker that does not answer. Arguments
    as for `where`.
    """
    places = where(pool, check)
    return tuple(places.get(worker, {}).get(DEVICE, "") for worker in range(pool.num_workers))


def kinds_text(kinds: Sequence[str]) -> str:
    """Describe how many workers have which device: `4 with NVIDIA H100 80GB HBM3, 2 with NVIDIA
    A100-SXM4-40GB`.
    """
    return ", ".join(
        f"{number} with {kind or 'an unknown device'}"
        for kind, number in Counter(kinds).most_common()
    )


def price_of(kind: str, prices: Mapping[str, float], otherwise: float | None) -> float | None:
    """Return the price of an hour of a device, in dollars.

    Args:
        kind: name of the device.
        prices: prices by part of a device's name, ignoring case, such as "H100"; the longest match
            counts.
        otherwise: price of a device that has no match.
    """
    matches = [name for name in prices if name.lower() in kind.lower()]
    return prices[max(matches, key=len)] if matches else otherwise
