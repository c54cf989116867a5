"""Make a corpus: tokenize the documents of files into hashed shards with a manifest.

The files are read in one pass. Memory does not grow with the corpus, except for the hashes of its
documents.
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
from proxies.data.shards import (
    another_corpus,
    check_same_settings,
    publish,
    read_published,
    unfinished,
)
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
"""Name of a corpus's only source, if the user gave none."""
MAX_KINDS_SHOWN = 6
"""Maximum number of kinds that the line about files that are not read names; a folder of code has
about seventy."""


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
    """Write the shards and the manifest of a corpus; identical documents count once.

    Args:
        sources: Files, folders, and URIs of parquet files; or several such lists by name, to mix.
        out: The corpus folder.
        suffixes: Suffixes of the files to take from folders.
        excluded: Names of folders to skip.
        text_key: Key of JSON Lines objects, or column of parquet files.
        tokenizer: `bytes`, or the path of a `tokenizer.json`.
        end_token: Token that ends a document; None to look for one of the usual names.
        bpe_vocab_size: Size of a BPE to train on a sample of the sources; None to train none.
        vocab_size: Vocabulary size of ids that do not imply it, not below that of a tokenizer.
        end_id: Id that ends a document in pre-tokenized files.
        raw_dtype: Dtype of raw ids, one of `RAW_DTYPES`; None to recognize it file by file.
        validation_fraction: Share of the documents that is held out.
        weights: Share of each source in training; None to use its share of the training tokens.
        progress: Called from time to time with the progress.
        say: Called with lines about the recognized files and the documents.

    Raises:
        DataError: There is nothing to read, `out` contains another corpus, a source has fewer than
            two documents, or the disk is full.
    """
    paths_by_name = _name_sources(sources)
    bpe_problems = _find_bpe_problems(bpe_vocab_size, tokenizer, end_token)
    _check(paths_by_name, validation_fraction, weights, bpe_problems)
    published = _check_published(out, paths_by_name, weights, bpe_vocab_size, say)
    listings = _list_sources(paths_by_name, suffixes, excluded, out, say)
    files = [file for listing in listings.values() for file in listing.files]
    options = ReaderOptions(
        text_key=text_key, vocab_size=vocab_size or 0, end_id=end_id, raw_dtype=raw_dtype
    )
    with unfinished(out) as folder:
        if bpe_vocab_size:
            tokenizer = _train_bpe(
                files, folder, bpe_vocab_size, text_key, validation_fraction, say
            )
        loaded = load_tokenizer(tokenizer, end_token)
        text_tokenizer, reading = _choose_vocabulary(files, loaded, options, say)
        job = SplitJob(
            folder=folder,
            tokenizer=text_tokenizer,
            reading=reading,
            validation_fraction=validation_fraction,
            progress=progress,
            say=say,
            total_bytes=sum(file.num_bytes for file in files),
            out=out,
            published=published,
        )
        return _write_corpus(job, listings, weights, is_mixture=isinstance(sources, Mapping))


def _list_sources(
    paths_by_name: Mapping[str, list[Path | str]],
    suffixes: tuple[str, ...],
    excluded: tuple[str, ...],
    out: Path,
    say: Callable[[str], None],
) -> dict[str, FoundFiles]:
    """Find the files of each source, then assign them to splits."""
    listings = {
        name: find_files(paths, suffixes, excluded, out) for name, paths in paths_by_name.items()
    }
    return {name: _sort_out(name, listing, suffixes, say) for name, listing in listings.items()}


def _name_sources(
    sources: Iterable[Path | str] | Mapping[str, Sequence[Path | str]],
) -> dict[str, list[Path | str]]:
    by_name = sources if isinstance(sources, Mapping) else {UNNAMED: sources}
    return {name: list(paths) for name, paths in by_name.items()}


def _sort_out(
    name: str, listing: FoundFiles, suffixes: tuple[str, ...], say: Callable[[str], None]
) -> FoundFiles:
    """Assign the files of a source to splits by their names, and say which files are read.

    Cards and test splits move to the files that are not read.
    """
    by_purpose, left = split_by_name(listing.files), Leftovers()
    for kind, unread in (("dataset card", by_purpose.cards), ("test split", by_purpose.test)):
        for file in unread:
            left.add(kind, file.relative_name, file.num_bytes)
    files, not_read = by_purpose.files, (*left.to_records(), *listing.not_read)
    say(f"{name}: {told(files)}; {counted(sum(file.num_bytes for file in files), 'byte')}")
    if not_read:
        say(f"{name}: not read: {describe_not_read(not_read)}; --suffix adds suffixes to read")
    if sentence := by_purpose.describe():
        say(f"{name}: {sentence}")
    if not files:
        raise DataError(
            f"source {name!r}: 0 documents with text found: of folders, files ending in "
            f"{', '.join(suffixes)} are read; --suffix names others, also .bin"
        )
    return FoundFiles(files, not_read)


