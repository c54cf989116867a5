"""Links in a study's folder that lead out of it: what writes the study would write there. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from sweeps.store.checkpoints import CHECKPOINTS_DIR
from sweeps.store.curves import CURVES_DIR

_NUM_NAMED = 8
_LOOKED_INTO = (CURVES_DIR, CHECKPOINTS_DIR, "frozen", "wandb")


class LinksOutError(ValueError):
    """A study's folder holds links that lead out of it."""


def refuse_links_out(study_dir: Path) -> None:
    """See that what a study's own writers open lies in its folder, which may itself be a link.

    What the user's own trainer makes (`external/`) and the main run's folder are theirs, and not looked into.

    Raises:
        LinksOutError: some links lead elsewhere; they are named.
    """
    home = study_dir.resolve()
    folders = [home, *(home / name for name in _LOOKED_INTO)]
    out = sorted(
        f"{link.relative_to(home)} -> {link.readlink()}"
        for folder in folders
        for link in _links(folder)
        if not Path(os.path.realpath(link)).is_relative_to(home)  # resolve() fails on a loop
    )
    if out:
        more = f" and {len(out) - _NUM_NAMED} more" if len(out) > _NUM_NAMED else ""
        raise LinksOutError(
            f"{study_dir} holds links that lead out of it: {', '.join(out[:_NUM_NAMED])}{more}. What is written there "
            "would change other files: remove them, or move the whole study and make a link of its folder"
        )


def _links(folder: Path) -> Iterator[Path]:
    if folder.is_symlink() or not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                yield Path(entry.path)
