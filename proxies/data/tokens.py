"""A corpus of token shards, mapped into memory and read in an order that depends only on the seed
and the position.

A corpus folder contains `manifest.json`, the tokenizer's file if there is one, and raw
little-endian shards (uint16, or uint32 for large vocabularies; no header) of one or more sources.
The manifest's content id is the `data_id` of every run on the corpus. Exports carry this module to
other machines: it uses NumPy and the standard library only.
"""

from __future__ import annotations

import bisect
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from proxies.core import canon
from proxies.core.checks import Checks, SpecError
from proxies.core.errors import ExitCode, InputError
from proxies.core.notation import counted
from proxies.core.plain_files import read_plain, require_plain
from proxies.data.mixture import Mixture, weight_problems
from proxies.data.windows import Windows

MANIFEST = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
SCHEMA_VERSION = 3
MAX_EXAMPLES = 3
"""Maximum number of file names that are given as examples of a kind of file."""
MAX_MANIFEST_BYTES = 2**28
"""Maximum size of a manifest, which would be reached at a million shards."""
Split = Literal["train", "validation"]
Dtype = Literal["uint16", "uint32"]
SPLITS: tuple[Split, Split] = ("train", "validation")


class DataError(InputError):
    """A corpus cannot be read, or is not what its manifest says; `problems` lists every problem."""

    cause, refuses_study = "bad_data", True

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(problems))


class CorruptCorpusError(DataError):
    """A corpus has shards or a tokenizer that are not what its manifest says."""

    exit_code = ExitCode.CORRUPT


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of tokens."""

    file: str
    num_tokens: int
    max_id: int
    sha256: str

    def __post_init__(self) -> None:
        checks = Checks(self)
        is_plain_name = re.fullmatch(r"[\w-]+\.bin", self.file) is not None
        checks.that(
            is_plain_name,
            f"file = {self.file!r}: must be the name of a .bin file in the corpus folder",
        )
        checks.whole("num_tokens", "max_id", least=0)
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One part of a corpus, with its weight in the mixture."""

    name: str
    weight: float
    """Share of a run's sequences; the shares of a corpus add up to 1."""
    num_documents: int
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]

    def num_tokens(self, split: Split) -> int:
        """Return the number of tokens in a split."""
        return sum(shard.num_tokens for shard in getattr(self, split))


