"""Where a run's checkpoints lie, and which of them are complete, by their names alone. Standard library only."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINTS = "checkpoints"
"""In a run's folder."""
_COMPLETE = re.compile(r"step-(\d{8})")


def complete_folders(root: Path) -> dict[int, Path]:
    """Complete checkpoints by the updates made, newest first."""
    if not root.is_dir():
        return {}
    found = {int(named[1]): folder for folder in root.iterdir() if (named := _COMPLETE.fullmatch(folder.name))}
    return dict(sorted(found.items(), reverse=True))
