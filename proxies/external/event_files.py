"""TensorBoard's event files, read without TensorBoard: scalars by step. Standard library only.

Framing (TFRecord): length of 8 bytes, its masked crc32c, the data, the data's masked crc32c. The data is an `Event`
(tensorflow/core/util/event.proto): step = 2, summary = 5; Summary.value = 1; Value.tag = 1, simple_value = 2,
tensor = 8; TensorProto.dtype = 1, tensor_content = 4, float_val = 5, double_val = 6.
"""

from __future__ import annotations

import struct
from pathlib import Path

from proxies.external import wire
from proxies.external.growing import MAX_NAMES, MAX_PENDING_BYTES, MetricsError, Rows

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
        raise MetricsError(f"{name} is a tensor of {len(values)} numbers: a scalar is wanted")
    return values[0]
