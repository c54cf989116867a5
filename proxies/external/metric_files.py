"""The metrics that a trainer has logged so far: losses and gradient norms by step.

The metrics are read from JSONL files, TensorBoard event files, or W&B runs. A run may have several
files (ranks, restarts, writers), which are read in the order of their names. If a step was logged
twice, for example after a resume, the last value counts. The module also tells whether two losses
may have the same unit. It and the modules of forerun that it imports need only the standard
library.

TensorBoard's event files are read without TensorBoard. Their frames (TFRecord) have the length in 8
bytes, its checksum, the data, and the data's checksum; the checksums are not verified. The data is
an `Event` (tensorflow/core/util/event.proto): step = 2, summary = 5; Summary.value = 1; Value.tag =
1, simple_value = 2, tensor = 8; TensorProto.dtype = 1, tensor_content = 4, float_val = 5,
double_val = 6.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import require_plain
from forerun._proxies.core.programs import Command
from forerun._proxies.core.tables.numerals import to_number
from forerun._proxies.external import protocol_buffers
from forerun._proxies.external.growing_file import (
    MAX_NAMES,
    MAX_PENDING_BYTES,
    MetricsError,
    RowReader,
)
from forerun._proxies.external.wandb_run import WandbRun

# ---- JSONL files ----

# Python's `f"{loss}"` and C's printf write these words. JSON has none of them, and Python's reader
# accepts only NaN and Infinity.
_NON_FINITE_WORD = re.compile(r"(?<=[:,\[\s])([-+]?)(nan|inf|infinity)(?=[,}\]\s])", re.IGNORECASE)


class JsonLines(RowReader):
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
        """Return the requested values of a line; empty if there are none."""
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
        return {name: value for name, value in flat.items() if name in self._metric_names}

    def _skip_line(self) -> dict[str, object]:
        """Count a line that is not an object, and return an empty row."""
        self._num_skipped += 1
        are = "is not a JSON object" if self._num_skipped == 1 else "are not JSON objects"
        self.complaint = f"{format_counted(self._num_skipped, 'line')} {are}"
        return {}


def _parse_line(line: str) -> object:
    """Parse a line of JSON, in which numbers may be nan and inf in any spelling; None if it is not
    JSON.
    """
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(_NON_FINITE_WORD.sub(_to_json_word, line))
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

_LENGTH_BYTES, _CRC_BYTES = 12, 4
"""Sizes of a frame's length with its checksum, and of the checksum of its data."""
_FLOAT, _DOUBLE = 1, 2  # tensorflow/core/framework/types.proto


class EventFile(RowReader):
    """An `events.out.tfevents.*` file; each row has the step under `step_key`."""

    def __init__(self, path: Path, metric_names: frozenset[str], step_key: str) -> None:
        super().__init__(path, metric_names - {step_key})
        self._step_key = step_key

    def _take(self, rows: list[dict[str, object]]) -> None:
        used = 0
        while len(self._pending) >= used + _LENGTH_BYTES:
            (size,) = struct.unpack_from("<Q", self._pending, used)
            if size > MAX_PENDING_BYTES:
                raise MetricsError(
                    f"the event at byte {self._offset + used} is damaged (its length)"
                )
            start = used + _LENGTH_BYTES
            if len(self._pending) < start + size + _CRC_BYTES:
                break
            try:
                rows += self._read_rows(self._pending[start : start + size])
            except protocol_buffers.WireError as error:
                raise MetricsError(
                    f"the event at byte {self._offset + used} is damaged: {error}"
                ) from error
            used = start + size + _CRC_BYTES
        self._pending, self._offset = self._pending[used:], self._offset + used

    def _read_rows(self, event: bytes) -> list[dict[str, object]]:
        """Return the row of an event's requested scalars, in a list; empty if it has none."""
        step, values = 0, dict[str, object]()
        for number, value in protocol_buffers.read_fields(event):
            if number == 2 and isinstance(value, int):
                step = value
            elif number == 5 and isinstance(value, bytes):
                values |= self._read_scalars(value)
        return [{**values, self._step_key: step}] if values else []

    def _read_scalars(self, summary: bytes) -> dict[str, object]:
        """Return the requested scalars of a summary, by tag."""
        scalars: dict[str, object] = {}
        for number, value in protocol_buffers.read_fields(summary):
            if number != 1 or not isinstance(value, bytes):
                continue
            parts = dict(protocol_buffers.read_fields(value))
            tag = parts.get(1, b"")
            name = tag.decode("utf-8", errors="replace") if isinstance(tag, bytes) else ""
            if len(self.names) < MAX_NAMES and {2, 8} & set(parts):
                self.names.add(name)
            if name in self._metric_names and isinstance(simple := parts.get(2), bytes):
                scalars[name] = protocol_buffers.unpack_floats(simple, 4)[0]
            elif name in self._metric_names and isinstance(tensor := parts.get(8), bytes):
                scalars[name] = _read_scalar(tensor, name)
        return scalars


