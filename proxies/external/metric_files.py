"""What a trainer has logged so far, from wherever it logs: losses by step, and the first that is not a number.

Several files are one run's (ranks, restarts, writers): they are read in the order of their names, and of a step that
was logged twice, as after a trainer's own resume, the last value counts. Standard library only.
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

# A JSONL file that a trainer appends to, as rows of metrics. Standard library only.

# Python's `f"{loss}"` and C's printf write these; JSON knows none, and Python's own reader only NaN and Infinity.
_BARE = re.compile(r"(?<=[:,\[\s])([-+]?)(nan|inf|infinity)(?=[,}\]\s])", re.IGNORECASE)


class JsonLines(Rows):
    """Objects, one a line. What is no object is passed over and counted; nested keys are written with dots."""

    _num_odd = 0

    def _take(self, rows: list[dict[str, object]]) -> None:
        *lines, self._pending = self._pending.split(b"\n")
        rows += [row for line in lines if (row := self._row(line))]
        if len(self._pending) > MAX_PENDING_BYTES:
            raise MetricsError(f"no end of line within {MAX_PENDING_BYTES} bytes: this is not a JSONL file")

    def end(self) -> list[dict[str, object]]:
        """See `Rows`: the last line, if it is whole but for its end."""
        line, self._pending = self._pending, b""
        return [row] if (row := self._row(line)) else []

    def _row(self, line: bytes) -> dict[str, object]:
        text = line.decode("utf-8", errors="replace").removeprefix("\ufeff")
        if not text.strip():
            return {}
        found = _parsed(text)
        if not isinstance(found, dict):
            return self._skip_line()
        try:
            flat = _flat(found)
        except RecursionError:
            return self._skip_line()
        if len(self.names) < MAX_NAMES:
            self.names.update(name for name, value in flat.items() if not isinstance(value, dict))
        return {name: value for name, value in flat.items() if name in self._wanted}

    def _skip_line(self) -> dict[str, object]:
        """Count a line that is no object, and return an empty row."""
        self._num_odd += 1
        are = "is not a JSON object" if self._num_odd == 1 else "are not JSON objects"
        self.complaint = f"{counted(self._num_odd, 'line')} {are}"
        return {}


def _parsed(line: str) -> object:
    try:
        return parse_deep(line)
    except ValueError:
        pass
    try:
        return parse_deep(_BARE.sub(lambda m: m[1].strip("+") + ("NaN" if m[2][0] in "nN" else "Infinity"), line))
    except ValueError:
        return None


def _flat(found: dict[str, object], prefix: str = "") -> dict[str, object]:
    """What lies in an object, also deeper down, by its path with dots; a name that has dots itself comes first."""
    flat: dict[str, object] = {}
    for key, value in found.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {}
    return flat | {prefix + key: value for key, value in found.items()}


# TensorBoard's event files, read without TensorBoard: scalars by step. Standard library only.
#
# Framing (TFRecord): length of 8 bytes, its masked crc32c, the data, the data's masked crc32c. The data is an `Event`
# (tensorflow/core/util/event.proto): step = 2, summary = 5; Summary.value = 1; Value.tag = 1, simple_value = 2, tensor
# = 8; TensorProto.dtype = 1, tensor_content = 4, float_val = 5, double_val = 6.

_FLOAT, _DOUBLE = 1, 2  # tensorflow/core/framework/types.proto
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed: RFC 3720, section 12.1


def _crc_table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)  # noqa: PLW2901  (the loop is the algorithm)
        table.append(crc)
    return table


_TABLE = _crc_table()


def masked_crc32c(data: bytes) -> int:
    """TFRecord's checksum: crc32c, rotated right by 15 bits, plus a constant (some 10 MB/s here)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class EventFile(Rows):
    """An `events.out.tfevents.*` file; each scalar's row carries its step under `step_key`."""

    def __init__(self, path: Path, wanted: frozenset[str], step_key: str) -> None:
        super().__init__(path, wanted - {step_key})
        self._step_key = step_key

    def _take(self, rows: list[dict[str, object]]) -> None:
        used = 0
        while len(self._pending) >= used + 12:
            size, crc = struct.unpack_from("<QI", self._pending, used)
            if masked_crc32c(self._pending[used : used + 8]) != crc or size > MAX_PENDING_BYTES:
                raise MetricsError(f"the event at byte {self._at + used} is damaged (its length's checksum)")
            end = used + 12 + size
            if len(self._pending) < end + 4:
                break
            data, (crc,) = self._pending[used + 12 : end], struct.unpack_from("<I", self._pending, end)
            rows += self._rows(data, crc, self._at + used)
            used = end + 4
        self._pending, self._at = self._pending[used:], self._at + used

    def _rows(self, event: bytes, crc: int, at: int) -> list[dict[str, object]]:
        """An event's scalars."""
        if masked_crc32c(event) != crc:
            raise MetricsError(f"the event at byte {at} is damaged (its checksum does not fit)")
        step, values = 0, dict[str, object]()
        try:
            for number, value in wire.fields(event):
                if number == 2 and isinstance(value, int):
                    step = value
                elif number == 5 and isinstance(value, bytes):
                    values |= self._scalars(value)
        except wire.WireError as error:
            raise MetricsError(f"the event at byte {at} is damaged: {error}") from error
        return [{**values, self._step_key: step}] if values else []

    def _scalars(self, summary: bytes) -> dict[str, object]:
        found: dict[str, object] = {}
        for number, value in wire.fields(summary):
            if number != 1 or not isinstance(value, bytes):
                continue
            parts = dict(wire.fields(value))
            tag = parts.get(1, b"")
            name = tag.decode("utf-8", errors="replace") if isinstance(tag, bytes) else ""
            if len(self.names) < MAX_NAMES and {2, 8} & set(parts):
                self.names.add(name)
            if name in self._wanted and isinstance(simple := parts.get(2), bytes):
                found[name] = wire.floats(simple, 4)[0]
            elif name in self._wanted and isinstance(tensor := parts.get(8), bytes):
                found[name] = _scalar(tensor, name)
        return found


