"""Runs as TensorBoard's event files, written without TensorBoard. Standard library only.

Framing and messages are those that `proxies.external.event_files` reads, and besides Event.wall_time = 1 (double),
Event.file_version = 3, Event.session_log = 7; SessionLog.status = 1, of which 1 is START: a reader then forgets what it
was told of this step and later ones, as it must when a run goes back.

Text and settings are Values with metadata = 9, SummaryMetadata.plugin_data = 1: plugin_name = 1, content = 2. Text is a
tensor of one string: TensorProto.dtype = 1 (7: DT_STRING), string_val = 8. Settings are the hparams plugin's
(tensorboard/plugins/hparams/plugin_data.proto): version = 1, session_start_info = 3, whose hparams = 1 is a map from
names to google.protobuf.Value (number_value = 2, string_value = 3, bool_value = 4) and group_name = 4.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.dashboards.records import Logged, RunRecord, flat
from proxies.core.canon import Json
from proxies.external.event_files import masked_crc32c
from sweeps.store.errors import CurveCorrupt

_VERSION = b"brain.Event:2"
_LARGEST = 3.4028234663852886e38  # of a float32
_MARK_DIGITS = 16


def write_runs(log_dir: Path, runs: Sequence[RunRecord]) -> Logged:
    """Write every run that is not there as it is now, in place of what was: a folder each.

    Raises:
        OSError: `log_dir` cannot be written.
    """
    folders, written, damaged = {}, [], []
    for run in runs:
        about = run.name.removeprefix(run.group).strip()
        folder = log_dir / f"{run.group}/{about}-{run.run_id[:8]}".replace(" ", "-")  # search/mup-w64-0123abcd
        mark = f"forerun-{run.content[:_MARK_DIGITS]}"
        older = sorted(folder.glob("events.out.tfevents.*.forerun-*"))
        if [path for path in older if path.name.endswith(mark)]:
            folders[run.run_id] = folder
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*.part"):
            left.unlink()
        part = folder / f"{os.getpid()}.part"  # a reader, or a later call, must not take a part of it for all
        try:
            write_run(part, run)
        except CurveCorrupt as error:
            damaged.append(f"{run.name} is not logged: {error}")
            part.unlink()
            continue
        part.rename(folder / _file_name(mark))
        for path in older:
            path.unlink(missing_ok=True)
        folders[run.run_id] = folder
        written.append(run.run_id)
    return Logged(folders=folders, written=tuple(written), damaged=tuple(damaged))


def write_growing(log_dir: Path, run: RunRecord) -> tuple[Path, int]:
    """Write one run while it grows; returns the file and the number of its rows.

    What was written of it before is written anew: an event file cannot be added to, and two of one run would show
    every step twice.

    Raises:
        OSError: `log_dir` cannot be written, or what the rows are read from cannot be read.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    mark = f"forerun-{run.run_id}"
    for file in log_dir.glob(f"events.out.tfevents.*.{mark}"):
        file.unlink(missing_ok=True)
    path = log_dir / _file_name(mark)
    return path, write_run(path, run)


def _file_name(mark: str) -> str:
    return f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}.{mark}"


def write_run(path: Path, run: RunRecord) -> int:
    """Write one run as an event file, each row as it comes: settings, rows, summary. Returns the number of rows.

    Raises:
        OSError: it cannot be written.
    """
    writer = EventWriter(path)
    try:
        config = _plain(run.config)
        told = "\n".join(f"| {name} | {value} |" for name, value in {**config, **_plain(run.summary)}.items())
        writer.text("settings", f"| | |\n|---|---|\n{told}")
        writer.hyperparameters(config, run.name)
        num_rows, step, take = 0, 0, 1.0
        for row in run.rows():
            step = int(row["step"])
            if row.get("take", take) > take:
                take = row["take"]
                writer.forget_from(step + 1)
            writer.scalars(step, {name: value for name, value in row.items() if name not in ("step", "take")})
            num_rows += 1
        ends = {f"summary/{name}": value for name, value in _plain(run.summary).items() if not isinstance(value, str)}
        if ends:
            writer.scalars(step, {name: float(value) for name, value in ends.items()})
    finally:
        writer.close()
    return num_rows


def _plain(values: dict[str, Json]) -> dict[str, str | float | bool]:
    return {name: value for name, value in flat(values).items() if value is not None}


class EventWriter:
    """Appends to one event file, made anew."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be written."""
        self._file = path.open("xb")
        self._event(0, _text(3, _VERSION))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step by name, as float32; one too large for it is written as infinity."""
        summary = b"".join(
            _text(1, _text(1, name.encode()) + b"\x15" + struct.pack("<f", _single(value)))
            for name, value in values.items()
        )
        self._event(step, _text(5, summary))

    def text(self, name: str, markdown: str) -> None:
        """A text under a name."""
        tensor = b"\x08\x07" + _text(8, markdown.encode())
        self._event(0, _text(5, _text(1, _text(1, name.encode()) + _plugin("text", b"") + _text(8, tensor))))

    def hyperparameters(self, values: Mapping[str, str | float | bool], group: str) -> None:
        """Settings, for the view that sets runs side by side; `group` names the run there."""
        entries = b"".join(_text(1, _text(1, name.encode()) + _text(2, _value(v))) for name, v in values.items())
        content = _text(3, entries + _text(4, group.encode()))
        tag = _text(1, b"_hparams_/session_start_info")
        self._event(0, _text(5, _text(1, tag + _plugin("hparams", content))))

    def forget_from(self, step: int) -> None:
        """Void what was written of `step` and later ones."""
        self._event(step, _text(7, b"\x08\x01"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _event(self, step: int, what: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + what
        size = struct.pack("<Q", len(event))
        crcs = [struct.pack("<I", masked_crc32c(part)) for part in (size, event)]
        self._file.write(size + crcs[0] + event + crcs[1])
        self._file.flush()  # where a reader finds it


def _plugin(name: str, content: bytes) -> bytes:
    return _text(9, _text(1, _text(1, name.encode()) + _text(2, content)))


def _value(value: str | float | bool) -> bytes:
    if isinstance(value, bool):
        return b"\x20" + bytes([value])
    return _text(3, value.encode()) if isinstance(value, str) else b"\x11" + struct.pack("<d", value)


def _single(value: float) -> float:
    return value if abs(value) <= _LARGEST else float("inf") if value > 0 else float("-inf")


def _text(number: int, content: bytes) -> bytes:
    """A field of bytes."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
