"""Runs in, outcomes out: fills banks, commits each run once, survives lost and hung workers, stops in order.

Executions may repeat, outcomes may not: the first valid result of a run is recorded, any other is dropped. Curves
are on disk before their results are recorded. A run that is lost is run again, from its last checkpoint, up to a
limit that holds across drivers; its last attempt has a bank to itself, so that a run which brings its worker down
cannot take its neighbours with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from proxies.core.spec import RunSpec
from sweeps.run.backlog import Backlog
from sweeps.run.crew import Crew, Leases
from sweeps.run.driver import POLL_SECONDS, Driver
from sweeps.run.pool import Pool
from sweeps.search.source import Source
from sweeps.store.checkpoints import drop_stale_checkpoints
from sweeps.store.ledger import Ledger
from sweeps.store.live import Progress

GRACE_SECONDS = 15.0
"""For workers to save once a stop was asked for. SLURM kills 30 s after its SIGTERM, and the pool must close too."""
HANG_SECONDS = 600.0
"""The longest that a worker may be silent, whatever it does."""


def drive(
    source: Source,
    pool: Pool,
    ledger: Ledger,
    study_dir: Path,
    *,
    num_slots_for: Callable[[RunSpec], int],
    bank_key_for: Callable[[RunSpec], str],
    steps_per_call: int,
    max_attempts: int = 3,
    hang_seconds: float = HANG_SECONDS,
    grace_seconds: float = GRACE_SECONDS,
    progress: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    refusal: Callable[[RunSpec, Sequence[RunSpec]], str] = lambda spec, in_flight: "",
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run everything `source` gives, until it is done or `should_stop()`.

    Args:
        source: what to run; runs that have an outcome in the ledger are skipped, those that it may prune are looked at.
        pool: where; it stays open.
        ledger: where outcomes and losses go, open for writing.
        study_dir: where curves go, and where workers keep checkpoints.
        num_slots_for: K of a run's bank; part of the run's numerics.
        bank_key_for: what runs must share to share a bank (shape, parametrization, numerics ...).
        steps_per_call: optimizer steps between reports of a worker.
        max_attempts: after as many losses a run is recorded as failed; the others go on.
        hang_seconds: a worker that has not reported for so long is given up, mostly sooner: `sweeps.run.crew`.
        grace_seconds: for workers to save, once a stop was asked for.
        progress: called whenever a worker has reported or was given up.
        should_stop: asked several times a second: on true, no new work is given out, workers save what they hold, and
            what has arrived is recorded.
        refusal: why a run may not start beside those in flight; empty if it may. One refused, none starts any more.
        clock: monotonic seconds.

    Raises:
        BudgetSpent: a run was refused, and those in flight then have ended.
        SourceStuck: the source waits for what is not running.
        RunsFail: a run failed for good before any other had ended, or cannot be run at all; it is not recorded.
        PoolDead, DiskFull, StaleDriver: as named; what was recorded stands.
    """
    crew, backlog = Crew(pool, num_slots_for, Leases(hang_seconds), clock), Backlog(num_slots_for)
    driver = Driver(
        source, ledger, study_dir, crew, backlog, bank_key_for,
        steps_per_call=steps_per_call, max_attempts=max_attempts, should_stop=should_stop, refusal=refusal,
    )  # fmt: skip
    drop_stale_checkpoints(study_dir, driver.settled)
    while not should_stop():
        driver.pull()
        driver.hand_out()
        if not driver.has_work():
            return
        if event := driver.collect(POLL_SECONDS):
            progress(event)
    for event in driver.stop(grace_seconds, clock):
        progress(event)
