"""Make a corpus: tokenize the documents of files into hashed shards with a manifest.

The files are read in one pass, after a pass over a sample if a BPE is trained. Memory does not grow
with the corpus, except for the hashes of its documents.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun._proxies.core.notation import format_counted
from forerun._proxies.data.dataset_folder import split_by_name
from forerun._proxies.data.document_split import SplitJob, SplitProgress, write_source
from forerun._proxies.data.documents import (
    RAW,
    TEXT_SUFFIXES,
    FoundFiles,
    ReaderOptions,
    SourceFile,
    UnreadFiles,
    describe_formats,
    find_files,
)
from forerun._proxies.data.mixture import find_weight_problems
from forerun._proxies.data.pretokenized import check_range, find_ids_dtype, find_vocabulary
from forerun._proxies.data.shards import (
    create_unfinished_folder,
    make_another_corpus_error,
    publish_corpus,
    read_published,
)
from forerun._proxies.data.tokenizer import (
    MAX_BPE_VOCAB,
    MIN_BPE_VOCAB,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from forerun._proxies.data.tokenizer_sample import MAX_SAMPLE_BYTES, sample_documents
from forerun._proxies.data.tokens import (
    SCHEMA_VERSION,
    TOKENIZER_FILE,
    DataError,
    Manifest,
    NotRead,
)

Say = Callable[[str], None]
"""Function that shows a line of text to the user."""
UNNAMED = "text"
"""Name of a corpus's only source, if the user gave none."""
MAX_KINDS_SHOWN = 6
"""Maximum number of file kinds to name in the line about files that are not read. A folder of code
has about seventy kinds."""


def tokenize(
    sources: Sequence[Path | str] | Mapping[str, Sequence[Path | str]],
    out: Path,
    *,
    suffixes: tuple[str, ...] = TEXT_SUFFIXES,
    excluded: tuple[str, ...] = (),
    reading: ReaderOptions = ReaderOptions(),  # noqa: B008 - frozen
    tokenizer: str = "bytes",
    end_token: str | None = None,
    bpe_vocab_size: int | None = None,
    validation_fraction: float = 0.02,
    weights: Mapping[str, float] | None = None,
    progress: Callable[[SplitProgress], None] = lambda progress: None,
    say: Say = lambda text: None,
) -> Manifest:
    """Write the shards and the manifest of a corpus; identical documents count once.

    Args:
        sources: Files, folders, and URIs of parquet files; or several such lists by name, to mix.
        out: The corpus folder.
        suffixes: Suffixes of the files to take from folders.
        excluded: Names of folders to skip.
        reading: Options of the readers.
        tokenizer: `bytes`, or the path of a `tokenizer.json`.
        end_token: Token that ends a document; None to look for one of the usual names.
        bpe_vocab_size: Size of a BPE to train on a sample of the sources; None to train none.
        validation_fraction: Share of the documents that is held out.
        weights: Share of each source in training; None to use its share of the training tokens.
        progress: Called from time to time with the progress.
        say: Called with lines about the recognized files and the documents.

    Raises:
        DataError: There is nothing to read, `out` contains another corpus, a source has fewer than
            two documents, or the disk is full.
    """
    paths_by_name = sources if isinstance(sources, Mapping) else {UNNAMED: sources}
    problems = _find_bpe_problems(bpe_vocab_size, tokenizer, end_token)
    _check_arguments(paths_by_name, validation_fraction, weights, problems)
    listings = {
        name: find_files(paths, suffixes, excluded, out) for name, paths in paths_by_name.items()
    }
    listings = {name: _sort_files(name, files, suffixes, say) for name, files in listings.items()}
    all_files = [file for listing in listings.values() for file in listing.files]
    with create_unfinished_folder(out) as folder:
        if bpe_vocab_size:
            texts = sample_documents(all_files, reading, validation_fraction)
            tokenizer = _train_bpe(texts, folder, bpe_vocab_size, say)
        loaded = load_tokenizer(tokenizer, end_token)
        text_tokenizer, reading = _choose_vocabulary(all_files, loaded, reading, say)
        job = SplitJob(
            folder=folder,
            tokenizer=text_tokenizer,
            reading=reading,
            validation_fraction=validation_fraction,
            progress=progress,
            say=say,
            total_bytes=sum(file.num_bytes for file in all_files),
        )
        return _write_corpus(job, out, listings, weights, is_mixture=isinstance(sources, Mapping))