@dataclass(frozen=True, kw_only=True, slots=True)
class NotRead:
    """Files of one kind that are not read into a corpus."""

    suffix: str
    num_files: int
    num_bytes: int
    examples: tuple[str, ...] = field(default=(), metadata=canon.UNLESS_DEFAULT)
    """Names of the first files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The description of a corpus: everything that the data of a run depends on.

    It contains no path and no date. `not_read` and `source_bytes` are no part of the corpus's id.
    """

    schema_version: int
    tokenizer: str
    """`bytes`, `sha256:` and the hash of the tokenizer's file, or `unnamed` for ids whose tokenizer
    is unknown."""
    vocab_size: int
    dtype: Dtype
    end_id: int | None
    """Id that ends each document; None if there is none."""
    sources: tuple[Source, ...]
    not_read: tuple[NotRead, ...] = ()
    """Files of the sources' folders that are not in the corpus; no part of `data_id`."""
    source_bytes: int = field(default=0, metadata=canon.UNLESS_DEFAULT)
    """Total bytes of the files that were read, no part of `data_id`; 0 if unknown."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.that(
            self.schema_version == SCHEMA_VERSION,
            f"schema_version = {self.schema_version}: must be {SCHEMA_VERSION}",
        )
        checks.whole("vocab_size")
        checks.whole("source_bytes", least=0)
        checks.that(bool(self.sources), "sources is empty: there must be at least one")
        names = self.names
        checks.that(
            len(set(names)) == len(names), f"sources are {', '.join(names)}: a name appears twice"
        )
        if checks.fine:
            limit = int(np.iinfo(self.dtype).max) + 1
            checks.that(
                self.vocab_size <= limit,
                f"vocab_size = {self.vocab_size}: shards of {self.dtype} hold "
                f"{counted(limit, 'id')} at most",
            )
            in_range = self.end_id is None or 0 <= self.end_id < self.vocab_size
            checks.that(
                in_range, f"end_id = {self.end_id}: outside the vocabulary of {self.vocab_size}"
            )
            shards = [
                shard for source in self.sources for shard in (*source.train, *source.validation)
            ]
            largest_id = max((shard.max_id for shard in shards), default=0)
            min_vocab_size = max(256 if self.tokenizer == "bytes" else 2, largest_id + 1)
            checks.that(
                self.vocab_size >= min_vocab_size,
                f"vocab_size = {self.vocab_size}: must be at least {min_vocab_size} "
                f"({self.tokenizer}, largest id {largest_id})",
            )
            checks.problems += weight_problems(
                names, {source.name: source.weight for source in self.sources}
            )
        checks.done()

    @property
    def data_id(self) -> str:
        """Content id of the corpus."""
        return canon.content_id(replace(self, not_read=(), source_bytes=0))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources, in the order they were given."""
        return tuple(source.name for source in self.sources)

    @property
    def weights(self) -> dict[str, float]:
        """Share of each source in a run's sequences."""
        return {source.name: source.weight for source in self.sources}

    @property
    def num_documents(self) -> int:
        """Number of documents of all sources, in both splits."""
        return sum(source.num_documents for source in self.sources)

    def num_tokens(self, split: Split) -> int:
        """Return the number of tokens in a split, over all sources."""
        return sum(source.num_tokens(split) for source in self.sources)

    def reweighted(self, weights: Mapping[str, float]) -> Manifest:
        """Return a manifest of the same shards with other weights, which is another corpus.

        Args:
            weights: Weight of each source by name; they are scaled to add up to 1.

        Raises:
            DataError: A source is unknown or has no weight, a weight is negative or not finite, or
                all are zero. All problems are listed at once.
        """
        if problems := weight_problems(self.names, weights):
            raise DataError(*problems)
        total = math.fsum(weights.values())
        # Shares that add up to 1 but for rounding stay exactly as given.
        total = 1.0 if math.isclose(total, 1.0, rel_tol=1e-12) else total
        sources = tuple(
            replace(source, weight=weights[source.name] / total) for source in self.sources
        )
        return replace(self, sources=sources)


def has_other_files(folder: Path) -> bool:
    """Return whether there is something else than a corpus at a path, such as the text itself."""
    if folder.is_dir():
        # Hidden files do not count: an interrupted `tokenize` leaves them.
        has_files = any(not entry.name.startswith(".") for entry in folder.iterdir())
        return has_files and not (folder / MANIFEST).exists()
    return folder.exists()


def advise_corpus(folder: Path) -> str:
    """Return the message that there is no corpus at a path, with the command that makes one.

    If the path contains other files, which may be the text, the command writes to another folder.
    """
    if not has_other_files(folder):
        return (
            "no corpus there; make it by `forerun tokenize SOURCE... --out "
            f"{shlex.quote(str(folder))}`"
        )
    out = folder.with_name("corpus" if folder.name != "corpus" else "tokens")
    kind = f"a folder without {MANIFEST}" if folder.is_dir() else "a file"
    return (
        f"no corpus, but {kind}; if it is your text, make a corpus of it by `forerun tokenize "
        f"{shlex.quote(str(folder))} --out {shlex.quote(str(out))}` and name that folder"
    )


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a corpus folder.

    Raises:
        DataError: The manifest is missing, is not valid, or has another schema.
    """
    path = folder / MANIFEST
    try:
        return canon.decode(Manifest, canon.parse(read_plain(path, MAX_MANIFEST_BYTES)))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path} does not exist: {advise_corpus(folder)}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (canon.CanonError, SpecError) as error:
        advice = "write the corpus to a new folder by `forerun tokenize SOURCE... --out FOLDER`"
        raise DataError(f"{path} is not a manifest: {error}: {advice}") from error


def shard_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Return the problems of a corpus's files, without reading the shards.

    A shard is a problem if it is missing or has another size than recorded, and the tokenizer if
    it is missing or has another hash.
    """
    shards = [shard for source in manifest.sources for shard in (*source.train, *source.validation)]
    return [
        f"{folder / shard.file}: it {problem}; run `forerun tokenize` again"
        for shard in shards
        if (problem := _find_size_problem(folder / shard.file, shard, manifest.dtype))
    ] + [
        f"{folder}: {problem}; run `forerun tokenize` again"
        for problem in _find_tokenizer_problems(folder, manifest.tokenizer)
    ]


