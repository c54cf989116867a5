"""A run as a TensorBoard event file, written without TensorBoard. Standard library only.

Framing and messages are those that `proxies.external.event_files` reads, and besides Event.wall_time = 1 (double),
Event.file_version = 3, Event.session_log = 7; SessionLog.status = 1, of which 1 is START: a reader then forgets what it
was told of this step and later ones, as it must when a run goes back.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.dashboards.records import RunRecord
from proxies.external.event_files import masked_crc32c

_VERSION = b"brain.Event:2"
_LARGEST = 3.4028234663852886e38  # of a float32


def write_growing(log_dir: Path, run: RunRecord) -> tuple[Path, int]:
    """Write one run, each row as it comes, while it grows; returns the file and the number of its rows.

    What was written of it before is written anew: an event file cannot be added to, and two of one run would show
    every step twice.

    Raises:
        OSError: `log_dir` cannot be written, or what the rows are read from cannot be read.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    mark = f"forerun-{run.run_id}"
    for file in log_dir.glob(f"events.out.tfevents.*.{mark}"):
        file.unlink(missing_ok=True)
    path = log_dir / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}.{mark}"
    writer, num_rows, take = EventWriter(path), 0, 1.0
    try:
        for row in run.rows():
            step = int(row["step"])
            if row.get("take", take) > take:
                take = row["take"]
                writer.forget_from(step + 1)
            writer.scalars(step, {name: value for name, value in row.items() if name not in ("step", "take")})
            num_rows += 1
    finally:
        writer.close()
    return path, num_rows


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
