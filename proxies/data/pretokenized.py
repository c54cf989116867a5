"""Readers of token ids that another program wrote.

The formats are raw ids (`forerun._proxies.data.raw_ids`), NumPy's `.npy`, llm.c's `.bin` with a
header, and Megatron-LM's `.bin` with an index file (`forerun._proxies.data.megatron_index`).

The header of llm.c (dev/data/data_common.py) is 256 int32: the magic number 20240520 (uint16 ids,
GPT-2) or 20240801 (uint32 ids, Llama 3), version 1 or 7, and the number of tokens; the rest is
unused. The ids begin at byte 1024.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import open_plain, require_plain
from forerun._proxies.data.documents import LLMC_MAGICS, RAW, Document, ReaderOptions, SourceFile
from forerun._proxies.data.megatron_index import read_index
from forerun._proxies.data.raw_ids import find_dtype, read_npy_header
from forerun._proxies.data.tokens import DataError

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


def find_vocabulary(files: Sequence[SourceFile], options: ReaderOptions) -> ReaderOptions:
    """Return the options with the vocabulary size and the end id of pre-tokenized files.

    Values that are not given follow from llm.c's headers. Without such a header, the end id is
    GPT-2's if the vocabulary is GPT-2's; else there is none.

    Args:
        files: The pre-tokenized files.
        options: Options of the readers as the user gave them.

    Raises:
        DataError: The vocabulary of a file is unknown, or its ids cannot be of that vocabulary.
    """
    # (vocabulary size, end id) of the files with llm.c's header
    implied = {
        _LLMC_VOCABULARIES[dtype]
        for file in files
        if file.format == "llm.c" and (dtype := file.ids_dtype)
    }
    vocab_size, end_id = options.vocab_size, options.end_id
    if not vocab_size:
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
        if len(ends) == 1:
            end_id = next((end for end in ends if end < vocab_size), None)
    reading = replace(options, vocab_size=vocab_size, end_id=end_id)
    check_range(files, reading)
    return reading


def check_range(files: Iterable[SourceFile], reading: ReaderOptions) -> None:
    """Check that the dtypes of files can represent every id of a vocabulary.

    Raises:
        DataError: A file's dtype is too small or unknown, or the end id is outside the vocabulary.
            All problems are listed at once.
    """
    problems = []
    vocab_size, end_id = reading.vocab_size, reading.end_id
    if end_id is not None and not 0 <= end_id < vocab_size:
        problems.append(f"--end-id {end_id} is outside the vocabulary of {vocab_size}")
    for file in files:
        try:
            dtype = find_ids_dtype(file, reading)
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


def find_ids_dtype(file: SourceFile, reading: ReaderOptions) -> str:
    """Return the dtype of a pre-tokenized file's ids; a raw file is read to recognize it.

    Raises:
        DataError: The dtype cannot be determined (`find_dtype`).
    """
    if file.ids_dtype == RAW:
        return find_dtype(file.path, file.num_bytes, reading.vocab_size, reading.raw_dtype)
    return file.ids_dtype or "uint32"


def read_raw(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
    """Yield the documents of a raw file of ids, each with its end id.

    Raises:
        DataError: The dtype cannot be determined (`find_dtype`), or an id is outside the
            vocabulary.
    """
    yield from _read_ids(file, reading, np.dtype(find_ids_dtype(file, reading)), 0)


def read_npy(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
    """Yield the documents of a `.npy` file, each with its end id.

    Raises:
        DataError: The header cannot be read (`read_npy_header`), or an id is outside the
            vocabulary.
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
            f"{file.path} has {format_counted(len(header), 'byte')}, llm.c's header alone has "
            f"{_HEADER_BYTES}: it is truncated"
        )
    magic, version, num_tokens = (int(number) for number in np.frombuffer(header, dtype="<i4")[:3])
    dtype = np.dtype(LLMC_MAGICS[magic])
    expected_version = {"uint16": 1, "uint32": 7}[dtype.name]
    if version != expected_version:
        raise DataError(
            f"{file.path} has llm.c's version {version}: for magic {magic} it must be "
            f"{expected_version}"
        )
    num_bytes = _HEADER_BYTES + num_tokens * dtype.itemsize
    if num_bytes != file.num_bytes:
        raise DataError(
            f"{file.path} has {format_counted(file.num_bytes, 'byte')}, its header says "
            f"{format_counted(num_tokens, 'id')}, which take {num_bytes:,}: it is truncated, or "
            "something was appended"
        )
    yield from _read_ids(file, reading, dtype, _HEADER_BYTES)


def read_megatron(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
    """Yield the documents of a Megatron-LM file by its index, each with its end id if there is one.

    Raises:
        DataError: The index does not fit the file, or an id is outside the vocabulary.
    """
    index = read_index(file.path)
    ids = _map_ids(file, np.dtype(index.dtype), 0)
    for start, length in zip(index.starts.tolist(), index.lengths.tolist(), strict=True):
        document = ids[start : start + length]
        _check_ids(file, document, start, reading)
        if reading.end_id is not None and (not length or document[-1] != reading.end_id):
            document = np.append(document, reading.end_id)
        yield from _cut_pieces(document)


def _check_ids(
    file: SourceFile, ids: NDArray[np.integer], position: int, reading: ReaderOptions
) -> None:
    """Check that all ids are inside the vocabulary.

    Args:
        file: The file.
        ids: Some of its ids.
        position: Place of the first of them in the file.
        reading: Options of the readers.

    Raises:
        DataError: An id is outside the vocabulary.
    """
    outside = (ids < 0) | (ids >= reading.vocab_size)
    if outside.any():
        place = int(np.argmax(outside))
        raise DataError(
            f"{file.path} token {position + place:,} is the id {int(ids[place])}, outside the "
            f"vocabulary of {reading.vocab_size} (read as {ids.dtype.name}): correct --vocab-size "
            "or --dtype, or the file is damaged or of another format"
        )


def _read_ids(
    file: SourceFile, reading: ReaderOptions, dtype: np.dtype[np.integer], start: int
) -> Iterator[Document]:
    """Yield the documents of an array of ids that begins at byte `start`, each with its end id."""
    ids, document_start = _map_ids(file, dtype, start), 0
    for first in range(0, len(ids), _CHUNK_TOKENS):
        chunk = ids[first : first + _CHUNK_TOKENS]
        _check_ids(file, chunk, first, reading)
        ends = [] if reading.end_id is None else np.flatnonzero(chunk == reading.end_id).tolist()
        for end in ends:
            document_end = first + end + 1
            yield from _cut_pieces(ids[document_start:document_end])
            document_start = document_end
    yield from _cut_pieces(ids[document_start:])


def _map_ids(file: SourceFile, dtype: np.dtype[np.integer], start: int) -> NDArray[np.integer]:
    """Map the ids of a file, which begin at byte `start`, into memory."""
    require_plain(file.path)
    if file.num_bytes <= start:
        return np.empty(0, dtype)
    stored = dtype if dtype.byteorder == ">" else dtype.newbyteorder("<")
    return np.asarray(np.memmap(file.path, dtype=stored, mode="r", offset=start))


def _cut_pieces(ids: NDArray[np.integer]) -> Iterator[Document]:
    """Yield a document in pieces of at most `PIECE_TOKENS`."""
    for start in range(0, max(1, len(ids)), PIECE_TOKENS):
        yield ids[start : start + PIECE_TOKENS].astype(np.uint32)
