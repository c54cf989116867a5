"""What a main run leaves for its readers: `metrics.jsonl`, appended line by line, and how the last attempt ended.

A line is strict JSON, of one of two kinds.

A step's line has `train_loss_nats`:
`step` (steps done), `train_loss_nats` (before that step's update), `grad_norm` (before clipping), `lr` (of the first
group), `tokens` (seen so far), `tokens_per_second`, `seconds` (of that step); and where they are known
`mfu` (share of the peak of the header's `peak_flops_per_second`), `clip_norm` (in force),
`validation_loss_nats` (after the update), `rank_seconds` (compute time of each rank, before it waits for the others),
`noise_scale_tokens`, `noise_scale_low_tokens`, `noise_scale_high_tokens` (the gradient noise scale of the last thousand
steps with its 90 % interval, of runs that accumulate or have several ranks; what cannot be told is not there),
`layers` (name of a layer -> `weight_rms`, `param_norm`, `grad_norm`, `update_ratio`).

Any other line has `event` and the `step` after which it came: `started` (a `Header`: the first line of every attempt),
`saved` (`seconds`, of which the run waited `wait_seconds`), `replayed` (`difference`; of that very step, whose
line follows), `rolled_back` (`number`, `to_step`, `skipped_sequences`, `clip_norm`, `reason`), and the last line of an
attempt that ended in order, its `AttemptEnd`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.plain_files import open_plain, open_to_append, read_plain
from proxies.external.growing_file import GrowingFile

# A run's `metrics.jsonl`, followed while it is written, also over rewinds. Standard library only.

_PORTION_BYTES = 8 * 2**20
_MAX_LINE_BYTES = 64 * 2**20
"""A longer line is none: what is pending of it is dropped."""


class Following:
    """Reads on where it stopped; lines that are not whole wait for their rest, lines that are none are skipped."""

    def __init__(self, run_dir: Path) -> None:
        self._file = GrowingFile(run_dir / METRICS_FILE)
        self._pending = b""

    @property
    def at_end(self) -> bool:
        """Whether all that was there has been read."""
        return self._file.at_end

    def read(self) -> tuple[list[dict[str, Json]], bool]:
        """The next lines, and whether they are the file's first: it was replaced, by a shorter one as a rule.

        Raises:
            OSError: it cannot be read; a file that is not there yet is empty.
        """
        data, begins = self._file.read(_PORTION_BYTES)
        if begins:
            self._pending = b""
        *whole, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _MAX_LINE_BYTES:
            self._pending = b""
        return [value for line in whole if isinstance(value := _parsed(line), dict)], begins


class RecordedSteps:
    """The steps and the saves that a run's metrics hold, read on as the file grows."""

    def __init__(self) -> None:
        self.last = 0
        """Last step that has a line."""
        self.saves: list[int] = []
        """Steps of the saves that are reported, oldest first."""
        self._gaps: list[range] = []

    def take(self, lines: list[dict[str, Json]], *, begins: bool) -> None:
        """Add lines as `Following.read` returns them; the first lines of a replaced file begin anew."""
        if begins:
            self.last, self.saves, self._gaps = 0, [], []
        for line in lines:
            step = line.get("step")
            if not isinstance(step, int):
                continue
            if line.get("event") == "saved":
                self.saves.append(step)
            elif "train_loss_nats" in line:
                if step > self.last + 1:
                    self._gaps.append(range(self.last + 1, step))
                self.last = max(self.last, step)

    def find_gaps(self, last_step: int = 0) -> list[range]:
        """Return the steps without a line, from the first step to the last that has one, or to `last_step`."""
        return self._gaps + ([range(self.last + 1, last_step + 1)] if last_step > self.last else [])


def read_recorded(run_dir: Path) -> RecordedSteps:
    """Return what the metrics of a run hold now."""
    recorded, following = RecordedSteps(), Following(run_dir)
    while True:
        lines, begins = following.read()
        recorded.take(lines, begins=begins)
        if following.at_end:
            return recorded


def _parsed(line: bytes) -> Json:
    try:
        return canon.parse(line)
    except canon.CanonError:
        return None


METRICS_FILE = "metrics.jsonl"
ENDING_FILE = "ending.json"
SCHEMA_VERSION = 1
ENDINGS = ("finished", "stopped", "interrupted", "aborted", "refused")
"""Events that end an attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What the lines below belong to, and the machine they were made on."""

    event: Literal["started"] = "started"
    schema_version: int = SCHEMA_VERSION
    digest: str
    """The launch config's: a reader that follows another one says so."""
    step: int
    """Steps done when this attempt began."""
    started_at: str
    """UTC, ISO 8601."""
    num_ranks: int
    device: str
    """As torch names it; `cpu`."""
    model_flops_per_token: float
    """Forward and backward, convention `causal` of `proxies.core.flops`: what MFU counts."""
    peak_flops_per_second: float | None
    """Peak of one rank's device at the run's precision, as its maker names it; None: not known, and no MFU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """How an attempt at a run ended. A killed or crashed one leaves none."""

    event: Literal["finished", "stopped", "interrupted", "aborted", "refused"]
    """The schedule's end; the asked-for step; a signal; the run's own brake; or it never started."""
    exit_code: int
    step: int
    """Optimizer steps done; 0 when refused."""
    reason: str = ""
    validation_loss_nats: float | None = None
    """Only of `finished` and `stopped`."""


def not_finite(columns: canon.Json, name: str = "") -> str:
    """The first number in the columns of a line that is NaN or infinite, with its path; empty where there is none."""
    if isinstance(columns, float):
        return "" if math.isfinite(columns) else f"{name} is {columns}"
    parts = columns.items() if isinstance(columns, dict) else enumerate(columns) if isinstance(columns, list) else ()
    told = (not_finite(part, f"{name}.{key}" if name else str(key)) for key, part in parts)
    return next(filter(None, told), "")


def append(run_dir: Path, record: object) -> None:
    """Add one line.

    Raises:
        CanonError: a number in it is not finite.
    """
    line = canon.canonical(record) + "\n"
    run_dir.mkdir(parents=True, exist_ok=True)  # it may have been removed: the supervisor notices, the run saves
    with open_to_append(run_dir / METRICS_FILE) as file:
        file.write(line.encode())


def read(run_dir: Path) -> list[dict[str, canon.Json]]:
    """The lines there are; what a killed run left half-written is skipped."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    with open_plain(path) as file:
        lines = file.read().splitlines()
    return [value for line in lines if isinstance(value := _parsed(line), dict)]


def rewind(run_dir: Path, step: int) -> None:
    """Drop what a run resumed after `step` steps will write anew: later steps and events, and earlier endings."""
    kept = [
        line
        for line in read(run_dir)
        if line.get("event") not in ENDINGS and isinstance(at := line.get("step"), int) and at <= step
    ]
    content = "".join(canon.canonical(record) + "\n" for record in kept)
    canon.write_atomic(run_dir / METRICS_FILE, content.encode())


def write_ending(run_dir: Path, ending: AttemptEnd) -> None:
    """Tell the supervisor; a refused attempt leaves the run's own metrics alone."""
    if ending.event != "refused":
        append(run_dir, ending)
    canon.write_atomic(run_dir / ENDING_FILE, canon.pretty(ending))


def read_ending(run_dir: Path) -> AttemptEnd | None:
    """How the last attempt ended, None if it did not get so far.

    Raises:
        CanonError: the file is not one of ours.
    """
    path = run_dir / ENDING_FILE
    return canon.decode(AttemptEnd, canon.parse(read_plain(path))) if path.exists() else None