def _scalar(tensor: bytes, name: str) -> float:
    """The one number of a float or double tensor."""
    kind, numbers = 0, b""
    for number, value in wire.fields(tensor):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number in (4, 5, 6) and isinstance(value, bytes):
            numbers += value
    if kind not in (_FLOAT, _DOUBLE):
        raise MetricsError(f"{name} is a tensor of type {kind}: log it as a float32 or float64 scalar")
    values = wire.floats(numbers, 4 if kind == _FLOAT else 8)
    if len(values) != 1:
        raise MetricsError(f"{name} is a tensor of {counted(len(values), 'number')}: must be a scalar")
    return values[0]


READ_BYTES = 2**22
"""Of one file at a time: some 0.1 s of parsing."""
_PATTERNS = {"wandb": "*.wandb", "tensorboard": "*tfevents*"}


@dataclass(kw_only=True, slots=True)
class LoggedMetrics:
    """Metrics by the trainer's own step."""

    train_loss: dict[int, float] = field(default_factory=dict)
    validation_loss: dict[int, float] = field(default_factory=dict)
    grad_norm: dict[int, float] = field(default_factory=dict)
    bad: tuple[int, str] | None = None
    """The first loss that is NaN or infinite: its step, and a sentence."""
    nulls: dict[str, int] = field(default_factory=dict)
    """Step of the first null of each loss after its last number, from rows in which every loss is null.

    A null alone proves nothing: many loggers write null for a column without a value.
    """

    @property
    def last_step(self) -> int | None:
        """The last step with a loss."""
        return max((*self.train_loss, *self.validation_loss), default=None)

    def steps_done(self, num_steps: int) -> int:
        """Return how many of a run's `num_steps` steps are done, by the last one with a loss."""
        last = self.last_step
        if last is None:
            return 0
        return min(last + counts_from_zero(self.train_loss, num_steps), num_steps)


def counts_from_zero(loss_steps: Collection[int], num_steps: int) -> bool:
    """Return whether a log numbers the first step of a run 0, not 1.

    A log that has a training loss at step 0 and at `num_steps` counts steps done: its first loss was measured before
    the first update.

    Args:
        loss_steps: Steps that have a training loss, as the log numbers them.
        num_steps: Steps of the whole run.
    """
    return 0 in loss_steps and num_steps not in loss_steps


def rows_of(path: Path, wanted: frozenset[str], step_key: str) -> Rows:
    """A reader of a log, by the file's name; `step_key` is what an event's own step is called."""
    if path.name.endswith(".wandb"):
        return WandbRun(path, wanted)
    if "tfevents" in path.name:
        return EventFile(path, wanted, step_key)
    return JsonLines(path, wanted)


