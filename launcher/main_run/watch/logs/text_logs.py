"""Readers of CSV logs, of `trainer_state.json`, and of the lines of text that trainers print.

Rows have the names and units of `forerun._launcher.main_run.watch.logs.keys`. The formats are those
of the trainers' sources:

- llm.c, llmc/logger.h, `main.log`: `s:STEP trl:LOSS lr:RATE norm:NORM` and `s:STEP
  tel:VALIDATION_LOSS`.
- modded-nanogpt, train_gpt.py: `step:STEP/STEPS val_loss:LOSS train_time:MSms`, in earlier versions
  also `train_loss`.
- nanotron, trainer.py and logging: `iteration: STEP / STEPS | lm_loss: LOSS | ...`, with 4.1K for
  4,100.
- Megatron-LM, training/training.py: ` iteration STEP/ STEPS | lm loss: LOSS | ...`, and `validation
  loss at iteration STEP | lm loss value: LOSS | ...`.
- Hugging Face transformers, trainer_callback.py: `log_history` of `trainer_state.json`, a list of
  objects.
"""

from __future__ import annotations

import csv
import json
import re
from abc import abstractmethod
from collections.abc import Set
from pathlib import Path

from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import open_plain
from forerun._proxies.core.tables.numerals import parse_amount
from forerun._proxies.external.growing_file import (
    MAX_NAMES,
    MAX_PENDING_BYTES,
    MetricsError,
    RowReader,
)
from forerun._proxies.external.metric_files import open_rows

KNOWN = (
    "JSON Lines, CSV, trainer_state.json, or lines of llm.c, modded-nanogpt, nanotron or "
    "Megatron-LM"
)
"""Kinds of logs that are recognized by their content, for messages."""
_MAX_SNIFFED_BYTES, _SHOWN_CHARACTERS = 2**16, 80
# First bytes of gzip, zstd, zip, and xz files
_COMPRESSED_STARTS = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"\xfd7zXZ")
_DELIMITERS = (",", "\t", ";")

