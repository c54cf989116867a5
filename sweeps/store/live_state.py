"""Reports of a driver at work: its progress events, and its current state in `live.json`, which is
rewritten about once a second for people and programs that watch the study.

The file is not a record: it is not durable, and a study without it is complete. The next driver
reads from it what a killed driver had spent.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from forerun._proxies.core import canon
from forerun._proxies.core.checks import Checks, SpecError
from forerun._proxies.core.plain_files import read_plain, require_plain
from forerun._proxies.core.spec import Run
from forerun._sweeps.store.lock import is_alive


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningRun:
    """A run in a slot of a worker, as last reported."""

    run_id: str
    worker: int
    step: int
    """Optimizer steps done."""
    num_steps: int
    """Optimizer steps of the whole run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverProgress:
    """Events since the last call of `progress`, and the current state."""

    outcomes: tuple[Run, ...]
    """Runs whose outcomes were just recorded."""
    failures: tuple[str, ...]
    """A message for every worker or run whose attempt just failed: the cause, the last lines of
    the log, and what to do.
    """
    notes: tuple[str, ...]
    """Notes of workers: a checkpoint that was resumed from, or set aside."""
    running: tuple[RunningRun, ...]
    """Runs in the slots of all workers, by worker."""
    num_queued: int
    """Number of known runs that wait for a slot; a search may add more."""


LIVE_NAME = "live.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyState:
    """Progress of a driver over all stages that it was asked for."""

    done: float
    """Share of the FLOPs of all stages, below 1 until all stages have ended."""
    stage: str
    """Name of the stage: check, sweep, transfer, ladder, or fit (fits, verdicts and the report)."""
    number: int
    """Number of the stage, from 1."""
    num_stages: int
    left_low_seconds: float | None
    """Lower end of the interval of the time left, in seconds; None if it is not known yet."""
    left_high_seconds: float | None
    best_loss_nats: float | None
    """Lowest validation loss of any run of the study's own parametrization, in nats; None before
    one has finished.
    """
    best_learning_rate: float | None
    """Learning rate of the run with `best_loss_nats`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverState:
    """One snapshot of a driver at work."""

    driver: int
    """Number of the driver in the ledger."""
    pid: int
    born: str
    """Start of the process, as `forerun._sweeps.store.lock.get_process_start` returns it."""
    host: str
    stage: str
    stretch: int
    """Number of times that the driver has recorded its spend."""
    seconds: float
    """Seconds of work since the last such record; not recorded yet."""
    device_seconds: float
    left_seconds: float | None
    """Estimated seconds until the known runs have ended, at the rate so far; None before a run has
    ended.
    """
    study: StudyState
    num_queued: int
    running: tuple[RunningRun, ...]
    at: str
    """Time of writing, for people."""
    by_kind: dict[str, float] = field(default_factory=dict)
    """`device_seconds` by kind of device (`forerun._sweeps.run.device_kinds`)."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole("driver", "stretch", "num_queued", least=0)
        checks.require_whole("pid")
        # The next driver adds these to the spend if this driver was killed
        for name in ("seconds", "device_seconds"):
            checks.require_number(name, least=0)
        checks.raise_problems()

    @property
    def is_at_work(self) -> bool | None:
        """Whether the driver's process is alive; None if it is on another host."""
        return is_alive(self.host, self.pid, self.born)


def write_live(study_dir: Path, live: DriverState) -> None:
    """Replace the file, if there is room for it; failures are ignored."""
    path = study_dir / LIVE_NAME
    scratch = path.with_suffix(".tmp")
    with contextlib.suppress(OSError):
        scratch.unlink(missing_ok=True)  # opening a pipe would block
        scratch.write_text(canon.to_canonical_json(live), encoding="utf-8")
        scratch.replace(path)


def read_live(study_dir: Path) -> DriverState | None:
    """Return the last snapshot; None if there is none that can be read.

    Raises:
        OSError: the file is a pipe, socket, device or folder.
    """
    path = study_dir / LIVE_NAME
    with contextlib.suppress(FileNotFoundError):
        require_plain(path)
    try:
        return canon.decode(DriverState, canon.parse(read_plain(path)))
    except (OSError, canon.CanonError, SpecError):
        return None
