"""Token shards: written once with a hashed manifest, read by memory map in an order that is a pure function.

A corpus folder holds `manifest.json` and raw little-endian shards (uint16, or uint32 for large vocabularies; no
header). A document goes whole to training or to validation, by the hash of its text, so the splits share no document.
The manifest's content id is the `data_id` of every run on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from proxies import canon
from proxies.documents import DataError, read_documents
from proxies.permutation import permuted

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
SHARD_TOKENS = 2**26
DOCUMENT_END = 0  # the byte NUL, which text does not hold
Split = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of tokens."""

    file: str
    num_tokens: int
    max_id: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a corpus is: everything a run's data depends on, and no path or date."""

    schema_version: int
    tokenizer: str
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    num_documents: int
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]

    @property
    def data_id(self) -> str:
        """Content id of the corpus."""
        return canon.content_id(self)

    def num_tokens(self, split: Split) -> int:
        """Tokens in a split."""
        return sum(shard.num_tokens for shard in getattr(self, split))


def tokenize(
    sources: Iterable[Path],
    out: Path,
    *,
    suffixes: tuple[str, ...] = (".txt", ".md", ".py", ".jsonl"),
    excluded: tuple[str, ...] = (),
    validation_fraction: float = 0.02,
    progress: Callable[[int, int], None] = lambda num_documents, num_tokens: None,
) -> Manifest:
    """Write the byte-level shards and the manifest of `sources` into the folder `out`; identical documents count once.

    Bytes, not a learned vocabulary: at proxy sizes the embedding tables would be most of the model.

    Raises:
        DataError: nothing readable, a corpus already there that is another one, or a split left empty.
    """
    if not 0 < validation_fraction < 1:
        raise DataError(f"validation_fraction = {validation_fraction}: between 0 and 1 is wanted")
    texts: dict[bytes, bytes] = {}  # by hash, in the order read
    num_tokens = 0
    for document in read_documents(sources, suffixes, excluded):
        text = document.replace(bytes([DOCUMENT_END]), b"")
        digest = hashlib.sha256(text).digest()
        if not text.strip() or digest in texts:
            continue
        texts[digest] = text
        num_tokens += len(text) + 1
        if len(texts) % 256 == 0:
            progress(len(texts), num_tokens)
    if len(texts) < 2:
        raise DataError(
            f"{len(texts)} documents with text found: at least 2 are wanted, one to train on and one to hold out "
            f"(in folders, files ending in {', '.join(suffixes)} are taken)"
        )
    held_out = {digest for digest in texts if digest[0] / 256 + digest[1] / 65536 < validation_fraction}
    held_out = held_out or {min(texts)}  # a corpus of few documents still needs one
    train = _cut("train", [text for digest, text in texts.items() if digest not in held_out])
    validation = _cut("validation", [text for digest, text in texts.items() if digest in held_out])
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        tokenizer="bytes",
        vocab_size=256,
        dtype="uint16",
        num_documents=len(texts),
        train=tuple(train),
        validation=tuple(validation),
    )
    if (out / MANIFEST).exists() and read_manifest(out).data_id != manifest.data_id:
        raise DataError(f"{out} holds another corpus, which runs may be built on: choose another folder or remove it")
    out.mkdir(parents=True, exist_ok=True)
    for shard, tokens in (train | validation).items():
        canon.write_atomic(out / shard.file, tokens.tobytes())
    canon.write_atomic(out / MANIFEST, canon.pretty(manifest))
    progress(len(texts), num_tokens)
    return manifest


