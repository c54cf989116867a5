"""A corpus of token shards, mapped into memory and read in an order that depends only on the seed
and the position.

A corpus folder contains `manifest.json`, the tokenizer's file if there is one, and raw
little-endian shards (uint16, or uint32 for large vocabularies; no header) of one or more sources.
The manifest's content id is the `data_id` of every run on the corpus. Exports carry copies of this
module and of the modules of forerun that it imports, so all of them must use only NumPy and the
standard library.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forerun._proxies.core import canon
from forerun._proxies.core.checks import Checks, SpecError
from forerun._proxies.core.errors import ExitCode, InputError
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import read_plain, require_plain
from forerun._proxies.data.mixture import Mixture, find_weight_problems
from forerun._proxies.data.windows import Windows

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
    """Kind of failure, and that the driver ends the study instead of retrying the run."""

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(problems))


class CorruptCorpusError(DataError):
    """A corpus has shards or a tokenizer that are not what its manifest says."""

    exit_code = ExitCode.CORRUPT


@contextlib.contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Turn operating system errors while reading into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or path} cannot be read: {error.strerror or error}"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of tokens."""

    file: str
    """Name of the file in the corpus folder."""
    num_tokens: int
    max_id: int
    """Largest token id in the file."""
    sha256: str

    def __post_init__(self) -> None:
        checks = Checks(self)
        is_plain_name = re.fullmatch(r"[\w-]+\.bin", self.file) is not None
        checks.require(
            is_plain_name,
            f"file = {self.file!r}: must be the name of a .bin file in the corpus folder",
        )
        checks.require_whole("num_tokens", "max_id", least=0)
        checks.raise_problems()


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One part of a corpus, with its weight in the mixture."""

    name: str
    weight: float
    """Share of a run's sequences; the shares of a corpus add up to 1."""
    num_documents: int
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]

    def count_tokens(self, split: Split) -> int:
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

    It contains no path and no date. The id of the corpus does not depend on `not_read` and
    `source_bytes`.
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
        checks.require(
            self.schema_version == SCHEMA_VERSION,
            f"schema_version = {self.schema_version}: must be {SCHEMA_VERSION}",
        )
        checks.require_whole("vocab_size")
        checks.require_whole("source_bytes", least=0)
        checks.require(bool(self.sources), "sources is empty: there must be at least one")
        names = self.names
        checks.require(
            len(set(names)) == len(names), f"sources are {', '.join(names)}: a name appears twice"
        )
        if checks.has_no_problem:
            limit = int(np.iinfo(self.dtype).max) + 1
            checks.require(
                self.vocab_size <= limit,
                f"vocab_size = {self.vocab_size}: shards of {self.dtype} hold "
                f"{format_counted(limit, 'id')} at most",
            )
            in_range = self.end_id is None or 0 <= self.end_id < self.vocab_size
            checks.require(
                in_range, f"end_id = {self.end_id}: outside the vocabulary of {self.vocab_size}"
            )
            largest_id = max((shard.max_id for shard in self.shards), default=0)
            min_vocab_size = max(256 if self.tokenizer == "bytes" else 2, largest_id + 1)
            checks.require(
                self.vocab_size >= min_vocab_size,
                f"vocab_size = {self.vocab_size}: must be at least {min_vocab_size} "
                f"({self.tokenizer}, largest id {largest_id})",
            )
            checks.problems += find_weight_problems(
                names, {source.name: source.weight for source in self.sources}
            )
        checks.raise_problems()

    @property
    def data_id(self) -> str:
        """Content id of the corpus."""
        return canon.compute_content_id(replace(self, not_read=(), source_bytes=0))

    @property
    def shards(self) -> list[Shard]:
        """Shards of all sources."""
        return [shard for source in self.sources for shard in (*source.train, *source.validation)]

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

    def count_tokens(self, split: Split) -> int:
        """Return the number of tokens in a split, over all sources."""
        return sum(source.count_tokens(split) for source in self.sources)

    def reweight(self, weights: Mapping[str, float]) -> Manifest:
        """Return a manifest of the same shards with other weights, which is another corpus.

        Args:
            weights: Weight of each source by name; they are scaled to add up to 1.

        Raises:
            DataError: A source is unknown or has no weight, a weight is negative or not finite, or
                all are zero. All problems are listed at once.
        """
        if problems := find_weight_problems(self.names, weights):
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


