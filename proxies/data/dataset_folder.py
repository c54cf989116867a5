"""Dataset folders of the Hugging Face Hub: data files that are named by their split, and a README card."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal

from proxies.core.notation import counted
from proxies.core.plain_files import open_plain
from proxies.data.documents import SourceFile

_NamedSplit = Literal["train", "validation", "test"]
_WORDS: dict[str, _NamedSplit] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""The words of Hugging Face's `datasets` (data_files.py), between characters that are no letters."""
_CARD = re.compile(r"(readme|licen[sc]e|citation|changelog|notice|data(set)?[-_]?card)\b.*|readme_.*", re.IGNORECASE)
"""Names of files that describe data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFiles:
    """The files of a source by their purpose."""

    files: list[SourceFile]
    """Files to read; those of validation come first, so that a document in both splits is held out."""
    test: list[SourceFile]
    """Files of a test split, which are not read."""
    cards: list[SourceFile]
    """README files that describe the data, which are not read."""


def split_by_name(files: Sequence[SourceFile]) -> SplitFiles:
    """Assign files to the splits that they are named by, and set cards and test splits aside.

    Names count among files of one kind, where one is named for training and one for something else. Among texts, which
    may be about anything, each must be named so, cards aside.
    """
    cards = [file for file in files if _is_card(file, files)]
    kinds = defaultdict[str, list[SourceFile]](list)
    for file in files:
        if file not in cards:
            kinds["ids" if file.ids_dtype else file.format].append(file)
    texts = [file for file in kinds["text"] if not _has_card_name(file)]
    if _is_split([_find_split(file) for file in texts], is_text=True):
        cards += [file for file in kinds["text"] if _has_card_name(file)]
        kinds["text"] = texts
    named: list[tuple[SourceFile, _NamedSplit | None]] = []
    for kind, members in kinds.items():
        splits = [_find_split(file) for file in members]
        honored = _is_split(splits, is_text=kind == "text")
        named += zip(members, splits if honored else [None] * len(splits), strict=True)
    to_read = [replace(file, split=split) for file, split in named if split != "test"]
    return SplitFiles(
        files=sorted(to_read, key=lambda file: file.split != "validation"),
        test=[file for file, split in named if split == "test"],
        cards=cards,
    )


def describe_splits(files: Sequence[SourceFile]) -> str:
    """Describe the files whose name decides their split; empty if there are none."""
    counts = {split: sum(file.split == split for file in files) for split in ("train", "validation")}
    if not any(counts.values()):
        return ""
    num_by_content = len(files) - sum(counts.values())
    text = f"split by their names: {counts['train']} for training, {counts['validation']} for validation"
    return f"{text}; {counted(num_by_content, 'other')} by content" if num_by_content else text


def _find_split(file: SourceFile) -> _NamedSplit | None:
    """Return the split in a file's name, or else in the name of its nearest folder below the source; None if none."""
    if file.format == "text" and file.path.suffix in (".md", ".py"):
        return None  # train.py is code
    for part in reversed(PurePath(file.relative_name).parts):
        splits = {_WORDS[word] for word in re.split(r"[^a-z]+", part.lower()) if word in _WORDS}
        if len(splits) == 1:
            return splits.pop()
    return None


def _is_split(splits: Sequence[_NamedSplit | None], *, is_text: bool) -> bool:
    """Return whether names part files: some are for training and some are not."""
    return "train" in splits and bool(set(splits) - {"train", None}) and not (is_text and None in splits)


def _has_card_name(file: SourceFile) -> bool:
    return file.from_folder and file.format == "text" and _CARD.fullmatch(file.path.name) is not None


def _is_card(file: SourceFile, files: Sequence[SourceFile]) -> bool:
    """Return whether a file describes data: a README with a YAML header, or a card over tables, JSON lines, or ids."""
    if not _has_card_name(file):
        return False
    with open_plain(file.path) as stream:
        if file.path.name.lower() == "readme.md" and stream.read(4).rstrip() == b"---":
            return True
    folder = file.path.parent
    return any(sibling.format != "text" and folder in sibling.path.parents for sibling in files)
