"""Files of a run's folder: what lies there, and where checkpoints lie."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base import chronicle, metrics
from launcher.base.talk import say
from proxies.core.plain_files import name_kind

# Where a run's checkpoints lie, which of them are complete, by their names alone, and what is said
# of one that is not gone on from. Standard library only.

CHECKPOINTS, ROLLBACKS_FILE = "checkpoints", "rollbacks.json"
"""In a run's folder; the second is written before a run goes back, and loads a checkpoint again."""
_COMPLETE = re.compile(r"step-(\d{8})")


def name_checkpoint(step: int) -> str:
    """Return the name of the folder of the complete checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def complete_folders(root: Path) -> dict[int, Path]:
    """Complete checkpoints by the updates made, newest first."""
    if not root.is_dir():
        return {}
    found = {
        int(named[1]): folder
        for folder in root.iterdir()
        if (named := _COMPLETE.fullmatch(folder.name))
    }
    return dict(sorted(found.items(), reverse=True))


def expected(run_dir: Path, digest: str) -> str:
    """Why this run must have a complete checkpoint, in words; empty where it may not have saved one
    yet.
    """
    events = [entry for entry in chronicle.entries(run_dir) if entry.digest == digest]
    begun = max(
        (entry.step or 0 for entry in events if entry.kind in ("launched", "restarted")), default=0
    )
    if begun:
        return f"{chronicle.CHRONICLE_FILE} says that it resumed from step {begun}"
    saved = [line.get("step") for line in metrics.read(run_dir) if line.get("event") == "saved"]
    return f"{metrics.METRICS_FILE} says that it saved at step {saved[-1]}" if saved else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedCheckpoint:
    """A complete checkpoint that a run does not go on from."""

    step: int
    text: str
    """Why, and what became of it."""
    corrupt: bool
    """Or else of a path that the run went back from, which the chronicle tells as a rollback."""


def tell(run_dir: Path, digest: str, refused: Sequence[RefusedCheckpoint]) -> None:
    """Say it on stderr, and of corrupt ones in the run's chronicle, which a full disk may prevent.
    One rank only.
    """
    for each in refused:
        say(each.text)
        if each.corrupt:
            try:
                chronicle.record(run_dir, "corrupt", each.text, step=each.step, digest=digest)
            except OSError as error:
                say(f"{run_dir / chronicle.CHRONICLE_FILE}: {error.strerror}; not recorded")


def kinds_in(folder: Path) -> dict[str, str]:
    """What lies in a folder and below, by path: `file`, or the name of what is none; no folders, no
    bytecode caches.

    A link is a link, wherever it leads. A folder that is not there has nothing in it.
    """
    kinds: dict[str, str] = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        kind = name_kind(entry.lstat().st_mode)
        if kind != "folder":
            kinds[entry.name] = kind
        elif entry.name != "__pycache__":
            kinds |= {f"{entry.name}/{name}": of for name, of in kinds_in(entry).items()}
    return kinds
