"""The index file (`.idx`) of a Megatron-LM `.bin`, which tells where each document begins.

The format is that of `IndexedDataset` (megatron/core/datasets/indexed_dataset.py), little-endian:

- the magic `MMIDIDX` and two zero bytes
- version 1 (8 bytes), and the code of the ids' dtype (1 byte)
- the number of sequences, and the length of the list of documents (8 bytes each)
- the length of each sequence (int32), and then its offset in bytes (int64)
- the list of documents: the first sequence of each, and at the end the number of sequences (int64)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import open_plain
from forerun._proxies.data.tokens import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Dtype by its code; 6 and 7 are floats, which are not ids."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MegatronIndex:
    """The documents of a Megatron-LM `.bin`."""

    dtype: str
    """Dtype of the stored ids."""
    starts: NDArray[np.int64]
    """Start of each document, in ids from the beginning of the file."""
    lengths: NDArray[np.int64]
    """Length of each document, in ids."""


def _get_index_path(path: Path) -> Path:
    return path.with_suffix(".idx")


def has_index(path: Path) -> bool:
    """Return whether a `.bin` has an index of Megatron-LM.

    Raises:
        OSError: The index cannot be read.
    """
    try:
        with open_plain(_get_index_path(path)) as file:
            return file.read(len(MAGIC)) == MAGIC
    except FileNotFoundError:
        return False


def _read_header(index: Path, content: bytes) -> tuple[int, int, int]:
    """Return the code of the dtype, the number of sequences, and the length of the list of
    documents.

    Raises:
        DataError: The header is truncated, has another version or dtype, or does not fit the size
            of the index.
    """
    header_bytes = len(MAGIC) + _HEADER.size
    version, code, num_sequences, num_documents = _HEADER.unpack(
        content[len(MAGIC) : header_bytes].ljust(_HEADER.size, b"\0")
    )
    # The lists may be followed by one byte for each sequence, its mode, which is not read.
    num_bytes = header_bytes + num_sequences * (4 + 8) + num_documents * 8
    if len(content) < header_bytes or not num_bytes <= len(content) <= num_bytes + num_sequences:
        raise DataError(
            f"{index} has {format_counted(len(content), 'byte')}, its header says {num_bytes:,}: "
            "it is truncated or damaged"
        )
    if version != 1 or code not in _DTYPES:
        raise DataError(
            f"{index} has version {version} and type {code}: must be version 1 and whole numbers"
        )
    return code, num_sequences, num_documents


def read_index(path: Path) -> MegatronIndex:
    """Read the index of a `.bin`.

    Raises:
        DataError: The index has another version or dtype, is truncated, or does not fit the `.bin`.
        OSError: The index cannot be read.
    """
    index = _get_index_path(path)
    with open_plain(index) as file:
        content = file.read()
    code, num_sequences, num_documents = _read_header(index, content)

    # Sequences and documents
    offset = len(MAGIC) + _HEADER.size
    lengths = np.frombuffer(content, "<i4", num_sequences, offset).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", num_sequences, offset + 4 * num_sequences)
    offset += 12 * num_sequences  # 4 bytes for each length, 8 for each pointer
    first_sequences = np.frombuffer(content, "<i8", num_documents, offset)
    size = np.dtype(_DTYPES[code]).itemsize
    ends = np.cumsum(lengths)
    are_documents_valid = (
        num_documents > 0
        and first_sequences[0] == 0
        and first_sequences[-1] == num_sequences
        and bool((np.diff(first_sequences) >= 0).all())
    )
    are_contiguous = np.array_equal(pointers, (ends - lengths) * size)
    if (lengths < 0).any() or not are_documents_valid or not are_contiguous:
        raise DataError(
            f"{index} does not list sequences one after the other, in whole documents: it is "
            "damaged"
        )

    # Size of the ids
    num_ids = int(ends[-1]) if num_sequences else 0
    num_bytes = path.stat().st_size
    if num_bytes != num_ids * size:
        raise DataError(
            f"{path} has {format_counted(num_bytes, 'byte')}, its index says {num_ids * size:,}: "
            "one of them is truncated"
        )
    boundaries = np.concatenate([[0], ends])[first_sequences]
    return MegatronIndex(dtype=_DTYPES[code], starts=boundaries[:-1], lengths=np.diff(boundaries))
