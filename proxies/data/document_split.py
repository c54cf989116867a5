"""Documents of one source into its two splits: known by their hash, each once, each whole into one split.

The hash of a document's content decides its split, whatever else is in the corpus; identical documents count once. So
the splits share none. The hashes are all that grows with the corpus: some hundred bytes a document.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from proxies.core.canon import parse_deep
from proxies.core.notation import counted
from proxies.core.plain_files import open_plain, require_plain
from proxies.data.documents import Document, ReaderOptions, SourceFile
from proxies.data.pretokenized import read_llm_c, read_megatron, read_npy, read_raw
from proxies.data.remote import filesystem_of, first_line
from proxies.data.shards import PublishedShards, ShardWriter, another_corpus
from proxies.data.tokenizer import Tokenizer
from proxies.data.tokens import SPLITS, DataError, Dtype, Manifest, Source, Split

# Readers of text: plain files, JSON lines and parquet, a document at a time, whatever their size.

PIECE_BYTES = 2**18
LINE_BYTES = 2**30
_CHUNK_BYTES = 2**20
_ROWS = 256
_BOM = b"\xef\xbb\xbf"


def read_text(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
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
            f"{file.name} is not UTF-8 text: it holds 0x{text[error.start]:02x} after "
            f"{text[max(0, error.start - 20) : error.start].decode(errors='replace')!r}: convert it, or leave it out"
        ) from error
    return text


def _character_end(text: bytes, end: int) -> int:
    """`end`, or up to three bytes less where it would cut a character of UTF-8."""
    return next((cut for cut in range(end, end - 4, -1) if text[cut] & 0xC0 != 0x80), end)


def read_jsonl(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
    """The strings under `reading.text_key`, one object per line; empty lines are passed over, null is an empty text.

    Other keys may hold NaN, numbers beyond a float, bytes that are not UTF-8, values of any depth, and doubled keys.

    Raises:
        DataError: the file cannot be read, or a line is too long, not JSON, not an object or without its text.
    """
    decode = json.JSONDecoder(object_pairs_hook=lambda pairs: _Object(pairs, reading.text_key), parse_int=float).decode
    with _Stream(file) as stream:
        number = 0
        while line := stream.readline(LINE_BYTES + 1):
            number += 1
            if line.strip():
                yield _text_of(file, number, line, reading.text_key, decode)


class _Object(dict[str, object]):
    """A JSON object that knows whether it has the key of the text twice."""

    def __init__(self, pairs: list[tuple[str, object]], text_key: str) -> None:
        super().__init__(pairs)
        self.is_doubled = len(pairs) != len(self) and sum(name == text_key for name, _ in pairs) > 1


def _text_of(file: SourceFile, number: int, line: bytes, text_key: str, decode: Callable[[str], object]) -> bytes:
    where = f"{file.path} line {number}"
    if len(line) > LINE_BYTES:
        raise DataError(f"{where} is longer than {LINE_BYTES:,} bytes: is it one object per line?")
    try:
        value = parse_deep(line.decode(errors="surrogateescape"), decode)
    except ValueError as error:
        if number == 1 and line.lstrip().startswith(b"["):
            raise _array_error(file, where) from error
        raise DataError(f"{where}: not JSON: {error} (each line must be one object)") from error
    if isinstance(value, list):
        raise _array_error(file, where)
    if not isinstance(value, _Object):
        raise DataError(
            f"{where} is {line.strip().decode(errors='replace')[:40]}: must be an object with a string `{text_key}`"
        )
    if value.is_doubled:
        raise DataError(f"{where}: the key `{text_key}` appears twice, so its text is not known: keep one of them")
    text = value.get(text_key, 0)
    if text is not None and not isinstance(text, str):
        strings = [name for name, content in value.items() if isinstance(content, str)]
        choice = f"strings are under {', '.join(strings)}" if strings else "no key of this line holds a string"
        raise DataError(
            f"{where}: must be an object with a string `{text_key}` ({choice}; --text-key names another key)"
        )
    try:
        return (text or "").encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: `{text_key}` holds bytes that are not UTF-8, or half a surrogate pair") from None


def _array_error(file: SourceFile, where: str) -> DataError:
    return DataError(
        f"{where} begins a JSON array; JSON Lines are read, one object a line: write them, such as by "
        f"`jq -c '.[]' {file.path.name} > {file.path.stem}.jsonl`"
    )


def read_parquet(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
    """The column `reading.text_key`, some rows at a time; null is an empty text.

    Raises:
        DataError: the file cannot be read, or has no such column of texts.
    """
    try:
        source: object = file.path
        if file.uri:
            filesystem, path = filesystem_of(file.uri)
            source = filesystem.open_input_file(path)
        else:
            require_plain(file.path)
        # Not buffered ahead: a row group may be larger than memory.
        with pyarrow.parquet.ParquetFile(source, pre_buffer=False, buffer_size=_CHUNK_BYTES) as table:
            _check_column(file, table.schema_arrow, reading.text_key)
            for batch in table.iter_batches(batch_size=_ROWS, columns=[reading.text_key], use_threads=False):
                for value in batch.column(0).to_pylist():
                    text = value.encode() if isinstance(value, str) else value or b""
                    yield _checked(file, text)
    except DataError:
        raise
    except Exception as error:
        if not file.uri and not isinstance(error, (pa.ArrowException, OSError, UnicodeDecodeError)):
            raise  # of a store's client, which raises its own, all are bad input
        raise DataError(f"{file.name} cannot be read as parquet: {first_line(error)}") from error


def _check_column(file: SourceFile, schema: pa.Schema, text_key: str) -> None:
    """Check that the column exists once and holds texts; the error names the columns that do.

    Raises:
        DataError: the column and its type, and the columns of texts.
    """
    fields = [field for field in schema if field.name == text_key]
    if len(fields) == 1 and (_holds_texts(fields[0].type) or pa.types.is_null(fields[0].type)):
        return
    texts = [field.name for field in schema if _holds_texts(field.type)]
    if texts:
        advice = f"name one of {', '.join(texts)} with --text-key"
    else:
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        advice = f"no column holds texts ({columns[:300]}): write one first, such as each chat as one text"
    if len(fields) == 1:
        raise DataError(f"{file.name} column {text_key!r} holds {str(fields[0].type)[:80]}, not text: {advice}")
    raise DataError(f"{file.name} has {len(fields) or 'no'} column {text_key!r}: {advice}")


def _holds_texts(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    checks = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_string_view,
        pa.types.is_binary_view,
    )
    return any(check(kind) for check in checks)


class _Stream:
    """A file's bytes, decompressed, without the byte order mark; errors name the file."""

    def __init__(self, file: SourceFile) -> None:
        self._path, self._raw = file.path, cast(io.BufferedReader, open_plain(file.path))
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
                f"{self._path} cannot be read beyond byte {at:,}: {first_line(error)}; make it again, or leave it out"
            ) from error


