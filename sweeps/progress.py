"""What the driver says while it works. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from proxies.spec import RunResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A run in a slot of a worker, as last heard of."""

    run_id: str
    worker: int
    step: int
    """Optimizer steps done."""
    num_steps: int
    """Of the whole run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What happened since the last call, and how things stand."""

    outcomes: tuple[RunResult, ...]
    """Just recorded."""
    lost: tuple[str, ...]
    """A text for every worker just lost: why, what its log said last, what to do."""
    notes: tuple[str, ...]
    """Sentences of workers: a checkpoint gone on from, or put aside."""
    running: tuple[Running, ...]
    """In the slots of all workers, by worker."""
    num_queued: int
    """Known and waiting for a slot; a search may bring more."""
