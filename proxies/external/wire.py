"""Protocol buffers without their compiler: the fields of a message, as they come. Standard library
only.

The encoding is documented at protobuf.dev/programming-guides/encoding. A message is a row of tag
and value; the tag gives the field's number and one of four live wire types: varint, 8 bytes, length
and bytes, 4 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from proxies.core.errors import InputError
from proxies.core.notation import counted

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class WireError(InputError):
    """Bytes that are no message."""


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) in order: whole numbers for varints, raw little-endian bytes for all
    else.

    A repeated field comes repeatedly. Groups, which nobody has written since 2008, are refused.

    Raises:
        WireError: the bytes are no message; what came before was.
    """
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise WireError(f"field number 0 before byte {at}")
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise WireError(f"wire type {kind} at byte {at}")
        if at + size > len(message):
            raise WireError(
                f"field {number} of {counted(size, 'byte')} at byte {at} of {len(message)}"
            )
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_MAX_VARINT_BYTES):
        if at + place >= len(message):
            raise WireError(f"a number is cut at byte {at + place}")
        byte = message[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise WireError(f"a number of more than {_MAX_VARINT_BYTES} bytes at byte {at}")


def floats(data: bytes, size: int) -> tuple[float, ...]:
    """Packed little-endian floats of 4 or 8 bytes.

    Raises:
        WireError: the length is no multiple.
    """
    if len(data) % size:
        raise WireError(f"{counted(len(data), 'byte')} are not floats of {size}")
    return struct.unpack(f"<{len(data) // size}{'f' if size == 4 else 'd'}", data)
