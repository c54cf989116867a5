"""The metrics file of a main run, `metrics.jsonl`, and the record of how its last attempt ended.

Lines are appended. Each line is strict JSON: a step, or an event.

A step's line has `train_loss_nats`: `step` (number of completed steps), `train_loss_nats` (before
that step's update), `grad_norm` (before clipping), `lr` (of the first group), `tokens` (seen so
far), `tokens_per_second`, `seconds` (of that step). These keys are present if they are known: `mfu`
(share of the header's `peak_flops_per_second`), `clip_norm` (in force), `validation_loss_nats`
(after the update), `rank_seconds` (compute time of each rank, without the wait for the others),
`noise_scale_tokens`, `noise_scale_low_tokens`, `noise_scale_high_tokens` (gradient noise scale of
the last thousand steps with its 90 % interval, for runs that accumulate gradients or have several
ranks; a bound that is not known is left out), `layers` (name of a layer -> `weight_rms`,
`param_norm`, `grad_norm`, `update_ratio`).

Any other line has `event` and the `step` after which it happened: `started` (an `AttemptStart`, the
first line of every attempt), `saved` (`seconds`; the run waited for `wait_seconds` of them),
`replayed` (`difference`; the event is about the step whose line follows), `rolled_back` (`number`,
`to_step`, `skipped_sequences`, `clip_norm`, `reason`), and `AttemptEnd`, the last line of an
attempt that ended in order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.plain_files import open_plain, open_to_append, read_plain
from forerun._proxies.external.growing_file import GrowingFile

# ---- Following a file that grows ----

_PORTION_BYTES = 8 * 2**20
"""Maximum number of bytes that are read at once."""
_MAX_LINE_BYTES = 64 * 2**20
"""Maximum length of a line; the pending part of a longer one is dropped."""


class MetricsFollower:
    """A reader of a run's `metrics.jsonl` that continues where it stopped, also after the file is
    rewound.

    An incomplete line waits for its end. Lines that are not JSON objects are skipped.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = GrowingFile(run_dir / METRICS_FILE)
        self._pending = b""

    @property
    def at_end(self) -> bool:
        """Whether everything in the file has been read."""
        return self._file.at_end

    def read(self) -> tuple[list[dict[str, Json]], bool]:
        """Return the next lines, and whether they are the first of the file.

        The latter is true at the first call, and after the file was replaced, usually by a shorter
        one.

        Raises:
            OSError: The file cannot be read. A missing file counts as empty.
        """
        data, begins = self._file.read(_PORTION_BYTES)
        if begins:
            self._pending = b""
        *complete_lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _MAX_LINE_BYTES:
            self._pending = b""
        return _parse_lines(complete_lines), begins

    def read_to_end(self) -> Iterator[tuple[list[dict[str, Json]], bool]]:
        """Yield the results of `read` until everything in the file has been read."""
        yield self.read()
        while not self.at_end:
            yield self.read()


class RecordedSteps:
    """Steps and saves that a run's metrics file records, updated while the file grows."""

    def __init__(self) -> None:
        self.last = 0
        """Last step that has a line."""
        self.saves: list[int] = []
        """Steps of the recorded saves, oldest first."""
        self._gaps: list[range] = []

    def add_lines(self, lines: list[dict[str, Json]], *, begins: bool) -> None:
        """Add lines from `MetricsFollower.read`. If `begins` is set, they are the first lines of a
        replaced file, and earlier lines are forgotten.
        """
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
        """Return the ranges of steps without a line, from step 1 to the last recorded step, or to
        `last_step` if it is larger.
        """
        return self._gaps + ([range(self.last + 1, last_step + 1)] if last_step > self.last else [])


def read_recorded_steps(run_dir: Path) -> RecordedSteps:
    """Return the steps and saves that a run's metrics file records now."""
    recorded = RecordedSteps()
    for lines, begins in MetricsFollower(run_dir).read_to_end():
        recorded.add_lines(lines, begins=begins)
    return recorded


def _parse_lines(lines: list[bytes]) -> list[dict[str, Json]]:
    """Return the JSON objects of lines; other lines are skipped."""
    objects = []
    for line in lines:
        with contextlib.suppress(canon.CanonError):
            if isinstance(value := canon.parse(line), dict):
                objects.append(value)
    return objects


