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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from forerun._proxies.core import canon
from forerun._proxies.data.tokens import (
    MANIFEST,
    SPLITS,
    TOKENIZER_FILE,
    DataError,
    Manifest,
    Shard,
    read_manifest,
)

SHARD_TOKENS = 2**26
"""Number of tokens in each shard of a split but the last."""
UNFINISHED = ".unfinished"
"""Name of the folder in which a corpus is assembled."""


class ShardWriter:
    """Writes ids into files of `SHARD_TOKENS` ids, and hashes them.

    Args:
        folder: Folder to write to.
        stem: Beginning of the file names: `train` gives `train-00000.bin`, and so on.
        dtype: Dtype of the stored ids, `uint16` or `uint32`.
    """

    def __init__(self, folder: Path, stem: str, dtype: str) -> None:
        self._folder, self._stem, self._dtype = folder, stem, np.dtype(dtype).newbyteorder("<")
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
            with _explain_write_errors(self._path):
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
        with _explain_write_errors(self._path), self._file as file:
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
def _explain_write_errors(path: Path) -> Iterator[None]:
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
def create_unfinished_folder(out: Path) -> Iterator[Path]:
    """Create a folder in which the corpus `out` is assembled, and remove it at the end.

    The folder is locked. Files that a killed process left in it are deleted.

    Raises:
        DataError: Another process is writing to `out`, `out` has files that are named like those of
            a corpus but no manifest, or the folder cannot be created.
    """
    folder, is_new = out / UNFINISHED, not out.exists()
    read_published(out)  # refuses a folder that cannot hold the corpus
    with _explain_write_errors(out):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_new = False  # the folder is the other process's
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
        # The names that `ShardWriter` gives, also with the name of a source before them
        patterns = [
            *(f"*{split}-[0-9][0-9][0-9][0-9][0-9].bin" for split in SPLITS),
            TOKENIZER_FILE,
        ]
        if unknown_files := sorted(file.name for pattern in patterns for file in out.glob(pattern)):
            raise DataError(
                f"{out} has no {MANIFEST} but has {unknown_files[0]}, which would be overwritten: "
                "name another --out"
            )
    return None


def make_another_corpus_error(out: Path, difference: str) -> DataError:
    """Return the error for a folder that contains another corpus than the one to be written."""
    return DataError(
        f"{out} holds another corpus ({difference}), which runs may depend on: name another --out, "
        "or remove the folder"
    )


def publish_corpus(folder: Path, out: Path, manifest: Manifest, tokenizer: bytes | None) -> None:
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
        raise make_another_corpus_error(
            out,
            f"of {published.count_tokens('train'):,} training and "
            f"{published.count_tokens('validation'):,} validation tokens, not "
            f"{manifest.count_tokens('train'):,} and {manifest.count_tokens('validation'):,}",
        )
    targets = {file: out / file.name for file in sorted(folder.iterdir())}
    try:
        with _explain_write_errors(out / MANIFEST):
            if tokenizer is not None:
                canon.write_atomic(folder / TOKENIZER_FILE, tokenizer)
                targets[folder / TOKENIZER_FILE] = out / TOKENIZER_FILE
            for file, target in targets.items():
                file.replace(target)
            canon.write_atomic(out / MANIFEST, canon.to_pretty_json(manifest))
    except BaseException:
        # Without a manifest, the next `tokenize` would refuse to overwrite these files.
        if not was_published:
            for target in targets.values():
                target.unlink(missing_ok=True)
        raise