def _check_arguments(
    paths_by_name: Mapping[str, Sequence[Path | str]],
    validation_fraction: float,
    weights: Mapping[str, float] | None,
    problems: list[str],
) -> None:
    """Check the arguments of `tokenize`, and raise their problems together with earlier ones.

    Raises:
        DataError: There are problems.
    """
    problems += [
        f"{name!r} is not a valid source name: use letters, digits, _ and - only"
        for name in paths_by_name
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name)
    ]
    if not any(paths_by_name.values()):
        problems.append("no source was named: name at least one file or folder")
    if not 0 < validation_fraction < 1:
        problems.append(f"validation_fraction = {validation_fraction}: must be above 0 and below 1")
    if weights is not None:
        problems += find_weight_problems(tuple(paths_by_name), weights)
    if problems:
        raise DataError(*problems)


def _sort_files(name: str, listing: FoundFiles, suffixes: tuple[str, ...], say: Say) -> FoundFiles:
    """Assign the files of a source to splits by their names, and say which files are read.

    Dataset cards and the files of test splits are added to the files that are not read.

    Raises:
        DataError: No file of the source is read.
    """
    by_purpose, unread = split_by_name(listing.files), UnreadFiles()
    for kind, files in (("dataset card", by_purpose.cards), ("test split", by_purpose.test)):
        for file in files:
            unread.add(kind, file.relative_name, file.num_bytes)
    files, not_read = by_purpose.files, (*unread.to_records(), *listing.not_read)
    say(
        f"{name}: {describe_formats(files)}; "
        f"{format_counted(sum(file.num_bytes for file in files), 'byte')}"
    )
    if not_read:
        say(f"{name}: not read: {_describe_not_read(not_read)}; --suffix adds suffixes to read")
    if sentence := by_purpose.describe():
        say(f"{name}: {sentence}")
    if not files:
        raise DataError(
            f"source {name!r}: 0 documents with text found: of folders, files ending in "
            f"{', '.join(suffixes)} are read; --suffix names others, also .bin"
        )
    return FoundFiles(files, not_read)


def _describe_not_read(kinds: Sequence[NotRead]) -> str:
    """Describe the kinds of files that are not read, with the names of the first files of each."""
    words = []
    for kind in kinds[:MAX_KINDS_SHOWN]:
        more = ", ..." if kind.num_files > len(kind.examples) else ""
        names = f" ({', '.join(kind.examples)}{more})" if kind.examples else ""
        words.append(f"{kind.num_files} {kind.suffix or 'without suffix'}{names}")
    if unnamed := kinds[MAX_KINDS_SHOWN:]:
        files = format_counted(sum(kind.num_files for kind in unnamed), "file")
        words.append(f"{files} of {format_counted(len(unnamed), 'other kind')} (--json names all)")
    return "; ".join(words)


# ---- Tokenizer and vocabulary ----


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


def _train_bpe(texts: Sequence[bytes], folder: Path, vocab_size: int, say: Say) -> str:
    """Train a tokenizer on a sample of the documents, and return the path of its file."""
    say(
        f"training a byte-level BPE of {format_counted(vocab_size, 'entry')} on "
        f"{format_counted(len(texts), 'training document')}, {sum(map(len, texts)):,} bytes (a "
        f"sample has at most {MAX_SAMPLE_BYTES:,})"
    )
    path = folder / TOKENIZER_FILE
    path.write_bytes(train_bpe(texts, vocab_size))
    return str(path)


def _choose_vocabulary(
    files: Sequence[SourceFile], tokenizer: Tokenizer, user_options: ReaderOptions, say: Say
) -> tuple[Tokenizer | None, ReaderOptions]:
    """Decide the vocabulary of a corpus.

    Args:
        files: All files of the corpus.
        tokenizer: The tokenizer that the user chose.
        user_options: Options of the readers as the user gave them.
        say: Called with lines about the vocabulary.

    Returns:
        The tokenizer of the texts, None if the sources are ids of an unknown tokenizer; and the
        options of the readers.

    Raises:
        DataError: The options contradict the tokenizer or the files.
    """
    ids = [file for file in files if file.ids_dtype]
    texts = [file for file in files if not file.ids_dtype]
    if user_options.raw_dtype and not any(file.ids_dtype == RAW for file in ids):
        raise DataError(
            f"--dtype {user_options.raw_dtype}: no file of raw ids is among the sources: leave it "
            "out"
        )
    if ids and not isinstance(tokenizer, FileTokenizer):
        if texts:
            raise DataError(
                f"{ids[0].path} holds ids, {texts[0].path} text: give the tokenizer of the ids "
                "with --tokenizer, or tokenize them separately"
            )
        reading = find_vocabulary(ids, user_options)
        _say_about_ids(ids, reading, say)
        return None, reading
    _check_tokenizer(tokenizer, user_options)
    vocab_size = user_options.vocab_size or tokenizer.vocab_size
    reading = replace(user_options, vocab_size=vocab_size, end_id=tokenizer.end_id)
    check_range(ids, reading)
    if isinstance(tokenizer, FileTokenizer):
        say(f"end of a document: {tokenizer.end_reason}; --end-token names another")
    if ids:
        _say_about_ids(ids, reading, say)
    return tokenizer, reading


