"""What the driver is doing right now, for whoever looks on: `live.json`, rewritten about once a
second.

No record: it is never durable, never trusted, and a study without it is whole. What a killed driver
had spent is read from it by the next one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from proxies.core import canon
from proxies.core.checks import Checks, SpecError
from proxies.core.plain_files import read_plain, require_plain
from proxies.core.spec import Run
from sweeps.store.lock import lives


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningRun:
    """A run in a slot of a worker, as last heard of."""

    run_id: str
    worker: int
    step: int
    """Optimizer steps done."""
    num_steps: int
    """Steps of the whole run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverProgress:
    """What happened since the last call, and how things stand."""

    outcomes: tuple[Run, ...]
    """Just recorded."""
    lost: tuple[str, ...]
    """A text for every worker just lost: why, what its log said last, what to do."""
    notes: tuple[str, ...]
    """Sentences of workers: a checkpoint gone on from, or put aside."""
    running: tuple[RunningRun, ...]
    """In the slots of all workers, by worker."""
    num_queued: int
    """Known and waiting for a slot; a search may bring more."""


LIVE_NAME = "live.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyState:
    """How far a driver is with all that it was asked to do, not this stage alone."""

    done: float
    """Share of the FLOPs of all stages, below 1 until all has ended."""
    stage: str
    """check, sweep, transfer, ladder, or fit: fits, verdicts and the report."""
    number: int
    """Of the stage, from 1."""
    num_stages: int
    left_low_seconds: float | None
    """Of the range in which the time left lies; None: cannot tell yet."""
    left_high_seconds: float | None
    best_loss_nats: float | None
    """The lowest validation loss of any run of the study's own parametrization; None before one has
    finished."""
    best_learning_rate: float | None
    """Of that run."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.number("done", least=0, most=1)
        checks.whole("number", "num_stages")
        for name in (
            "left_low_seconds",
            "left_high_seconds",
            "best_loss_nats",
            "best_learning_rate",
        ):
            if getattr(self, name) is not None:
                checks.number(name, least=0)
        alone = (self.best_loss_nats is None) != (self.best_learning_rate is None)
        checks.that(
            not alone, "best_loss_nats and best_learning_rate must both be there, or neither"
        )
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverState:
    """One look at a driver at work."""

    driver: int
    """Its number in the ledger."""
    pid: int
    born: str
    """See `sweeps.store.lock.born`."""
    host: str
    stage: str
    stretch: int
    """How often it has written down what its work took."""
    seconds: float
    """Since then, in no record yet."""
    device_seconds: float
    left_seconds: float | None
    """What is left of the runs that are known, at the rate so far; None before anything has
    ended."""
    study: StudyState
    num_queued: int
    running: tuple[RunningRun, ...]
    at: str
    """Time of writing, a label."""
    by_kind: dict[str, float] = field(default_factory=dict)
    """`device_seconds` by kind of device (`sweeps.run.kinds`)."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("driver", "stretch", "num_queued", least=0)
        checks.whole("pid")
        for name in (
            "seconds",
            "device_seconds",
            *(() if self.left_seconds is None else ("left_seconds",)),
        ):
            checks.number(name, least=0)
        checks.done()

    @property
    def at_work(self) -> bool | None:
        """Whether that process lives; None if it is on another host."""
        return lives(self.host, self.pid, self.born)


def write_live(study_dir: Path, live: DriverState) -> None:
    """Replace the file, if there is room; nobody waits for it."""
    path = study_dir / LIVE_NAME
    scratch = path.with_suffix(".tmp")
    with contextlib.suppress(OSError):
        scratch.unlink(missing_ok=True)  # to open a pipe would wait
        scratch.write_text(canon.canonical(live), encoding="utf-8")
        scratch.replace(path)


def read_live(study_dir: Path) -> DriverState | None:
    """The last look; None if there is none that can be read.

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
