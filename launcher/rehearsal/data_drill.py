"""The data drill: the real corpus's ends and ids, and every window of the drills' own runs found in the files.

What was drawn is looked up in the shards' bytes by this module's own arithmetic, not by the store that drew it.
"""

from __future__ import annotations

import collections
import itertools
from pathlib import Path

from launcher.rehearsal.corpus import read_ids
from launcher.rehearsal.faults import Drawn, consumed, sha_of
from launcher.rehearsal.registry import MOST_READ_BYTES, DrillResult, judged
from launcher.rehearsal.stage import Stage
from proxies.core.canon import Json
from proxies.data.tokens import SPLITS, DataError, Manifest, Shard, TokenStore


def data(stage: Stage) -> DrillResult:
    """Ends of shards, ids, and no window drawn twice or left out, across the resumes of the runs there are."""
    decision, manifest = stage.real, stage.cut
    problems, seen = _corpus(stage)
    runs = [stage.reference(), stage.cut_thrice()]
    runs += [run for run in ("killed-rank", "hang") if stage.ended(run)]
    windows = 0
    for run in runs:
        found, wrong = _consumed(stage, run, manifest)
        windows = max(windows, found)
        problems += [f"{run}: {problem}" for problem in wrong]
    epochs = decision.num_tokens / max(1, decision.data.num_train_tokens)
    seen |= {"num_runs_compared": len(runs), "num_windows": windows, "epochs": epochs}
    said = (
        f"{seen['num_shards']} shards: first and last token readable, {seen['ids_read']} ids below the vocabulary; "
        f"{windows} windows of {', '.join(runs)}: each drawn once, found in the shards, and the same across resumes; "
        f"the real run passes over its tokens {epochs:.2f} times"
    )
    return judged("data", not problems, "; ".join(problems[:4]) or said, seen)


def _corpus(stage: Stage) -> tuple[list[str], dict[str, Json]]:
    """What is wrong with the real corpus, and what was read of it."""
    decision, corpus = stage.real, stage.real_corpus
    weights = dict(decision.data.weights) or None
    try:
        manifest = TokenStore(corpus, trusted=True, weights=weights).manifest
        shards = [shard for source in manifest.sources for split in SPLITS for shard in getattr(source, split)]
        num_bytes = sum((corpus / shard.file).stat().st_size for shard in shards)
        whole = num_bytes <= MOST_READ_BYTES
        if whole:
            TokenStore(corpus, weights=weights)
    except (DataError, OSError) as error:
        return [str(error)], {"num_shards": 0, "ids_read": "no"}
    problems = [problem for shard in shards for problem in _ends(corpus, shard, manifest)]
    if manifest.data_id != decision.data.data_id:
        problems.append(f"the corpus is {manifest.data_id[:16]}..., frozen is {decision.data.data_id[:16]}...")
    if manifest.vocab_size > decision.shape.vocab_size:
        problems.append(f"the corpus has a vocabulary of {manifest.vocab_size}, the model {decision.shape.vocab_size}")
    if manifest.num_tokens("train") != decision.data.num_train_tokens:
        problems.append(f"{manifest.num_tokens('train')} training tokens, frozen are {decision.data.num_train_tokens}")
    read = f"all {sum(shard.num_tokens for shard in shards):,}" if whole else f"{2 * len(shards):,} (the shards' ends)"
    return problems, {"num_shards": len(shards), "ids_read": read, "num_bytes": num_bytes}


def _ends(corpus: Path, shard: Shard, manifest: Manifest) -> list[str]:
    """What is wrong with a shard's first and last token."""
    problems = []
    for what, at in (("first", 0), ("last", shard.num_tokens - 1)):
        ids = read_ids(corpus / shard.file, manifest.dtype, at, 1)
        if len(ids) != 1:
            problems.append(f"{shard.file}: its {what} token cannot be read")
        elif int(ids[0]) >= manifest.vocab_size:
            problems.append(f"{shard.file}: its {what} token is {ids[0]}, of a vocabulary of {manifest.vocab_size}")
    return problems


def _consumed(stage: Stage, run: str, manifest: Manifest) -> tuple[int, list[str]]:
    """Windows that a run's updates used, and what is wrong with them."""
    schedule, seq_len = stage.decision.learning_rate.schedule, stage.decision.shape.seq_len
    batch = stage.decision.batch_tokens // seq_len
    drawn, wanted = consumed(stage.path(run)), consumed(stage.path(stage.reference()))
    problems = []
    for step in range(schedule.num_steps):
        first, count = schedule.sequences(step, batch)
        places = drawn.get(step, {})
        if sorted(places) != list(range(first, first + count)):
            problems.append(f"update {step + 1} used the places {_span(places)}, not {first} to {first + count - 1}")
        if places != wanted.get(step):
            problems.append(f"update {step + 1} used other windows than the uninterrupted run's")
    in_order = [(place, *row) for places in drawn.values() for place, row in places.items()]
    problems += _repeated(sorted(in_order), manifest, seq_len)
    for place, source, window, sha in in_order:
        if _read_window(stage.corpus, manifest, source, window, seq_len) != sha:
            problems.append(f"place {place}: window {window} of source {source} is not what lies in its shard")
    return len(in_order), problems


def _repeated(in_order: list[tuple[int, int, int, str]], manifest: Manifest, seq_len: int) -> list[str]:
    """Windows that came again before all of their source had come."""
    problems, num_drawn = [], collections.Counter[int]()
    seen: set[tuple[int, int, int]] = set()
    for place, source, window, _ in in_order:
        epoch = num_drawn[source] // sum(map(_num_windows, manifest.sources[source].train, itertools.repeat(seq_len)))
        num_drawn[source] += 1
        if (source, epoch, window) in seen:
            problems.append(f"place {place}: window {window} of source {source} came twice within an epoch")
        seen.add((source, epoch, window))
    return problems


def _num_windows(shard: Shard, seq_len: int) -> int:
    return max(0, (shard.num_tokens - 1) // seq_len)


def _read_window(corpus: Path, manifest: Manifest, source: int, window: int, seq_len: int) -> str:
    """Hash of a window's ids, read from its shard's file: windows do not overlap, and none crosses shards."""
    for shard in manifest.sources[source].train:
        num_windows = _num_windows(shard, seq_len)
        if window < num_windows:
            return sha_of(read_ids(corpus / shard.file, manifest.dtype, window * seq_len, seq_len + 1))
        window -= num_windows
    return "no such window"


def _span(places: dict[int, Drawn]) -> str:
    return f"{min(places)} to {max(places)}" if places else "none"
