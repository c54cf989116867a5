"""Writing shards: a corpus is put together in a folder within its own, and shows itself whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from proxies.core import canon
from proxies.core.plain_files import open_plain
from proxies.data.tokens import MANIFEST, TOKENIZER_FILE, DataError, Manifest, Shard, read_manifest

SHARD_TOKENS = 2**26
UNFINISHED = ".unfinished"


class PublishedShards:
    """The shards of one split that a corpus folder holds already, to compare new ones with as they are written.

    Args:
        folder: The corpus folder.
        shards: Its shards of the split, by the manifest.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        self._folder, self._shards = folder, shards
        self._damaged: set[int] = set()

    def differ(self, index: int, offset: int, content: bytes) -> bool:
        """Return whether content for a place in a shard is not what the corpus has there.

        A damaged shard differs in nothing: it is to be repaired.

        Args:
            index: Number of the shard.
            offset: Place of the content in the shard, in bytes.
            content: Ids in the dtype of the corpus.
        """
        if index in self._damaged:
            return False
        if index >= len(self._shards):
            return True
        shard = self._shards[index]
        try:
            with open_plain(self._folder / shard.file) as file:
                file.seek(offset)
                if file.read(len(content)) == content:
                    return False
            is_intact = canon.file_sha256(self._folder / shard.file) == shard.sha256
        except OSError:
            is_intact = False
        if not is_intact:
            self._damaged.add(index)
        return is_intact


class ShardWriter:
    """Writes ids into files of `SHARD_TOKENS`, hashing as it goes.

    Args:
        folder: where the files go.
        stem: what their names begin with: `train` gives `train-00000.bin` and so on.
        dtype: `uint16` or `uint32`.
        published: shards to compare with; None if there are none.
    """

    def __init__(self, folder: Path, stem: str, dtype: str, published: PublishedShards | None = None) -> None:
        self._folder, self._stem, self._dtype = folder, stem, np.dtype(dtype).newbyteorder("<")
        self._published = published
        self.differs = False
        """Whether an id has been written that is not the published one at its place."""
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._num_tokens = self._max_id = 0

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return sum(shard.num_tokens for shard in self._shards) + self._num_tokens

    def write(self, ids: NDArray[np.uint32]) -> None:
        """Append ids, over as many files as it takes.

        Raises:
            DataError: the disk is full, or fails.
        """
        while ids.size:
            part, ids = ids[: SHARD_TOKENS - self._num_tokens], ids[SHARD_TOKENS - self._num_tokens :]
            content = part.astype(self._dtype).tobytes()
            if self._published is not None and not self.differs:
                offset = self._num_tokens * self._dtype.itemsize
                self.differs = self._published.differ(len(self._shards), offset, content)
            with _writing(self._path):
                if self._file is None:
                    self._file = self._path.open("wb")
                self._file.write(content)
            self._hash.update(content)
            self._num_tokens += part.size
            self._max_id = max(self._max_id, int(part.max()))
            if self._num_tokens == SHARD_TOKENS:
                self._end_shard()

    def close(self) -> tuple[Shard, ...]:
        """End the last file; what was written.

        Raises:
            DataError: the disk is full, or fails.
        """
        self._end_shard()
        return tuple(self._shards)

    def abandon(self) -> None:
        """Let go of a file that was not ended; it is of no use."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what it still holds may not fit the disk
                self._file.close()

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._stem}-{len(self._shards):05d}.bin"

    def _end_shard(self) -> None:
        if self._file is None:
            return
        with _writing(self._path), self._file as file:
            file.flush()
            os.fsync(file.fileno())
        shard = Shard(
            file=self._path.name, num_tokens=self._num_tokens, max_id=self._max_id, sha256=self._hash.hexdigest()
        )
        self._shards.append(shard)
        self._file, self._hash, self._num_tokens, self._max_id = None, hashlib.sha256(), 0, 0


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            f"{path} cannot be written: {error.strerror}; nothing of this corpus was kept: "
            f"{'free some space, or ' if full else ''}name another --out, and run the command again"
        ) from error


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """A folder to put the corpus `out` together in; gone at the end, whatever happens. A killed run's is replaced.

    Raises:
        DataError: another process is writing into `out`, it holds files that are no corpus but are named like one, or
            it cannot be made.
    """
    folder, made = out / UNFINISHED, not out.exists()
    read_published(out)
    with _writing(out):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            made = False
            raise DataError(f"{out} is being written by another process: wait for it, or name another --out") from error
        try:
            for left in folder.iterdir():
                left.unlink()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if made:
                with contextlib.suppress(OSError):  # it holds the corpus now
                    out.rmdir()
    finally:
        os.close(descriptor)


def read_published(out: Path) -> Manifest | None:
    """Return the manifest of the corpus that a folder holds; None if it holds none.

    Raises:
        DataError: The folder holds a damaged manifest, or files that are named like a corpus's, or it is a file.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file: name a folder with --out")
    if (out / MANIFEST).exists():
        try:
            return read_manifest(out)
        except DataError as error:
            raise DataError(f"{out} cannot be written: {error}; or name another --out") from error
    if out.is_dir() and not (out / UNFINISHED).exists():
        names = [*(f"*{split}-[0-9][0-9][0-9][0-9][0-9].bin" for split in ("train", "validation")), TOKENIZER_FILE]
        if strangers := sorted(file.name for name in names for file in out.glob(name)):
            raise DataError(
                f"{out} has no {MANIFEST} but has {strangers[0]}, which would be overwritten: name another --out"
            )
    return None


def check_same_settings(out: Path, published: Manifest, settings: Mapping[str, object]) -> None:
    """Refuse, before any text is read, to tokenize into a corpus that differs in its settings.

    Raises:
        DataError: the manifest in `out` has another value for one of these fields.
    """
    differences = [
        f"{field} {_shorten(old)}, not {_shorten(new)}"
        for field, new in settings.items()
        if (old := getattr(published, field)) != new
    ]
    if differences:
        raise another_corpus(out, f"with {'; '.join(differences)}")


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def another_corpus(out: Path, difference: str) -> DataError:
    """Return the error that a folder holds another corpus than the one to be written."""
    return DataError(
        f"{out} holds another corpus ({difference}), which runs may depend on: name another --out, or remove the folder"
    )


def publish(folder: Path, out: Path, manifest: Manifest, tokenizer: bytes | None) -> None:
    """Move a finished corpus from `folder` to `out`: its files and the tokenizer's first, the manifest last.

    Raises:
        DataError: `out` holds another corpus, or the disk is full.
    """
    known = (out / MANIFEST).exists()
    if known and (published := read_manifest(out)).data_id != manifest.data_id:
        raise another_corpus(
            out,
            f"of {published.num_tokens('train'):,} training and {published.num_tokens('validation'):,} validation "
            f"tokens, not {manifest.num_tokens('train'):,} and {manifest.num_tokens('validation'):,}",
        )
    targets = {file: out / file.name for file in sorted(folder.iterdir())}
    try:
        with _writing(out / MANIFEST):
            if tokenizer is not None:
                canon.write_atomic(folder / TOKENIZER_FILE, tokenizer)
                targets[folder / TOKENIZER_FILE] = out / TOKENIZER_FILE
            for file, target in targets.items():
                file.replace(target)
            canon.write_atomic(out / MANIFEST, canon.pretty(manifest))
    except BaseException:
        for target in (
            [] if known else targets.values()
        ):  # without a manifest the next run would take them for another's
            target.unlink(missing_ok=True)
        raise
