"""A reader of the file that a W&B run writes, which does not need wandb.

After a header of 7 bytes, the file has LevelDB's log format: blocks of 32 kB, with frames of crc32,
length, kind and data; a record may span frames. Each record is a protocol buffer message. The field
numbers are those of `wandb_internal.proto` in wandb 0.31: Record.history = 2, HistoryRecord.item =
1, HistoryItem.key = 1, nested_key = 2, value_json = 16. The checksum is the ordinary CRC-32 of kind
and data. This module and the modules of forerun that it imports need only the standard library.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator

from forerun._proxies.external import protocol_buffers
from forerun._proxies.external.growing_file import (
    MAX_NAMES,
    MAX_PENDING_BYTES,
    MetricsError,
    RowReader,
)

_MAGIC = b":W&B"
_HEADER_BYTES, _FRAME_BYTES, _BLOCK_BYTES = 7, 7, 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
"""Kinds of frames: a whole record, or a part of one."""


class WandbRun(RowReader):
    """A `run-*.wandb` file of an offline or online run."""

    _record = b""
    """Beginning of a record that spans frames."""

    def _take(self, rows: list[dict[str, object]]) -> None:
        for record in self._records():
            try:
                rows += [
                    row
                    for number, part in protocol_buffers.read_fields(record)
                    if number == 2 and (row := self._read_row(part))
                ]
            except (protocol_buffers.WireError, ValueError, RecursionError) as error:
                raise MetricsError(
                    f"a record before byte {self._offset} is not a W&B record: {error}"
                ) from error

    def _records(self) -> Iterator[bytes]:
        """Yield the records that are complete by now."""
        used, data = 0, self._pending
        if self._offset == 0 and len(data) >= _HEADER_BYTES:
            if not data.startswith(_MAGIC):
                raise MetricsError("this is not a W&B run: it does not begin like one")
            used = _HEADER_BYTES
        while self._offset or used:
            bytes_left = _BLOCK_BYTES - (self._offset + used) % _BLOCK_BYTES
            # The end of a block that has no room for a frame is padding.
            if bytes_left < _FRAME_BYTES:
                if len(data) < used + bytes_left:
                    break
                used += bytes_left
                continue
            if len(data) < used + _FRAME_BYTES:
                break
            crc, size, kind = struct.unpack_from("<IHB", data, used)
            if len(data) < used + _FRAME_BYTES + size:
                break
            part = data[used + _FRAME_BYTES : used + _FRAME_BYTES + size]
            if (
                kind not in (_FULL, _FIRST, _MIDDLE, _LAST)
                or zlib.crc32(part, zlib.crc32(bytes([kind]))) != crc
            ):
                # The rest of the block may be empty.
                if kind == 0 and size == 0 and len(data) >= used + bytes_left:
                    used += bytes_left
                    continue
                raise MetricsError(
                    f"the frame at byte {self._offset + used} is damaged (its checksum does not "
                    "fit)"
                )
            used += _FRAME_BYTES + size
            self._record = part if kind in (_FULL, _FIRST) else self._record + part
            if kind in (_FULL, _LAST):
                yield self._record
            elif len(self._record) > MAX_PENDING_BYTES:
                raise MetricsError(
                    f"a record before byte {self._offset + used} is longer than "
                    f"{MAX_PENDING_BYTES} bytes"
                )
        self._pending, self._offset = data[used:], self._offset + used

    def _read_row(self, history: int | bytes) -> dict[str, object]:
        """Return the requested values of one call of `wandb.log`."""
        row: dict[str, object] = {}
        for number, item in protocol_buffers.read_fields(_require_bytes(history)):
            if number != 1:
                continue
            key, nested, text = "", [], b""
            for field, value in protocol_buffers.read_fields(_require_bytes(item)):
                if field == 1:
                    key = _require_bytes(value).decode("utf-8", errors="replace")
                elif field == 2:
                    nested.append(_require_bytes(value).decode("utf-8", errors="replace"))
                elif field == 16:
                    text = _require_bytes(value)
            name = ".".join(nested) or key
            if len(self.names) < MAX_NAMES:
                self.names.add(name)
            if name in self._metric_names:
                row[name] = json.loads(text)
        return row


def _require_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise protocol_buffers.WireError("a number in place of a message")
    return value
