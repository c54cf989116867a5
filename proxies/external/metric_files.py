"""The metrics that a trainer has logged so far: losses by step, and the first that is not finite.

They are read from JSONL files, TensorBoard event files, or W&B runs. A run may have several files
(ranks, restarts, writers), which are read in the order of their names. If a step was logged twice,
for example after a resume, the last value counts. Standard library only.

TensorBoard's event files are read without TensorBoard. Their frames (TFRecord) have the length in 8
bytes, its masked crc32c, the data, and the data's masked crc32c. The data is an `Event`
(tensorflow/core/util/event.proto): step = 2, summary = 5; Summary.value = 1; Value.tag = 1,
simple_value = 2, tensor = 8; TensorProto.dtype = 1, tensor_content = 4, float_val = 5, double_val =
6.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from proxies.core.canon import parse_deep
from proxies.core.notation import counted
from proxies.core.plain_files import require_plain
from proxies.core.programs import Command
from proxies.core.tables.numerals import to_number
from proxies.external import wire
from proxies.external.growing_file import MAX_NAMES, MAX_PENDING_BYTES, MetricsError, Rows
from proxies.external.wandb_run import WandbRun

# ---- JSONL files ----

# Python's `f"{loss}"` and C's printf write these words. JSON has none of them, and Python's reader
# accepts only NaN and Infinity.
_NON_FINITE_WORD = re.compile(r"(?<=[:,\[\s])([-+]?)(nan|inf|infinity)(?=[,}\]\s])", re.IGNORECASE)


class JsonLines(Rows):
    """A file with one JSON object per line.

    Lines that are not objects are skipped and counted. Nested keys are joined by dots.
    """

    _num_skipped = 0

    def _take(self, rows: list[dict[str, object]]) -> None:
        *lines, self._pending = self._pending.split(b"\n")
        rows += [row for line in lines if (row := self._read_row(line))]
        if len(self._pending) > MAX_PENDING_BYTES:
            raise MetricsError(
                f"no end of line within {MAX_PENDING_BYTES} bytes: this is not a JSONL file"
            )

    def end(self) -> list[dict[str, object]]:
        """Return the row of the last line if it is complete except for its line break."""
        line, self._pending = self._pending, b""
        return [row] if (row := self._read_row(line)) else []

    def _read_row(self, line: bytes) -> dict[str, object]:
        """Return the wanted values of a line; empty if there are none."""
        text = line.decode("utf-8", errors="replace").removeprefix("\ufeff")
        if not text.strip():
            return {}
        value = _parse_line(text)
        if not isinstance(value, dict):
            return self._skip_line()
        try:
            flat = _flatten(value)
        except RecursionError:
            return self._skip_line()
        if len(self.names) < MAX_NAMES:
            self.names.update(name for name, value in flat.items() if not isinstance(value, dict))
        return {name: value for name, value in flat.items() if name in self._wanted}

    def _skip_line(self) -> dict[str, object]:
        """Count a line that is not an object, and return an empty row."""
        self._num_skipped += 1
        are = "is not a JSON object" if self._num_skipped == 1 else "are not JSON objects"
        self.complaint = f"{counted(self._num_skipped, 'line')} {are}"
        return {}


def _parse_line(line: str) -> object:
    """Parse a line of JSON, in which numbers may be nan and inf in any spelling; None if it is not
    JSON.
    """
    try:
        return parse_deep(line)
    except ValueError:
        pass
    try:
        return parse_deep(_NON_FINITE_WORD.sub(_to_json_word, line))
    except ValueError:
        return None


def _to_json_word(match: re.Match[str]) -> str:
    """Return nan or inf in the spelling that Python's JSON reader accepts."""
    return match[1].strip("+") + ("NaN" if match[2][0] in "nN" else "Infinity")


