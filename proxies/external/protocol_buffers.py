"""A reader of protocol buffer messages that needs no generated code.

The encoding is documented at protobuf.dev/programming-guides/encoding. A message is a sequence of
tags and values. A tag has the number of the field and one of four wire types: varint, 8 bytes,
length and bytes, 4 bytes. This module and the modules of forerun that it imports need only the
standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from forerun._proxies.core.errors import InputError
from forerun._proxies.core.notation import format_counted

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class WireError(InputError):
    """Bytes are not a protocol buffer message."""


def read_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message in order, as pairs of field number and value.

    A varint is an integer, any other value its raw little-endian bytes. A repeated field is yielded
    repeatedly. Groups, which were deprecated in 2008, are refused.

    Raises:
        WireError: The bytes are not a message; fields before the error have been yielded.
    """
    offset = 0
    while offset < len(message):
        tag, offset = _read_varint(message, offset)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise WireError(f"field number 0 before byte {offset}")
        if kind == _VARINT:
            value, offset = _read_varint(message, offset)
            yield number, value
            continue
        if kind == _BYTES:
            size, offset = _read_varint(message, offset)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise WireError(f"wire type {kind} at byte {offset}")
        if offset + size > len(message):
            raise WireError(
                f"field {number} of {format_counted(size, 'byte')} at byte {offset} of "
                f"{len(message)}"
            )
        yield number, message[offset : offset + size]
        offset += size


def _read_varint(message: bytes, offset: int) -> tuple[int, int]:
    """Return the varint at an offset, and the offset after it."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if offset + index >= len(message):
            raise WireError(f"a number is cut at byte {offset + index}")
        byte = message[offset + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, offset + index + 1
    raise WireError(f"a number of more than {_MAX_VARINT_BYTES} bytes at byte {offset}")


def unpack_floats(data: bytes, size: int) -> tuple[float, ...]:
    """Unpack little-endian floats of 4 or 8 bytes.

    Raises:
        WireError: The length is not a multiple of the size.
    """
    if len(data) % size:
        raise WireError(f"{format_counted(len(data), 'byte')} are not floats of {size}")
    return struct.unpack(f"<{len(data) // size}{'f' if size == 4 else 'd'}", data)
