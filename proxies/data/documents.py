"""Files that contain documents: how they are found in folders, and how their format is recognized.

The format follows from a file's first bytes and its name.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from proxies.core.plain_files import name_kind, open_plain, read_plain
from proxies.data.megatron_index import index_of, is_indexed
from proxies.data.raw_ids import NPY_MAGIC, read_npy_header
from proxies.data.remote import find_remote, is_uri
from proxies.data.tokens import MAX_EXAMPLES, DataError, NotRead, Split

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
LLMC_MAGICS = {20240520: "uint16", 20240801: "uint32"}
_LLMC_EVAL_MAGIC = 20240522
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_COMPRESSED_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}
_PREFIX_BYTES = 2**16
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
RAW = "raw"
"""Value of `SourceFile.ids_dtype` if the file does not state its dtype (`proxies.data.raw_ids`)."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file, with the format that it was recognized as."""

    path: Path
    format: str
    """A key of the table of readers: `text`, `jsonl`, `parquet`, `nanogpt`, `npy`, `llm.c`,
    `megatron`."""
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
    """Split of all its documents, from the file's name; None if each document's content decides."""

    @property
    def name(self) -> str:
        """URI or path of the file, for messages."""
        return self.uri or str(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderOptions:
    """Options that every reader of documents takes."""

    text_key: str
    """Key of a JSON Lines object, or column of a parquet file, that contains the text."""
    vocab_size: int
    """Exclusive upper limit for the ids of pre-tokenized files."""
    end_id: int | None
    """Id that ends a document in pre-tokenized files; None if there is none."""
    raw_dtype: str | None = None
    """Dtype of raw ids that the user named; None to recognize it."""


class FoundFiles(NamedTuple):
    """The files of the sources that are read, and the kinds of files in their folders that are
    not.
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
            (`proxies.data.remote`).
        suffixes: Suffixes of the files to take from folders.
        excluded: Names of folders to skip.
        out: Folder that the corpus will be written to.

    Raises:
        DataError: A path is not a file or folder, or a file cannot be read or is not what its name
            says. All problems are listed at once.
    """
    files: list[SourceFile] = []
    left = Leftovers()
    problems: list[str] = []
    remote_not_read: list[NotRead] = []
    for path in paths:
        try:
            if isinstance(path, str) and is_uri(path):
                remote_files, not_read = _list_remote(path)
                files += remote_files
                remote_not_read += not_read
            else:
                files += _find_local(Path(path), suffixes, excluded, out, left, problems)
        except OSError as error:
            problems.append(f"{error.filename or path} cannot be read: {error.strerror}")
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(*problems)
    all_not_read = [*left.to_records(), *remote_not_read]
    all_not_read.sort(key=lambda kind: (-kind.num_bytes, kind.suffix))
    return FoundFiles(files, tuple(all_not_read))


def _find_local(
    path: Path,
    suffixes: tuple[str, ...],
    excluded: tuple[str, ...],
    out: Path | None,
    left: Leftovers,
    problems: list[str],
) -> list[SourceFile]:
    """Return the files at a path; files that are not read go to `left`, errors to `problems`."""
    if not path.is_dir():
        return [replace(recognise(path), relative_name=path.name, from_folder=False)]
    files = []
    for file in sorted(_walk(path, excluded, out)):
        try:
            recognized = _recognize_listed(file, suffixes, left)
        except DataError as error:
            problems += error.problems
            continue
        if recognized is not None:
            name = str(file.relative_to(path))
            files.append(replace(recognized, relative_name=name, from_folder=True))
    return files


class Leftovers:
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


def _recognize_listed(file: Path, suffixes: tuple[str, ...], left: Leftovers) -> SourceFile | None:
    """Return a folder's file if it is to be read; otherwise add it to `left` and return None."""
    try:
        stat = file.stat()
    except OSError:
        left.add("link to nothing", file.name, 0)
        return None
    kind = name_kind(stat.st_mode)
    if kind != "file":
        left.add(kind, file.name, 0)
    elif not file.name.endswith(suffixes):
        left.add(file.suffix, file.name, stat.st_size)
    elif not _is_text(recognized := recognise(file)):
        left.add(f"{file.suffix} not in UTF-8", file.name, stat.st_size)
    else:
        return recognized
    return None


def _list_remote(uri: str) -> FoundFiles:
    remote = find_remote(uri)
    root = uri.partition("://")[2].partition("?")[0].rstrip("/")
    files = [
        SourceFile(
            path=Path(file.path),
            uri=file.uri,
            format="parquet",
            compression=None,
            num_bytes=file.num_bytes,
            ids_dtype=None,
            relative_name=file.path.removeprefix(root).lstrip("/") or Path(file.path).name,
        )
        for file in remote.files
    ]
    return FoundFiles(files, tuple(remote.not_read))


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


def recognise(path: Path) -> SourceFile:
    """Recognize a file's format by its first bytes and its name.

    Raises:
        DataError: The file cannot be read, is not what its name says, or has a format that is not
            read.
    """
    try:
        with open_plain(path) as file:
            start = file.read(len(NPY_MAGIC))
            num_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise DataError(f"{path} is not a file or folder") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    compression = next(
        (name for magic, name in _COMPRESSIONS.items() if start.startswith(magic)), None
    )
    expected = _COMPRESSED_SUFFIXES.get(path.suffix)
    if expected and expected != compression:
        raise DataError(
            f"{path} is named {path.suffix} but does not begin as {expected} does: it is truncated "
            "or misnamed"
        )
    inner_name = path.stem if expected else path.name
    magic = struct.unpack("<i", start[:4])[0] if len(start) >= 4 else 0
    if path.suffix in _OTHER_KINDS:
        raise DataError(
            f"{path} is {_OTHER_KINDS[path.suffix]}, which is not read: convert it, or leave it out"
        )
    if start.startswith(b"PAR1"):
        kind = "parquet"
    elif inner_name.endswith(".parquet"):
        raise DataError(
            f"{path} is named .parquet but does not begin as parquet does: it is empty, truncated "
            "or misnamed"
        )
    elif inner_name.endswith(".npy"):
        kind = "npy" if start == NPY_MAGIC else "nanogpt"
    elif inner_name.endswith(".bin"):
        kind = "megatron" if is_indexed(path) else _recognize_bin(path, start, magic, compression)
    else:
        kind = "jsonl" if inner_name.endswith(_JSONL_SUFFIXES) else "text"
    dtype = {"llm.c": LLMC_MAGICS.get(magic), "nanogpt": RAW}.get(kind)
    if kind == "megatron":
        dtype = index_of(path).dtype
    elif kind == "npy":
        dtype = read_npy_header(path)[0].name
    return SourceFile(
        path=path, format=kind, compression=compression, num_bytes=num_bytes, ids_dtype=dtype
    )


def _recognize_bin(path: Path, start: bytes, magic: int, compression: str | None) -> str:
    if start == NPY_MAGIC:
        raise DataError(
            f"{path} is named .bin but begins as NumPy's .npy does: rename it to .npy, so that its "
            "header is read"
        )
    if compression and magic not in LLMC_MAGICS and path.suffix != ".bin":
        raise DataError(f"{path} is a compressed .bin file, which is not read: decompress it first")
    with contextlib.suppress(FileNotFoundError):
        _refuse_chunk(path, path.parent / "index.json")
    if magic == _LLMC_EVAL_MAGIC:
        raise DataError(
            f"{path} is an evaluation file of llm.c (magic {magic}), which contains no text: leave "
            "it out"
        )
    return "llm.c" if magic in LLMC_MAGICS else "nanogpt"


def _refuse_chunk(path: Path, index: Path) -> None:
    """Raise an error if the index of the file's folder lists chunks of a format that is not read.

    Raises:
        DataError: The index lists chunks of litdata or shards of MDS, or it cannot be read.
        FileNotFoundError: There is no index.
    """
    try:
        content = json.loads(read_plain(index))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise DataError(
            f"{index} lies beside {path} and cannot be read ({reason}): remove one of them"
        ) from error
    kinds = {"chunks": "litdata", "shards": "MosaicML's MDS"}
    for key in kinds.keys() & (content if isinstance(content, dict) else {}):
        raise DataError(
            f"{path} is a chunk of {kinds[key]} ({index.name} beside it), which is not read: "
            "convert it"
        )


def told(files: Iterable[SourceFile]) -> str:
    """Describe the formats of files, such as `12 parquet, 1 jsonl (zstd)`."""
    kinds = Counter(
        f"{file.format} ({file.compression})" if file.compression else file.format for file in files
    )
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no files"
