"""Write the shards of a corpus, and publish the corpus when it is complete.

A corpus is assembled in a hidden folder inside the corpus folder, and moved out of it at the end:
the corpus folder contains a complete corpus or none.
"""

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
"""Number of tokens in each shard of a split but the last."""
UNFINISHED = ".unfinished"
"""Name of the folder that a corpus is assembled in."""


class PublishedShards:
    """The published shards of one split, which new shards are compared with while being written.

    Args:
        folder: The corpus folder.
        shards: Shards of the split in the folder's manifest.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        self._folder, self._shards = folder, shards
        self._damaged: set[int] = set()

    def differ(self, index: int, offset: int, content: bytes) -> bool:
        """Return whether new content differs from the published content at the same place.

        A damaged shard does not count as different, because it is being repaired.

        Args:
            index: Number of the shard.
            offset: Offset of the content in the shard, in bytes.
            content: New ids, in the dtype of the corpus.
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
    """Writes ids into files of `SHARD_TOKENS` ids, and hashes them.

    Args:
        folder: Folder to write to.
        stem: Beginning of the file names: `train` gives `train-00000.bin`, and so on.
        dtype: Dtype of the stored ids, `uint16` or `uint32`.
        published: Published shards to compare with; None if there are none.
    """

    def __init__(
        self, folder: Path, stem: str, dtype: str, published: PublishedShards | None = None
    ) -> None:
        self._folder, self._stem, self._dtype = folder, stem, np.dtype(dtype).newbyteorder("<")
        self._published = published
        self.differs = False
        """Whether an id that was written differs from the published one at the same place."""
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._num_tokens = self._max_id = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens written so far."""
        return sum(shard.num_tokens for shard in self._shards) + self._num_tokens

    def write(self, ids: NDArray[np.uint32]) -> None:
        """Append ids; new files are started as needed.

        Raises:
            DataError: The disk is full, or fails.
        """
        while ids.size:
            num_free = SHARD_TOKENS - self._num_tokens
            part, ids = ids[:num_free], ids[num_free:]
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
        """Finish the last file, and return all shards that were written.

        Raises:
            DataError: The disk is full, or fails.
        """
        self._end_shard()
        return tuple(self._shards)

    def abandon(self) -> None:
        """Close a file that was not finished, without completing it."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # buffered bytes may not fit on the disk
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
            file=self._path.name,
            num_tokens=self._num_tokens,
            max_id=self._max_id,
            sha256=self._hash.hexdigest(),
        )
        self._shards.append(shard)
        self._file, self._hash, self._num_tokens, self._max_id = None, hashlib.sha256(), 0, 0


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn operating system errors while writing into a DataError with advice."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space, or name another --out" if is_full else "name another --out"
        raise DataError(
            f"{path} cannot be written: {error.strerror}; nothing of this corpus was kept: "
            f"{advice}, and run the command again"
        ) from error


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Create a folder in which the corpus `out` is assembled, and remove it at the end.

    The folder is locked. What a killed process left in it is deleted.

    Raises:
        DataError: Another process is writing to `out`, it contains files that are not of a corpus
            but are named like one, or it cannot be created.
    """
    folder, is_new = out / UNFINISHED, not out.exists()
    read_published(out)
    with _writing(out):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_new = False
            raise DataError(
                f"{out} is being written by another process: wait for it, or name another --out"
            ) from error
        try:
            for old_file in folder.iterdir():
                old_file.unlink()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if is_new:
                # This fails if the corpus was published.
                with contextlib.suppress(OSError):
                    out.rmdir()
    finally:
        os.close(descriptor)


def read_published(out: Path) -> Manifest | None:
    """Return the manifest of the corpus in a folder; None if the folder has no corpus.

    Raises:
        DataError: The manifest is damaged, the folder has files that are named like those of a
            corpus but no manifest, or it is a file.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file: name a folder with --out")
    if (out / MANIFEST).exists():
        try:
            return read_manifest(out)
        except DataError as error:
            raise DataError(f"{out} cannot be written: {error}; or name another --out") from error
    if out.is_dir() and not (out / UNFINISHED).exists():
        names = [
            *(f"*{split}-[0-9][0-9][0-9][0-9][0-9].bin" for split in ("train", "validation")),
            TOKENIZER_FILE,
        ]
        if unknown_files := sorted(file.name for name in names for file in out.glob(name)):
            raise DataError(
                f"{out} has no {MANIFEST} but has {unknown_files[0]}, which would be overwritten: "
                "name another --out"
            )
    return None


def check_same_settings(out: Path, published: Manifest, settings: Mapping[str, object]) -> None:
    """Check that a published corpus has the settings of the new one, before any text is read.

    Args:
        out: The corpus folder.
        published: Its manifest.
        settings: Fields of the manifest, with the values of the new corpus.

    Raises:
        DataError: A field has another value.
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
    """Return the error for a folder that contains another corpus than the one to be written."""
    return DataError(
        f"{out} holds another corpus ({difference}), which runs may depend on: name another --out, "
        "or remove the folder"
    )


def publish(folder: Path, out: Path, manifest: Manifest, tokenizer: bytes | None) -> None:
    """Move a finished corpus from `folder` to `out`: first its files, last the manifest.

    Args:
        folder: Folder in which the corpus was assembled.
        out: The corpus folder.
        manifest: The manifest of the corpus.
        tokenizer: Content of the tokenizer's file; None if there is none.

    Raises:
        DataError: `out` contains another corpus, or the disk is full.
    """
    was_published = (out / MANIFEST).exists()
    if was_published and (published := read_manifest(out)).data_id != manifest.data_id:
        raise another_corpus(
            out,
            f"of {published.num_tokens('train'):,} training and "
            f"{published.num_tokens('validation'):,} validation tokens, not "
            f"{manifest.num_tokens('train'):,} and {manifest.num_tokens('validation'):,}",
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
        # Without a manifest, the next `tokenize` would refuse to overwrite these files.
        if not was_published:
            for target in targets.values():
                target.unlink(missing_ok=True)
        raise
