"""What a trainer has logged so far, from wherever it logs: losses by step, and the first that is not a number.

Several files are one run's (ranks, restarts, writers): they are read in the order of their names, and of a step that
was logged twice, as after a trainer's own resume, the last value counts. Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from proxies.core.programs import Command
from proxies.external.event_files import EventFile
from proxies.external.growing import MetricsError, Rows
from proxies.external.json_lines import JsonLines
from proxies.external.wandb_run import WandbRun

READ_BYTES = 2**22
"""Of one file at a time: some 0.1 s of parsing."""
_PATTERNS = {"wandb": "*.wandb", "tensorboard": "*tfevents*"}


@dataclass(kw_only=True, slots=True)
class Logged:
    """Metrics by the trainer's own step."""

    train_loss: dict[int, float] = field(default_factory=dict)
    validation_loss: dict[int, float] = field(default_factory=dict)
    grad_norm: dict[int, float] = field(default_factory=dict)
    bad: tuple[int, str] | None = None
    """The first loss that is NaN or infinite: its step, and a sentence."""

    @property
    def last_step(self) -> int | None:
        """The last step with a loss."""
        return max((*self.train_loss, *self.validation_loss), default=None)


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
        self._files: dict[Path, tuple[Rows, Logged]] = {}
        self._steps: dict[Path, int] = {}

    def read(self, max_step: int) -> bool:
        """Read a portion of every file; whether there is more.

        Raises:
            MetricsError: a file is damaged, a value no number, or a step beyond `max_step`.
            OSError: a file cannot be read.
        """
        more = False
        for path in self._found():
            if path not in self._files:
                self._files[path] = (rows_of(path, self._wanted, self._command.step_key), Logged())
            rows, logged = self._files[path]
            try:
                for row in rows.read(READ_BYTES):
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

    def logged(self) -> Logged:
        """All files as one, the later ones' values over the earlier ones'."""
        whole = Logged()
        for _, (_, later) in sorted(self._files.items(), key=lambda file: file[0]):
            whole.train_loss |= later.train_loss
            whole.validation_loss |= later.validation_loss
            whole.grad_norm |= later.grad_norm
            whole.bad = whole.bad or later.bad
        return whole

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
            return [self.path] if self.path.is_file() else []
        return sorted(path for path in self.path.rglob(_PATTERNS[self._command.metrics_format]) if path.is_file())

    def _take(self, path: Path, row: dict[str, object], logged: Logged, max_step: int) -> None:
        """One row; a loss without a step is of the last step seen."""
        command = self._command
        if command.step_key in row:
            self._steps[path] = _step(row[command.step_key], command.step_key, max_step)
        losses = {command.train_loss_key: logged.train_loss, command.validation_loss_key: logged.validation_loss}
        if not {*losses, command.grad_norm_key} & row.keys():
            return
        if path not in self._steps:
            raise MetricsError(f"{', '.join(row)} without a step: {command.step_key!r} is not in it")
        step = self._steps[path]
        for key, series in losses.items():
            value = _number(row.get(key), key, step)
            if value is None:
                continue
            if not math.isfinite(value):
                logged.bad = logged.bad or (step, f"{key} is {'NaN' if math.isnan(value) else value} at step {step}")
            elif value < 0:
                raise MetricsError(f"{key} is {value:g} at step {step}: a loss in nats per token is not below 0")
            else:
                series[step] = value
        norm = _number(row.get(command.grad_norm_key), command.grad_norm_key, step)
        if norm is not None and math.isfinite(norm):
            logged.grad_norm[step] = norm


def _step(value: object, key: str, max_step: int) -> int:
    if not isinstance(value, int | float) or value != value // 1 or value < 0:
        raise MetricsError(f"{key} is {value!r:.80}: it must be a whole number of steps")
    if value > max_step:
        raise MetricsError(
            f"{key} is {value!s:.20}, and {max_step} optimizer steps were asked for: does it count something else, or "
            "does the trainer not obey {num_steps}?"
        )
    return int(value)


def _number(value: object, key: str, step: int) -> float | None:
    """A float, also from a word such as W&B's NaN; None for null, a column without a value."""
    if value is None:
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise MetricsError(f"{key} is {value!r:.80} at step {step}: it must be a number") from None
