"""Write the documents of one source into its two splits, training and validation.

The hash of a document's content decides its split, whatever else is in the corpus. Identical
documents count once, so no document is in both splits. Only the hashes are kept in memory for the
whole corpus, about 100 bytes per document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from forerun._proxies.core.notation import format_counted
from forerun._proxies.data.documents import Document, ReaderOptions, SourceFile
from forerun._proxies.data.pretokenized import read_llm_c, read_megatron, read_npy, read_raw
from forerun._proxies.data.shards import ShardWriter
from forerun._proxies.data.text_readers import read_jsonl, read_parquet, read_text
from forerun._proxies.data.tokenizer import Tokenizer
from forerun._proxies.data.tokens import (
    SPLITS,
    DataError,
    Dtype,
    Source,
    Split,
    explain_read_errors,
)

_READERS: dict[str, Callable[[SourceFile, ReaderOptions], Iterator[Document]]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "nanogpt": read_raw,
    "npy": read_npy,
    "megatron": read_megatron,
    "llm.c": read_llm_c,
}
"""Readers of documents by `SourceFile.format`."""
_MAX_BATCH_BYTES = 2**22
"""Size of waiting texts at which they are tokenized together."""
_REPORT_EVERY_DOCUMENTS = 256
_DIGEST_BYTES = 16
"""Bytes of a digest that are kept to recognize identical documents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitProgress:
    """Progress of a corpus that is being written."""

    bytes_read: int
    """Total size of the files that have been read to their ends."""
    total_bytes: int
    num_documents: int
    """Number of documents of the current source so far."""
    num_tokens: int
    """Number of tokens of the current source so far."""


@dataclass(kw_only=True, slots=True)
class SplitJob:
    """The settings that all sources of one corpus share, and the progress so far."""

    folder: Path
    tokenizer: Tokenizer | None
    """Tokenizer of the texts; None if every source is pre-tokenized."""
    reading: ReaderOptions
    validation_fraction: float
    progress: Callable[[SplitProgress], None]
    say: Callable[[str], None]
    total_bytes: int
    bytes_done: int = 0
    known_digests: set[bytes] = field(default_factory=set)
    """First bytes of the digests of the documents of finished sources."""

    @property
    def dtype(self) -> Dtype:
        """Dtype of the ids in shards."""
        return "uint16" if self.reading.vocab_size <= 2**16 else "uint32"


def read_documents(file: SourceFile, reading: ReaderOptions) -> Iterator[Document]:
    """Yield the documents of a file.

    Raises:
        DataError: The file cannot be read, or is not what its format says.
    """
    with explain_read_errors(file.path):
        yield from _READERS[file.format](file, reading)


def is_held_out(digest: bytes, validation_fraction: float) -> bool:
    """Return whether a document is held out for validation, by the SHA-256 digest of its text."""
    # The first two bytes of the digest are a number that is uniform on [0, 1). A change here would
    # move documents between the splits of every corpus, and give every corpus another id
    return digest[0] / 256 + digest[1] / 65536 < validation_fraction


def write_source(job: SplitJob, name: str, files: Sequence[SourceFile], stem: str) -> Source:
    """Write the shards of one source, whose weight is left at 1.

    If one split would be empty, the source is read a second time, and one document moves to the
    empty split: the document with the smallest hash to validation, or the document with the largest
    hash to training.

    Args:
        job: Settings that all sources share.
        name: Name of the source.
        files: Files of the source.
        stem: Beginning of the names of its shards.

    Raises:
        DataError: A file cannot be read, fewer than two documents are found, or the disk is full.
    """
    has_named_splits = any(file.split for file in files)
    with _Pass(
        job, name, stem, lambda digest: is_held_out(digest, job.validation_fraction)
    ) as first_pass:
        first_pass.take_all(files)
        if len(first_pass.new_digests) < 2:
            raise DataError(
                f"source {name!r}: {format_counted(len(first_pass.new_digests), 'new document')} "
                f"with text found, and {first_pass.num_left_out:,} left out that are without text, "
                "or identical to one before, in this source or an earlier one: there must be at "
                "least 2, one to train on and one to hold out"
            )
        if all(first_pass.num_documents.values()):
            return first_pass.finish()
        if has_named_splits:
            empty = next(split for split, count in first_pass.num_documents.items() if not count)
            raise DataError(
                f"source {name!r}: the files that are named for {empty} hold no new document "
                "with text: name other files, or rename all of them, so that documents are split "
                "by content"
            )
        first_pass.remove()

    # One split is empty: move exactly one document to it.
    smallest_digest, largest_digest = first_pass.smallest_digest, first_pass.largest_digest
    needs_validation = first_pass.num_documents["validation"] == 0

    def is_in_validation(digest: bytes) -> bool:
        return digest == smallest_digest if needs_validation else digest != largest_digest

    job.total_bytes += sum(file.num_bytes for file in files)
    with _Pass(job, name, stem, is_in_validation) as second_pass:
        second_pass.take_all(files)
        return second_pass.finish()


