"""Parquet files in object stores and on the Hugging Face Hub (`s3://`, `gs://`, `hf://`).

They are read through pyarrow's filesystems. Credentials come from where each store's own client
looks for them: the environment, profile files, `hf auth login`. URIs are stored and shown, so a URI
that contains a password is refused.
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
    """A parquet file in an object store."""

    uri: str
    path: str
    """Path inside the store."""
    num_bytes: int


class RemoteFiles(NamedTuple):
    """The parquet files at a URI, and the kinds of other files there."""

    files: list[RemoteFile]
    not_read: list[NotRead]


def is_uri(text: str) -> bool:
    """Return whether the name of a source is a URI, not a path."""
    return _URI.fullmatch(text) is not None


def filesystem_of(uri: str) -> tuple[Any, str]:
    """Return the pyarrow filesystem of a URI, and the path inside it.

    Raises:
        DataError: The scheme is unknown, the URI contains a password, or the store's client is not
            installed or cannot be created.
    """
    import pyarrow as pa
    import pyarrow.fs

    match = _URI.fullmatch(uri)
    scheme, location = (match[1].lower(), match[2]) if match else ("", "")
    if scheme not in SCHEMES:
        raise DataError(
            f"{uri}: must be a path, or begin with {', '.join(f'{each}://' for each in SCHEMES)}"
        )
    if ":" in location.partition("/")[0].rpartition("@")[0]:
        raise DataError(
            f"{scheme}://...: holds a password, which would be stored and shown: remove it, and "
            "put it where the store's own client finds it, such as the environment"
        )
    try:
        if scheme == "hf":
            from huggingface_hub import HfFileSystem

            return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(HfFileSystem())), location
        return pyarrow.fs.FileSystem.from_uri(uri)  # type: ignore[no-any-return]
    except ImportError:
        raise DataError(
            f"{uri}: huggingface_hub is not installed: pip install huggingface_hub"
        ) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{uri} cannot be opened: {first_line(error)}") from error


def find_remote(uri: str) -> RemoteFiles:
    """Find the parquet file at a URI, or the parquet files below it, in sorted order.

    Raises:
        DataError: There is no parquet file, or the URI cannot be listed.
    """
    from pyarrow import fs

    filesystem, root = filesystem_of(uri)
    try:
        info = filesystem.get_file_info(root)
        entries = [info]
        if info.type == fs.FileType.Directory:
            entries = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except Exception as error:  # each store's client raises its own exceptions
        raise DataError(f"{uri} cannot be listed: {first_line(error)}") from error
    all_files = sorted(
        (entry for entry in entries if entry.type == fs.FileType.File),
        key=lambda entry: entry.path,
    )
    parquet_files = [entry for entry in all_files if entry.path.endswith(_SUFFIX)]
    if not parquet_files:
        raise DataError(
            f"{uri}: no {_SUFFIX} file is there ({counted(len(all_files), 'other')}); from a store "
            "only parquet is read"
        )
    scheme, query = uri.partition("://")[0], uri.partition("?")[2]
    files = [
        RemoteFile(
            f"{scheme}://{entry.path}" + (f"?{query}" if query else ""),
            entry.path,
            int(entry.size or 0),
        )
        for entry in parquet_files
    ]
    others_by_suffix: dict[str, list[Any]] = {}
    for entry in all_files:
        if entry not in parquet_files:
            others_by_suffix.setdefault(Path(entry.path).suffix, []).append(entry)
    not_read = [
        NotRead(
            suffix=suffix,
            num_files=len(others),
            num_bytes=sum(int(entry.size or 0) for entry in others),
            examples=tuple(Path(entry.path).name for entry in others[:MAX_EXAMPLES]),
        )
        for suffix, others in others_by_suffix.items()
    ]
    return RemoteFiles(files, not_read)


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message; for an operating system error, its message
    without the path.
    """
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or (str(error).strip().splitlines() or [type(error).__name__])[0]
