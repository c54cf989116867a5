"""Readers of text, one document at a time: plain text, JSON lines, and parquet.

Files may be compressed and of any size; memory does not grow with the file. Errors name the file
and the place in it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pyarrow as pa
import pyarrow.parquet

from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import open_plain, require_plain
from forerun._proxies.data.documents import Document, ReaderOptions, SourceFile
from forerun._proxies.data.remote import get_first_line, open_filesystem
from forerun._proxies.data.tokens import DataError

MAX_PIECE_BYTES = 2**18
"""Maximum size of a piece of a text file, which counts as a document."""
MAX_LINE_BYTES = 2**30
"""Maximum size of a line of a JSON Lines file."""
_CHUNK_BYTES = 2**20
_BATCH_ROWS = 256
_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
_BOM = b"\xef\xbb\xbf"


def read_text(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
    """Yield a text file in pieces of at most `MAX_PIECE_BYTES`, cut at the ends of lines.

    Each piece counts as a document: one large file must give documents for both splits.

    Raises:
        DataError: The file cannot be read, ends in the middle of compressed data, or is not UTF-8.
    """
    pending = b""
    with _open_stream(file) as stream:
        while True:
            chunk = stream.read(_CHUNK_BYTES)
            pending, start = pending + chunk, 0
            while len(pending) - start > MAX_PIECE_BYTES:
                end = pending.rfind(b"\n", start, start + MAX_PIECE_BYTES) + 1
                end = end if end > start else _find_character_end(pending, start + MAX_PIECE_BYTES)
                yield _check_utf8(file, pending[start:end])
                start = end
            pending = pending[start:]
            if not chunk:
                break
        yield _check_utf8(file, pending)


def _check_utf8(file: SourceFile, text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.name} is not UTF-8 text: it holds 0x{text[error.start]:02x} after "
            f"{text[max(0, error.start - 20) : error.start].decode(errors='replace')!r}: convert "
            "it, or leave it out"
        ) from error
    return text


def _find_character_end(text: bytes, end: int) -> int:
    """Return `end`, or up to 3 bytes less so that no UTF-8 character is cut."""
    return next((cut for cut in range(end, end - 4, -1) if text[cut] & 0xC0 != 0x80), end)


def read_jsonl(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
    """Yield the string under `reading.text_key` of each line, one JSON object per line.

    Empty lines are skipped; null is an empty text. Other keys may hold NaN, numbers that no float
    can represent, bytes that are not UTF-8, and values nested to any depth. Of a repeated key, the
    last value counts.

    Raises:
        DataError: The file cannot be read, or a line is too long, is not a JSON object, or has no
            text.
    """
    decode = json.JSONDecoder(parse_int=float).decode
    with _open_stream(file) as stream:
        number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if line.strip():
                yield _read_line(file, number, line, reading.text_key, decode)


def _read_line(
    file: SourceFile, number: int, line: bytes, text_key: str, decode: Callable[[str], object]
) -> bytes:
    """Return the text of one line of a JSON Lines file."""
    where = f"{file.path} line {number}"
    if len(line) > MAX_LINE_BYTES:
        raise DataError(
            f"{where} is longer than {MAX_LINE_BYTES:,} bytes; JSON Lines have one object per line"
        )
    try:
        value = decode(line.decode(errors="surrogateescape"))
    except (ValueError, RecursionError) as error:
        if number != 1 or not line.lstrip().startswith(b"["):
            raise DataError(f"{where}: not JSON: {error} (each line must be one object)") from error
        value = []  # the beginning of a JSON array that spans several lines
    if isinstance(value, list):
        raise DataError(
            f"{where} begins a JSON array, but JSON Lines are read, one object per line: convert "
            f"it, for example by `jq -c '.[]' {file.path.name} > {file.path.stem}.jsonl`"
        )
    columns = value if isinstance(value, dict) else {}
    # 0 stands for a missing key; None is null, an empty text
    text = columns.get(text_key, 0)
    if text is not None and not isinstance(text, str):
        strings = [name for name, content in columns.items() if isinstance(content, str)]
        choice = f"strings are under {', '.join(strings)}" if strings else "it has no string"
        raise DataError(
            f"{where}: must be an object with a string `{text_key}` ({choice}; --text-key names "
            "another key)"
        )
    try:
        return (text or "").encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{where}: `{text_key}` holds bytes that are not UTF-8, or half a surrogate pair"
        ) from None


def read_parquet(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
    """Yield the texts of the column `reading.text_key`, a few rows at a time.

    Null is an empty text.

    Raises:
        DataError: The file cannot be read, or has no such column of texts.
    """
    try:
        source: object = file.path
        if file.uri:
            filesystem, path = open_filesystem(file.uri)
            source = filesystem.open_input_file(path)
        else:
            require_plain(file.path)
        # No read-ahead: a row group may be larger than memory.
        with pyarrow.parquet.ParquetFile(
            source, pre_buffer=False, buffer_size=_CHUNK_BYTES
        ) as table:
            _check_column(file, table.schema_arrow, reading.text_key)
            for batch in table.iter_batches(
                batch_size=_BATCH_ROWS, columns=[reading.text_key], use_threads=False
            ):
                for value in batch.column(0).to_pylist():
                    text = value.encode() if isinstance(value, str) else value or b""
                    yield _check_utf8(file, text)
    except DataError:
        raise
    except Exception as error:
        # The client of an object store raises its own exceptions: all of them are bad input.
        if not file.uri and not isinstance(error, (pa.ArrowException, OSError, UnicodeDecodeError)):
            raise
        raise DataError(
            f"{file.name} cannot be read as parquet: {get_first_line(error)}"
        ) from error


def _check_column(file: SourceFile, schema: pa.Schema, text_key: str) -> None:
    """Check that the column exists exactly once and contains texts.

    Raises:
        DataError: The column is missing, appears twice, or contains no texts. The message names its
            type, and the columns that contain texts.
    """
    fields = [field for field in schema if field.name == text_key]
    if len(fields) > 1:
        raise DataError(
            f"{file.name} has {format_counted(len(fields), 'column')} named {text_key!r}: rename "
            "or remove all but one"
        )
    if fields and (_is_text_type(fields[0].type) or pa.types.is_null(fields[0].type)):
        return
    texts = [field.name for field in schema if _is_text_type(field.type)]
    advice = f"name one of {', '.join(texts)} with --text-key"
    if not texts:
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        advice = f"no column holds texts ({columns[:300]}): write one first"
    problem = (
        f"column {text_key!r} holds {str(fields[0].type)[:80]}, not text"
        if fields
        else f"has no column {text_key!r}"
    )
    raise DataError(f"{file.name} {problem}: {advice}")


def _is_text_type(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return str(kind) in _TEXT_TYPES


@contextmanager
def _open_stream(file: SourceFile) -> Iterator[io.BufferedReader]:
    """Open the decompressed bytes of a file, without a byte order mark; errors name the file."""
    with open_plain(file.path) as raw:
        stream = cast(io.BufferedReader, raw)
        if file.compression:
            inner = pa.CompressedInputStream(pa.PythonFile(raw, "r"), file.compression)
            stream = io.BufferedReader(inner, _CHUNK_BYTES)
        try:
            if stream.peek(len(_BOM)).startswith(_BOM):
                stream.read(len(_BOM))
            yield stream
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{file.path} cannot be read beyond byte {raw.tell():,}: "
                f"{get_first_line(error)}; make it again, or leave it out"
            ) from error