class _Pass:
    """One pass over the files of a source."""

    def __init__(
        self, job: SplitJob, name: str, stem: str, is_in_validation: Callable[[bytes], bool]
    ) -> None:
        self._job, self._name, self._is_in_validation = job, name, is_in_validation
        self.writers = {
            split: ShardWriter(job.folder, f"{stem}{split}", job.dtype) for split in SPLITS
        }
        self.num_documents: dict[Split, int] = dict.fromkeys(SPLITS, 0)
        self.new_digests: set[bytes] = set()
        self.smallest_digest, self.largest_digest = b"\xff" * 32, b""
        self.num_left_out = 0
        self._texts: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
        self._num_taken = self._num_waiting = 0

    def __enter__(self) -> _Pass:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.writers.values():
            writer.abandon()

    def take_all(self, files: Iterable[SourceFile]) -> None:
        """Read the files to their ends, and write their new documents."""
        for file in files:
            for document in read_documents(file, self._job.reading):
                self._take(document, file.split)
                self._num_taken += 1
                if self._num_waiting >= _MAX_BATCH_BYTES:
                    self._write_texts()
                    self._report_progress()
                elif self._num_taken % _REPORT_EVERY_DOCUMENTS == 0:
                    self._report_progress()
            self._job.bytes_done += file.num_bytes
        self._write_texts()
        self._report_progress()

    def finish(self) -> Source:
        """Close the shards, and return the source that was written."""
        self._job.known_digests |= self.new_digests
        shards = {split: writer.close() for split, writer in self.writers.items()}
        tokens = {split: writer.num_tokens for split, writer in self.writers.items()}
        self._job.say(
            f"{self._name}: {format_counted(len(self.new_digests), 'document')}, "
            f"{tokens['train']:,} training and {tokens['validation']:,} validation tokens; "
            f"left out: {self.num_left_out:,} without text, or identical to one before"
        )
        return Source(name=self._name, weight=1.0, num_documents=len(self.new_digests), **shards)

    def remove(self) -> None:
        """Close the shards, and delete them."""
        for writer in self.writers.values():
            for shard in writer.close():
                (self._job.folder / shard.file).unlink()

    def _take(self, content: Document, named_split: Split | None) -> None:
        """Add a document to its split, unless it is empty or identical to one before."""
        end_id = self._job.reading.end_id
        if isinstance(content, bytes):
            # NUL is the byte tokenizer's end of a document.
            content = content.replace(b"\0", b"")
            hashed, is_blank = content, not content or content.isspace()
        else:
            # The end id is no part of the content: a document is the same with and without it.
            has_end = content.size > 0 and content[-1] == end_id
            body = content[:-1] if has_end else content
            hashed, is_blank = body.astype("<u4").tobytes(), body.size == 0
        digest = hashlib.sha256(hashed).digest()
        key = digest[:_DIGEST_BYTES]
        if is_blank or key in self.new_digests or key in self._job.known_digests:
            self.num_left_out += 1
            return
        self.new_digests.add(key)
        self.smallest_digest = min(self.smallest_digest, digest)
        self.largest_digest = max(self.largest_digest, digest)
        split: Split = named_split or ("validation" if self._is_in_validation(digest) else "train")
        self.num_documents[split] += 1
        if isinstance(content, bytes):
            self._texts[split].append(content)
            self._num_waiting += len(content)
        else:
            self._write_texts()
            missing_end = [] if end_id is None or content[-1] == end_id else [end_id]
            self.writers[split].write(np.append(content, np.array(missing_end, dtype=np.uint32)))

    def _write_texts(self) -> None:
        for split, texts in self._texts.items():
            if texts and self._job.tokenizer is not None:
                self.writers[split].write(self._job.tokenizer.encode(texts))
                texts.clear()
        self._num_waiting = 0

    def _report_progress(self) -> None:
        job = self._job
        job.progress(
            SplitProgress(
                bytes_read=job.bytes_done,
                total_bytes=job.total_bytes,
                num_documents=len(self.new_digests),
                num_tokens=sum(writer.num_tokens for writer in self.writers.values()),
            )
        )
