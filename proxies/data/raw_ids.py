"""The dtype of token ids in raw files, which do not state it, and in NumPy's `.npy`, which do.

nanoGPT, OLMo-core, and many scripts write an array of ids as it is in memory. A file that is read
with the wrong width (bytes per id) still gives ids: if uint32 ids below 65,536 are read as uint16,
every second id is 0. So a width is accepted if with it the ids are inside the vocabulary, and at
least half of them are not 0. If two widths are possible, the user must name one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import open_plain
from forerun._proxies.data.tokens import DataError

RAW_DTYPES = ("uint16", "int16", "uint32", "int32", "uint64", "int64")
NPY_MAGIC = b"\x93NUMPY"
_SAMPLE_BYTES, _NUM_SAMPLES = 2**16, 5
_MIN_SHARE_INSIDE = 0.98
"""Minimum share of ids inside the vocabulary; below 1, so that a few damaged ids do not change the
recognized width or byte order."""
_CONTAINERS = {
    b"PK\x03\x04": "a zip archive (numpy.savez and torch.save write one)",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"ARROW1": "an Arrow file",
    b"PAR1": "a Parquet file",
    b"SQLite format 3": "an SQLite database",
    b"\x1f\x8b\x08": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\xfd7zXZ\x00": "compressed with xz",
    b"BZh9": "compressed with bzip2",
    b"\x80\x04\x95": "a pickle",
    b"\x80\x05\x95": "a pickle",
}
"""Contents of files that are not plain ids, by their first bytes."""
_HEADER_BYTES, _SAFETENSORS_START = 1024, 8
"""Size of llm.c's header, and offset of the JSON in a safetensors file, after its length."""
_TEXT_BYTES, _MIN_TEXT_BYTES = frozenset(b"\t\n\r" + bytes(range(32, 127))), 64
"""Bytes of ASCII text, and minimum number of them that proves a text."""
_MIN_IDS, _MIN_NONZERO_SHARE = 16, 0.5
"""Minimum number of ids, and minimum share of them that is not 0, to prove a width."""


def find_dtype(path: Path, num_bytes: int, vocab_size: int, raw_dtype: str | None) -> str:
    """Return the dtype of the ids in a raw file.

    Args:
        path: The file.
        num_bytes: Its size.
        vocab_size: Size of the vocabulary; ids are below it.
        raw_dtype: Dtype that the user named, one of `RAW_DTYPES`; None to recognize it.

    Raises:
        DataError: The file is empty, contains something else than ids, has not a whole number of
            them, or may have ids of more than one width.
    """
    if not num_bytes:
        raise DataError(f"{path} is empty: leave it out")
    sample = _read_sample(path, num_bytes)
    if content := _name_other_content(sample, num_bytes, vocab_size):
        raise DataError(f"{path} is {content}, and not plain ids: convert it, or leave it out")
    if num_bytes % (size := np.dtype(raw_dtype or "uint16").itemsize):
        raise DataError(
            f"{path} has {format_counted(num_bytes, 'byte')}, not a whole number of {size}-byte "
            "ids: it is truncated, or its ids have another width (--dtype)"
        )
    if raw_dtype:
        return raw_dtype

    # Choose the largest width with which the ids fit.
    widths = [width for width in (8, 4, 2) if num_bytes % width == 0]
    shares = {width: _find_share_inside(sample, f"<u{width}", vocab_size) for width in widths}
    wide = [width for width in widths if width > 2 and shares[width] >= _MIN_SHARE_INSIDE]
    for width in wide:
        if _is_mostly_nonzero(sample, f"<u{width}"):
            return f"uint{8 * width}"
    if wide:
        fitting = ([2] if shares[2] == 1.0 else []) + sorted(wide)
        names = " or ".join(f"uint{8 * width}" for width in fitting)
        raise DataError(
            f"{path} may hold ids of {names}: it has too many zeros to tell; name one with --dtype"
        )
    return "uint16"  # The reader reports the first id outside the vocabulary.


