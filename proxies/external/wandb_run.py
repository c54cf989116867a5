"""The file a W&B run writes, read without wandb: what was logged, row by row. Standard library
only.

After a header of 7 bytes it is LevelDB's log format (blocks of 32 kB; frames of crc32, length and
kind; a record may span frames), and every record a protocol buffer message. Field numbers are those
of wandb 0.31's `wandb_internal.proto`: Record.history = 2, HistoryRecord.item = 1, HistoryItem.key
= 1, nested_key = 2, value_json = 16. wandb's crc is the plain CRC-32 of kind and data.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator

from proxies.external import wire
from proxies.external.growing_file import MAX_NAMES, MAX_PENDING_BYTES, MetricsError, Rows

_MAGIC = b":W&B"
_HEADER_BYTES, _FRAME_BYTES, _BLOCK_BYTES = 7, 7, 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class WandbRun(Rows):
    """A `run-*.wandb` file, offline or online alike."""

    _record = b""  # what there is of a record that spans frames

    def _take(self, rows: list[dict[str, object]]) -> None:
        for record in self._records():
            try:
                rows += [
                    row
                    for number, part in wire.fields(record)
                    if number == 2 and (row := self._row(part))
                ]
            except (wire.WireError, ValueError, RecursionError) as error:
                raise MetricsError(
                    f"a record before byte {self._at} is not a W&B record: {error}"
                ) from error

    def _records(self) -> Iterator[bytes]:
        """The records that are whole by now."""
        used, data = 0, self._pending
        if self._at == 0 and len(data) >= _HEADER_BYTES:
            if not data.startswith(_MAGIC):
                raise MetricsError("this is not a W&B run: it does not begin like one")
            used = _HEADER_BYTES
        while self._at or used:
            left = _BLOCK_BYTES - (self._at + used) % _BLOCK_BYTES
            if left < _FRAME_BYTES:
                if len(data) < used + left:
                    break
                used += left
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
                if kind == 0 and size == 0 and len(data) >= used + left:
                    used += left  # the rest of the block was left empty
                    continue
                raise MetricsError(
                    f"the frame at byte {self._at + used} is damaged (its checksum does not fit)"
                )
            used += _FRAME_BYTES + size
            self._record = part if kind in (_FULL, _FIRST) else self._record + part
            if kind in (_FULL, _LAST):
                yield self._record
            elif len(self._record) > MAX_PENDING_BYTES:
                raise MetricsError(
                    f"a record before byte {self._at + used} is longer than {MAX_PENDING_BYTES} "
                    "bytes"
                )
        self._pending, self._at = data[used:], self._at + used

    def _row(self, history: int | bytes) -> dict[str, object]:
        """What one call of `log` gave, the wanted names only."""
        row: dict[str, object] = {}
        for number, item in wire.fields(_bytes(history)):
            if number != 1:
                continue
            key, nested, text = "", [], b""
            for field, value in wire.fields(_bytes(item)):
                if field == 1:
                    key = _bytes(value).decode("utf-8", errors="replace")
                elif field == 2:
                    nested.append(_bytes(value).decode("utf-8", errors="replace"))
                elif field == 16:
                    text = _bytes(value)
            name = ".".join(nested) or key
            if len(self.names) < MAX_NAMES:
                self.names.add(name)
            if name in self._wanted:
                row[name] = json.loads(text)
        return row


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise wire.WireError("a number in place of a message")
    return value
