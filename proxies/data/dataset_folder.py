"""Dataset folders of the Hugging Face Hub: data files named by their split, and a README card."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal

from proxies.core.notation import counted
from proxies.core.plain_files import open_plain
from proxies.data.documents import SourceFile
from proxies.data.tokens import MAX_EXAMPLES

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
"""Split by the word that names it in Hugging Face's `datasets` (data_files.py)."""
_CARD = re.compile(
    r"(readme|licen[sc]e|citation|changelog|notice|data(set)?[-_]?card)\b.*|readme_.*",
    re.IGNORECASE,
)
"""Names of files that describe data."""
_FREE_SUFFIXES = (".md", ".py")
"""Suffixes of texts whose names do not name a split: `train.py` is code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFiles:
    """The files of a source by their purpose."""

    files: list[SourceFile]
    """Files to read. Validation files come first, so that a document in both splits is held out."""
    test: list[SourceFile]
    """Files of a test split, which are not read."""
    cards: list[SourceFile]
    """README files that describe the data, which are not read."""
    unmarked: list[SourceFile]
    """Files without a split's name that are for training, because others are named for
    validation."""
    ambiguous: list[SourceFile]
    """Texts that are split by content although their names contain a word for validation or
    test."""

    def describe(self) -> str:
        """Describe the splits that the names of the files decide; empty if they decide none."""
        counts = Counter(file.split for file in self.files)
        sentences = []
        if counts["validation"]:
            num_named = counts["train"] - len(self.unmarked)
            sentences.append(
                f"split by their names: {num_named} for training, {counts['validation']} for "
                "validation"
            )
            if self.unmarked:
                sentences.append(
                    f"files without a split's name are for training: {_list_names(self.unmarked)}"
                )
            if counts[None]:
                sentences.append(f"{counted(counts[None], 'other')} by content")
        elif self.test:
            sentences.append("no file is named for validation: split by content")
        if self.ambiguous:
            sentences.append(
                "split by content, since a text may be about anything: "
                f"{_list_names(self.ambiguous)} (val.txt is a "
                "name for validation, test.txt one for a test split)"
            )
        return "; ".join(sentences)


def split_by_name(files: Sequence[SourceFile]) -> SplitFiles:
    """Assign files to the splits that they are named for, and set cards and test splits aside.

    If a file is named for validation, the files that are named for no split are for training.
    Otherwise the content of each document decides. The names of texts are ignored if any of them
    is code or Markdown.
    """
    cards = [file for file in files if _is_card(file, files)]
    data = [file for file in files if file.format != "text"]
    texts = [file for file in files if file.format == "text" and not _has_card_name(file)]

    # Decide the splits by the names of the files.
    are_free = any(file.path.suffix in _FREE_SUFFIXES for file in texts)
    named_texts = {} if are_free else _find_text_splits(texts)
    splits = _complete_splits(
        data if are_free else [*data, *texts], _find_data_splits(data) | named_texts
    )

    # If the texts have splits, texts with the name of a card are cards too.
    if any(file in splits for file in texts):
        cards += [file for file in files if _has_card_name(file) and file not in cards]
    named = [(file, splits.get(file)) for file in files if file not in cards]
    to_read = [replace(file, split=split) for file, split in named if split != "test"]
    ambiguous = [
        file for file in texts if file not in splits and _find_split(file) not in (None, "train")
    ]
    return SplitFiles(
        files=sorted(to_read, key=lambda file: file.split != "validation"),
        test=[file for file, split in named if split == "test"],
        cards=cards,
        unmarked=[
            file for file, split in named if split == "train" and _find_split(file) != "train"
        ],
        ambiguous=[] if are_free or len(ambiguous) == len(named) else ambiguous,
    )


def _complete_splits(
    files: Sequence[SourceFile], named: dict[SourceFile, _NamedSplit]
) -> dict[SourceFile, _NamedSplit]:
    """Return the split of each file, as far as the names decide it.

    Args:
        files: All files whose names count.
        named: Split of each file whose name has one.
    """
    splits = {file: named.get(file, "train") for file in files}
    if "train" not in splits.values():
        return {}
    if "validation" in splits.values():
        return splits
    return {file: split for file, split in splits.items() if split == "test"}


def _find_data_splits(files: Sequence[SourceFile]) -> dict[SourceFile, _NamedSplit]:
    """Return the splits in the names of tables, JSON lines, and ids.

    If no name has the word `train`, a folder's name counts only if it consists of a split's words,
    which `dev-docs` does not.
    """
    splits = {file: split for file in files if (split := _find_split(file)) is not None}
    if "train" in splits.values():
        return splits
    return {
        file: split
        for file in files
        if (split := _find_split(file, needs_bare_folders=True)) is not None
    }


def _find_text_splits(files: Sequence[SourceFile]) -> dict[SourceFile, _NamedSplit]:
    """Return the splits in the names of texts.

    If every text names a split, and one of them training, all count. Otherwise only unambiguous
    names count: a split's word alone (`val.txt`, `val/1.txt`), or the name of another text of the
    source with a split's word added (`wiki.txt`, `wiki-val.txt`).
    """
    splits = {file: split for file in files if (split := _find_split(file)) is not None}
    if len(splits) == len(files) and "train" in splits.values():
        return splits
    top = (
        os.path.commonpath([PurePath(file.relative_name).parent for file in files]) if files else ""
    )
    stems = Counter(_strip_split(_find_stem(file)) for file in files)
    bare: dict[SourceFile, _NamedSplit] = {}
    for file in files:
        folder_or_name = PurePath(file.relative_name).relative_to(top).parts[0]
        is_folder = folder_or_name != file.path.name
        stem = folder_or_name if is_folder else _find_stem(file)
        has_twin = not is_folder and stems[_strip_split(stem)] > 1
        split = _find_split_in(stem)
        if split is not None and (_is_bare(stem) or has_twin):
            bare[file] = split
    return bare


def _find_split(file: SourceFile, *, needs_bare_folders: bool = False) -> _NamedSplit | None:
    """Return the split in a file's name, or else in the name of the nearest folder that has one.

    Only folders below the source count. Returns None if no name has a split.
    """
    if file.format == "text" and file.path.suffix in _FREE_SUFFIXES:
        return None
    *folders, name = PurePath(file.relative_name).parts
    for part in (
        name,
        *reversed([folder for folder in folders if not needs_bare_folders or _is_bare(folder)]),
    ):
        if (split := _find_split_in(part)) is not None:
            return split
    return None


def _find_split_in(name: str) -> _NamedSplit | None:
    splits = {_WORDS[word] for word in _find_words(name) if word in _WORDS}
    return splits.pop() if len(splits) == 1 else None


def _find_words(name: str) -> list[str]:
    return re.findall(r"[^\W\d_]+|\d+", name.lower())


def _find_stem(file: SourceFile) -> str:
    """Return a file's name without its suffixes: `wiki.val` of `wiki.val.txt.gz`."""
    name = file.path.name.removesuffix(file.path.suffix) if file.compression else file.path.name
    return PurePath(name).stem