def _flatten(value: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Return the values of a nested object by their path with dots.

    A key that contains dots itself takes precedence over a path.
    """
    flat: dict[str, object] = {}
    for key, child in value.items():
        flat |= _flatten(child, f"{prefix}{key}.") if isinstance(child, dict) else {}
    return flat | {prefix + key: child for key, child in value.items()}


# ---- TensorBoard event files ----

_FLOAT, _DOUBLE = 1, 2  # tensorflow/core/framework/types.proto
_POLYNOMIAL = 0x82F63B78  # Castagnoli polynomial, bits reversed: RFC 3720, section 12.1


def _make_crc_table() -> list[int]:
    """Return the crc32c of each byte."""
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)  # noqa: PLW2901  (the loop is the algorithm)
        table.append(crc)
    return table


_TABLE = _make_crc_table()


def masked_crc32c(data: bytes) -> int:
    """Return TFRecord's checksum: crc32c, rotated right by 15 bits, plus a constant.

    This Python code processes about 10 MB/s.
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class EventFile(Rows):
    """An `events.out.tfevents.*` file; each row has the step under `step_key`."""

    def __init__(self, path: Path, wanted: frozenset[str], step_key: str) -> None:
        super().__init__(path, wanted - {step_key})
        self._step_key = step_key

    def _take(self, rows: list[dict[str, object]]) -> None:
        used = 0
        while len(self._pending) >= used + 12:
            size, crc = struct.unpack_from("<QI", self._pending, used)
            if masked_crc32c(self._pending[used : used + 8]) != crc or size > MAX_PENDING_BYTES:
                raise MetricsError(
                    f"the event at byte {self._at + used} is damaged (its length's checksum)"
                )
            end = used + 12 + size
            if len(self._pending) < end + 4:
                break
            event = self._pending[used + 12 : end]
            (event_crc,) = struct.unpack_from("<I", self._pending, end)
            rows += self._read_rows(event, event_crc, self._at + used)
            used = end + 4
        self._pending, self._at = self._pending[used:], self._at + used

    def _read_rows(self, event: bytes, crc: int, offset: int) -> list[dict[str, object]]:
        """Return the row of an event's scalars; none if it has no wanted ones."""
        if masked_crc32c(event) != crc:
            raise MetricsError(f"the event at byte {offset} is damaged (its checksum does not fit)")
        step, values = 0, dict[str, object]()
        try:
            for number, value in wire.fields(event):
                if number == 2 and isinstance(value, int):
                    step = value
                elif number == 5 and isinstance(value, bytes):
                    values |= self._read_scalars(value)
        except wire.WireError as error:
            raise MetricsError(f"the event at byte {offset} is damaged: {error}") from error
        return [{**values, self._step_key: step}] if values else []

    def _read_scalars(self, summary: bytes) -> dict[str, object]:
        """Return the wanted scalars of a summary, by tag."""
        scalars: dict[str, object] = {}
        for number, value in wire.fields(summary):
            if number != 1 or not isinstance(value, bytes):
                continue
            parts = dict(wire.fields(value))
            tag = parts.get(1, b"")
            name = tag.decode("utf-8", errors="replace") if isinstance(tag, bytes) else ""
            if len(self.names) < MAX_NAMES and {2, 8} & set(parts):
                self.names.add(name)
            if name in self._wanted and isinstance(simple := parts.get(2), bytes):
                scalars[name] = wire.floats(simple, 4)[0]
            elif name in self._wanted and isinstance(tensor := parts.get(8), bytes):
                scalars[name] = _read_scalar(tensor, name)
        return scalars


def _read_scalar(tensor: bytes, name: str) -> float:
    """Return the only number of a float or double tensor."""
    kind, numbers = 0, b""
    for number, value in wire.fields(tensor):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number in (4, 5, 6) and isinstance(value, bytes):
            numbers += value
    if kind not in (_FLOAT, _DOUBLE):
        raise MetricsError(
            f"{name} is a tensor of type {kind}: log it as a float32 or float64 scalar"
        )
    values = wire.floats(numbers, 4 if kind == _FLOAT else 8)
    if len(values) != 1:
        raise MetricsError(
            f"{name} is a tensor of {counted(len(values), 'number')}: must be a scalar"
        )
    return values[0]


# ---- All files of a run ----

READ_BYTES = 2**22
"""Number of bytes that are read from one file at a time, which take about 0.1 s to parse."""
_PATTERNS = {"wandb": "*.wandb", "tensorboard": "*tfevents*"}


@dataclass(kw_only=True, slots=True)
class LoggedMetrics:
    """The metrics of a run, by step as the trainer counts them."""

    train_loss: dict[int, float] = field(default_factory=dict)
    validation_loss: dict[int, float] = field(default_factory=dict)
    grad_norm: dict[int, float] = field(default_factory=dict)
    bad: tuple[int, str] | None = None
    """Step of the first loss that is NaN or infinite, and a sentence about it."""
    nulls: dict[str, int] = field(default_factory=dict)
    """Step of the first null of each loss after its last number, from rows in which every loss is
    null.

    A null alone proves nothing: many loggers write null for a column without a value.
    """

    @property
    def last_step(self) -> int | None:
        """Last step with a loss; None if there is none."""
        return max((*self.train_loss, *self.validation_loss), default=None)

    def steps_done(self, num_steps: int) -> int:
        """Return how many of a run's `num_steps` steps are done, by the last one with a loss."""
        last = self.last_step
        if last is None:
            return 0
        return min(last + counts_from_zero(self.train_loss, num_steps), num_steps)


def counts_from_zero(loss_steps: Collection[int], num_steps: int) -> bool:
    """Return whether a log numbers the first step of a run 0, not 1.

    A log that has a training loss at step 0 and at `num_steps` counts steps done: its first loss
    was measured before the first update.

    Args:
        loss_steps: Steps that have a training loss, as the log numbers them.
        num_steps: Steps of the whole run.
    """
    return 0 in loss_steps and num_steps not in loss_steps


def rows_of(path: Path, wanted: frozenset[str], step_key: str) -> Rows:
    """Return a reader of a log, by the name of the file.

    Args:
        path: Path of the log.
        wanted: Names of the metrics to read.
        step_key: Name under which the step of a TensorBoard event is returned.
    """
    if path.name.endswith(".wandb"):
        return WandbRun(path, wanted)
    if "tfevents" in path.name:
        return EventFile(path, wanted, step_key)
    return JsonLines(path, wanted)


class MetricFiles:
    """All metrics files of a run, which are read on with each call of `read`.

    Args:
        command: The command of the run, with the format and the keys of its metrics.
        path: The JSONL file, or the folder that contains the files of other formats; it may not
            exist yet.
    """

    def __init__(self, command: Command, path: Path) -> None:
        self.path = path
        self._command = command
        keys = (
            command.step_key,
            command.train_loss_key,
            command.validation_loss_key,
            command.grad_norm_key,
        )
        self._wanted = frozenset(key for key in keys if key)
        self._files: dict[Path, tuple[Rows, LoggedMetrics]] = {}
        self._steps: dict[Path, int] = {}
        self._held: dict[Path, set[int]] = {}
        """Steps with a loss that each file contains now."""

    def read(self, max_step: int) -> bool:
        """Read a portion of every file.

        Args:
            max_step: Largest step that the run may log.

        Returns:
            Whether there is more to read.

        Raises:
            MetricsError: A file is damaged, a value is not a number, or a step is above `max_step`.
            OSError: A file cannot be read.
        """
        has_more = False
        for path in self._find_files():
            if path not in self._files:
                self._files[path] = (
                    rows_of(path, self._wanted, self._command.step_key),
                    LoggedMetrics(),
                )
            rows, logged = self._files[path]
            num_beginnings = rows.num_beginnings
            try:
                new_rows = rows.read(READ_BYTES)
                if rows.num_beginnings != num_beginnings:
                    self._held[path] = set()
                for row in new_rows:
                    self._take(path, row, logged, max_step)
            except MetricsError as error:
                raise MetricsError(f"{path.name}: {error}") from error
            has_more |= not rows.at_end
        return has_more

    def end(self, max_step: int) -> None:
        """Read rows that are complete only when the files are finished; raises as `read`."""
        for path, (rows, logged) in self._files.items():
            for row in rows.end():
                self._take(path, row, logged, max_step)

    def logged(self) -> LoggedMetrics:
        """Return the metrics of all files; values of later files replace those of earlier ones."""
        merged = LoggedMetrics()
        for _, (_, metrics) in sorted(self._files.items(), key=lambda file: file[0]):
            merged.train_loss |= metrics.train_loss
            merged.validation_loss |= metrics.validation_loss
            merged.grad_norm |= metrics.grad_norm
            merged.bad = merged.bad or metrics.bad
            # A number in a later file comes after a null in an earlier one.
            losses = {
                self._command.train_loss_key: metrics.train_loss,
                self._command.validation_loss_key: metrics.validation_loss,
            }
            unresolved = {key: step for key, step in merged.nulls.items() if not losses[key]}
            merged.nulls = unresolved | metrics.nulls
        return merged

    def held_steps(self) -> set[int]:
        """Return the steps with a loss that the files contain now, as far as they have been read.

        `logged` also has steps of files that were replaced or deleted.
        """
        steps_by_file = [steps for path, steps in self._held.items() if path.exists()]
        return set[int]().union(*steps_by_file)

    def hint(self) -> str:
        """Describe what the files contain, for the message that something is missing."""
        if not self._files:
            pattern = _PATTERNS.get(self._command.metrics_format, "file")
            return f"there is no {pattern} at {self.path}"
        names = sorted({name for rows, _ in self._files.values() for name in rows.names})
        complaints = [rows.complaint for rows, _ in self._files.values() if rows.complaint]
        return "; ".join([f"{self.path} holds {', '.join(names[:20]) or 'nothing'}", *complaints])

    def _find_files(self) -> list[Path]:
        """Return the files that exist by now, sorted by name."""
        if self._command.metrics_format == "jsonl":
            if not self.path.exists():
                return []
            require_plain(self.path)
            return [self.path]
        return sorted(
            path
            for path in self.path.rglob(_PATTERNS[self._command.metrics_format])
            if path.is_file()
        )

    def _take_nulls(self, row: dict[str, object], logged: LoggedMetrics, step: int) -> None:
        """Record nulls of a row in which every loss is null, and drop those before a number."""
        keys = [
            key
            for key in (self._command.train_loss_key, self._command.validation_loss_key)
            if key in row
        ]
        if all(row[key] is None for key in keys):
            for key in keys:
                logged.nulls.setdefault(key, step)
        for key in keys:
            if row[key] is not None:
                logged.nulls.pop(key, None)

    def _take(
        self, path: Path, row: dict[str, object], logged: LoggedMetrics, max_step: int
    ) -> None:
        """Add the values of a row; a loss without a step belongs to the last step of the file."""
        command = self._command
        if command.step_key in row:
            self._steps[path] = _parse_step(row[command.step_key], command.step_key, max_step)
        losses = {
            command.train_loss_key: logged.train_loss,
            command.validation_loss_key: logged.validation_loss,
        }
        units = {
            command.train_loss_key: command.train_loss_unit,
            command.validation_loss_key: command.validation_loss_unit,
        }
        if not {*losses, command.grad_norm_key} & row.keys():
            return
        if path not in self._steps:
            raise MetricsError(
                f"{', '.join(row)} without a step: {command.step_key!r} is not in it"
            )
        step = self._steps[path]
        self._take_nulls(row, logged, step)
        for key, series in losses.items():
            value = _parse_number(row.get(key), key, step)
            if value is None:
                continue
            if not math.isfinite(value):
                logged.bad = logged.bad or (
                    step,
                    f"{key} is {'NaN' if math.isnan(value) else value} at step {step}",
                )
            elif value < 0:
                raise MetricsError(f"{key} is {value:g} at step {step}: a loss must be at least 0")
            else:
                self._held.setdefault(path, set()).add(step)
                series[step] = value * command.nats_per_unit(units[key])
        norm = _parse_number(row.get(command.grad_norm_key), command.grad_norm_key, step)
        if norm is not None and math.isfinite(norm):
            logged.grad_norm[step] = norm


MAX_LOSS_RATIO = 1.33
"""Maximum ratio of a validation loss to the training loss near it, or the reverse, if both have the
same unit; bits are 1.44 times nats."""
UNIT_KEYS = (
    "proxy.metrics_train_loss_unit, proxy.metrics_validation_loss_unit (nats, bits, bits per byte)"
)
"""Keys of a plan that declare the units of logged losses, for messages."""


def units_agree(training: float, validation: float) -> bool:
    """Return whether two losses of one run may have the same unit: they have a similar size."""
    low, high = sorted((training, validation))
    # Near zero the ratio has no meaning.
    return high <= MAX_LOSS_RATIO * low or high - low < 0.3


def _parse_step(value: object, key: str, max_step: int) -> int:
    step = to_number(value)
    if step is None or not step.is_integer() or step < 0:
        raise MetricsError(f"{key} is {_format_logged(value)}: must be a whole number of steps")
    if step > max_step:
        raise MetricsError(
            f"{key} is {value!s:.20}, but the run has {counted(max_step, 'optimizer step')}: log "
            "optimizer steps under this key, and make the trainer obey {num_steps}"
        )
    return int(step)


def _parse_number(value: object, key: str, step: int) -> float | None:
    """Return a logged value as a float; None for null, a column without a value."""
    number = to_number(value)
    if number is None and value is not None:
        raise MetricsError(f"{key} is {_format_logged(value)} at step {step}: must be a number")
    return number


def _format_logged(value: object) -> str:
    """Return a value as it is written in its log, truncated for a message."""
    return f"{json.dumps(value, ensure_ascii=False, default=repr):.80}"