READERS: dict[str, Callable[[SourceFile, ReaderOptions], Iterator[Document]]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "nanogpt": read_raw,
    "npy": read_npy,
    "megatron": read_megatron,
    "llm.c": read_llm_c,
}
_BATCH_BYTES = 2**22
_TELL_EVERY = 256
_DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitProgress:
    """How far the writing of a corpus has come; documents and tokens are the present source's."""

    bytes_read: int
    """Of the files that are done."""
    total_bytes: int
    num_documents: int
    num_tokens: int


@dataclass(kw_only=True, slots=True)
class SplitJob:
    """What the sources of one corpus share, and how far it has come."""

    folder: Path
    tokenizer: Tokenizer | None
    """None where every source is pre-tokenized."""
    reading: ReaderOptions
    validation_fraction: float
    progress: Callable[[SplitProgress], None]
    say: Callable[[str], None]
    total_bytes: int
    out: Path
    """The corpus folder that the shards will move to."""
    published: Manifest | None
    """The corpus that it holds already, if any: only the same one may be written."""
    bytes_done: int = 0
    seen: set[bytes] = field(default_factory=set)
    """Digests of the documents of the sources that are done."""

    @property
    def dtype(self) -> Dtype:
        """Type of the ids in shards."""
        return "uint16" if self.reading.vocab_size <= 2**16 else "uint32"

    def open_writer(self, name: str, split: Split, stem: str) -> ShardWriter:
        """Return a writer of one split of a source."""
        old = [source for source in self.published.sources if source.name == name] if self.published else []
        published = PublishedShards(self.out, old[0].train if split == "train" else old[0].validation) if old else None
        return ShardWriter(self.folder, f"{stem}{split}", self.dtype, published)


def is_held_out(digest: bytes, validation_fraction: float) -> bool:
    """Return whether a document is held out for validation, by the SHA-256 digest of its text."""
    return digest[0] / 256 + digest[1] / 65536 < validation_fraction


def write_source(job: SplitJob, name: str, files: Sequence[SourceFile], stem: str) -> Source:
    """Write the shards of one source; its weight is left at one.

    A source too small for one of its splits is gone through again, and the document of the smallest hash held out (or
    that of the largest trained on).

    Args:
        job: folder, tokenizer and what else the sources share.
        name: the source's.
        files: its files.
        stem: what the names of its shards begin with.

    Raises:
        DataError: a file cannot be read, fewer than two documents are found, or the disk is full.
    """
    by_name = any(file.split for file in files)
    with _Pass(job, name, stem, lambda digest: is_held_out(digest, job.validation_fraction)) as taken:
        taken.take_all(files)
        if len(taken.fresh) < 2:
            raise DataError(
                f"source {name!r}: {counted(len(taken.fresh), 'new document')} with text found, and "
                f"{taken.num_left_out:,} left out that are without text, or identical to one before, in this source or "
                "an earlier one: there must "
                "be at least 2, one to train on and one to hold out"
            )
        if all(taken.num_documents.values()):
            return taken.source()
        if by_name:
            empty = next(split for split, count in taken.num_documents.items() if not count)
            raise DataError(
                f"source {name!r}: the files that their names give to {empty} hold no new document with text: name "
                "other files, or rename them all, and documents are split by content"
            )
        taken.remove()
    smallest, largest, few = taken.smallest, taken.largest, taken.num_documents["validation"] == 0
    job.total_bytes += sum(file.num_bytes for file in files)
    with _Pass(job, name, stem, lambda digest: digest == smallest if few else digest != largest) as again:
        again.take_all(files)
        return again.source()