def _strip_split(name: str) -> tuple[str, ...]:
    """Return the words of a name that are not a split's."""
    return tuple(word for word in _find_words(name) if word not in _WORDS)


def _is_bare(name: str) -> bool:
    """Return whether a name consists of a split's words and numbers: `val`, `validation-00001`."""
    return not any(word.isalpha() for word in _strip_split(name))


def _list_names(files: Sequence[SourceFile]) -> str:
    names = ", ".join(file.relative_name for file in files[:MAX_EXAMPLES])
    return names + (f", ... ({len(files):,} in all)" if len(files) > MAX_EXAMPLES else "")


def _has_card_name(file: SourceFile) -> bool:
    return (
        file.from_folder and file.format == "text" and _CARD.fullmatch(file.path.name) is not None
    )


def _is_card(file: SourceFile, files: Sequence[SourceFile]) -> bool:
    """Return whether a file describes data.

    It does if it has a card's name and is a README with a YAML header, or its folder contains
    tables, JSON lines, or ids.
    """
    if not _has_card_name(file):
        return False
    with open_plain(file.path) as stream:
        if file.path.name.lower() == "readme.md" and stream.read(4).rstrip() == b"---":
            return True
    folder = file.path.parent
    return any(sibling.format != "text" and folder in sibling.path.parents for sibling in files)
