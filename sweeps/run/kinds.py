"""Kinds of devices in one pool: which worker has which, and what an hour of each costs. No torch.

A kind is a device's name, as results have it in `environment` (`sweeps.store.sites.DEVICE`):
"NVIDIA H100 80GB HBM3", "cpu". What is measured of one kind (rates, memory) is not used for
another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sweeps.run.pool import Pool, ask_all
from sweeps.store.sites import DEVICE, WHERE

WHERE_SECONDS = 300.0
"""For workers to answer where they are: a first call loads torch and opens its GPU, many at once
from a cold disk."""


def where(pool: Pool, check: Callable[[], None]) -> dict[int, dict[str, str]]:
    """By worker, what its process answers of its place (`sweeps.store.sites`); without those that
    do not in time.

    Args:
        pool: idle.
        check: raises what ends the work.
    """
    reports = ask_all(pool, WHERE, WHERE_SECONDS, check)
    return {
        r.worker: {name: str(value) for name, value in r.answer.items()}
        for r in reports
        if r.answer is not None
    }


def kinds_of(pool: Pool, check: Callable[[], None]) -> tuple[str, ...]:
    """The kind of every worker's device; empty of one that does not answer. Arguments as for
    `where`.
    """
    found = where(pool, check)
    return tuple(found.get(worker, {}).get(DEVICE, "") for worker in range(pool.num_workers))


def kinds_text(kinds: Sequence[str]) -> str:
    """How many workers have which device: `4 with NVIDIA H100 80GB HBM3, 2 with NVIDIA
    A100-SXM4-40GB`.
    """
    return ", ".join(
        f"{number} with {kind or 'an unknown device'}"
        for kind, number in Counter(kinds).most_common()
    )


def price_of(kind: str, prices: Mapping[str, float], otherwise: float | None) -> float | None:
    """Dollars for an hour of a device: that of the longest name in `prices` that is part of its
    own, in any case of letters, so that "H100" is enough; else the price of all.
    """
    named = [name for name in prices if name.lower() in kind.lower()]
    return prices[max(named, key=len)] if named else otherwise
