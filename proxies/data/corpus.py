"""Making a corpus: documents out of files of any known kind into hashed shards and a manifest, in one pass.

Memory does not grow with the corpus, but for the hashes of its documents.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxies.core.notation import counted
from proxies.data.dataset_folder import split_by_name
from proxies.data.document_split import SplitJob, SplitProgress, write_source
from proxies.data.documents import (
    RAW,
    TEXT_SUFFIXES,
    FoundFiles,
    Leftovers,
    ReaderOptions,
    SourceFile,
    find_files,
    told,
)
from proxies.data.mixture import weight_problems
from proxies.data.pretokenized import check_range, dtype_of, vocabulary_of
from proxies.data.shards import another_corpus, check_same_settings, publish, read_published, unfinished
from proxies.data.tokenizer import (
    MAX_BPE_VOCAB,
    MIN_BPE_VOCAB,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from proxies.data.tokenizer_sample import MAX_SAMPLE_BYTES, sample_documents
from proxies.data.tokens import SCHEMA_VERSION, TOKENIZER_FILE, DataError, Manifest, NotRead, Source

UNNAMED = "text"
"""The name of a corpus's only source, if it was given none."""
MAX_KINDS_SHOWN = 6
"""Most kinds of files that a line about what is not read names; a folder of code has seventy."""


def tokenize(
    sources: Iterable[Path | str] | Mapping[str, Sequence[Path | str]],
    out: Path,
    *,
    suffixes: tuple[str, ...] = TEXT_SUFFIXES,
    excluded: tuple[str, ...] = (),
    text_key: str = "text",
    tokenizer: str = "bytes",
    end_token: str | None = None,
    bpe_vocab_size: int | None = None,
    vocab_size: int | None = None,
    end_id: int | None = None,
    raw_dtype: str | None = None,
    validation_fraction: float = 0.02,
    weights: Mapping[str, float] | None = None,
    progress: Callable[[SplitProgress], None] = lambda progress: None,
    say: Callable[[str], None] = lambda text: None,
) -> Manifest:
    """Write the shards and the manifest of `sources` into the folder `out`; identical documents count once.

    Args:
        sources: files and folders, as text also URIs of parquet; or several such lists by name, to be mixed.
        out: the corpus folder.
        suffixes: files taken from folders.
        excluded: names of folders that are passed over.
        text_key: key of jsonl objects, or column of parquet files.
        tokenizer: `bytes`, or the path of a `tokenizer.json`.
        end_token: the token of that file that ends a document; None: found among the usual names.
        bpe_vocab_size: entries of a byte-level BPE to train on a sample of the sources; None to train none.
        vocab_size: of pre-tokenized files that do not imply it; else at least the tokenizer's.
        end_id: of pre-tokenized files, the id that ends a document.
        raw_dtype: dtype of raw ids, one of `RAW_DTYPES`; None to recognize it file by file.
        validation_fraction: share of the documents that is held out.
        weights: share of each source in training; None: its share of the training tokens.
        progress: called now and then with the work done so far.
        say: called with a line on what was recognised, and on what became of the documents.

    Raises:
        DataError: nothing readable, another corpus in `out`, a source of fewer than two documents, or a full disk.
    """
    named = _name_sources(sources)
    _check(named, validation_fraction, weights, _bpe_problems(bpe_vocab_size, tokenizer, end_token))
    published = _check_published(out, named, weights, bpe_vocab_size, say)
    found = {name: find_files(paths, suffixes, excluded, out) for name, paths in named.items()}
    listings = {name: _sort_out(name, listing, suffixes, say) for name, listing in found.items()}
    every = [file for listing in listings.values() for file in listing.files]
    options = ReaderOptions(text_key=text_key, vocab_size=vocab_size or 0, end_id=end_id, raw_dtype=raw_dtype)
    with unfinished(out) as folder:
        if bpe_vocab_size:
            tokenizer = _train_bpe(every, folder, bpe_vocab_size, text_key, validation_fraction, say)
        chosen, reading = _vocabulary(every, load_tokenizer(tokenizer, end_token), options, say)
        job = SplitJob(
            folder=folder, tokenizer=chosen, reading=reading, validation_fraction=validation_fraction,
            progress=progress, say=say, total_bytes=sum(file.num_bytes for file in every), out=out, published=published,
        )  # fmt: skip
        written = _write_sources(job, listings, is_mixture=isinstance(sources, Mapping))
        manifest = _manifest(job, written, weights, listings)
        publish(folder, out, manifest, chosen.content if isinstance(chosen, FileTokenizer) else None)
    return manifest


def _name_sources(sources: Iterable[Path | str] | Mapping[str, Sequence[Path | str]]) -> dict[str, list[Path | str]]:
    by_name = sources if isinstance(sources, Mapping) else {UNNAMED: sources}
    return {name: list(paths) for name, paths in by_name.items()}


