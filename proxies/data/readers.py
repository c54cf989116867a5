"""Readers of text: plain files, JSON lines and parquet, a document at a time, whatever their size."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.parquet

from proxies.core import canon
from proxies.data.documents import Document, Reading, SourceFile
from proxies.data.tokens import DataError

PIECE_BYTES = 2**18
LINE_BYTES = 2**30
_CHUNK_BYTES = 2**20
_ROWS = 256
_BOM = b"\xef\xbb\xbf"


def read_text(file: SourceFile, reading: Reading) -> Iterator[Document]:
    """A text in pieces of some `PIECE_BYTES`, cut after lines: a huge file must be many documents to be split.

    Raises:
        DataError: the file cannot be read, ends in the middle of compressed data, or is not in UTF-8.
    """
    pending = b""
    with _Stream(file) as stream:
        while True:
            chunk = stream.read(_CHUNK_BYTES)
            pending, start = pending + chunk, 0
            while len(pending) - start > PIECE_BYTES:
                end = pending.rfind(b"\n", start, start + PIECE_BYTES) + 1
                end = end if end > start else _character_end(pending, start + PIECE_BYTES)
                yield _checked(file, pending[start:end])
                start = end
            pending = pending[start:]
            if not chunk:
                break
        yield _checked(file, pending)


def _checked(file: SourceFile, text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.path} is no text in UTF-8: it holds 0x{text[error.start]:02x} after "
            f"{text[max(0, error.start - 20) : error.start].decode(errors='replace')!r}: convert it, or leave it out"
        ) from error
    return text


def _character_end(text: bytes, end: int) -> int:
    """`end`, or up to three bytes less where it would cut a character of UTF-8."""
    return next((cut for cut in range(end, end - 4, -1) if text[cut] & 0xC0 != 0x80), end)


def read_jsonl(file: SourceFile, reading: Reading) -> Iterator[Document]:
    """The strings under `reading.text_key`, one object per line; empty lines are passed over, null is an empty text.

    Raises:
        DataError: the file cannot be read, or a line is too long, not strict JSON, not an object or without its text.
    """
    with _Stream(file) as stream:
        number = 0
        while line := stream.readline(LINE_BYTES + 1):
            number += 1
            if line.strip():
                yield _text_of(file, number, line, reading.text_key)


def _text_of(file: SourceFile, number: int, line: bytes, text_key: str) -> bytes:
    where = f"{file.path} line {number}"
    if len(line) > LINE_BYTES:
        raise DataError(f"{where} is longer than {LINE_BYTES:,} bytes: is it one object per line?")
    try:
        value = canon.parse(line)
    except canon.CanonError as error:
        raise DataError(f"{where}: {error} (one object per line is wanted)") from error
    text = value.get(text_key, 0) if isinstance(value, dict) else 0
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: an object with a string `{text_key}` is wanted (--text-key names another key)")
    try:
        return (text or "").encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: `{text_key}` holds half a surrogate pair, which no UTF-8 text can") from None


def read_parquet(file: SourceFile, reading: Reading) -> Iterator[Document]:
    """The column `reading.text_key`, some rows at a time; null is an empty text.

    Raises:
        DataError: the file cannot be read, or has no such column of texts.
    """
    try:
        # Not buffered ahead: a row group may be larger than memory.
        with pyarrow.parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=_CHUNK_BYTES) as table:
            columns = table.schema_arrow.names
            if columns.count(reading.text_key) != 1:
                said = f"{file.path} has no column {reading.text_key!r}"
                raise DataError(f"{said}: name one of {', '.join(columns)} with --text-key")
            for batch in table.iter_batches(batch_size=_ROWS, columns=[reading.text_key], use_threads=False):
                for value in batch.column(0).to_pylist():
                    text = value.encode() if isinstance(value, str) else b"" if value is None else value
                    if not isinstance(text, bytes):
                        said = f"{file.path} column {reading.text_key!r} holds {value!r:.40}, no text"
                        raise DataError(f"{said}: name one of {', '.join(columns)} with --text-key")
                    yield _checked(file, text)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file.path} cannot be read as parquet: {_first_line(error)}") from error


class _Stream:
    """A file's bytes, decompressed, without the byte order mark; errors name the file."""

    def __init__(self, file: SourceFile) -> None:
        self._path, self._raw = file.path, file.path.open("rb")
        self._stream = self._raw
        if file.compression:
            inner = pa.CompressedInputStream(pa.PythonFile(self._raw, "r"), file.compression)
            self._stream = io.BufferedReader(inner, _CHUNK_BYTES)

    def __enter__(self) -> _Stream:
        if self._guarded(self._stream.peek, len(_BOM)).startswith(_BOM):
            self.read(len(_BOM))
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def read(self, size: int) -> bytes:
        return self._guarded(self._stream.read, size)

    def readline(self, size: int) -> bytes:
        return self._guarded(self._stream.readline, size)

    def _guarded(self, read: Callable[[int], bytes], size: int) -> bytes:
        try:
            return read(size)
        except (OSError, pa.ArrowException) as error:
            at = self._raw.tell()
            self._raw.close()
            raise DataError(
                f"{self._path} cannot be read beyond byte {at:,}: {_first_line(error)}; make it again, or leave it out"
            ) from error


def _first_line(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or str(error).partition("\n")[0]
