"""Files with documents in them: found in folders, recognised by their first bytes and their names. Stdlib only."""

from __future__ import annotations

import codecs
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from proxies.data.megatron_index import index_of, is_indexed
from proxies.data.remote import find_remote, is_uri
from proxies.data.tokens import DataError, NotRead

TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet")
LLMC_MAGICS = {20240520: "uint16", 20240801: "uint32"}
_LLMC_EVAL_MAGIC = 20240522
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_COMPRESSED_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}
_LOOKED_AT_BYTES = 2**16
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file and what it was recognised as."""

    path: Path
    format: str
    """A key of the table of readers: `text`, `jsonl`, `parquet`, `nanogpt`, `llm.c`, `megatron`."""
    compression: str | None
    num_bytes: int
    ids_dtype: str | None
    """What the ids of a pre-tokenized file are stored as; None for text."""
    uri: str = ""
    """Where it lies, if that is no file system of this machine."""

    @property
    def name(self) -> str:
        """As messages name it."""
        return self.uri or str(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderOptions:
    """What a reader needs to know."""

    text_key: str
    """Key of a jsonl object, or column of a parquet file, that holds the text."""
    vocab_size: int
    end_id: int | None
    """For pre-tokenized files: ids lie below `vocab_size`, and `end_id` parts documents."""


class FoundFiles(NamedTuple):
    """The files that sources name, and what else lies in their folders."""

    files: list[SourceFile]
    not_read: tuple[NotRead, ...]


Document = bytes | NDArray[np.uint32]
"""What a reader gives: a text in UTF-8, or token ids."""


def find_files(
    paths: Iterable[Path | str], suffixes: tuple[str, ...], excluded: tuple[str, ...] = (), out: Path | None = None
) -> FoundFiles:
    """The files, and the files of those suffixes below the folders, in sorted order, each recognised.

    Folders of the `excluded` names are passed over, and so is the folder `out`, which may lie inside a source. Any
    other file below a folder that is not taken is counted, and so is one of theirs that does not begin as UTF-8.

    Args:
        paths: files, which must be readable, and folders; as text also URIs (`proxies.data.remote`).
        suffixes: of the files taken from folders.
        excluded: names of folders.
        out: where the corpus will lie.

    Raises:
        DataError: every path that is not a file or folder, and every file that cannot be read or is not what its name
            says.
    """
    found: list[SourceFile] = []
    left: dict[str, list[Path]] = {}
    problems: list[str] = []
    elsewhere: list[NotRead] = []
    for given in paths:
        if isinstance(given, str) and is_uri(given):
            try:
                remote, left_there = _remote(given)
            except DataError as error:
                problems += error.problems
                continue
            found += remote
            elsewhere += left_there
            continue
        path = Path(given)
        try:
            files = sorted(f for f in _walk(path, excluded, out) if f.is_file()) if path.is_dir() else [path]
        except OSError as error:
            problems.append(f"{error.filename or path} cannot be read: {error.strerror}")
            continue
        for file in files:
            if file != path and not file.name.endswith(suffixes):
                left.setdefault(file.suffix, []).append(file)
                continue
            try:
                recognised = recognise(file)
                if file != path and not _is_text(recognised):
                    left.setdefault(f"{file.suffix} not in UTF-8", []).append(file)
                    continue
                found.append(recognised)
            except DataError as error:
                problems += error.problems
    if problems:
        raise DataError(*problems)
    not_read = [
        NotRead(suffix=suffix, num_files=len(files), num_bytes=sum(file.stat().st_size for file in files))
        for suffix, files in left.items()
    ] + elsewhere
    return FoundFiles(found, tuple(sorted(not_read, key=lambda one: (-one.num_bytes, one.suffix))))


def _remote(uri: str) -> FoundFiles:
    found = find_remote(uri)
    files = [
        SourceFile(
            path=Path(file.path), uri=file.uri, format="parquet", compression=None, num_bytes=file.num_bytes,
            ids_dtype=None,
        )
        for file in found.files
    ]  # fmt: skip
    return FoundFiles(files, tuple(found.not_read))


def _is_text(file: SourceFile) -> bool:
    """Whether the beginning of a plain text file is UTF-8; what else a file is, its reader says."""
    if file.compression or file.format not in ("text", "jsonl"):
        return True
    with file.path.open("rb") as stream:
        start = stream.read(_LOOKED_AT_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < _LOOKED_AT_BYTES)
    except UnicodeDecodeError:
        return False
    return True


def _walk(folder: Path, excluded: tuple[str, ...], out: Path | None) -> Iterator[Path]:
    for entry in folder.iterdir():
        if not entry.is_dir():
            yield entry
            continue
        passed_over = entry.name in excluded or (out is not None and out.exists() and out.samefile(entry))
        if not passed_over and not entry.is_symlink():  # a link could lead round in a circle
            yield from _walk(entry, excluded, out)


def recognise(path: Path) -> SourceFile:
    """What a file is, by its first bytes and its name.

    Raises:
        DataError: it cannot be read, is not what its name says, or is of a kind that holds no corpus.
    """
    if not path.is_file():
        raise DataError(f"{path} is not a file or folder")
    try:
        with path.open("rb") as file:
            start = file.read(4)
            num_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    compression = next((name for magic, name in _COMPRESSIONS.items() if start.startswith(magic)), None)
    named = _COMPRESSED_SUFFIXES.get(path.suffix)
    if named and named != compression:
        raise DataError(
            f"{path} is named {path.suffix} but does not begin as {named} does: it is truncated or misnamed"
        )
    inner = path.stem if named else path.name
    magic = struct.unpack("<i", start)[0] if len(start) == 4 else 0
    if start == b"PAR1":
        kind = "parquet"
    elif inner.endswith(".parquet"):
        raise DataError(
            f"{path} is named .parquet but does not begin as parquet does: it is empty, truncated or misnamed"
        )
    elif inner.endswith(".bin"):
        kind = "megatron" if is_indexed(path) else _recognise_bin(path, magic, compression)
    else:
        kind = "jsonl" if inner.endswith(_JSONL_SUFFIXES) else "text"
    dtype = {"llm.c": LLMC_MAGICS.get(magic), "nanogpt": "uint16"}.get(kind)
    dtype = index_of(path).dtype if kind == "megatron" else dtype
    return SourceFile(path=path, format=kind, compression=compression, num_bytes=num_bytes, ids_dtype=dtype)


def _recognise_bin(path: Path, magic: int, compression: str | None) -> str:
    if compression and magic not in LLMC_MAGICS and path.suffix != ".bin":
        raise DataError(f"{path} is a compressed .bin file, which is not read: decompress it first")
    if magic == _LLMC_EVAL_MAGIC:
        raise DataError(f"{path} is llm.c's file of an evaluation (magic {magic}), not of text: leave it out")
    return "llm.c" if magic in LLMC_MAGICS else "nanogpt"


def told(files: Iterable[SourceFile]) -> str:
    """What the files were recognised as, in words: `12 parquet, 1 jsonl (zstd)`."""
    kinds = Counter(f"{file.format} ({file.compression})" if file.compression else file.format for file in files)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no files"