def describe_not_read(kinds: Sequence[NotRead]) -> str:
    """Describe the kinds of files that are not read.

    Kinds that were set aside for their content or name come first, then those with the most bytes.
    """

    def importance(kind: NotRead) -> tuple[bool, int]:
        is_suffix_alone = kind.suffix.startswith(".") and " " not in kind.suffix
        return not kind.suffix or is_suffix_alone, -kind.num_bytes

    shown = sorted(kinds, key=importance)[:MAX_KINDS_SHOWN]
    left = [kind for kind in kinds if kind not in shown]
    words = [*map(_describe, shown)]
    if left:
        words.append(
            f"{sum(kind.num_files for kind in left)} files of {counted(len(left), 'other kind')} "
            "(--json names all)"
        )
    return "; ".join(words)


def _describe(kind: NotRead) -> str:
    """Describe the files of a kind: their number, and the names of the first."""
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
    """Return the manifest of the corpus in `out`, if there is one, and say that there is.

    Raises:
        DataError: The corpus has other sources, weights or tokenizer than the new one, or it cannot
            be read.
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
        f"{out} holds a corpus of {counted(published.num_documents, 'document')}, "
        f"{published.num_tokens('train'):,} training and "
        f"{published.num_tokens('validation'):,} validation tokens: the same text repairs its "
        "shards, other text is refused at the first token that differs (name another --out for it)"
    )
    return published


def _find_bpe_problems(
    bpe_vocab_size: int | None, tokenizer: str, end_token: str | None
) -> list[str]:
    if bpe_vocab_size is None:
        return []
    problems = []
    if not MIN_BPE_VOCAB <= bpe_vocab_size <= MAX_BPE_VOCAB:
        problems.append(
            f"train_bpe = {bpe_vocab_size}: must be {MIN_BPE_VOCAB} (256 bytes and the end token) "
            f"to {MAX_BPE_VOCAB}"
        )
    if tokenizer != "bytes":
        problems.append(f"train_bpe and tokenizer = {tokenizer}: give one of them")
    if end_token is not None:
        problems.append(
            f"train_bpe and end_token = {end_token}: a trained tokenizer has its own end token; "
            "omit this"
        )
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
        f"training a byte-level BPE of {counted(vocab_size, 'entry')} on "
        f"{counted(len(texts), 'training document')}, {num_bytes:,} bytes (a sample has at most "
        f"{MAX_SAMPLE_BYTES:,})"
    )
    path = folder / TOKENIZER_FILE
    path.write_bytes(train_bpe(texts, vocab_size))
    return str(path)


def _choose_vocabulary(
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    user_options: ReaderOptions,
    say: Callable[[str], None],
) -> tuple[Tokenizer | None, ReaderOptions]:
    """Decide the vocabulary of a corpus.

    Args:
        files: All files of the corpus.
        tokenizer: The tokenizer that the user chose.
        user_options: Options of the readers as the user gave them.
        say: Called with lines about the vocabulary.

    Returns:
        The tokenizer of texts, None if the ids' is unknown; and the options of the readers.

    Raises:
        DataError: The options contradict the tokenizer or the files.
    """
    ids = [file for file in files if file.ids_dtype]
    texts = [file for file in files if not file.ids_dtype]
    is_unnamed = bool(ids) and not isinstance(tokenizer, FileTokenizer)
    if user_options.raw_dtype and not any(file.ids_dtype == RAW for file in ids):
        raise DataError(
            f"--dtype {user_options.raw_dtype}: no file of raw ids is among the sources: leave it "
            "out"
        )
    if is_unnamed and texts:
        raise DataError(
            f"{ids[0].path} holds ids, {texts[0].path} text: give the tokenizer of the ids with "
            "--tokenizer, or tokenize them separately"
        )
    if is_unnamed:
        size, end = vocabulary_of(
            ids, user_options.vocab_size or None, user_options.end_id, user_options.raw_dtype
        )
        reading = replace(user_options, vocab_size=size, end_id=end)
        _say_about_ids(ids, reading, say)
        return None, reading
    _check_tokenizer(tokenizer, user_options)
    reading = replace(
        user_options,
        vocab_size=user_options.vocab_size or tokenizer.vocab_size,
        end_id=tokenizer.end_id,
    )
    check_range(ids, reading.vocab_size, None, user_options.raw_dtype)
    if isinstance(tokenizer, FileTokenizer):
        say(f"end of a document: {tokenizer.end_reason}; --end-token names another")
    if ids:
        _say_about_ids(ids, reading, say)
    return tokenizer, reading


def _check_tokenizer(tokenizer: Tokenizer, user_options: ReaderOptions) -> None:
    """Check that the options for ids do not contradict the tokenizer.

    Raises:
        DataError: The end id is another, or the vocabulary is smaller than the tokenizer's.
    """
    if user_options.end_id is not None and user_options.end_id != tokenizer.end_id:
        raise DataError(
            f"--end-id {user_options.end_id}: the tokenizer ends documents with "
            f"{tokenizer.end_id}; --end-token names another token"
        )
    if user_options.vocab_size and user_options.vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"--vocab-size {user_options.vocab_size}: the tokenizer has "
            f"{counted(tokenizer.vocab_size, 'id')}"
        )


def _say_about_ids(
    ids: Sequence[SourceFile], reading: ReaderOptions, say: Callable[[str], None]
) -> None:
    """Say which dtypes raw ids have, and which id ends a document."""
    raw = Counter(
        dtype_of(file, reading.vocab_size, reading.raw_dtype)
        for file in ids
        if file.ids_dtype == RAW
    )
    if raw:
        widths = ", ".join(f"{count} of {dtype}" for dtype, count in raw.items())
        say(
            f"raw ids: {widths} "
            f"({'as --dtype says' if reading.raw_dtype else 'recognized; --dtype names another'})"
        )
    end = (
        "none: long texts are cut; --end-id names one"
        if reading.end_id is None
        else f"id {reading.end_id}"
    )
    say(f"end of a document in ids: {end}")


def _write_corpus(
    job: SplitJob,
    listings: Mapping[str, FoundFiles],
    weights: Mapping[str, float] | None,
    *,
    is_mixture: bool,
) -> Manifest:
    """Write the shards of all sources, publish the corpus, and return its manifest."""
    sources = _write_sources(job, listings, is_mixture=is_mixture)
    manifest = _make_manifest(job, sources, weights, listings)
    tokenizer = job.tokenizer.content if isinstance(job.tokenizer, FileTokenizer) else None
    publish(job.folder, job.out, manifest, tokenizer)
    return manifest


def _write_sources(
    job: SplitJob, listings: Mapping[str, FoundFiles], *, is_mixture: bool
) -> list[Source]:
    """Write the shards of every source.

    Raises:
        DataError: `job.out` contains a corpus with other settings.
    """
    if job.published is not None:
        check_same_settings(job.out, job.published, _get_settings(job))
        if job.published.source_bytes not in (0, job.total_bytes):
            job.say(
                f"{job.out} was made from {counted(job.published.source_bytes, 'byte')}, and the "
                f"sources have {job.total_bytes:,}: a new document in them is refused when it is "
                "reached"
            )
    return [
        write_source(job, name, listing.files, f"{name}-" if is_mixture else "")
        for name, listing in listings.items()
    ]


def _get_settings(job: SplitJob) -> dict[str, Any]:
    """Return the fields of the manifest that are known before documents are read."""
    return {
        "tokenizer": "unnamed" if job.tokenizer is None else job.tokenizer.name,
        "vocab_size": job.reading.vocab_size,
        "dtype": job.dtype,
        "end_id": job.reading.end_id,
    }


def _make_manifest(
    job: SplitJob,
    sources: Sequence[Source],
    weights: Mapping[str, float] | None,
    listings: Mapping[str, FoundFiles],
) -> Manifest:
    shares = {source.name: float(source.num_tokens("train")) for source in sources}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        sources=tuple(sources),
        **_get_settings(job),
    )
    not_read = tuple(kind for listing in listings.values() for kind in listing.not_read)
    num_bytes = sum(file.num_bytes for listing in listings.values() for file in listing.files)
    return replace(
        manifest.reweighted(shares if weights is None else weights),
        not_read=not_read,
        source_bytes=num_bytes,
    )