class _Pass:
    """One pass over the files of a source."""

    def __init__(self, job: SplitJob, name: str, stem: str, held_out: Callable[[bytes], bool]) -> None:
        self._job, self._name, self._held_out = job, name, held_out
        self.writers = {split: job.open_writer(name, split, stem) for split in SPLITS}
        self.num_documents: dict[Split, int] = dict.fromkeys(SPLITS, 0)
        self.fresh: set[bytes] = set()
        self.smallest, self.largest = b"\xff" * 32, b""
        self.num_left_out = 0
        self._texts: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
        self._num_taken = self._num_waiting = 0

    def __enter__(self) -> _Pass:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.writers.values():
            writer.abandon()

    def take_all(self, files: Iterable[SourceFile]) -> None:
        """Read the files to their ends and write what is new in them."""
        for file in files:
            for document in self._read(file):
                self._take(document, file.split)
                self._num_taken += 1
                if self._num_waiting >= _BATCH_BYTES:
                    self._write_texts()
                    self._tell()
                elif self._num_taken % _TELL_EVERY == 0:
                    self._tell()
            self._job.bytes_done += file.num_bytes
        self._write_texts()
        self._tell()

    def _read(self, file: SourceFile) -> Iterator[Document]:
        try:
            yield from READERS[file.format](file, self._job.reading)
        except OSError as error:
            raise DataError(f"{file.path} cannot be read: {error.strerror or error}") from error

    def source(self) -> Source:
        """End the shards: the source that was written."""
        self._job.seen |= self.fresh
        shards = {split: writer.close() for split, writer in self.writers.items()}
        tokens = {split: writer.num_tokens for split, writer in self.writers.items()}
        self._job.say(
            f"{self._name}: {counted(len(self.fresh), 'document')}, {tokens['train']:,} training and "
            f"{tokens['validation']:,} validation tokens; left out: {self.num_left_out:,} without text, or identical "
            "to one before"
        )
        return Source(name=self._name, weight=1.0, num_documents=len(self.fresh), **shards)

    def remove(self) -> None:
        """End the shards, and delete them."""
        for writer in self.writers.values():
            for shard in writer.close():
                (self._job.folder / shard.file).unlink()

    def _take(self, content: Document, named: Split | None) -> None:
        end_id = self._job.reading.end_id
        if isinstance(content, bytes):
            content = content.replace(b"\0", b"")  # the byte tokenizer's end of a document
            known_by, blank = content, not content or content.isspace()
        else:
            ended = content.size > 0 and content[-1] == end_id
            body = content[:-1] if ended else content
            known_by, blank = body.astype("<u4").tobytes(), body.size == 0
        digest = hashlib.sha256(known_by).digest()
        key = digest[:_DIGEST_BYTES]
        if blank or key in self.fresh or key in self._job.seen:
            self.num_left_out += 1
            return
        self.fresh.add(key)
        self.smallest, self.largest = min(self.smallest, digest), max(self.largest, digest)
        split: Split = named or ("validation" if self._held_out(digest) else "train")
        self.num_documents[split] += 1
        if isinstance(content, bytes):
            self._texts[split].append(content)
            self._num_waiting += len(content)
        else:
            self._write_texts()
            end = [] if end_id is None or content[-1] == end_id else [end_id]
            self.writers[split].write(np.append(content, np.array(end, dtype=np.uint32)))

    def _write_texts(self) -> None:
        for split, texts in self._texts.items():
            if texts and self._job.tokenizer is not None:
                self.writers[split].write(self._job.tokenizer.encode(texts))
                texts.clear()
        self._num_waiting = 0
        self._refuse_other_text()

    def _refuse_other_text(self) -> None:
        """End the command where a written token is not the published one, unless this pass may be undone."""
        differing = [split for split, writer in self.writers.items() if writer.differs]
        if differing and all(self.num_documents.values()):
            names = {"train": "training", "validation": "validation"}
            tokens = " and ".join(names[split] for split in differing)
            raise another_corpus(self._job.out, f"with other {tokens} tokens of source {self._name!r}")

    def _tell(self) -> None:
        job = self._job
        job.progress(
            SplitProgress(
                bytes_read=job.bytes_done,
                total_bytes=job.total_bytes,
                num_documents=len(self.fresh),
                num_tokens=sum(writer.num_tokens for writer in self.writers.values()),
            )
        )