def _read_scalar(tensor: bytes, name: str) -> float:
    """Return the only number of a float or double tensor."""
    kind, numbers = 0, b""
    for number, value in protocol_buffers.read_fields(tensor):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number in (4, 5, 6) and isinstance(value, bytes):
            numbers += value
    if kind not in (_FLOAT, _DOUBLE):
        raise MetricsError(
            f"{name} is a tensor of type {kind}: log it as a float32 or float64 scalar"
        )
    values = protocol_buffers.unpack_floats(numbers, 4 if kind == _FLOAT else 8)
    if len(values) != 1:
        raise MetricsError(
            f"{name} is a tensor of {format_counted(len(values), 'number')}: must be a scalar"
        )
    return values[0]


# ---- All files of a run ----

READ_BYTES = 2**22
"""Number of bytes that are read from one file at a time, which take about 0.1 s to parse."""
_PATTERNS = {"wandb": "*.wandb", "tensorboard": "*tfevents*"}


@dataclass(kw_only=True, slots=True)
class LoggedMetrics:
    """The metrics of a run in nats per token, by step as the trainer counts steps."""

    train_loss: dict[int, float] = field(default_factory=dict)
    validation_loss: dict[int, float] = field(default_factory=dict)
    grad_norm: dict[int, float] = field(default_factory=dict)
    first_nonfinite: tuple[int, str] | None = None
    """Step of the first loss that is NaN or infinite, and a sentence about it."""
    null: tuple[int, str] | None = None
    """Step and name of the first null loss after the last number, from rows in which every loss is
    null.

    A null alone proves nothing: many loggers write null for a column without a value.
    """

    @property
    def last_step(self) -> int | None:
        """Last step with a loss; None if there is none."""
        return max((*self.train_loss, *self.validation_loss), default=None)

    def count_steps_done(self, num_steps: int) -> int:
        """Return how many of a run's `num_steps` steps are done, by the last step with a loss."""
        last = self.last_step
        if last is None:
            return 0
        return min(last + is_counted_from_zero(self.train_loss, num_steps), num_steps)


def is_counted_from_zero(loss_steps: Collection[int], num_steps: int) -> bool:
    """Return whether a log numbers the first step of a run 0, not 1.

    A log that has a training loss at step 0 and at `num_steps` counts steps done: its first loss
    was measured before the first update.

    Args:
        loss_steps: Steps that have a training loss, as the log numbers them.
        num_steps: Steps of the whole run.
    """
    return 0 in loss_steps and num_steps not in loss_steps