def _cut(split: Split, texts: list[bytes]) -> dict[Shard, NDArray[np.uint16]]:
    end = bytes([DOCUMENT_END])
    tokens = np.frombuffer(end.join(texts) + end, dtype=np.uint8).astype("<u2")
    parts = [tokens[start : start + SHARD_TOKENS] for start in range(0, len(tokens), SHARD_TOKENS)]
    return {
        Shard(
            file=f"{split}-{number:05d}.bin",
            num_tokens=len(part),
            max_id=int(part.max()),
            sha256=hashlib.sha256(part.data).hexdigest(),
        ): part
        for number, part in enumerate(parts)
    }


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a corpus folder.

    Raises:
        DataError: it is missing, not one, or of another schema.
    """
    path = folder / MANIFEST
    try:
        manifest = canon.decode(Manifest, canon.parse(path.read_bytes()))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: `forerun tokenize SOURCE... --out {folder}` writes it") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except canon.CanonError as error:
        raise DataError(f"{path} is not a manifest: {error}") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise DataError(f"{path} is of schema {manifest.schema_version}: this forerun reads schema {SCHEMA_VERSION}")
    return manifest


class CorruptCorpusError(DataError):
    """Shards that are not what their manifest says."""


class TokenStore:
    """A verified corpus, mapped into memory.

    Args:
        folder: what `tokenize` wrote.
        trusted: look at sizes alone; for workers, whose driver has just read every byte.

    Raises:
        DataError: there is no manifest.
        CorruptCorpusError: a shard is missing, truncated or grown, its hash or largest id is not the manifest's, or an
            id lies outside the vocabulary. All such problems are named at once.
    """

    def __init__(self, folder: Path, *, trusted: bool = False) -> None:
        self.manifest = read_manifest(folder)
        self._trusted = trusted
        problems: list[str] = []
        self._splits = {
            split: [self._open(folder, shard, problems) for shard in getattr(self.manifest, split)]
            for split in ("train", "validation")
        }
        if problems:
            raise CorruptCorpusError(f"{folder}: " + "; ".join(problems) + "; run `forerun tokenize` again")

    def _open(self, folder: Path, shard: Shard, problems: list[str]) -> NDArray[np.integer]:
        path = folder / shard.file
        itemsize = np.dtype(self.manifest.dtype).itemsize
        empty = np.empty(0, dtype=self.manifest.dtype)
        if not path.is_file():
            problems.append(f"{shard.file} is missing")
            return empty
        wanted, found = shard.num_tokens * itemsize, path.stat().st_size
        if wanted != found or not found:
            problems.append(f"{shard.file} has {found} bytes, the manifest says {wanted}")
            return empty
        tokens = np.memmap(path, dtype=np.dtype(self.manifest.dtype).newbyteorder("<"), mode="r")
        if self._trusted:
            return tokens
        largest = int(tokens.max())
        if largest >= self.manifest.vocab_size:
            problems.append(
                f"{shard.file} holds the id {largest}, outside the vocabulary of {self.manifest.vocab_size}"
            )
        elif canon.file_sha256(path) != shard.sha256:
            problems.append(f"{shard.file} does not have the manifest's hash: its content changed")
        return tokens

    def num_windows(self, split: Split, seq_len: int) -> int:
        """Non-overlapping windows of `seq_len` tokens (each with its next token) in a split."""
        return sum(max(0, (len(tokens) - 1) // seq_len) for tokens in self._splits[split])

    def train_batch(self, *, seed: int, step: int, num_sequences: int, seq_len: int) -> NDArray[np.int64]:
        """Batch of step `step`: ids [B, T + 1]. Every window once per epoch, in an order of (seed, epoch) alone.

        Raises:
            DataError: the split holds no window of that length.
        """
        num_windows = self.num_windows("train", seq_len)
        if num_windows == 0:
            raise DataError(f"the training split is shorter than one window of {seq_len + 1} tokens")
        first = step * num_sequences
        indices = [
            permuted((first + i) % num_windows, num_windows, key=(seed, (first + i) // num_windows))
            for i in range(num_sequences)
        ]
        return self._windows("train", indices, seq_len)

    def validation_batch(self, *, num_sequences: int, seq_len: int) -> NDArray[np.int64]:
        """The same evenly spread windows for everybody: ids [B, T + 1].

        Raises:
            DataError: the split holds fewer windows.
        """
        num_windows = self.num_windows("validation", seq_len)
        if num_windows < num_sequences:
            raise DataError(
                f"the validation split holds {num_windows} windows of {seq_len} tokens, {num_sequences} are wanted"
            )
        return self._windows("validation", [i * num_windows // num_sequences for i in range(num_sequences)], seq_len)

    def _windows(self, split: Split, indices: list[int], seq_len: int) -> NDArray[np.int64]:
        batch_BT = np.empty((len(indices), seq_len + 1), dtype=np.int64)
        for row, index in enumerate(indices):
            tokens, start = self._locate(split, index, seq_len)
            batch_BT[row] = tokens[start : start + seq_len + 1]
        return batch_BT

    def _locate(self, split: Split, index: int, seq_len: int) -> tuple[NDArray[np.integer], int]:
        """The shard that holds a window, and where it starts there: no window crosses shards."""
        before = 0
        for tokens in self._splits[split]:
            count = max(0, (len(tokens) - 1) // seq_len)
            if index < before + count:
                return tokens, (index - before) * seq_len
            before += count
        raise IndexError(f"window {index} of {before}")
