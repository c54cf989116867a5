"""The verb that makes a corpus: tokenize."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun._launcher.cli.options import PATH, json_option, print_result
from forerun._launcher.main_run.progress_output import WorkMeter, print_progress
from forerun._proxies.core.notation import format_counted

if TYPE_CHECKING:
    from forerun._proxies.data.document_split import SplitProgress
    from forerun._proxies.data.tokens import Manifest

_SUFFIXES = (
    ".txt",
    ".md",
    ".py",
    ".jsonl",
    ".jsonl.gz",
    ".jsonl.zst",
    ".json.gz",
    ".json.zst",
    ".parquet",
)
"""Suffixes of the files that are taken from folders by default."""
_RAW_DTYPES = ("uint16", "int16", "uint32", "int32", "uint64", "int64")
"""Types of token ids in raw .bin files."""


@click.command()
@click.argument("sources", nargs=-1, required=True)
@click.option("--out", type=PATH, required=True, help="Corpus folder to write.")
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    metavar="bytes|FILE",
    help="FILE: a tokenizer.json of Hugging Face's tokenizers.",
)
@click.option(
    "--train-bpe",
    "bpe_vocab_size",
    type=int,
    metavar="N",
    help="Train a byte-level BPE of N entries on a sample of SOURCES and use it.",
)
@click.option("--end-token", help="End-of-document token of FILE, if not one of the usual ones.")
@click.option(
    "--text-key",
    default="text",
    show_default=True,
    help="Name of the text field in .jsonl, of the column in .parquet.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(min=1),
    help="Vocabulary of pre-tokenized .bin files; llm.c's imply it.",
)
@click.option(
    "--end-id", type=click.IntRange(min=0), help="Id of the end-of-document token in .bin files."
)
@click.option(
    "--dtype",
    "raw_dtype",
    type=click.Choice(_RAW_DTYPES),
    help="Type of the ids in raw .bin files, where it cannot be recognized.",
)
@click.option(
    "--weight",
    "weights",
    multiple=True,
    metavar="NAME=SHARE",
    help="Training share of a named source, one for each source; default: by their tokens.",
)
@click.option(
    "--suffix",
    "suffixes",
    multiple=True,
    default=_SUFFIXES,
    show_default=True,
    help="Suffix of the files taken from folders; repeatable.",
)
@click.option("--exclude", "excluded", multiple=True, help="Folder name to skip; repeatable.")
@click.option(
    "--validation-fraction",
    type=float,
    default=0.02,
    show_default=True,
    help="Share of documents held out.",
)
@json_option
def tokenize(
    sources: tuple[str, ...], out: Path, weights: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Write SOURCES ([NAME=]PATH...) as shards of token ids with a hashed manifest.

    A source is a file or a folder: text, .jsonl (also .gz, .zst), .parquet, or ids as nanoGPT,
    llm.c and Megatron-LM write them (.bin) or NumPy does (.npy); or parquet at hf://, s3://, gs://.
    Several named ones are mixed: web=crawl/ code=repos/ --weight web=0.7 --weight code=0.3.
    """
    from forerun._proxies.data import corpus
    from forerun._proxies.data.documents import ReaderOptions

    reading = ReaderOptions(
        text_key=options.pop("text_key"),
        vocab_size=options.pop("vocab_size") or 0,
        end_id=options.pop("end_id"),
        raw_dtype=options.pop("raw_dtype"),
    )
    manifest = corpus.tokenize(
        _parse_sources(sources),
        out,
        reading=reading,
        weights=_parse_weights(weights),
        progress=_ProgressLine(),
        say=print_progress,
        **options,
    )
    _print_answer(manifest, out, as_json=as_json)


class _ProgressLine:
    """A callback that shows progress as a live line with the time left."""

    def __init__(self) -> None:
        self._meter: WorkMeter | None = None
        self._total_bytes = self._bytes_shown = 0

    def __call__(self, progress: SplitProgress) -> None:
        # Another total means another pass over the sources.
        if self._meter is None or progress.total_bytes != self._total_bytes:
            self._total_bytes, self._bytes_shown = progress.total_bytes, 0
            self._meter = WorkMeter("tokenize", progress.total_bytes)
        note = (
            f"{format_counted(progress.num_documents, 'document')}, {progress.num_tokens:,} tokens"
        )
        self._meter.add(progress.bytes_read - self._bytes_shown, note)
        self._bytes_shown = progress.bytes_read


def _parse_sources(given: tuple[str, ...]) -> list[Path | str] | dict[str, list[Path | str]]:
    """Return paths and URIs, as a list or grouped by the names of the sources. A text that exists
    as a path has no name, even if it contains `=`.
    """
    from forerun._proxies.data.remote import is_uri

    named: dict[str, list[Path | str]] = {}
    bare: list[Path | str] = []
    for text in given:
        if is_uri(text):
            bare.append(text)
            continue
        name, sign, path = text.partition("=")
        if not text or (sign and not path):
            raise click.BadParameter(f"{text!r}: no such file or folder")
        if sign and "/" not in name and not Path(text).exists():
            named.setdefault(name, []).append(path if is_uri(path) else Path(path))
        else:
            bare.append(Path(text))
    if named and bare:
        raise click.BadParameter(
            f"{bare[0]} has no name: give every source one (NAME={bare[0]}), or none"
        )
    return named or bare


def _parse_weights(texts: tuple[str, ...]) -> dict[str, float] | None:
    weights: dict[str, float] = {}
    for text in texts:
        name, _, share = text.partition("=")
        try:
            weight = float(share)
        except ValueError:
            raise click.BadParameter(
                f"--weight {text}: must be NAME=SHARE, such as web=0.7"
            ) from None
        if name in weights:
            raise click.BadParameter(f"--weight {text}: {name} has a weight already")
        weights[name] = weight
    return weights or None


def _print_answer(manifest: Manifest, out: Path, *, as_json: bool) -> None:
    parts = [
        {
            "name": source.name,
            "weight": source.weight,
            "num_documents": source.num_documents,
            "num_train_tokens": source.count_tokens("train"),
            "num_validation_tokens": source.count_tokens("validation"),
        }
        for source in manifest.sources
    ]
    body = {
        "data_id": manifest.data_id,
        "tokenizer": manifest.tokenizer,
        "num_documents": manifest.num_documents,
        "num_train_tokens": manifest.count_tokens("train"),
        "num_validation_tokens": manifest.count_tokens("validation"),
        "vocab_size": manifest.vocab_size,
        "end_id": manifest.end_id,
        "sources": parts,
        "not_read": [dataclasses.asdict(source) for source in manifest.not_read],
        "out": str(out),
    }
    text = (
        f"{format_counted(manifest.num_documents, 'document')}, {body['num_train_tokens']:,} "
        f"training and {body['num_validation_tokens']:,} validation tokens in {out}\n"
    )
    if len(parts) > 1:
        text += "".join(f"  {part['name']}: weight {part['weight']:.4g}\n" for part in parts)
    print_result(as_json, body, f"{text}next: forerun init --data {out}")
