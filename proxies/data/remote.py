"""Parquet files in object stores and on the Hugging Face Hub (`s3://`, `gs://`, `hf://`).

They are read through pyarrow's filesystems. Credentials come from where each store's own client
looks for them: the environment, profile files, `hf auth login`. URIs are stored and shown, so a URI
that contains a password is refused.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from forerun._proxies.data.tokens import DataError

SCHEMES = ("hf", "s3", "gs")
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


class RemoteFile(NamedTuple):
    """A file in an object store."""

    uri: str
    path: str
    """Path inside the store."""
    num_bytes: int


def is_uri(text: str) -> bool:
    """Return whether the name of a source is a URI, not a path."""
    return _URI.fullmatch(text) is not None


def open_filesystem(uri: str) -> tuple[Any, str]:
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
        raise DataError(f"{uri} cannot be opened: {get_first_line(error)}") from error


def list_remote(uri: str) -> list[RemoteFile]:
    """Return the file at a URI, or the files below it, in sorted order.

    Raises:
        DataError: The URI cannot be listed.
    """
    from pyarrow import fs

    filesystem, root = open_filesystem(uri)
    try:
        entries = [filesystem.get_file_info(root)]
        if entries[0].type == fs.FileType.Directory:
            entries = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except Exception as error:  # each store's client raises its own exceptions
        raise DataError(f"{uri} cannot be listed: {get_first_line(error)}") from error
    scheme, (_, mark, query) = uri.partition("://")[0], uri.partition("?")
    return [
        RemoteFile(f"{scheme}://{entry.path}{mark}{query}", entry.path, int(entry.size or 0))
        for entry in sorted(entries, key=lambda entry: entry.path)
        if entry.type == fs.FileType.File
    ]


def get_first_line(error: Exception) -> str:
    """Return the first line of an exception's message; for an operating system error, its message
    without the path.
    """
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or (str(error).strip().splitlines() or [type(error).__name__])[0]
