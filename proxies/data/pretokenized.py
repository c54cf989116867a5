"""Readers of token ids that another program wrote.

The formats are raw ids (`proxies.data.raw_ids`), NumPy's `.npy`, llm.c's `.bin` with a header, and
Megatron-LM's `.bin` with an index file (`proxies.data.megatron_index`).

The header of llm.c (dev/data/data_common.py) is 256 int32: the magic number 20240520 (uint16 ids,
GPT-2) or 20240801 (uint32 ids, Llama 3), version 1 or 7, and the number of tokens; the rest is
unused. The ids begin at byte 1024.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from proxies.core.notation import counted
from proxies.core.plain_files import open_plain, require_plain
from proxies.data.documents import LLMC_MAGICS, RAW, Document, ReaderOptions, SourceFile
from proxies.data.megatron_index import index_of
from proxies.data.raw_ids import find_dtype, read_npy_header
from proxies.data.tokens import DataError

PIECE_TOKENS = 2**16
"""Maximum number of tokens in a document; longer ones are cut, as in files without an end id."""
_HEADER_BYTES = 1024
_CHUNK_TOKENS = 2**20
_GPT2_END_ID = 50256
_GPT2_VOCAB_SIZES = range(50257, 50433)
"""Sizes of GPT-2's vocabulary, also padded to a multiple of up to 256. In other vocabularies the id
50256 is a word."""
_LLMC_VOCABULARIES = {"uint16": (50257, _GPT2_END_ID), "uint32": (128_256, 128_000)}
"""Vocabulary size and end id of llm.c's files, by the dtype of their ids."""


def vocabulary_of(
    files: Sequence[SourceFile],
    vocab_size: int | None,
    end_id: int | None,
    raw_dtype: str | None = None,
) -> tuple[int, int | None]:
    """Return the vocabulary size and the end id of pre-tokenized files.

    Values that are not given follow from llm.c's headers. Without such a header, the end id is
    GPT-2's if the vocabulary is GPT-2's; else there is none.

    Args:
        files: The pre-tokenized files.
        vocab_size: Vocabulary size that the user gave, or None.
        end_id: End id that the user gave, or None.
        raw_dtype: Dtype of raw ids that the user gave, or None.

    Raises:
        DataError: The vocabulary of a file is unknown, or its ids cannot be of that vocabulary.
    """
    implied = {
        _LLMC_VOCABULARIES[dtype]
        for file in files
        if file.format == "llm.c" and (dtype := file.ids_dtype)
    }
    if vocab_size is None:
        without_header = [file for file in files if file.format != "llm.c"]
        if without_header and not implied:
            raise DataError(
                f"{without_header[0].path} holds ids and does not state its vocabulary: give "
                "--vocab-size (50257 for GPT-2)"
            )
        if len(implied) > 1:
            raise DataError(
                f"{files[0].path} and others hold ids of both GPT-2 and Llama 3: tokenize them "
                "separately"
            )
        vocab_size = next(iter(implied))[0]
    if end_id is None:
        ends = {end for _, end in implied} or (
            {_GPT2_END_ID} if vocab_size in _GPT2_VOCAB_SIZES else set()
        )
        end_id = next((end for end in ends if len(ends) == 1 and end < vocab_size), None)
    check_range(files, vocab_size, end_id, raw_dtype)
    return vocab_size, end_id


def check_range(
    files: Iterable[SourceFile], vocab_size: int, end_id: int | None, raw_dtype: str | None = None
) -> None:
    """Check that the dtypes of files can represent every id of a vocabulary.

    Raises:
        DataError: A file's dtype is too small or unknown, or the end id is outside the vocabulary.
            All problems are listed at once.
    """
    problems = []
    if end_id is not None and not 0 <= end_id < vocab_size:
        problems.append(f"--end-id {end_id} is outside the vocabulary of {vocab_size}")
    for file in files:
        try:
            dtype = dtype_of(file, vocab_size, raw_dtype)
        except DataError as error:
            problems += error.problems
            continue
        limit = int(np.iinfo(dtype).max) + 1
        if vocab_size > limit:
            problems.append(
                f"{file.path} holds {dtype} ids, {limit} at most: a vocabulary of {vocab_size} "
                "does not fit; correct --vocab-size, or name another file"
            )
    if problems:
        raise DataError(*problems)


def dtype_of(file: SourceFile, vocab_size: int, raw_dtype: str | None) -> str:
    """Return the dtype of a pre-tokenized file's ids; a raw file is read to recognize it.

    Raises:
        DataError: see `find_dtype`.
    """
    if file.ids_dtype == RAW:
        return find_dtype(file.path, file.num_bytes, vocab_size, raw_dtype)
    return file.ids_dtype or "uint32"