def _sort_out(name: str, listing: FoundFiles, suffixes: tuple[str, ...], say: Callable[[str], None]) -> FoundFiles:
    """Assign the files of a source to splits by their names, and say which files are read and which are not.

    Cards and test splits move to the files that are not read.
    """
    sorted_files, left = split_by_name(listing.files), Leftovers()
    for kind, others in (("dataset card", sorted_files.cards), ("test split", sorted_files.test)):
        for file in others:
            left.add(kind, file.relative_name, file.num_bytes)
    files, not_read = sorted_files.files, (*left.to_records(), *listing.not_read)
    say(f"{name}: {told(files)}; {counted(sum(file.num_bytes for file in files), 'byte')}")
    if not_read:
        say(f"{name}: not read: {describe_not_read(not_read)}; --suffix adds suffixes to read")
    if sentence := sorted_files.describe():
        say(f"{name}: {sentence}")
    if not files:
        raise DataError(
            f"source {name!r}: 0 documents with text found: of folders, files ending in {', '.join(suffixes)} are "
            "read; --suffix names others, also .bin"
        )
    return FoundFiles(files, not_read)


def describe_not_read(kinds: Sequence[NotRead]) -> str:
    """Name the kinds of files that are not read: set aside by their content or name first, then by their bytes."""

    def importance(kind: NotRead) -> tuple[bool, int]:
        is_suffix_alone = kind.suffix.startswith(".") and " " not in kind.suffix
        return not kind.suffix or is_suffix_alone, -kind.num_bytes

    shown = sorted(kinds, key=importance)[:MAX_KINDS_SHOWN]
    left = [kind for kind in kinds if kind not in shown]
    words = [*map(_describe, shown)]
    if left:
        words.append(
            f"{sum(kind.num_files for kind in left)} files of {counted(len(left), 'other kind')} (--json names all)"
        )
    return "; ".join(words)


def _describe(kind: NotRead) -> str:
    """Describe the files of a kind: how many there are, and the names of the first."""
    more = ", ..." if kind.num_files > len(kind.examples) else ""
    names = f" ({', '.join(kind.examples)}{more})" if kind.examples else ""
    return f"{kind.num_files} {kind.suffix or 'without suffix'}{names}"


def _check(
    named: Mapping[str, list[Path | str]],
    validation_fraction: float,
    weights: Mapping[str, float] | None,
    problems: list[str],
) -> None:
    problems += [
        f"{name!r} is not a valid source name: use letters, digits, _ and - only"
        for name in named
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name)
    ]
    if not any(named.values()):
        problems.append("no source was named: name at least one file or folder")
    if not 0 < validation_fraction < 1:
        problems.append(f"validation_fraction = {validation_fraction}: must be above 0 and below 1")
    if weights is not None:
        problems += weight_problems(tuple(named), weights)
    if problems:
        raise DataError(*problems)


def _check_published(
    out: Path,
    named: Mapping[str, list[Path | str]],
    weights: Mapping[str, float] | None,
    bpe_vocab_size: int | None,
    say: Callable[[str], None],
) -> Manifest | None:
    """Say that `out` holds a corpus, and return its manifest; refuse it if the new one is known to differ.

    Raises:
        DataError: The corpus has other sources, shares of them, or another tokenizer, or it cannot be read.
    """
    published = read_published(out)
    if published is None:
        return None
    check_same_settings(out, published, {"names": tuple(named)})
    shares = {source.name: float(source.num_tokens("train")) for source in published.sources}
    expected = published.reweighted(shares if weights is None else weights)
    check_same_settings(out, published, {"weights": expected.weights})
    if bpe_vocab_size and not published.tokenizer.startswith("sha256:"):
        raise another_corpus(out, f"with tokenizer {published.tokenizer}, not a trained one")
    say(
        f"{out} holds a corpus of {counted(published.num_documents, 'document')}, {published.num_tokens('train'):,} "
        f"training and {published.num_tokens('validation'):,} validation tokens: the same text repairs its shards, "
        "other text is refused at the first token that differs (name another --out for it)"
    )
    return published


def _bpe_problems(bpe_vocab_size: int | None, tokenizer: str, end_token: str | None) -> list[str]:
    if bpe_vocab_size is None:
        return []
    problems = []
    if not MIN_BPE_VOCAB <= bpe_vocab_size <= MAX_BPE_VOCAB:
        problems.append(
            f"train_bpe = {bpe_vocab_size}: must be {MIN_BPE_VOCAB} (256 bytes and the end token) to {MAX_BPE_VOCAB}"
        )
    if tokenizer != "bytes":
        problems.append(f"train_bpe and tokenizer = {tokenizer}: give one of them")
    if end_token is not None:
        problems.append(f"train_bpe and end_token = {end_token}: a trained tokenizer has its own end token; omit this")
    return problems