def _find_size_problem(path: Path, shard: Shard, dtype: Dtype) -> str:
    """Return what is wrong with a shard's file or its size, to follow the file's name in a message;
    empty if nothing is.
    """
    try:
        require_plain(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    expected_bytes = shard.num_tokens * np.dtype(dtype).itemsize
    num_bytes = path.stat().st_size
    if num_bytes and num_bytes == expected_bytes:
        return ""
    return f"has {counted(num_bytes, 'byte')}, the manifest says {expected_bytes:,}"


def _find_tokenizer_problems(folder: Path, tokenizer: str) -> list[str]:
    path = folder / TOKENIZER_FILE
    if not tokenizer.startswith("sha256:"):
        return []
    try:
        require_plain(path)
    except FileNotFoundError:
        return [f"{TOKENIZER_FILE} is missing"]
    except OSError as error:
        return [f"{TOKENIZER_FILE} cannot be read: {error.strerror}"]
    if f"sha256:{canon.file_sha256(path)}" != tokenizer:
        return [
            (
                f"{TOKENIZER_FILE} does not match the manifest's hash: it is another tokenizer, or "
                "was edited"
            )
        ]
    return []


class TokenStore:
    """A verified corpus, mapped into memory.

    Args:
        folder: Corpus folder that `forerun tokenize` wrote.
        trusted: Check only the sizes of shards, not their hashes; for workers, whose driver has
            just read every byte.
        weights: Weights of the sources that replace the manifest's; None to keep those. The
            store's manifest has the weights that are used.
        on_shard: Called before each shard is read, with its file name and the share of all tokens
            before it.

    Raises:
        DataError: There is no manifest, or the weights do not fit its sources.
        CorruptCorpusError: A shard is missing, has another size or hash than the manifest says, or
            the tokenizer's file is missing or another one. All problems are listed at once.
    """

    def __init__(
        self,
        folder: Path,
        *,
        trusted: bool = False,
        weights: Mapping[str, float] | None = None,
        on_shard: Callable[[str, float], None] = lambda file, share: None,
    ) -> None:
        stored = read_manifest(folder)
        self._on_shard, self._num_opened = on_shard, 0
        self._num_stored = sum(stored.num_tokens(split) for split in SPLITS)
        self.manifest = stored if weights is None else stored.reweighted(weights)
        self._trusted = trusted
        problems = [] if trusted else _find_tokenizer_problems(folder, stored.tokenizer)
        self._shards: dict[Split, list[list[NDArray[np.integer]]]] = {
            split: [
                [self._open(folder, shard, problems) for shard in getattr(source, split)]
                for source in stored.sources
            ]
            for split in SPLITS
        }
        if problems:
            problems[0] = f"{folder}: {problems[0]}"
            problems[-1] += "; run `forerun tokenize` again"
            raise CorruptCorpusError(*problems)
        self._windows_of: dict[tuple[Split, int], list[Windows]] = {}
        self._mixture = Mixture([source.weight for source in self.manifest.sources])

    def _open(self, folder: Path, shard: Shard, problems: list[str]) -> NDArray[np.integer]:
        """Map a shard into memory and verify it; problems are added to the list."""
        path = folder / shard.file
        self._on_shard(shard.file, self._num_opened / max(1, self._num_stored))
        self._num_opened += shard.num_tokens
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        if problem := _find_size_problem(path, shard, self.manifest.dtype):
            problems.append(f"{shard.file} {problem}")
            return np.empty(0, dtype=dtype)
        # As a plain array: slicing it is faster than slicing a memmap.
        tokens = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
        if self._trusted:
            return tokens
        if canon.file_sha256(path) != shard.sha256:
            problems.append(f"{shard.file} does not match the manifest's hash: its content changed")
        return tokens

    def num_windows(self, split: Split, seq_len: int) -> int:
        """Return how many sequences can be drawn before a window is drawn a second time.

        Windows do not overlap. With several sources, the one that is used up first at the corpus's
        weights decides; a source with a weight but without a window makes the number 0.

        Args:
            split: Split to draw from.
            seq_len: Number of tokens in a sequence, without its next token.
        """
        num_windows = [len(windows) for windows in self._make_windows(split, seq_len)]
        if any(
            source.weight > 0 and not num
            for source, num in zip(self.manifest.sources, num_windows, strict=True)
        ):
            return 0

        def is_repeating(num_sequences: int) -> bool:
            counts = self._mixture.counts(num_sequences)
            return any(count > num for count, num in zip(counts, num_windows, strict=True))

        return bisect.bisect_left(range(sum(num_windows) + 1), True, key=is_repeating) - 1

    def train_batch(
        self, *, seed: int, first_sequence: int, num_sequences: int, seq_len: int
    ) -> NDArray[np.int64]:
        """Return a batch of training sequences.

        Sources alternate by their weights. Each window of a source is drawn once per epoch, in an
        order that depends only on the seed, the epoch and the source.

        Args:
            seed: Seed of the run's data order.
            first_sequence: Number of sequences of the run before this batch.
            num_sequences: Number of sequences in the batch, B.
            seq_len: Number of tokens in a sequence, T, without its next token.

        Returns:
            Token ids, [B, T + 1].

        Raises:
            DataError: A source of the mixture has no window of that length.
        """
        windows_by_source = self._make_windows("train", seq_len)
        for source, windows in zip(self.manifest.sources, windows_by_source, strict=True):
            if source.weight > 0 and not len(windows):
                place = f" of source {source.name!r}" if len(windows_by_source) > 1 else ""
                raise DataError(
                    f"the training split{place} is shorter than one window of {seq_len + 1} tokens"
                )
        source_B, index_B = self._mixture.draw(first_sequence, num_sequences)
        batch_BT = np.empty((num_sequences, seq_len + 1), dtype=np.int64)
        for number, windows in enumerate(windows_by_source):
            rows = np.flatnonzero(source_B == number)
            windows.copy_into(batch_BT, rows, windows.shuffled(index_B[rows], seed))
        return batch_BT

    def validation_batch(self, *, num_sequences: int, seq_len: int) -> NDArray[np.int64]:
        """Return the validation batch: evenly spaced windows, the same for every run.

        Args:
            num_sequences: Number of sequences in the batch, B, by the weights of the sources.
            seq_len: Number of tokens in a sequence, T, without its next token.

        Returns:
            Token ids, [B, T + 1].

        Raises:
            DataError: The split has fewer windows.
        """
        num_windows = self.num_windows("validation", seq_len)
        if num_windows < num_sequences:
            raise DataError(
                f"the validation split holds {counted(num_windows, 'window')} of {seq_len} tokens: "
                f"{num_sequences:,} are needed"
            )
        source_B, index_B = self._mixture.draw(0, num_sequences)
        batch_BT = np.empty((num_sequences, seq_len + 1), dtype=np.int64)
        for number, windows in enumerate(self._make_windows("validation", seq_len)):
            rows = np.flatnonzero(source_B == number)
            windows.copy_into(batch_BT, rows, index_B[rows] * len(windows) // max(1, len(rows)))
        return batch_BT

    def _make_windows(self, split: Split, seq_len: int) -> list[Windows]:
        """Return the windows of each source, from the cache after the first call."""
        if (split, seq_len) not in self._windows_of:
            # A single source needs no key: there is no other order to differ from.
            keys = (
                [f"/{name}" for name in self.manifest.names]
                if len(self.manifest.sources) > 1
                else [""]
            )
            self._windows_of[split, seq_len] = [
                Windows(shards, seq_len, key)
                for shards, key in zip(self._shards[split], keys, strict=True)
            ]
        return self._windows_of[split, seq_len]