def read_raw(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
    """Yield the documents of a raw file of ids, each with its end id.

    Raises:
        DataError: see `find_dtype`; or an id outside the vocabulary.
    """
    dtype = np.dtype(dtype_of(file, reading.vocab_size, reading.raw_dtype)).newbyteorder("<")
    yield from _read_ids(file, reading, dtype, 0)


def read_npy(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
    """Yield the documents of a `.npy` file, each with its end id.

    Raises:
        DataError: see `read_npy_header`; or an id outside the vocabulary.
    """
    dtype, _, start = read_npy_header(file.path)
    yield from _read_ids(file, reading, dtype, start)


def read_llm_c(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
    """Yield the documents of an llm.c file, each with its end id.

    Raises:
        DataError: The header is truncated, has another version, or does not fit the file's size; or
            an id is outside the vocabulary.
    """
    with open_plain(file.path) as stream:
        header = stream.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES:
        raise DataError(
            f"{file.path} has {counted(len(header), 'byte')}, llm.c's header alone has "
            f"{_HEADER_BYTES}: it is truncated"
        )
    magic, version, num_tokens = (int(number) for number in np.frombuffer(header, dtype="<i4")[:3])
    dtype = np.dtype(LLMC_MAGICS[magic]).newbyteorder("<")
    readable = {2: 1, 4: 7}[dtype.itemsize]
    if version != readable:
        raise DataError(
            f"{file.path} has llm.c's version {version}: for magic {magic} it must be {readable}"
        )
    num_bytes = _HEADER_BYTES + num_tokens * dtype.itemsize
    if num_bytes != file.num_bytes:
        raise DataError(
            f"{file.path} has {counted(file.num_bytes, 'byte')}, its header says "
            f"{counted(num_tokens, 'id')}, which take {num_bytes:,}: it is truncated, or something "
            "was appended"
        )
    yield from _read_ids(file, reading, dtype, _HEADER_BYTES)


def read_megatron(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
    """Yield the documents of a Megatron-LM file by its index, each with its end id if there is one.

    Raises:
        DataError: The index does not fit the file, or an id is outside the vocabulary.
    """
    index = index_of(file.path)
    stored = np.dtype(index.dtype).newbyteorder("<")
    require_plain(file.path)
    ids = np.memmap(file.path, dtype=stored, mode="r") if file.num_bytes else np.empty(0, stored)
    for start, length in zip(index.starts.tolist(), index.lengths.tolist(), strict=True):
        document = np.asarray(ids[start : start + length])
        outside = (document < 0) | (document >= reading.vocab_size)
        if outside.any():
            place = int(np.argmax(outside))
            raise DataError(
                f"{file.path} token {start + place:,} is the id {int(document[place])}, outside "
                f"the vocabulary of {reading.vocab_size}: correct --vocab-size"
            )
        if reading.end_id is not None and (not length or document[-1] != reading.end_id):
            document = np.append(document, reading.end_id)
        for piece in range(0, len(document), PIECE_TOKENS):
            yield document[piece : piece + PIECE_TOKENS].astype(np.uint32)


def _read_ids(
    file: SourceFile, reading: ReaderOptions, dtype: np.dtype[np.integer], start: int
) -> Iterator[Document]:
    """Yield the documents of an array of ids that begins at byte `start`, each with its end id."""
    end_id = -1 if reading.end_id is None else reading.end_id  # no id is -1
    pending, position = np.empty(0, dtype=np.uint32), 0
    for ids in _read_chunks(file, dtype, start):
        outside = (ids < 0) | (ids >= reading.vocab_size)
        if outside.any():
            place = int(np.argmax(outside))
            raise DataError(
                f"{file.path} token {position + place:,} is the id {int(ids[place])}, outside the "
                f"vocabulary of {reading.vocab_size} (read as {dtype.name}): correct --vocab-size "
                "or --dtype, or the file is damaged or of another format"
            )
        position += len(ids)
        pending = np.concatenate([pending, ids.astype(np.uint32)])
        num_yielded = 0
        # The last document may continue in the next chunk: only full pieces of it are yielded.
        for end in [*(np.flatnonzero(pending == end_id) + 1).tolist(), None]:
            stop = len(pending) if end is None else end
            while stop - num_yielded > PIECE_TOKENS:
                yield pending[num_yielded : num_yielded + PIECE_TOKENS]
                num_yielded += PIECE_TOKENS
            if end is not None:
                yield pending[num_yielded:end]
                num_yielded = end
        pending = pending[num_yielded:]
    yield pending


def _read_chunks(
    file: SourceFile, dtype: np.dtype[np.integer], start: int
) -> Iterator[NDArray[np.integer]]:
    with open_plain(file.path) as stream:
        stream.seek(start)
        while content := stream.read(_CHUNK_TOKENS * dtype.itemsize):
            yield np.frombuffer(content, dtype=dtype)