# ---- Records ----

METRICS_FILE = "metrics.jsonl"
ENDING_FILE = "ending.json"
SCHEMA_VERSION = 1
EndingEvent = Literal["finished", "stopped", "interrupted", "aborted", "refused"]
ENDINGS: tuple[EndingEvent, ...] = get_args(EndingEvent)
"""Events that end an attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStart:
    """First line of an attempt, its header: the launch config and the machine of the lines below
    it.
    """

    event: Literal["started"] = "started"
    schema_version: int = SCHEMA_VERSION
    digest: str
    """Digest of the launch config; a reader that follows another config reports it."""
    step: int
    """Number of completed steps when this attempt began."""
    started_at: str
    """Start of the attempt: UTC, ISO 8601."""
    num_ranks: int
    device: str
    """Name of the device as torch reports it, or `cpu`."""
    model_flops_per_token: float
    """FLOPs per token of forward and backward pass, by convention `causal` of
    `forerun._proxies.core.flops`; MFU counts these.
    """
    peak_flops_per_second: float | None
    """Peak of one rank's device at the run's precision, from the maker's data sheet; None if it is
    not known, and then there is no MFU.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """The way one attempt at a run ended. An attempt that was killed or crashed leaves no such
    record.
    """

    event: EndingEvent
    """The reason for the end: the end of the schedule, the requested step, a signal, the run's own
    abort policy; or the attempt never started.
    """
    exit_code: int
    step: int
    """Number of completed optimizer steps; 0 if refused."""
    reason: str = ""
    validation_loss_nats: float | None = None
    """Validation loss in nats; None unless the event is `finished` or `stopped`."""


def find_not_finite(columns: Json, name: str = "") -> str:
    """Return the path and value of the first number in `columns` that is NaN or infinite; empty if
    there is none.

    Args:
        columns: A line of metrics, or a part of one.
        name: Path of that part within the line.
    """
    if isinstance(columns, float):
        return "" if math.isfinite(columns) else f"{name} is {columns}"
    parts = (
        columns.items()
        if isinstance(columns, dict)
        else enumerate(columns)
        if isinstance(columns, list)
        else ()
    )
    messages = (find_not_finite(part, f"{name}.{key}" if name else str(key)) for key, part in parts)
    return next(filter(None, messages), "")


def append_line(run_dir: Path, record: object) -> None:
    """Append one line to the run's metrics file.

    Raises:
        CanonError: A number in the record is not finite.
    """
    line = canon.to_canonical_json(record) + "\n"
    # The folder may have been removed: the supervisor notices, and the run still saves.
    run_dir.mkdir(parents=True, exist_ok=True)
    with open_to_append(run_dir / METRICS_FILE) as file:
        file.write(line.encode())


def read_lines(run_dir: Path) -> list[dict[str, Json]]:
    """Return the lines of the run's metrics file. A line that a killed run left half-written is
    skipped.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    with open_plain(path) as file:  # `read_plain` has a limit that a long run may exceed
        return _parse_lines(file.read().splitlines())


def rewind_metrics(run_dir: Path, step: int) -> None:
    """Drop what a run that resumes after `step` steps will write again: lines of later steps, later
    events, and the ends of earlier attempts.
    """
    kept = [
        line
        for line in read_lines(run_dir)
        if line.get("event") not in ENDINGS
        and isinstance(at := line.get("step"), int)
        and at <= step
    ]
    content = "".join(canon.to_canonical_json(record) + "\n" for record in kept)
    canon.write_atomic(run_dir / METRICS_FILE, content.encode())


def write_ending(run_dir: Path, ending: AttemptEnd) -> None:
    """Record the end of an attempt for the supervisor. A refused attempt does not add a line to the
    run's metrics.
    """
    if ending.event != "refused":
        append_line(run_dir, ending)
    canon.write_atomic(run_dir / ENDING_FILE, canon.to_pretty_json(ending))


def read_ending(run_dir: Path) -> AttemptEnd | None:
    """Return how the last attempt ended; None if it did not record its end.

    Raises:
        CanonError: The file is not one of forerun's.
    """
    path = run_dir / ENDING_FILE
    return canon.decode(AttemptEnd, canon.parse(read_plain(path))) if path.exists() else None
