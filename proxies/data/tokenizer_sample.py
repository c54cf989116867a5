"""The sample of a corpus that a new tokenizer is trained on: bounded, and the same however the files are ordered."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence

from proxies.data.document_split import READERS
from proxies.data.documents import ReaderOptions, SourceFile
from proxies.data.tokens import DataError

MAX_SAMPLE_BYTES = 2**24
"""Text in a sample. A BPE of 4,096 entries takes 6 s for it on one core; of 32,768 entries 7 s."""


def sample_documents(files: Sequence[SourceFile], reading: ReaderOptions, validation_fraction: float) -> list[bytes]:
    """Return the documents with the largest hashes, up to `MAX_SAMPLE_BYTES` of them, by hash.

    Documents with the smallest hashes are held out for validation: they are left out, so that the
    tokenizer does not fit the text that models are judged on.

    Args:
        files: every file of the corpus.
        reading: options of the readers.
        validation_fraction: share of the documents that is held out.

    Raises:
        DataError: a file cannot be read, or holds token ids.
    """
    if ids := [file for file in files if file.ids_dtype]:
        raise DataError(f"{ids[0].path} holds token ids: a tokenizer is trained on text")
    kept: dict[bytes, bytes] = {}
    hashes: list[bytes] = []
    num_bytes = 0
    for file in (file for file in files if file.split != "validation"):
        try:
            for document in READERS[file.format](file, reading):
                assert isinstance(document, bytes)
                text = document.replace(b"\0", b"")
                digest = hashlib.sha256(text).digest()
                if digest in kept or digest[0] / 256 + digest[1] / 65536 < validation_fraction:
                    continue
                kept[digest] = text
                heapq.heappush(hashes, digest)
                num_bytes += len(text)
                while num_bytes > MAX_SAMPLE_BYTES and len(hashes) > 1:
                    num_bytes -= len(kept.pop(heapq.heappop(hashes)))
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{file.path} cannot be read: {reason}") from error
    return [kept[digest] for digest in sorted(hashes)]
