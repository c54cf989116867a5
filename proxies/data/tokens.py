"""A corpus of token shards, mapped into memory and read in an order that is a pure function of (seed, position).

A corpus folder holds `manifest.json`, the tokenizer's file if there is one, and raw little-endian shards (uint16, or
uint32 for large vocabularies; no header) of one source or several. The manifest's content id is the `data_id` of every
run on it. numpy and the standard library only: exports carry this module to other machines.
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
MAX_MANIFEST_BYTES = 2**28
"""Maximum size of a manifest, which a million shards take."""
Split = Literal["train", "validation"]
Dtype = Literal["uint16", "uint32"]
SPLITS: tuple[Split, Split] = ("train", "validation")


class DataError(InputError):
    """The corpus cannot be read, or is not what its manifest says. `problems` lists all that is wrong."""

    cause, refuses_study = "bad_data", True

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(problems))


class CorruptCorpusError(DataError):
    """Shards that are not what their manifest says."""

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
        plain = re.fullmatch(r"[\w-]+\.bin", self.file) is not None
        checks.that(plain, f"file = {self.file!r}: must be the name of a .bin file in the corpus folder")
        checks.whole("num_tokens", "max_id", least=0)
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One part of a corpus, drawn from with its own weight."""

    name: str
    weight: float
    """Share of a run's sequences; the shares of a corpus add up to one."""
    num_documents: int
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]

    def num_tokens(self, split: Split) -> int:
        """Tokens in a split."""
        return sum(shard.num_tokens for shard in getattr(self, split))


@dataclass(frozen=True, kw_only=True, slots=True)
class NotRead:
    """Files of a suffix that was not asked for."""

    suffix: str
    num_files: int
    num_bytes: int
    examples: tuple[str, ...] = field(default=(), metadata=canon.UNLESS_DEFAULT)
    """Names of the first files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a corpus is: everything a run's data depends on, no path or date; and what was left out when it was made."""

    schema_version: int
    tokenizer: str
    """`bytes`, `sha256:` and the hash of the tokenizer's file, or `unnamed` for ids that came without one."""
    vocab_size: int
    dtype: Dtype
    end_id: int | None
    """The token after each document, if there is one."""
    sources: tuple[Source, ...]
    not_read: tuple[NotRead, ...] = ()
    """Files of the sources' folders that are not in it; no part of `data_id`."""
    source_bytes: int = field(default=0, metadata=canon.UNLESS_DEFAULT)
    """Bytes of the files that were read, no part of `data_id`; 0 if not known."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.that(
            self.schema_version == SCHEMA_VERSION, f"schema_version = {self.schema_version}: must be {SCHEMA_VERSION}"
        )
        checks.whole("vocab_size")
        checks.whole("source_bytes", least=0)
        checks.that(bool(self.sources), "sources is empty: there must be at least one")
        names = self.names
        checks.that(len(set(names)) == len(names), f"sources are {', '.join(names)}: a name appears twice")
        if checks.fine:
            limit = int(np.iinfo(self.dtype).max) + 1
            checks.that(
                self.vocab_size <= limit,
                f"vocab_size = {self.vocab_size}: shards of {self.dtype} hold {counted(limit, 'id')} at most",
            )
            in_range = self.end_id is None or 0 <= self.end_id < self.vocab_size
            checks.that(in_range, f"end_id = {self.end_id}: outside the vocabulary of {self.vocab_size}")
            largest = max(
                (shard.max_id for each in self.sources for shard in (*each.train, *each.validation)), default=0
            )
            least = max(256 if self.tokenizer == "bytes" else 2, largest + 1)
            checks.that(
                self.vocab_size >= least,
                f"vocab_size = {self.vocab_size}: must be at least {least} ({self.tokenizer}, largest id {largest})",
            )
            checks.problems += weight_problems(names, {source.name: source.weight for source in self.sources})
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
        """Documents of all sources, both splits."""
        return sum(source.num_documents for source in self.sources)

    def num_tokens(self, split: Split) -> int:
        """Tokens in a split, all sources together."""
        return sum(source.num_tokens(split) for source in self.sources)

    def reweighted(self, weights: Mapping[str, float]) -> Manifest:
        """The same shards drawn in other shares, which is another corpus; weights are made to add up to one.

        Raises:
            DataError: every problem: a source that is unknown or has no weight; a weight that is negative or not
                finite; all zero.
        """
        if problems := weight_problems(self.names, weights):
            raise DataError(*problems)
        total = math.fsum(weights.values())
        total = 1.0 if math.isclose(total, 1.0, rel_tol=1e-12) else total  # shares stay as they were given
        sources = tuple(replace(source, weight=weights[source.name] / total) for source in self.sources)
        return replace(self, sources=sources)


def has_other_files(folder: Path) -> bool:
    """Return whether a place that should hold a corpus holds something else, such as the text itself."""
    if folder.is_dir():
        # What an interrupted `tokenize` leaves is hidden.
        has_files = any(not entry.name.startswith(".") for entry in folder.iterdir())
        return has_files and not (folder / MANIFEST).exists()
    return folder.exists()


def advise_corpus(folder: Path) -> str:
    """Say that there is no corpus at a place, and how to make one: never among the files of its own text."""
    if not has_other_files(folder):
        return f"no corpus there; make it by `forerun tokenize SOURCE... --out {shlex.quote(str(folder))}`"
    out = folder.with_name("corpus" if folder.name != "corpus" else "tokens")
    kind = f"a folder without {MANIFEST}" if folder.is_dir() else "a file"
    return (
        f"no corpus, but {kind}; if it is your text, make a corpus of it by `forerun tokenize "
        f"{shlex.quote(str(folder))} --out {shlex.quote(str(out))}` and name that folder"
    )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a corpus folder.

    Raises:
        DataError: it is missing, not one, or of another schema.
    """
    path = folder / MANIFEST
    try:
        return canon.decode(Manifest, canon.parse(read_plain(path, MAX_MANIFEST_BYTES)))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path} does not exist: {advise_corpus(folder)}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (canon.CanonError, SpecError) as error:
        again = "write the corpus to a new folder by `forerun tokenize SOURCE... --out FOLDER`"
        raise DataError(f"{path} is not a manifest: {error}: {again}") from error