def _check_tokenizer(tokenizer: Tokenizer, user_options: ReaderOptions) -> None:
    """Check that the options for ids do not contradict the tokenizer.

    Raises:
        DataError: The end id differs from the tokenizer's, or the vocabulary is smaller than the
            tokenizer's.
    """
    if user_options.end_id not in (None, tokenizer.end_id):
        raise DataError(
            f"--end-id {user_options.end_id}: the tokenizer ends documents with "
            f"{tokenizer.end_id}; --end-token names another token"
        )
    if user_options.vocab_size and user_options.vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"--vocab-size {user_options.vocab_size}: the tokenizer has "
            f"{format_counted(tokenizer.vocab_size, 'id')}"
        )


def _say_about_ids(ids: Sequence[SourceFile], reading: ReaderOptions, say: Say) -> None:
    """Say which dtypes raw ids have, and which id ends a document."""
    raw = Counter(find_ids_dtype(file, reading) for file in ids if file.ids_dtype == RAW)
    if raw:
        counts = ", ".join(f"{count} of {dtype}" for dtype, count in raw.items())
        reason = "as --dtype says" if reading.raw_dtype else "recognized; --dtype names another"
        say(f"raw ids: {counts} ({reason})")
    end = (
        "none: long texts are cut; --end-id names one"
        if reading.end_id is None
        else f"id {reading.end_id}"
    )
    say(f"end of a document in ids: {end}")


# ---- Shards and manifest ----


def _write_corpus(
    job: SplitJob,
    out: Path,
    listings: Mapping[str, FoundFiles],
    weights: Mapping[str, float] | None,
    *,
    is_mixture: bool,
) -> Manifest:
    """Write the shards of all sources, publish the corpus, and return its manifest."""
    settings: dict[str, Any] = {
        "tokenizer": "unnamed" if job.tokenizer is None else job.tokenizer.name,
        "vocab_size": job.reading.vocab_size,
        "dtype": job.dtype,
        "end_id": job.reading.end_id,
        "source_bytes": job.total_bytes,
    }
    if published := read_published(out):
        _check_published(out, published, {"names": tuple(listings), **settings}, weights)
        job.say(f"{out} holds this corpus already: its shards are written again")
    sources = tuple(
        write_source(job, name, listing.files, f"{name}-" if is_mixture else "")
        for name, listing in listings.items()
    )
    not_read = tuple(kind for listing in listings.values() for kind in listing.not_read)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION, sources=sources, not_read=not_read, **settings
    )
    manifest = manifest.reweight(weights or _get_token_shares(manifest))
    tokenizer = job.tokenizer.content if isinstance(job.tokenizer, FileTokenizer) else None
    publish_corpus(job.folder, out, manifest, tokenizer)
    return manifest


def _get_token_shares(manifest: Manifest) -> dict[str, float]:
    return {source.name: float(source.count_tokens("train")) for source in manifest.sources}


def _check_published(
    out: Path,
    published: Manifest,
    settings: dict[str, Any],
    weights: Mapping[str, float] | None,
) -> None:
    """Check that the corpus in `out` has the settings of the new one.

    Args:
        out: The corpus folder.
        published: The manifest in it.
        settings: Fields of the new manifest.
        weights: Weights of the new sources; None for their shares of the training tokens.

    Raises:
        DataError: The published corpus has other settings.
    """
    if published.names == settings["names"]:
        expected = published.reweight(weights or _get_token_shares(published))
        settings["weights"] = expected.weights
    if not published.source_bytes:
        del settings["source_bytes"]
    differences = [
        f"{field} {old!s:.80}, not {new!s:.80}"
        for field, new in settings.items()
        if (old := getattr(published, field)) != new
    ]
    if differences:
        raise make_another_corpus_error(out, f"with {'; '.join(differences)}")
