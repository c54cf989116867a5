"""Splits of files by their names, as in dataset folders of the Hugging Face Hub.

In such a folder, data files are named for a split. A README, called a card, describes the data and
is not read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal

from forerun._proxies.core.notation import format_counted
from forerun._proxies.data.documents import SourceFile
from forerun._proxies.data.tokens import MAX_EXAMPLES

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
_CODE_SUFFIXES = (".md", ".py")
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
                sentences.append(f"{format_counted(counts[None], 'other')} by content")
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
    texts = [file for file in files if file.format == "text" and not _has_card_name(file)]
    has_code = any(file.path.suffix in _CODE_SUFFIXES for file in texts)
    cards = [file for file in files if _is_card(file, files, has_code=has_code)]
    if len(cards) == len(files):
        cards = []

    # A word for a split counts anywhere in the name of a table, JSON lines, or ids. A text may be
    # about anything: unless every text has such a word, one of them for training, its name must
    # consist of the word (`val.txt`, `val/1.txt`).
    words = {_find_word(text) for text in texts}
    needs_bare_names = None in words or "train" not in words
    splits = _complete_splits(
        {
            file: _find_word(file, needs_bare_name=needs_bare_names and file.format == "text")
            for file in files
            if file not in cards and not (has_code and file.format == "text")
        }
    )
    named = [(file, splits.get(file)) for file in files if file not in cards]
    to_read = [replace(file, split=split) for file, split in named if split != "test"]
    ambiguous = [
        file for file in texts if file not in splits and _find_word(file) not in (None, "train")
    ]
    return SplitFiles(
        files=sorted(to_read, key=lambda file: file.split != "validation"),
        test=[file for file, split in named if split == "test"],
        cards=cards,
        unmarked=[
            file for file, split in named if split == "train" and _find_word(file) != "train"
        ],
        ambiguous=[] if has_code or len(ambiguous) == len(named) else ambiguous,
    )


def _complete_splits(named: dict[SourceFile, _NamedSplit | None]) -> dict[SourceFile, _NamedSplit]:
    """Return the split of each file, as far as the names decide it.

    Args:
        named: Split in the name of each file whose name counts; None if it has none.
    """
    splits: dict[SourceFile, _NamedSplit] = {
        file: split or "train" for file, split in named.items()
    }
    # Names that leave nothing to train on do not count
    if "train" not in splits.values():
        return {}
    if "validation" in splits.values():
        return splits
    # Without a validation file, the content of the other files decides their splits
    return {file: split for file, split in splits.items() if split == "test"}


def _find_word(file: SourceFile, *, needs_bare_name: bool = False) -> _NamedSplit | None:
    """Return the split in a file's name, or else in the name of the nearest folder that has one.

    Only folders below the source count, and only if their names consist of a split's words, which
    `dev-docs` does not. Returns None if no name has a split.
    """
    *folders, name = PurePath(file.relative_name).parts
    split = _find_split_in(name)
    if split is not None and (not needs_bare_name or _is_bare(_find_stem(file))):
        return split
    bare_folders = (folder for folder in reversed(folders) if _is_bare(folder))
    return next((split for folder in bare_folders if (split := _find_split_in(folder))), None)


def _find_split_in(name: str) -> _NamedSplit | None:
    """Return the split that a name's words mean; None if they mean none, or several."""
    splits = {_WORDS[word] for word in _find_words(name) if word in _WORDS}
    return splits.pop() if len(splits) == 1 else None


def _find_words(name: str) -> list[str]:
    """Return the words and numbers of a name, in lower case."""
    return re.findall(r"[^\W\d_]+|\d+", name.lower())


def _find_stem(file: SourceFile) -> str:
    """Return a file's name without its suffixes: `wiki.val` of `wiki.val.txt.gz`."""
    name = file.path.name.removesuffix(file.path.suffix) if file.compression else file.path.name
    return PurePath(name).stem


def _is_bare(name: str) -> bool:
    """Return whether a name consists of a split's words and numbers: `val`, `validation-00001`."""
    return all(word in _WORDS or not word.isalpha() for word in _find_words(name))


def _list_names(files: Sequence[SourceFile]) -> str:
    names = ", ".join(file.relative_name for file in files[:MAX_EXAMPLES])
    return names + (f", ... ({len(files):,} in all)" if len(files) > MAX_EXAMPLES else "")


def _has_card_name(file: SourceFile) -> bool:
    return (
        file.from_folder and file.format == "text" and _CARD.fullmatch(file.path.name) is not None
    )


def _is_card(file: SourceFile, files: Sequence[SourceFile], *, has_code: bool) -> bool:
    """Return whether a file is a card, which describes data.

    A file is a card if it has a card's name and one of two things is true: its folder contains
    tables, JSON lines, or ids; or no text of the source is code or Markdown (`has_code`).
    """
    if not _has_card_name(file):
        return False
    folder = file.path.parent
    return not has_code or any(
        sibling.format != "text" and folder in sibling.path.parents for sibling in files
    )
