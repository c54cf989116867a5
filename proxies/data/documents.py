"""Files with documents in them: found in folders, recognised by their first bytes and their names.
Stdlib only.
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
_LOOKED_AT_BYTES = 2**16
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
    """A file and what it was recognised as."""

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
    """Where it lies, if that is no file system of this machine."""
    relative_name: str = ""
    """Path below the folder that was named as a source; the file's name if the file itself was
    named."""
    from_folder: bool = False
    """Whether the file was found in a folder, instead of being named as a source."""
    split: Split | None = None
    """Split of all its documents, from the file's name; None if each document's content decides."""

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
    raw_dtype: str | None = None
    """Dtype of raw ids that the user named; None to recognize it."""


class FoundFiles(NamedTuple):
    """The files of sources, and those in their folders that are not read."""

    files: list[SourceFile]
    not_read: tuple[NotRead, ...]


Document = bytes | NDArray[np.uint32]
"""What a reader gives: a text in UTF-8, or token ids."""


def find_files(
    paths: Iterable[Path | str],
    suffixes: tuple[str, ...],
    excluded: tuple[str, ...] = (),
    out: Path | None = None,
) -> FoundFiles:
    """The files, and the files of those suffixes below the folders, in sorted order, each
    recognised.

    Folders of the `excluded` names are passed over, and so is the folder `out`, which may lie
    inside a source. Any other file below a folder that is not taken is counted, and so is one of
    theirs that does not begin as UTF-8.

    Args:
        paths: files, which must be readable, and folders; as text also URIs
            (`proxies.data.remote`).
        suffixes: of the files taken from folders.
        excluded: names of folders.
        out: where the corpus will lie.

    Raises:
        DataError: every path that is not a file or folder, and every file that cannot be read or is
            not what its name says.
    """
    recognised_files: list[SourceFile] = []
    left = Leftovers()
    problems: list[str] = []
    elsewhere: list[NotRead] = []
    for given in paths:
        try:
            if isinstance(given, str) and is_uri(given):
                remote, left_there = _remote(given)
                recognised_files += remote
                elsewhere += left_there
                continue
            path = Path(given)
            files = sorted(_walk(path, excluded, out)) if path.is_dir() else [path]
        except OSError as error:
            problems.append(f"{error.filename or given} cannot be read: {error.strerror}")
            continue
        except DataError as error:
            problems += error.problems
            continue
        for file in files:
            try:
                recognised = (
                    _recognise_listed(file, suffixes, left) if file != path else recognise(file)
                )
            except DataError as error:
                problems += error.problems
                continue
            if recognised is not None:
                name = str(file.relative_to(path)) if file != path else file.name
                recognised_files.append(
                    replace(recognised, relative_name=name, from_folder=file != path)
                )
    if problems:
        raise DataError(*problems)
    return FoundFiles(
        recognised_files,
        tuple(
            sorted(
                [*left.to_records(), *elsewhere], key=lambda kind: (-kind.num_bytes, kind.suffix)
            )
        ),
    )


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


def _recognise_listed(file: Path, suffixes: tuple[str, ...], left: Leftovers) -> SourceFile | None:
    """Return a file of a folder if it is to be read; else add it to the leftovers and return
    None.
    """
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
    elif not _is_text(recognised := recognise(file)):
        left.add(f"{file.suffix} not in UTF-8", file.name, stat.st_size)
    else:
        return recognised
    return None


def _remote(uri: str) -> FoundFiles:
    found = find_remote(uri)
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
        for file in found.files
    ]
    return FoundFiles(files, tuple(found.not_read))


def _is_text(file: SourceFile) -> bool:
    """Whether the beginning of a plain text file is UTF-8; what else a file is, its reader says."""
    if file.compression or file.format not in ("text", "jsonl"):
        return True
    with open_plain(file.path) as stream:
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
        passed_over = entry.name in excluded or (
            out is not None and out.exists() and out.samefile(entry)
        )
        if not passed_over and not entry.is_symlink():  # a link could lead round in a circle
            yield from _walk(entry, excluded, out)


def recognise(path: Path) -> SourceFile:
    """What a file is, by its first bytes and its name.

    Raises:
        DataError: it cannot be read, is not what its name says, or is of a kind that holds no
            corpus.
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
    named = _COMPRESSED_SUFFIXES.get(path.suffix)
    if named and named != compression:
        raise DataError(
            f"{path} is named {path.suffix} but does not begin as {named} does: it is truncated or "
            "misnamed"
        )
    inner = path.stem if named else path.name
    magic = struct.unpack("<i", start[:4])[0] if len(start) >= 4 else 0
    if path.suffix in _OTHER_KINDS:
        raise DataError(
            f"{path} is {_OTHER_KINDS[path.suffix]}, which is not read: convert it, or leave it out"
        )
    if start.startswith(b"PAR1"):
        kind = "parquet"
    elif inner.endswith(".parquet"):
        raise DataError(
            f"{path} is named .parquet but does not begin as parquet does: it is empty, truncated "
            "or misnamed"
        )
    elif inner.endswith(".npy"):
        kind = "npy" if start == NPY_MAGIC else "nanogpt"
    elif inner.endswith(".bin"):
        kind = "megatron" if is_indexed(path) else _recognise_bin(path, start, magic, compression)
    else:
        kind = "jsonl" if inner.endswith(_JSONL_SUFFIXES) else "text"
    dtype = {"llm.c": LLMC_MAGICS.get(magic), "nanogpt": RAW}.get(kind)
    if kind == "megatron":
        dtype = index_of(path).dtype
    elif kind == "npy":
        dtype = read_npy_header(path)[0].name
    return SourceFile(
        path=path, format=kind, compression=compression, num_bytes=num_bytes, ids_dtype=dtype
    )


def _recognise_bin(path: Path, start: bytes, magic: int, compression: str | None) -> str:
    if start == NPY_MAGIC:
        raise DataError(
            f"{path} is named .bin but begins as NumPy's .npy does: name it .npy, and its header "
            "is read"
        )
    if compression and magic not in LLMC_MAGICS and path.suffix != ".bin":
        raise DataError(f"{path} is a compressed .bin file, which is not read: decompress it first")
    with contextlib.suppress(FileNotFoundError):
        _refuse_chunk(path, path.parent / "index.json")
    if magic == _LLMC_EVAL_MAGIC:
        raise DataError(
            f"{path} is llm.c's file of an evaluation (magic {magic}), not of text: leave it out"
        )
    return "llm.c" if magic in LLMC_MAGICS else "nanogpt"


def _refuse_chunk(path: Path, index: Path) -> None:
    """Raise DataError if a folder's index lists a file as a chunk of a format that is not plain
    ids.
    """
    try:
        listed = json.loads(read_plain(index))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise DataError(
            f"{index} lies beside {path} and cannot be read ({reason}): remove one of them"
        ) from error
    kinds = {"chunks": "litdata", "shards": "MosaicML's MDS"}
    for key in kinds.keys() & (listed if isinstance(listed, dict) else {}):
        raise DataError(
            f"{path} is a chunk of {kinds[key]} ({index.name} beside it), which is not read: "
            "convert it"
        )


def told(files: Iterable[SourceFile]) -> str:
    """What the files were recognised as, in words: `12 parquet, 1 jsonl (zstd)`."""
    kinds = Counter(
        f"{file.format} ({file.compression})" if file.compression else file.format for file in files
    )
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no files"