# Name in lines of text -> name of `forerun._launcher.main_run.watch.logs.keys`, and the factor to
# its unit
_NAMES = {
    "trl": ("loss", 1.0),
    "tel": ("val_loss", 1.0),
    "norm": ("grad_norm", 1.0),
    "train_loss": ("loss", 1.0),
    "val_loss": ("val_loss", 1.0),
    "lm_loss": ("loss", 1.0),
    "lm loss": ("loss", 1.0),
    "lm loss value": ("val_loss", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "grad norm": ("grad_norm", 1.0),
    "tokens_per_sec": ("tokens_per_second", 1.0),
    "elapsed_time_per_iteration_ms": ("seconds", 1e-3),
    "elapsed time per iteration (ms)": ("seconds", 1e-3),
}
_SPACED_PATTERN = re.compile(r"(?:s|step):(\d+)(?:/\d+)?((?:\s+[\w./-]+:\S+)+)\s*")
_BARRED_PATTERN = re.compile(
    r"(?:^|\s)(?:validation loss at )?iteration:?\s*(\d+)\s*(?:/\s*\d+)?\s*\|(.*)"
)
_ARRAY_PATTERN = re.compile(r"\s*\[\s*(\{|$)")
"""Beginning of a JSON array of objects; `[2026-01-31 10:00:00]` or `[rank0]:` begins a line of
text."""


def read_first_line(path: Path) -> str:
    """Return the first line of a file that is not blank; empty if the first 64 KiB have none.

    Raises:
        OSError: The file cannot be read, or is not a plain file.
    """
    with open_plain(path) as file:
        text = file.read(_MAX_SNIFFED_BYTES)
    lines = (line for line in text.decode("utf-8", errors="replace").splitlines() if line.strip())
    return next(lines, "")


def describe_unknown(path: Path, line: str) -> str:
    """Return a message that a file is not a log that forerun reads.

    Args:
        path: The file.
        line: First line that cannot be read, which the message quotes.
    """
    with open_plain(path) as file:
        start = file.read(max(map(len, _COMPRESSED_STARTS)))
    if start.startswith(_COMPRESSED_STARTS):
        return f"{path.name} is compressed: unpack it, and name the unpacked file with --metrics"
    excerpt = repr(line[:_SHOWN_CHARACTERS]) + ("..." if len(line) > _SHOWN_CHARACTERS else "")
    return (
        f"{path.name} is no log that forerun knows ({KNOWN}); the first line it cannot read: "
        f"{excerpt}"
    )


def open_log(path: Path, metric_names: frozenset[str]) -> RowReader:
    """Open a log with the reader for its name, or else for its first line.

    Args:
        path: The log.
        metric_names: Names of metrics to read.

    Raises:
        OSError: The file cannot be read, or is not a plain file.
    """
    line = read_first_line(path)
    if path.suffix in (".jsonl", ".wandb") or "tfevents" in path.name or not line:
        return open_rows(path, metric_names, "step")
    if path.suffix == ".json" or line.strip() == "{" or _ARRAY_PATTERN.match(line):
        return JsonDocument(path, metric_names)
    if line.lstrip().startswith("{"):
        return open_rows(path, metric_names, "step")
    delimiter = _find_delimiter(line, metric_names)
    if not delimiter:
        return TextLines(path, metric_names)
    return CsvLines(path, metric_names, delimiter)


def _find_delimiter(line: str, metric_names: Set[str]) -> str:
    """Return the delimiter of a table's header; empty if the line is not a header.

    A header has at least one of the names.
    """
    for delimiter in _DELIMITERS:
        cells = _split(line, delimiter)
        if len(cells) > 1 and metric_names & set(cells):
            return delimiter
    return ""


def _split(line: str, delimiter: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]


class _Lines(RowReader):
    """A log of lines; a last line without a newline is pending until `end`."""

    def _take(self, rows: list[dict[str, object]]) -> None:
        *lines, self._pending = self._pending.split(b"\n")
        if len(self._pending) > MAX_PENDING_BYTES:
            raise MetricsError(
                f"no end of line within {MAX_PENDING_BYTES} bytes: this is not a log"
            )
        for line in lines:
            self._add(line, rows)

    def end(self) -> list[dict[str, object]]:
        """Return the row of a last line without a newline, if it is complete."""
        rows: list[dict[str, object]] = []
        line, self._pending = self._pending, b""
        self._add(line, rows)
        return rows

    def _add(self, line: bytes, rows: list[dict[str, object]]) -> None:
        text = line.decode("utf-8", errors="replace").strip("\r\ufeff")
        row = self._parse(text) if text.strip() else {}
        if len(self.names) < MAX_NAMES:
            self.names.update(row)
        if values := {name: value for name, value in row.items() if name in self._metric_names}:
            rows.append(values)

    @abstractmethod
    def _parse(self, line: str) -> dict[str, object]:
        """Return the values of a line by name; empty if it has none."""


class CsvLines(_Lines):
    """A table whose first line names its columns; empty cells have no value."""

    def __init__(self, path: Path, metric_names: frozenset[str], delimiter: str) -> None:
        super().__init__(path, metric_names)
        self._delimiter = delimiter
        self._header: list[str] = []
        self._num_ragged = 0

    def _parse(self, line: str) -> dict[str, object]:
        cells = _split(line, self._delimiter)
        self._header = self._header or cells
        if cells == self._header:  # A restarted trainer may write the header again.
            return {}
        if len(cells) != len(self._header):
            self._num_ragged += 1
            self.complaint = (
                f"{format_counted(self._num_ragged, 'line')} without the "
                f"{format_counted(len(self._header), 'cell')} of the header"
            )
            return {}
        return {name: cell for name, cell in zip(self._header, cells, strict=True) if cell}


class TextLines(_Lines):
    """Lines that trainers print; lines without a step are skipped."""

    def _parse(self, line: str) -> dict[str, object]:
        if match := _SPACED_PATTERN.fullmatch(line.strip()):
            fields = match[2].split()
        elif match := _BARRED_PATTERN.search(line):
            fields = match[2].split("|")
        else:
            return {}
        row: dict[str, object] = {"step": int(match[1])}
        for field in fields:
            key, _, text = field.partition(":")
            name, factor = _NAMES.get(key.strip(), ("", 1.0))
            if name:
                number = parse_amount(text)  # nanotron writes 4.1K.
                row[name] = text.strip() if number is None else number * factor
        return row


class JsonDocument(RowReader):
    """A JSON document: a list of objects, or an object that has such a list under `log_history`."""

    def _take(self, rows: list[dict[str, object]]) -> None:
        if len(self._pending) > MAX_PENDING_BYTES:
            raise MetricsError(f"a JSON document of more than {MAX_PENDING_BYTES} bytes")
        if not self._file.at_end:
            return
        try:
            document = json.loads(self._pending)
        except (ValueError, RecursionError):
            self.complaint = "it is not a complete JSON document (it may still be written)"
            return
        history = document.get("log_history") if isinstance(document, dict) else document
        if not isinstance(history, list):
            self.complaint = "it has no `log_history`"
            return
        for entry in history:
            if isinstance(entry, dict):
                self.names.update(list(entry)[: MAX_NAMES - len(self.names)])
                rows.append(
                    {name: value for name, value in entry.items() if name in self._metric_names}
                )
        self._pending = b""
