"""What a main run leaves for its readers: `metrics.jsonl`, appended step by step, and how the last attempt ended.

A line of metrics is strict JSON. One per optimizer step:
`step` (steps done), `train_loss_nats` (before that step's update), `grad_norm` (before clipping), `lr` (of the first
group), `tokens` (seen so far), `tokens_per_second`, `seconds` (of that step).
The last line of an attempt that ended in order is its ending: `event`, `step`, `reason`, `validation_loss_nats`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from proxies import canon

METRICS_FILE = "metrics.jsonl"
ENDING_FILE = "ending.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How an attempt at a run ended. A killed or crashed one leaves none."""

    event: Literal["finished", "stopped", "interrupted", "aborted", "refused"]
    """The schedule's end; the asked-for step; a signal; the run's own brake; or it never started."""
    exit_code: int
    step: int
    """Optimizer steps done; 0 when refused."""
    reason: str = ""
    validation_loss_nats: float | None = None
    """Only of `finished` and `stopped`."""


def append(run_dir: Path, record: object) -> None:
    """Add one line."""
    with (run_dir / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(canon.canonical(record) + "\n")


def read(run_dir: Path) -> list[dict[str, canon.Json]]:
    """The lines there are; what a killed run left half-written is skipped."""
    path = run_dir / METRICS_FILE
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            value = canon.parse(line)
        except canon.CanonError:
            continue
        if isinstance(value, dict):
            records.append(value)
    return records


def rewind(run_dir: Path, step: int) -> None:
    """Drop what a run resumed after `step` steps will write anew: later steps, and earlier endings."""
    kept = [r for r in read(run_dir) if "event" not in r and isinstance(at := r.get("step"), int) and at <= step]
    content = "".join(canon.canonical(record) + "\n" for record in kept)
    canon.write_atomic(run_dir / METRICS_FILE, content.encode())


def write_ending(run_dir: Path, ending: Ending) -> None:
    """Tell the supervisor; a refused attempt leaves the run's own metrics alone."""
    if ending.event != "refused":
        append(run_dir, ending)
    canon.write_atomic(run_dir / ENDING_FILE, canon.pretty(ending))


def read_ending(run_dir: Path) -> Ending | None:
    """How the last attempt ended, None if it did not get so far.

    Raises:
        CanonError: the file is not one of ours.
    """
    path = run_dir / ENDING_FILE
    return canon.decode(Ending, canon.parse(path.read_bytes())) if path.exists() else None