def describe_missing_corpus(folder: Path) -> str:
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
        raise DataError(f"{path} does not exist: {describe_missing_corpus(folder)}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (canon.CanonError, SpecError) as error:
        advice = "write the corpus to a new folder by `forerun tokenize SOURCE... --out FOLDER`"
        raise DataError(f"{path} is not a manifest: {error}: {advice}") from error


def find_corpus_problems(
    folder: Path,
    manifest: Manifest,
    *,
    reads_shards: bool = False,
    on_shard: Callable[[str, float], None] = lambda file, share: None,
) -> list[str]:
    """Return the problems of a corpus's files.

    A file is a problem if it is missing, cannot be read, or is not what the manifest says.

    Args:
        folder: Corpus folder.
        manifest: Its manifest.
        reads_shards: Whether to verify the hashes of shards, not only their sizes.
        on_shard: Called before each shard, with its file name and the share of all tokens before
            it.
    """
    problems, num_read = [], 0
    num_tokens = sum(shard.num_tokens for shard in manifest.shards)
    for shard in manifest.shards:
        on_shard(shard.file, num_read / max(1, num_tokens))
        num_read += shard.num_tokens
        num_bytes = shard.num_tokens * np.dtype(manifest.dtype).itemsize
        sha256 = shard.sha256 if reads_shards else ""
        problems.append(_find_file_problem(folder / shard.file, num_bytes, sha256))
    kind, _, sha256 = manifest.tokenizer.partition(":")
    if kind == "sha256":
        problems.append(_find_file_problem(folder / TOKENIZER_FILE, None, sha256))
    return [f"{problem}; run `forerun tokenize` again" for problem in problems if problem]


def _find_file_problem(path: Path, num_bytes: int | None, sha256: str) -> str:
    """Return the problem of a file; empty if it has none.

    Args:
        path: The file.
        num_bytes: Size that it must have; None for any.
        sha256: Hash that it must have; empty for any.
    """
    try:
        require_plain(path)
        size = path.stat().st_size
        if num_bytes is not None and (size != num_bytes or not size):
            return f"{path} has {format_counted(size, 'byte')}, the manifest says {num_bytes:,}"
        if sha256 and canon.hash_file(path) != sha256:
            return f"{path} does not match the manifest's hash: its content changed"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return ""


class TokenStore:
    """A verified corpus, mapped into memory.

    Args:
        folder: Corpus folder that `forerun tokenize` wrote.
        trusted: Whether to check only the sizes of shards, not their hashes: workers do so, because
            the driver that started them has just checked every byte.
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
        self.manifest = stored if weights is None else stored.reweight(weights)
        if problems := find_corpus_problems(
            folder, stored, reads_shards=not trusted, on_shard=on_shard
        ):
            raise CorruptCorpusError(*problems)
        dtype = np.dtype(stored.dtype).newbyteorder("<")
        # As plain arrays: slicing them is faster than slicing a memmap.
        self._shards: dict[Split, list[list[NDArray[np.integer]]]] = {
            split: [
                [
                    np.asarray(np.memmap(folder / shard.file, dtype=dtype, mode="r"))
                    for shard in getattr(source, split)
                ]
                for source in stored.sources
            ]
            for split in SPLITS
        }
        self._windows_of: dict[tuple[Split, int], list[Windows]] = {}
        self._mixture = Mixture([source.weight for source in self.manifest.sources])

    def count_windows(self, split: Split, seq_len: int) -> int:
        """Return how many sequences can be drawn before a window is drawn a second time.

        Windows do not overlap. In a mixture, the number is reached when the first source runs out
        of windows. It is 0 if a source with a weight has no window.

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
            counts = self._mixture.count_by_source(num_sequences)
            return any(count > num for count, num in zip(counts, num_windows, strict=True))

        # One less than the smallest number of sequences at which a source repeats
        return bisect.bisect_left(range(sum(num_windows) + 1), True, key=is_repeating) - 1

    def read_train_batch(
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
        return self._read_batch(
            windows_by_source,
            first_sequence,
            num_sequences,
            lambda windows, index_B: windows.shuffle(index_B, seed),
        )

    def read_validation_batch(self, *, num_sequences: int, seq_len: int) -> NDArray[np.int64]:
        """Return the validation batch: evenly spaced windows, the same for every run.

        Args:
            num_sequences: Number of sequences in the batch, B, by the weights of the sources.
            seq_len: Number of tokens in a sequence, T, without its next token.

        Returns:
            Token ids, [B, T + 1].

        Raises:
            DataError: The split has fewer windows.
        """
        num_windows = self.count_windows("validation", seq_len)
        if num_windows < num_sequences:
            raise DataError(
                f"the validation split holds {format_counted(num_windows, 'window')} of "
                f"{seq_len} tokens: {num_sequences:,} are needed"
            )
        return self._read_batch(
            self._make_windows("validation", seq_len),
            0,
            num_sequences,
            lambda windows, index_B: index_B * len(windows) // max(1, len(index_B)),
        )

    def _read_batch(
        self,
        windows_by_source: list[Windows],
        first_sequence: int,
        num_sequences: int,
        choose_windows: Callable[[Windows, NDArray[np.int64]], NDArray[np.int64]],
    ) -> NDArray[np.int64]:
        """Read the sequences that the mixture draws, [B, T + 1].

        Args:
            windows_by_source: Windows of each source.
            first_sequence: Number of sequences before the batch.
            num_sequences: Number of sequences in the batch, B.
            choose_windows: Returns the windows of a source for the numbers of its draws.
        """
        source_B, index_B = self._mixture.draw(first_sequence, num_sequences)
        num_tokens = windows_by_source[0].seq_len + 1
        batch_BT = np.empty((num_sequences, num_tokens), dtype=np.int64)
        for number, windows in enumerate(windows_by_source):
            rows = np.flatnonzero(source_B == number)
            windows.copy_into(batch_BT, rows, choose_windows(windows, index_B[rows]))
        return batch_BT

    def _make_windows(self, split: Split, seq_len: int) -> list[Windows]:
        """Return the windows of each source, from the cache after the first call."""
        if (split, seq_len) not in self._windows_of:
            # The key gives each source an order of its own; a single source needs none. Any change
            # to a key changes the batches of recorded runs and of exported trainers.
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