def open_rows(path: Path, metric_names: frozenset[str], step_key: str) -> RowReader:
    """Return a reader of a log, by the name of the file.

    Args:
        path: Path of the log.
        metric_names: Names of the metrics to read.
        step_key: Name under which the step of a TensorBoard event is returned.
    """
    if path.name.endswith(".wandb"):
        return WandbRun(path, metric_names)
    if "tfevents" in path.name:
        return EventFile(path, metric_names, step_key)
    return JsonLines(path, metric_names)


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
        self._metric_names = frozenset(key for key in keys if key)
        self._files: dict[Path, _MetricFile] = {}

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
                rows = open_rows(path, self._metric_names, self._command.step_key)
                self._files[path] = _MetricFile(rows=rows)
            file = self._files[path]
            num_beginnings = file.rows.num_beginnings
            try:
                new_rows = file.rows.read(READ_BYTES)
                if file.rows.num_beginnings != num_beginnings:
                    file.steps_held = set()
                for row in new_rows:
                    self._take(file, row, max_step)
            except MetricsError as error:
                raise MetricsError(f"{path.name}: {error}") from error
            has_more |= not file.rows.at_end
        return has_more

    def end(self, max_step: int) -> None:
        """Read rows that are complete only when the files are finished; raises as `read`."""
        for file in self._files.values():
            for row in file.rows.end():
                self._take(file, row, max_step)

    def merge_metrics(self) -> LoggedMetrics:
        """Return the metrics of all files; values of later files replace those of earlier ones."""
        merged = LoggedMetrics()
        for _, file in sorted(self._files.items()):
            metrics = file.metrics
            # A number in a later file comes after a null in an earlier one.
            has_numbers = metrics.last_step is not None
            merged.null = metrics.null or (None if has_numbers else merged.null)
            merged.train_loss |= metrics.train_loss
            merged.validation_loss |= metrics.validation_loss
            merged.grad_norm |= metrics.grad_norm
            merged.first_nonfinite = merged.first_nonfinite or metrics.first_nonfinite
        return merged

    def get_steps_in_files(self) -> set[int]:
        """Return the steps with a loss that the files contain now, as far as they have been read.

        `merge_metrics` also has steps of files that were replaced or deleted.
        """
        return {
            step for path, file in self._files.items() if path.exists() for step in file.steps_held
        }

    def describe_contents(self) -> str:
        """Describe what the files contain, for the message that something is missing."""
        if not self._files:
            pattern = _PATTERNS.get(self._command.metrics_format, "file")
            return f"there is no {pattern} at {self.path}"
        readers = [file.rows for file in self._files.values()]
        names = sorted({name for rows in readers for name in rows.names})
        complaints = [rows.complaint for rows in readers if rows.complaint]
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

    def _take(self, file: _MetricFile, row: dict[str, object], max_step: int) -> None:
        """Add the values of a row; a loss without a step belongs to the last step of the file."""
        command, metrics = self._command, file.metrics
        if command.step_key in row:
            file.step = _parse_step(row[command.step_key], command.step_key, max_step)
        losses = (
            (command.train_loss_key, command.train_loss_unit, metrics.train_loss),
            (command.validation_loss_key, command.validation_loss_unit, metrics.validation_loss),
        )
        loss_keys = [key for key, _, _ in losses if key in row]
        if not loss_keys and command.grad_norm_key not in row:
            return
        if file.step is None:
            raise MetricsError(
                f"{', '.join(row)} without a step: {command.step_key!r} is not in it"
            )
        if any(row[key] is not None for key in loss_keys):
            metrics.null = None
        elif loss_keys:
            metrics.null = metrics.null or (file.step, loss_keys[0])
        for key, unit, series in losses:
            value = _parse_number(row.get(key), key, file.step)
            if value is None:
                continue
            if not math.isfinite(value):
                word = "NaN" if math.isnan(value) else value
                metrics.first_nonfinite = metrics.first_nonfinite or (
                    file.step,
                    f"{key} is {word} at step {file.step}",
                )
            elif value < 0:
                raise MetricsError(
                    f"{key} is {value:g} at step {file.step}: a loss must be at least 0"
                )
            else:
                file.steps_held.add(file.step)
                series[file.step] = value * command.get_nats_per_unit(unit)
        norm = _parse_number(row.get(command.grad_norm_key), command.grad_norm_key, file.step)
        if norm is not None and math.isfinite(norm):
            metrics.grad_norm[file.step] = norm


@dataclass(kw_only=True, slots=True)
class _MetricFile:
    """One metrics file of a run, as far as it has been read."""

    rows: RowReader
    metrics: LoggedMetrics = field(default_factory=LoggedMetrics)
    step: int | None = None
    """Last step that the file has logged."""
    steps_held: set[int] = field(default_factory=set)
    """Steps with a loss that the file contains now."""


MAX_LOSS_RATIO = 1.33
"""Maximum ratio of a validation loss to the training loss near it, or the reverse, if both have the
same unit; bits are 1.44 times nats."""
_MIN_DIFFERENCE = 0.3
"""Difference of two losses below which their ratio is not judged: near zero it has no meaning."""
UNIT_KEYS = (
    "proxy.metrics_train_loss_unit, proxy.metrics_validation_loss_unit (nats, bits, bits per byte)"
)
"""Keys of a plan that declare the units of logged losses, for messages."""


def have_same_unit(training: float, validation: float) -> bool:
    """Return whether two losses of one run may have the same unit: they have a similar size."""
    low, high = sorted((training, validation))
    return high <= MAX_LOSS_RATIO * low or high - low < _MIN_DIFFERENCE


def _parse_step(value: object, key: str, max_step: int) -> int:
    step = to_number(value)
    if step is None or not step.is_integer() or step < 0:
        raise MetricsError(f"{key} is {_format_logged(value)}: must be a whole number of steps")
    if step > max_step:
        raise MetricsError(
            f"{key} is {value!s:.20}, but the run has "
            f"{format_counted(max_step, 'optimizer step')}: log optimizer steps under this key, "
            "and make the trainer obey {num_steps}"
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
