"""The `.idx` beside a Megatron-LM `.bin`: which ids are a document.

Megatron-LM's `IndexedDataset` (megatron/core/datasets/indexed_dataset.py), little-endian: the magic
`MMIDIDX` and two zero bytes, version 1 in 8 bytes, a byte for the type of the ids, the numbers of
sequences and of entries in the list of documents in 8 bytes each; then each sequence's length
(int32) and place in bytes (int64), and the sequences at which documents begin, with the number of
sequences at the end (int64).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from proxies.core.notation import counted
from proxies.core.plain_files import open_plain
from proxies.data.tokens import DataError

MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX"
_HEADER = struct.Struct("<QBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""By its code; 6 and 7 are floats, which are no ids."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MegatronIndex:
    """What it says."""

    dtype: str
    starts: NDArray[np.int64]
    """Of each document, in ids from the file's beginning."""
    lengths: NDArray[np.int64]
    """Of each document, in ids."""


def _index_path(path: Path) -> Path:
    return path.with_suffix(".idx")


def is_indexed(path: Path) -> bool:
    """Whether such an index lies beside a `.bin`.

    Raises:
        DataError: What lies there cannot be read, or is the index of an older program.
    """
    index = _index_path(path)
    try:
        with open_plain(index) as file:
            magic = file.read(len(MAGIC))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DataError(f"{index} cannot be read: {error.strerror}") from error
    if magic.startswith(_OLD_MAGIC):
        raise DataError(
            f"{index} is an index of fairseq ({_OLD_MAGIC.decode()}), which is not read: convert "
            f"{path}"
        )
    return magic == MAGIC


def index_of(path: Path) -> MegatronIndex:
    """The index beside a `.bin`.

    Raises:
        DataError: it is of another version, holds no ids, is cut off, or does not fit the `.bin`.
    """
    index = _index_path(path)
    try:
        with open_plain(index) as file:
            content = file.read()
    except OSError as error:
        raise DataError(f"{index} cannot be read: {error.strerror}") from error
    at = len(MAGIC)
    if len(content) < at + _HEADER.size:
        raise DataError(
            f"{index} has {counted(len(content), 'byte')}, its header alone has "
            f"{at + _HEADER.size}: it is truncated"
        )
    version, code, num_sequences, num_documents = _HEADER.unpack_from(content, at)
    if version != 1 or code not in _DTYPES:
        raise DataError(
            f"{index} has version {version} and type {code}: must be version 1 and whole numbers"
        )
    at += _HEADER.size
    wanted = at + num_sequences * (4 + 8) + num_documents * 8
    if not wanted <= len(content) <= wanted + num_sequences:  # a mode of each sequence may follow
        raise DataError(
            f"{index} has {counted(len(content), 'byte')}, its header says {wanted:,}: it is "
            "truncated or damaged"
        )
    lengths = np.frombuffer(content, "<i4", num_sequences, at).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", num_sequences, at + 4 * num_sequences)
    first = np.frombuffer(content, "<i8", num_documents, at + 12 * num_sequences)
    size = np.dtype(_DTYPES[code]).itemsize
    ends = np.cumsum(lengths)
    whole = (
        num_documents > 0
        and first[0] == 0
        and first[-1] == num_sequences
        and bool((np.diff(first) >= 0).all())
    )
    if (lengths < 0).any() or not whole or not np.array_equal(pointers, (ends - lengths) * size):
        raise DataError(
            f"{index} does not list sequences one after the other, in whole documents: it is "
            "damaged"
        )
    total = int(ends[-1]) if num_sequences else 0
    num_bytes = path.stat().st_size
    if num_bytes != total * size:
        raise DataError(
            f"{path} has {counted(num_bytes, 'byte')}, its index says {total * size:,}: one of "
            "them is truncated"
        )
    edges = np.concatenate([[0], ends])[first]
    return MegatronIndex(dtype=_DTYPES[code], starts=edges[:-1], lengths=np.diff(edges))
