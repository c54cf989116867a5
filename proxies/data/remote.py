"""Parquet in object stores and on the Hugging Face Hub (`s3://`, `gs://`, `hf://`), through
pyarrow's filesystems.

Credentials come from where each store's own client looks: environment, profile files, `hf auth
login`. A URI is kept and shown, so one that holds a password is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from proxies.core.notation import counted
from proxies.data.tokens import MAX_EXAMPLES, DataError, NotRead

SCHEMES = ("hf", "s3", "gs")
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_SUFFIX = ".parquet"


class RemoteFile(NamedTuple):
    """One parquet file."""

    uri: str
    path: str
    """Inside its store."""
    num_bytes: int


class RemoteFiles(NamedTuple):
    """What lies at a URI."""

    files: list[RemoteFile]
    not_read: list[NotRead]


def is_uri(text: str) -> bool:
    """Whether a source is named by a URI, and not by a path."""
    return _URI.fullmatch(text) is not None


def filesystem_of(uri: str) -> tuple[Any, str]:
    """The pyarrow filesystem that a URI is of, and the path inside it.

    Raises:
        DataError: another scheme, a URI with a password, or a client that is not installed or
            cannot be made.
    """
    import pyarrow as pa
    import pyarrow.fs

    found = _URI.fullmatch(uri)
    scheme, rest = (found[1].lower(), found[2]) if found else ("", "")
    if scheme not in SCHEMES:
        raise DataError(
            f"{uri}: must be a path, or begin with {', '.join(f'{each}://' for each in SCHEMES)}"
        )
    if ":" in rest.partition("/")[0].rpartition("@")[0]:
        raise DataError(
            f"{scheme}://...: holds a password, which would be kept and shown: leave it out, and "
            "put it where the "
            "store's own client finds it, such as the environment"
        )
    try:
        if scheme == "hf":
            from huggingface_hub import HfFileSystem

            return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(HfFileSystem())), rest
        return pyarrow.fs.FileSystem.from_uri(uri)  # type: ignore[no-any-return]
    except ImportError:
        raise DataError(
            f"{uri}: huggingface_hub is not installed: pip install huggingface_hub"
        ) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{uri} cannot be opened: {first_line(error)}") from error


def find_remote(uri: str) -> RemoteFiles:
    """The parquet file at a URI, or those below it, in sorted order; what else lies there is
    counted.

    Raises:
        DataError: nothing is there, no parquet is, or it cannot be listed.
    """
    from pyarrow import fs

    filesystem, root = filesystem_of(uri)
    try:
        info = filesystem.get_file_info(root)
        below = [info]
        if info.type == fs.FileType.Directory:
            below = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except Exception as error:  # each store's client raises its own
        raise DataError(f"{uri} cannot be listed: {first_line(error)}") from error
    held = sorted(
        (each for each in below if each.type == fs.FileType.File), key=lambda each: each.path
    )
    taken = [each for each in held if each.path.endswith(_SUFFIX)]
    if not taken:
        raise DataError(
            f"{uri}: no {_SUFFIX} file is there ({counted(len(held), 'other')}); from a store only "
            "parquet is read"
        )
    scheme, query = uri.partition("://")[0], uri.partition("?")[2]
    files = [
        RemoteFile(
            f"{scheme}://{each.path}" + (f"?{query}" if query else ""),
            each.path,
            int(each.size or 0),
        )
        for each in taken
    ]
    left: dict[str, list[Any]] = {}
    for each in held:
        if each not in taken:
            left.setdefault(Path(each.path).suffix, []).append(each)
    records = [
        NotRead(
            suffix=suffix,
            num_files=len(entries),
            num_bytes=sum(int(each.size or 0) for each in entries),
            examples=tuple(Path(each.path).name for each in entries[:MAX_EXAMPLES]),
        )
        for suffix, entries in left.items()
    ]
    return RemoteFiles(files, records)


def first_line(error: Exception) -> str:
    """What an exception says first; of the system's errors, without the path."""
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or (str(error).strip().splitlines() or [type(error).__name__])[0]