def _name_other_content(sample: bytes, num_bytes: int, vocab_size: int) -> str:
    """Name the content of a file that is surely not plain ids; empty if nothing is sure."""
    for start, name in _CONTAINERS.items():
        if sample.startswith(start):
            return name
    if (
        sample[_SAFETENSORS_START:].startswith(b'{"')
        and int.from_bytes(sample[:8], "little") < num_bytes
    ):
        return "a safetensors file"
    if len(sample) >= _MIN_TEXT_BYTES and _TEXT_BYTES.issuperset(sample):
        return "text"
    for width in (4, 8):
        values = np.frombuffer(sample, f"<f{width}", len(sample) // width)
        with np.errstate(invalid="ignore"):
            are_ids = (values >= 0) & (values < vocab_size) & (values == np.floor(values))
        if values.size >= _MIN_IDS and are_ids.all() and values.any():
            return f"an array of float{8 * width}"
    words = np.frombuffer(sample, "<u4", len(sample) // 4)
    # A chunk of litdata or MDS begins with the number of its samples and the offset of each.
    if words.size > 2 and words[1] == 4 * (int(words[0]) + 2) <= num_bytes:
        return "a chunk of litdata or of MosaicML's MDS"
    # Headers like that of llm.c are zero after the number of ids.
    sizes = (
        [_HEADER_BYTES + int(words[2]) * width for width in (2, 4)]
        if words.size >= _HEADER_BYTES // 4
        else []
    )
    if num_bytes in sizes and not words[3 : _HEADER_BYTES // 4].any():
        return (
            f"ids after a header of {_HEADER_BYTES} bytes with the unknown magic number {words[0]}"
        )
    return ""


def read_npy_header(path: Path) -> tuple[np.dtype[np.integer], int, int]:
    """Read the header of a `.npy` file.

    Returns:
        The dtype of the ids, their number, and their offset in the file in bytes.

    Raises:
        DataError: The header is damaged, or the array is not one row of integers.
    """
    try:
        with open_plain(path) as file:
            version = np.lib.format.read_magic(file)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = read_header(file)
            start = file.tell()
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} has a damaged NumPy header: {error}") from error
    if dtype.kind not in "iu" or len(shape) != 1:
        raise DataError(
            f"{path} is a NumPy array of {dtype} with shape {shape}: must be one row of whole "
            "numbers; flatten it, or leave it out"
        )
    num_bytes = path.stat().st_size - start
    if num_bytes != shape[0] * dtype.itemsize:
        raise DataError(
            f"{path} has {format_counted(num_bytes, 'byte')} of ids, its header says "
            f"{shape[0] * dtype.itemsize:,}: it is truncated, or something was appended"
        )
    return dtype, shape[0], start


def _read_sample(path: Path, num_bytes: int) -> bytes:
    """Return the content of a small file, or evenly spaced pieces of a large one.

    Each piece starts at a multiple of 8 bytes, so that no id of any width is cut.
    """
    with open_plain(path) as file:
        if num_bytes <= _SAMPLE_BYTES * _NUM_SAMPLES:
            return file.read()
        pieces = []
        for number in range(_NUM_SAMPLES):
            file.seek((num_bytes - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1) // 8 * 8)
            pieces.append(file.read(_SAMPLE_BYTES))
        return b"".join(pieces)


def _view_ids(sample: bytes, dtype: str) -> NDArray[np.unsignedinteger]:
    return np.frombuffer(sample, dtype, len(sample) // np.dtype(dtype).itemsize)


def _find_share_inside(sample: bytes, dtype: str, vocab_size: int) -> float:
    """Return the share of ids inside the vocabulary; 0 if the sample is shorter than one id."""
    ids = _view_ids(sample, dtype)
    return float(np.count_nonzero(ids < vocab_size)) / max(ids.size, 1)


def _is_mostly_nonzero(sample: bytes, dtype: str) -> bool:
    """Return whether enough ids are not 0 to prove their width.

    Half or more of the ids are 0 if ids of a larger width are read with a smaller one.
    """
    ids = _view_ids(sample, dtype)
    return bool(ids.size >= _MIN_IDS and np.count_nonzero(ids) >= _MIN_NONZERO_SHARE * ids.size)
