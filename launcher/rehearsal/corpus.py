"""A cut of a corpus for the drills: of every source and split the first tokens and the last, as shards of their own.

Every start of a run reads its corpus through; of the real one that may take hours.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from proxies.core import canon
from proxies.data.tokens import MANIFEST, SPLITS, Manifest, Shard, read_manifest

NUM_TOKENS = 100_000
"""At either end of a source's split."""


def cut_corpus(corpus: Path, weights: dict[str, float], out: Path) -> Manifest:
    """Write the cut of `corpus` into `out`, its sources in the shares of `weights`, if there are any.

    Raises:
        DataError: there is no corpus, or the weights do not fit it.
        OSError: a shard cannot be read, or `out` not written.
    """
    stored = read_manifest(corpus)
    manifest = stored.reweighted(weights) if weights else stored
    out.mkdir(parents=True, exist_ok=True)
    sources = []
    for number, source in enumerate(manifest.sources):
        shards = {
            split: tuple(
                _write(out / f"source-{number}-{split}-{end}.bin", ids)
                for end, ids in enumerate(_ends(corpus, getattr(source, split), manifest.dtype))
            )
            for split in SPLITS
        }
        sources.append(dataclasses.replace(source, train=shards["train"], validation=shards["validation"]))
    # The tokenizer's file stays behind: a trainer does not read it.
    cut = dataclasses.replace(manifest, sources=tuple(sources), tokenizer="unnamed")
    canon.write_atomic(out / MANIFEST, canon.pretty(cut))
    return cut


def _read_ids(path: Path, dtype: str, first: int, num_tokens: int) -> NDArray[np.integer]:
    """Some ids of a shard, as its file has them."""
    kind = np.dtype(dtype).newbyteorder("<")
    return np.fromfile(path, dtype=kind, count=num_tokens, offset=first * kind.itemsize)


def _ends(corpus: Path, shards: tuple[Shard, ...], dtype: str) -> list[NDArray[np.integer]]:
    """The first tokens of the first shard and the last of the last; all of a split's only shard where it is short."""
    if not shards:
        return []
    first, last = shards[0], shards[-1]
    if first is last and first.num_tokens <= 2 * NUM_TOKENS:
        return [_read_ids(corpus / first.file, dtype, 0, first.num_tokens)]
    start = max(0, last.num_tokens - NUM_TOKENS)
    head = _read_ids(corpus / first.file, dtype, 0, min(NUM_TOKENS, first.num_tokens))
    return [head, _read_ids(corpus / last.file, dtype, start, last.num_tokens - start)]


def _write(path: Path, ids: NDArray[np.integer]) -> Shard:
    ids.tofile(path)
    return Shard(file=path.name, num_tokens=len(ids), max_id=int(ids.max()), sha256=canon.file_sha256(path))