def shard_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Return problems of shards (missing, or of another size than recorded) and of the tokenizer. Reads no shard."""
    shards = [shard for source in manifest.sources for shard in (*source.train, *source.validation)]
    return [
        f"{folder / shard.file}: it {wrong}; run `forerun tokenize` again"
        for shard in shards
        if (wrong := _size_problem(folder / shard.file, shard, manifest.dtype))
    ] + [
        f"{folder}: {problem}; run `forerun tokenize` again"
        for problem in _tokenizer_problems(folder, manifest.tokenizer)
    ]


def _size_problem(path: Path, shard: Shard, dtype: Dtype) -> str:
    """What is wrong with a shard's file before it is read, after the file's name; empty where nothing is."""
    try:
        require_plain(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    expected, found = shard.num_tokens * np.dtype(dtype).itemsize, path.stat().st_size
    return "" if found and found == expected else f"has {counted(found, 'byte')}, the manifest says {expected:,}"


def _tokenizer_problems(folder: Path, tokenizer: str) -> list[str]:
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
        return [f"{TOKENIZER_FILE} does not match the manifest's hash: it is another tokenizer, or was edited"]
    return []


class TokenStore:
    """A verified corpus, mapped into memory.

    Args:
        folder: what `forerun tokenize` wrote.
        trusted: look at sizes alone; for workers, whose driver has just read every byte.
        weights: shares of the sources other than the manifest's; the store's manifest is then the reweighted one.
        on_shard: called before each shard is read, with its file and the share of all tokens before it.

    Raises:
        DataError: there is no manifest, or the weights do not fit its sources.
        CorruptCorpusError: a shard is missing, truncated or grown, its hash is not the manifest's, or the tokenizer's
            file is missing or another. All problems are named at once.
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
        problems = [] if trusted else _tokenizer_problems(folder, stored.tokenizer)
        self._shards: dict[Split, list[list[NDArray[np.integer]]]] = {
            split: [[self._open(folder, s, problems) for s in getattr(source, split)] for source in stored.sources]
            for split in SPLITS
        }
        if problems:
            problems[0] = f"{folder}: {problems[0]}"
            problems[-1] += "; run `forerun tokenize` again"
            raise CorruptCorpusError(*problems)
        self._windows_of: dict[tuple[Split, int], list[Windows]] = {}
        self._mixture = Mixture([source.weight for source in self.manifest.sources])

    def _open(self, folder: Path, shard: Shard, problems: list[str]) -> NDArray[np.integer]:
        path = folder / shard.file
        self._on_shard(shard.file, self._num_opened / max(1, self._num_stored))
        self._num_opened += shard.num_tokens
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        if wrong := _size_problem(path, shard, self.manifest.dtype):
            problems.append(f"{shard.file} {wrong}")
            return np.empty(0, dtype=dtype)
        tokens = np.asarray(np.memmap(path, dtype=dtype, mode="r"))  # a plain array: its slices are made faster
        if self._trusted:
            return tokens
        if canon.file_sha256(path) != shard.sha256:
            problems.append(f"{shard.file} does not match the manifest's hash: its content changed")
        return tokens

    def num_windows(self, split: Split, seq_len: int) -> int:
        """Sequences of `seq_len` tokens (each with its next token) that can be drawn before a window comes again.

        Windows do not overlap. Of several sources the one that is soonest used up decides, at the corpus's weights;
        one without a window leaves none.
        """
        there = [len(windows) for windows in self._windows(split, seq_len)]
        if any(source.weight > 0 and not have for source, have in zip(self.manifest.sources, there, strict=True)):
            return 0

        def comes_again(num_sequences: int) -> bool:
            return any(count > have for count, have in zip(self._mixture.counts(num_sequences), there, strict=True))

        return bisect.bisect_left(range(sum(there) + 1), True, key=comes_again) - 1

    def train_batch(self, *, seed: int, first_sequence: int, num_sequences: int, seq_len: int) -> NDArray[np.int64]:
        """The batch after the first `first_sequence` sequences of a run: ids [B, T + 1].

        Sources take turns by their weights; of each, every window comes once per epoch, in an order of (seed, epoch,
        source) alone.

        Raises:
            DataError: a source of the mixture holds no window of that length.
        """
        windows = self._windows("train", seq_len)
        for source, there in zip(self.manifest.sources, windows, strict=True):
            if source.weight > 0 and not len(there):
                of = f" of source {source.name!r}" if len(windows) > 1 else ""
                raise DataError(f"the training split{of} is shorter than one window of {seq_len + 1} tokens")
        source_B, index_B = self._mixture.draw(first_sequence, num_sequences)
        batch_BT = np.empty((num_sequences, seq_len + 1), dtype=np.int64)
        for number, there in enumerate(windows):
            rows = np.flatnonzero(source_B == number)
            there.copy_into(batch_BT, rows, there.shuffled(index_B[rows], seed))
        return batch_BT

    def validation_batch(self, *, num_sequences: int, seq_len: int) -> NDArray[np.int64]:
        """The same evenly spread windows for everybody, in the weights of the sources: ids [B, T + 1].

        Raises:
            DataError: the split holds fewer windows.
        """
        num_windows = self.num_windows("validation", seq_len)
        if num_windows < num_sequences:
            raise DataError(
                f"the validation split holds {counted(num_windows, 'window')} of {seq_len} tokens: {num_sequences:,} "
                "are needed"
            )
        source_B, index_B = self._mixture.draw(0, num_sequences)
        batch_BT = np.empty((num_sequences, seq_len + 1), dtype=np.int64)
        for number, there in enumerate(self._windows("validation", seq_len)):
            rows = np.flatnonzero(source_B == number)
            there.copy_into(batch_BT, rows, index_B[rows] * len(there) // max(1, len(rows)))
        return batch_BT

    def _windows(self, split: Split, seq_len: int) -> list[Windows]:
        """Of each source; the only one of a corpus needs no key to tell its order from others'."""
        if (split, seq_len) not in self._windows_of:
            keys = [f"/{name}" for name in self.manifest.names] if len(self.manifest.sources) > 1 else [""]
            self._windows_of[split, seq_len] = [
                Windows(shards, seq_len, key) for shards, key in zip(self._shards[split], keys, strict=True)
            ]
        return self._windows_of[split, seq_len]