def _train_bpe(
    files: Sequence[SourceFile],
    folder: Path,
    vocab_size: int,
    text_key: str,
    validation_fraction: float,
    say: Callable[[str], None],
) -> str:
    """Train a tokenizer on a sample of the files and return the path of its file."""
    reading = ReaderOptions(text_key=text_key, vocab_size=vocab_size, end_id=None)
    texts = sample_documents(files, reading, validation_fraction)
    num_bytes = sum(map(len, texts))
    say(
        f"training a byte-level BPE of {counted(vocab_size, 'entry')} on {counted(len(texts), 'training document')}, "
        f"{num_bytes:,} bytes (a sample has at most {MAX_SAMPLE_BYTES:,})"
    )
    path = folder / TOKENIZER_FILE
    path.write_bytes(train_bpe(texts, vocab_size))
    return str(path)


def _vocabulary(
    files: Sequence[SourceFile], tokenizer: Tokenizer, asked: ReaderOptions, say: Callable[[str], None]
) -> tuple[Tokenizer | None, ReaderOptions]:
    """The tokenizer, None if every file is ids without one, and what readers must be told."""
    ids = [file for file in files if file.ids_dtype]
    texts = [file for file in files if not file.ids_dtype]
    unnamed = bool(ids) and not isinstance(tokenizer, FileTokenizer)
    if asked.raw_dtype and not any(file.ids_dtype == RAW for file in ids):
        raise DataError(f"--dtype {asked.raw_dtype}: no file of raw ids is among the sources: leave it out")
    if unnamed and texts:
        raise DataError(
            f"{ids[0].path} holds ids, {texts[0].path} text: give the ids' own tokenizer with --tokenizer, or "
            "tokenize them separately"
        )
    if unnamed:
        size, end = vocabulary_of(ids, asked.vocab_size or None, asked.end_id, asked.raw_dtype)
        reading = replace(asked, vocab_size=size, end_id=end)
        _say_about_ids(ids, reading, say)
        return None, reading
    if asked.end_id is not None and asked.end_id != tokenizer.end_id:
        raise DataError(
            f"--end-id {asked.end_id}: the tokenizer ends documents with {tokenizer.end_id}; --end-token names another "
            "token"
        )
    if asked.vocab_size and asked.vocab_size < tokenizer.vocab_size:
        raise DataError(f"--vocab-size {asked.vocab_size}: the tokenizer has {counted(tokenizer.vocab_size, 'id')}")
    reading = replace(asked, vocab_size=asked.vocab_size or tokenizer.vocab_size, end_id=tokenizer.end_id)
    check_range(ids, reading.vocab_size, None, asked.raw_dtype)
    if isinstance(tokenizer, FileTokenizer):
        say(f"end of a document: {tokenizer.end_reason}; --end-token names another")
    if ids:
        _say_about_ids(ids, reading, say)
    return tokenizer, reading


def _say_about_ids(ids: Sequence[SourceFile], reading: ReaderOptions, say: Callable[[str], None]) -> None:
    raw = Counter(dtype_of(file, reading.vocab_size, reading.raw_dtype) for file in ids if file.ids_dtype == RAW)
    if raw:
        widths = ", ".join(f"{count} of {dtype}" for dtype, count in raw.items())
        say(f"raw ids: {widths} ({'as --dtype says' if reading.raw_dtype else 'recognized; --dtype names another'})")
    end = "none: long texts are cut; --end-id names one" if reading.end_id is None else f"id {reading.end_id}"
    say(f"end of a document in ids: {end}")


def _write_sources(job: SplitJob, listings: Mapping[str, FoundFiles], *, is_mixture: bool) -> list[Source]:
    """Write the shards of every source, unless `job.out` holds a corpus of other settings."""
    if job.published is not None:
        check_same_settings(job.out, job.published, _settings(job))
        if job.published.source_bytes not in (0, job.total_bytes):
            job.say(
                f"{job.out} was made from {counted(job.published.source_bytes, 'byte')}, and the sources have "
                f"{job.total_bytes:,}: a new document in them is refused when it is reached"
            )
    return [
        write_source(job, name, listing.files, f"{name}-" if is_mixture else "") for name, listing in listings.items()
    ]


def _settings(job: SplitJob) -> dict[str, Any]:
    """Return the fields of the manifest that are known before a document is read."""
    return {
        "tokenizer": "unnamed" if job.tokenizer is None else job.tokenizer.name,
        "vocab_size": job.reading.vocab_size,
        "dtype": job.dtype,
        "end_id": job.reading.end_id,
    }


def _manifest(
    job: SplitJob, sources: Sequence[Source], weights: Mapping[str, float] | None, listings: Mapping[str, FoundFiles]
) -> Manifest:
    shares = {source.name: float(source.num_tokens("train")) for source in sources}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        sources=tuple(sources),
        **_settings(job),
    )
    not_read = tuple(kind for listing in listings.values() for kind in listing.not_read)
    num_bytes = sum(file.num_bytes for listing in listings.values() for file in listing.files)
    return replace(
        manifest.reweighted(shares if weights is None else weights), not_read=not_read, source_bytes=num_bytes
    )
