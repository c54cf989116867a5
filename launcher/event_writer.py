"""TensorBoard's event files, written without TensorBoard: scalars by step. Standard library only.

Framing and messages are those that `proxies.external.event_files` reads, and besides Event.wall_time = 1 (double),
Event.file_version = 3, Event.session_log = 7; SessionLog.status = 1, of which 1 is START: a reader then forgets what it
was told of this step and later ones, as it must when a run goes back.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path

from proxies.external.event_files import masked_crc32c

_VERSION = b"brain.Event:2"
_LARGEST = 3.4028234663852886e38  # of a float32


class EventWriter:
    """Appends to one event file, made anew."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be written."""
        self._file = path.open("xb")
        self._event(0, _text(3, _VERSION))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Numbers of a step by name, as float32; one too large for it is written as infinity."""
        summary = b"".join(
            _text(1, _text(1, name.encode()) + b"\x15" + struct.pack("<f", _single(value)))
            for name, value in values.items()
        )
        self._event(step, _text(5, summary))

    def forget_from(self, step: int) -> None:
        """Void what was written of `step` and later ones."""
        self._event(step, _text(7, b"\x08\x01"))

    def flush(self) -> None:
        """Have it in the file, where a reader finds it."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def _event(self, step: int, what: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + what
        size = struct.pack("<Q", len(event))
        crcs = [struct.pack("<I", masked_crc32c(part)) for part in (size, event)]
        self._file.write(size + crcs[0] + event + crcs[1])


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