class MetricFiles:
    """A run's metrics, read on whenever asked."""

    def __init__(self, command: Command, path: Path) -> None:
        """`path` is the JSONL file, or the folder below which the others lie; it need not exist yet."""
        self.path = path
        self._command = command
        keys = (command.step_key, command.train_loss_key, command.validation_loss_key, command.grad_norm_key)
        self._wanted = frozenset(key for key in keys if key)
        self._files: dict[Path, tuple[Rows, LoggedMetrics]] = {}
        self._steps: dict[Path, int] = {}
        self._held: dict[Path, set[int]] = {}  # steps with a loss that each file has now

    def read(self, max_step: int) -> bool:
        """Read a portion of every file; whether there is more.

        Raises:
            MetricsError: a file is damaged, a value no number, or a step beyond `max_step`.
            OSError: a file cannot be read.
        """
        more = False
        for path in self._found():
            if path not in self._files:
                self._files[path] = (rows_of(path, self._wanted, self._command.step_key), LoggedMetrics())
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
            more |= not rows.at_end
        return more

    def end(self, max_step: int) -> None:
        """Read what only a finished file gives. Raises as `read`."""
        for path, (rows, logged) in self._files.items():
            for row in rows.end():
                self._take(path, row, logged, max_step)

    def logged(self) -> LoggedMetrics:
        """All files as one, the later ones' values over the earlier ones'."""
        whole = LoggedMetrics()
        for _, (_, later) in sorted(self._files.items(), key=lambda file: file[0]):
            whole.train_loss |= later.train_loss
            whole.validation_loss |= later.validation_loss
            whole.grad_norm |= later.grad_norm
            whole.bad = whole.bad or later.bad
            # A number in a later file is a later number.
            losses = {
                self._command.train_loss_key: later.train_loss,
                self._command.validation_loss_key: later.validation_loss,
            }
            whole.nulls = {key: step for key, step in whole.nulls.items() if not losses[key]} | later.nulls
        return whole

    def held_steps(self) -> set[int]:
        """Return the steps with a loss that the files hold now, as far as they have been read; see `logged` for all."""
        files = [steps for path, steps in self._held.items() if path.exists()]
        return set[int]().union(*files)

    def hint(self) -> str:
        """What there is instead, for the message that something is missing."""
        if not self._files:
            what = "file" if self._command.metrics_format == "jsonl" else f"{_PATTERNS[self._command.metrics_format]}"
            return f"there is no {what} at {self.path}"
        names = sorted({name for rows, _ in self._files.values() for name in rows.names})
        complaints = [rows.complaint for rows, _ in self._files.values() if rows.complaint]
        return "; ".join([f"{self.path} holds {', '.join(names[:20]) or 'nothing'}", *complaints])

    def _found(self) -> list[Path]:
        if self._command.metrics_format == "jsonl":
            if not self.path.exists():
                return []
            require_plain(self.path)
            return [self.path]
        return sorted(path for path in self.path.rglob(_PATTERNS[self._command.metrics_format]) if path.is_file())

    def _take_nulls(self, row: dict[str, object], logged: LoggedMetrics, step: int) -> None:
        keys = [key for key in (self._command.train_loss_key, self._command.validation_loss_key) if key in row]
        if all(row[key] is None for key in keys):
            for key in keys:
                logged.nulls.setdefault(key, step)
        for key in keys:
            if row[key] is not None:
                logged.nulls.pop(key, None)

    def _take(self, path: Path, row: dict[str, object], logged: LoggedMetrics, max_step: int) -> None:
        """One row; a loss without a step is of the last step seen."""
        command = self._command
        if command.step_key in row:
            self._steps[path] = _step(row[command.step_key], command.step_key, max_step)
        losses = {command.train_loss_key: logged.train_loss, command.validation_loss_key: logged.validation_loss}
        units = {
            command.train_loss_key: command.train_loss_unit,
            command.validation_loss_key: command.validation_loss_unit,
        }
        if not {*losses, command.grad_norm_key} & row.keys():
            return
        if path not in self._steps:
            raise MetricsError(f"{', '.join(row)} without a step: {command.step_key!r} is not in it")
        step = self._steps[path]
        self._take_nulls(row, logged, step)
        for key, series in losses.items():
            value = _number(row.get(key), key, step)
            if value is None:
                continue
            if not math.isfinite(value):
                logged.bad = logged.bad or (step, f"{key} is {'NaN' if math.isnan(value) else value} at step {step}")
            elif value < 0:
                raise MetricsError(f"{key} is {value:g} at step {step}: a loss must be at least 0")
            else:
                self._held.setdefault(path, set()).add(step)
                series[step] = value * command.nats_per_unit(units[key])
        norm = _number(row.get(command.grad_norm_key), command.grad_norm_key, step)
        if norm is not None and math.isfinite(norm):
            logged.grad_norm[step] = norm


MAX_LOSS_RATIO = 1.33
"""Maximum ratio of a validation loss and the training loss near it, either way; bits are 1.44 times nats."""
UNIT_KEYS = "proxy.metrics_train_loss_unit, proxy.metrics_validation_loss_unit (nats, bits, bits per byte)"
"""Keys of a plan that declare the units of logged losses, for messages."""


def units_agree(training: float, validation: float) -> bool:
    """Return whether two losses of one run may have the same unit: neither is much larger than the other."""
    low, high = sorted((training, validation))
    return high <= MAX_LOSS_RATIO * low or high - low < 0.3  # near zero a ratio says nothing


def _step(value: object, key: str, max_step: int) -> int:
    step = to_number(value)
    if step is None or not step.is_integer() or step < 0:
        raise MetricsError(f"{key} is {_as_logged(value)}: must be a whole number of steps")
    if step > max_step:
        raise MetricsError(
            f"{key} is {value!s:.20}, and {counted(max_step, 'optimizer step')} were asked for: does it count "
            "something else, or "
            "does the trainer not obey {num_steps}?"
        )
    return int(step)


def _number(value: object, key: str, step: int) -> float | None:
    """Return a logged value as a float; None for null, a column without a value."""
    number = to_number(value)
    if number is None and value is not None:
        raise MetricsError(f"{key} is {_as_logged(value)} at step {step}: must be a number")
    return number


def _as_logged(value: object) -> str:
    """Return a value as its log spells it, cut to a length for a message."""
    return f"{json.dumps(value, ensure_ascii=False, default=repr):.80}"
