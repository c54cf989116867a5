"""Texts out of files and folders, one document at a time. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from proxies import canon

PIECE_BYTES = 2**18


class DataError(ValueError):
    """The corpus cannot be read, or is not what its manifest says."""


def read_documents(
    sources: Iterable[Path], suffixes: tuple[str, ...], excluded: tuple[str, ...] = ()
) -> Iterator[bytes]:
    """Texts of the files, or of every file of those suffixes below the folders, in sorted order; folders of the
    `excluded` names are passed over.

    `.jsonl` files give one document per line, from its `text` field.

    Raises:
        DataError: a source does not exist, or a file cannot be read or parsed.
    """
    for source in sources:
        if not source.exists():
            raise DataError(f"{source} does not exist")
        files = [source]
        if source.is_dir():
            files = sorted(f for f in _walk(source, excluded) if f.suffix in suffixes and f.is_file())
        for file in files:
            try:
                content = file.read_bytes()
            except OSError as error:
                raise DataError(f"{file} cannot be read: {error.strerror}") from error
            yield from _jsonl_texts(file, content) if file.suffix == ".jsonl" else _pieces(content)


def _pieces(text: bytes) -> Iterator[bytes]:
    """A text in pieces of some `PIECE_BYTES`, cut after lines: a huge file must be many documents to be split."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        end = text.rfind(b"\n", start, start + PIECE_BYTES) + 1
        end = end if end > start else start + PIECE_BYTES
        yield text[start:end]
        start = end
    yield text[start:]


def _walk(folder: Path, excluded: tuple[str, ...]) -> Iterator[Path]:
    for entry in folder.iterdir():
        if not entry.is_dir():
            yield entry
        elif entry.name not in excluded and not entry.is_symlink():  # a link could lead round in a circle
            yield from _walk(entry, excluded)


def _jsonl_texts(file: Path, content: bytes) -> Iterator[bytes]:
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = canon.parse(line)
        except canon.CanonError as error:
            raise DataError(f"{file} line {number}: {error}") from error
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise DataError(f"{file} line {number}: an object with a string `text` is wanted")
        try:
            yield text.encode()
        except UnicodeEncodeError:
            raise DataError(f"{file} line {number}: `text` holds half a surrogate pair") from None
