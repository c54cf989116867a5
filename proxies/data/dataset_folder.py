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
"""Split by word, as in Hugging Face's `datasets` (data_files.py); words are separated by anything but letters."""
_CARD = "readme.md"


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

    Names count among files of one format if at least one is named for training and one for another split. Texts may be
    about anything, so all of them must be named for a split.
    """
    cards = [file for file in files if _is_card(file, files)]
    kinds = defaultdict[str, list[SourceFile]](list)
    for file in files:
        if file not in cards:
            kinds["ids" if file.ids_dtype else file.format].append(file)
    named: list[tuple[SourceFile, _NamedSplit | None]] = []
    for kind, members in kinds.items():
        splits = [_find_split(file) for file in members]
        names_count = "train" in splits and set(splits) - {"train", None} and (kind != "text" or None not in splits)
        named += zip(members, splits if names_count else [None] * len(splits), strict=True)
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


def _is_card(file: SourceFile, files: Sequence[SourceFile]) -> bool:
    """Return whether a file describes data: a README that begins with YAML, or whose folder holds data files."""
    if file.path.name.lower() != _CARD or not file.from_folder:
        return False
    with open_plain(file.path) as stream:
        if stream.read(4).rstrip() == b"---":
            return True
    folder = file.path.parent
    return any(sibling.format != "text" and folder in sibling.path.parents for sibling in files)
