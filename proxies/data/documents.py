"""Files that contain documents: how they are found in folders, and how their format is recognized.

The format follows from a file's first bytes and its name.
"""

from __future__ import annotations

import codecs
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import name_kind, open_plain
from forerun._proxies.data.megatron_index import has_index, read_index
from forerun._proxies.data.raw_ids import NPY_MAGIC, read_npy_header
from forerun._proxies.data.remote import is_uri, list_remote
from forerun._proxies.data.tokens import (
    MAX_EXAMPLES,
    DataError,
    NotRead,
    Split,
    explain_read_errors,
)

TEXT_SUFFIXES = (
    ".txt",
    ".md",
    ".py",
    ".jsonl",
    ".jsonl.gz",
    ".jsonl.zst",
    ".json.gz",
    ".json.zst",
    ".parquet",
)
"""Suffixes of the files that are read from folders, unless the user names others."""
LLMC_MAGICS = {20240520: "uint16", 20240801: "uint32"}
"""Dtype of the ids by the magic number of llm.c's header."""
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_COMPRESSED_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}
_PREFIX_BYTES = 2**16
"""Size of the beginning of a text file that is checked for UTF-8."""
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
RAW = "raw"
"""Value of `SourceFile.ids_dtype` if the file does not state its dtype
(`forerun._proxies.data.raw_ids`).
"""
_OTHER_KINDS = {
    ".mds": "a shard of MosaicML's MDS",
    ".ds": "datatrove's tokens",
    ".arrow": (
        "an Arrow file of Hugging Face's datasets (`dataset.to_parquet(FILE)` writes what is read)"
    ),
    ".npz": "an archive of NumPy arrays (save its ids as .npy)",
    ".tar": "an archive",
    ".zip": "an archive",
}
"""Formats that are recognized by their suffix and refused, for messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file, with the format that it was recognized as."""

    path: Path
    format: str
    """A key of the table of readers in `document_split`, such as `text` or `parquet`."""
    compression: str | None
    num_bytes: int
    ids_dtype: str | None
    """Stored dtype of the ids of a pre-tokenized file; `RAW` if the file does not state it; None
    for text."""
    uri: str = ""
    """URI of a file in an object store; empty for a file on this machine."""
    relative_name: str = ""
    """Path below the folder that was named as a source; the file's name if the file itself was
    named."""
    from_folder: bool = False
    """Whether the file was found in a folder, instead of being named as a source."""
    split: Split | None = None
    """Split of all documents of the file, by its name; None if each document's content decides."""

    @property
    def name(self) -> str:
        """URI or path of the file, for messages."""
        return self.uri or str(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderOptions:
    """Options that every reader of documents takes."""

    text_key: str = "text"
    """Key of a JSON Lines object, or column of a parquet file, that contains the text."""
    vocab_size: int = 0
    """Exclusive upper limit for the ids of pre-tokenized files, at least the vocabulary size of the
    tokenizer if there is one; 0 if the user gave none."""
    end_id: int | None = None
    """Id that ends a document in pre-tokenized files; None if there is none."""
    raw_dtype: str | None = None
    """Dtype of raw ids that the user named; None to recognize it."""


class FoundFiles(NamedTuple):
    """The files of the sources that are read, and the kinds of files in their folders that are not
    read.
    """

    files: list[SourceFile]
    not_read: tuple[NotRead, ...]


Document = bytes | NDArray[np.uint32]
"""A document as a reader yields it: text in UTF-8, or token ids."""


def find_files(
    paths: Iterable[Path | str],
    suffixes: tuple[str, ...],
    excluded: tuple[str, ...] = (),
    out: Path | None = None,
) -> FoundFiles:
    """Find the files to read, and recognize the format of each.

    Files below a folder are taken if they have one of the suffixes, in sorted order. Folders named
    in `excluded` are skipped, and so is `out`, which may be inside a source. All other files below
    a folder are counted as not read, as are plain texts that do not begin as UTF-8.

    Args:
        paths: Files, which must be readable, and folders; a string may also be a URI
            (`forerun._proxies.data.remote`).
        suffixes: Suffixes of the files to take from folders.
        excluded: Names of folders to skip.
        out: Folder that the corpus will be written to.

    Raises:
        DataError: A path is not a file or folder, or a file cannot be read or is not what its name
            says. All problems are listed at once.
    """
    files: list[SourceFile] = []
    unread, problems = UnreadFiles(), list[str]()
    for path in paths:
        try:
            if isinstance(path, str) and is_uri(path):
                files += _find_remote(path, unread)
            elif not Path(path).is_dir():
                files.append(recognize_file(Path(path)))
            else:
                listed = _walk(Path(path), excluded, out)
                files += _find_listed(Path(path), sorted(listed), suffixes, unread, problems)
        except OSError as error:
            problems.append(f"{error.filename or path} cannot be read: {error.strerror}")
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(*problems)
    not_read = sorted(unread.to_records(), key=lambda kind: (-kind.num_bytes, kind.suffix))
    return FoundFiles(files, tuple(not_read))


def _find_listed(
    folder: Path,
    paths: Iterable[Path],
    suffixes: tuple[str, ...],
    unread: UnreadFiles,
    problems: list[str],
) -> Iterator[SourceFile]:
    """Yield the files of a folder that are read; others go to `unread`, errors to `problems`."""
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            unread.add("link to nothing", path.name, 0)
            continue
        kind = name_kind(stat.st_mode)
        if kind != "file":
            unread.add(kind, path.name, 0)
        elif not path.name.endswith(suffixes):
            unread.add(path.suffix, path.name, stat.st_size)
        else:
            try:
                file = recognize_file(path)
                is_text = _is_text(file)
            except DataError as error:
                problems += error.problems
                continue
            if is_text:
                name = str(path.relative_to(folder))
                yield replace(file, relative_name=name, from_folder=True)
            else:
                unread.add(f"{path.suffix} not in UTF-8", path.name, stat.st_size)


class UnreadFiles:
    """Collects files that are not read, by kind."""

    def __init__(self) -> None:
        self._files: dict[str, list[tuple[str, int]]] = {}

    def add(self, kind: str, name: str, num_bytes: int) -> None:
        """Add a file."""
        self._files.setdefault(kind, []).append((name, num_bytes))

    def to_records(self) -> list[NotRead]:
        """Return the number of files of each kind, with the names of the first."""
        return [
            NotRead(
                suffix=kind,
                num_files=len(files),
                num_bytes=sum(num_bytes for _, num_bytes in files),
                examples=tuple(name for name, _ in files[:MAX_EXAMPLES]),
            )
            for kind, files in self._files.items()
        ]


def _find_remote(uri: str, unread: UnreadFiles) -> list[SourceFile]:
    """Return the parquet files at a URI; other files go to `unread`.

    Raises:
        DataError: There is no parquet file, or the URI cannot be listed.
    """
    remote_files = list_remote(uri)
    root = uri.partition("://")[2].partition("?")[0].rstrip("/")
    files = []
    for file in remote_files:
        name = PurePath(file.path).name
        if not name.endswith(".parquet"):
            unread.add(PurePath(name).suffix, name, file.num_bytes)
            continue
        files.append(
            SourceFile(
                path=Path(file.path),
                uri=file.uri,
                format="parquet",
                compression=None,
                num_bytes=file.num_bytes,
                ids_dtype=None,
                relative_name=file.path.removeprefix(root).lstrip("/") or name,
            )
        )
    if not files:
        raise DataError(
            f"{uri}: no .parquet file is there ({format_counted(len(remote_files), 'other')}); "
            "from a store only parquet is read"
        )
    return files


def _is_text(file: SourceFile) -> bool:
    """Return whether a plain text file begins as UTF-8; True for a file of any other format, which
    its reader checks.
    """
    if file.compression or file.format not in ("text", "jsonl"):
        return True
    with open_plain(file.path) as stream:
        start = stream.read(_PREFIX_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < _PREFIX_BYTES)
    except UnicodeDecodeError:
        return False
    return True


def _walk(folder: Path, excluded: tuple[str, ...], out: Path | None) -> Iterator[Path]:
    for entry in folder.iterdir():
        if not entry.is_dir():
            yield entry
            continue
        is_excluded = entry.name in excluded or (
            out is not None and out.exists() and out.samefile(entry)
        )
        # Links to folders are not followed: they could form a cycle.
        if not is_excluded and not entry.is_symlink():
            yield from _walk(entry, excluded, out)


def recognize_file(path: Path) -> SourceFile:
    """Recognize a file's format by its first bytes, and then by its name.

    Raises:
        DataError: The file cannot be read, is not what its name says, or has a format that is not
            read.
    """
    with explain_read_errors(path):
        try:
            with open_plain(path) as file:
                start = file.read(len(NPY_MAGIC))
                num_bytes = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            raise DataError(f"{path} is not a file or folder") from None
        compression = next(
            (name for magic, name in _COMPRESSIONS.items() if start.startswith(magic)), None
        )
        kind, dtype = _find_format(path, start, compression)
    return SourceFile(
        path=path,
        format=kind,
        compression=compression,
        num_bytes=num_bytes,
        ids_dtype=dtype,
        relative_name=path.name,
    )


def _find_format(path: Path, start: bytes, compression: str | None) -> tuple[str, str | None]:
    """Return a file's format, and the stored dtype of its ids; None if it contains text.

    Args:
        path: The file.
        start: Its first bytes.
        compression: Compression that these bytes show; None if they show none.

    Raises:
        DataError: The file is not what its name says, or has a format that is not read.
        OSError: The file or its index cannot be read.
    """
    expected = _COMPRESSED_SUFFIXES.get(path.suffix)
    if expected and expected != compression:
        raise DataError(
            f"{path} is named {path.suffix} but does not begin as {expected} does: it is truncated "
            "or misnamed"
        )
    if path.suffix in _OTHER_KINDS:
        raise DataError(
            f"{path} is {_OTHER_KINDS[path.suffix]}, which is not read: convert it, or leave it out"
        )
    inner_name = path.stem if expected else path.name
    if start.startswith(b"PAR1"):
        return "parquet", None
    if inner_name.endswith(".parquet"):
        raise DataError(
            f"{path} is named .parquet but does not begin as parquet does: it is empty, truncated "
            "or misnamed"
        )
    if start == NPY_MAGIC:
        return "npy", read_npy_header(path)[0].name
    if inner_name.endswith(".bin") and has_index(path):
        return "megatron", read_index(path).dtype
    if inner_name.endswith((".bin", ".npy")):
        llm_c_dtype = LLMC_MAGICS.get(int.from_bytes(start[:4], "little"))
        return ("llm.c", llm_c_dtype) if llm_c_dtype else ("nanogpt", RAW)
    return ("jsonl" if inner_name.endswith(_JSONL_SUFFIXES) else "text"), None


def describe_formats(files: Iterable[SourceFile]) -> str:
    """Describe the formats of files, such as `12 parquet, 1 jsonl (zstd)`."""
    kinds = Counter(
        f"{file.format} ({file.compression})" if file.compression else file.format for file in files
    )
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no files"
