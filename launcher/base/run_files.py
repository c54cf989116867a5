"""Files in a run's folder: where checkpoints are, which of them are complete, and messages about
those that cannot be used.

A checkpoint is complete if its folder has its final name. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base import chronicle, metrics
from launcher.base.talk import say
from proxies.core.plain_files import name_kind

CHECKPOINTS, ROLLBACKS_FILE = "checkpoints", "rollbacks.json"
"""Names in a run's folder. The rollbacks file is written before a run goes back to a checkpoint,
and loads one.
"""
_COMPLETE = re.compile(r"step-(\d{8})")


def name_checkpoint(step: int) -> str:
    """Return the name of the folder of the complete checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def complete_folders(root: Path) -> dict[int, Path]:
    """Return the folders of complete checkpoints by number of optimizer steps, newest first."""
    if not root.is_dir():
        return {}
    folders = {
        int(match[1]): folder
        for folder in root.iterdir()
        if (match := _COMPLETE.fullmatch(folder.name))
    }
    return dict(sorted(folders.items(), reverse=True))


def expected(run_dir: Path, digest: str) -> str:
    """Return the reason why this run must have a complete checkpoint; empty if it may not have
    saved one yet.
    """
    events = [entry for entry in chronicle.entries(run_dir) if entry.digest == digest]
    resumed_step = max(
        (entry.step or 0 for entry in events if entry.kind in ("launched", "restarted")), default=0
    )
    if resumed_step:
        return f"{chronicle.CHRONICLE_FILE} says that it resumed from step {resumed_step}"
    saved_steps = [
        line.get("step") for line in metrics.read(run_dir) if line.get("event") == "saved"
    ]
    return (
        f"{metrics.METRICS_FILE} says that it saved at step {saved_steps[-1]}"
        if saved_steps
        else ""
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedCheckpoint:
    """A complete checkpoint from which a run does not resume."""

    step: int
    text: str
    """The reason, and what happened to the checkpoint."""
    corrupt: bool
    """True if the checkpoint is corrupt; False if the run has gone back from it, which the event
    log records as a rollback.
    """


def tell(run_dir: Path, digest: str, refused: Sequence[RefusedCheckpoint]) -> None:
    """Print refused checkpoints on stderr, and record corrupt ones in the run's event log; a full
    disk may prevent that. Call it on one rank only.
    """
    for checkpoint in refused:
        say(checkpoint.text)
        if checkpoint.corrupt:
            try:
                chronicle.record(
                    run_dir, "corrupt", checkpoint.text, step=checkpoint.step, digest=digest
                )
            except OSError as error:
                say(f"{run_dir / chronicle.CHRONICLE_FILE}: {error.strerror}; not recorded")


def kinds_in(folder: Path) -> dict[str, str]:
    """Return the entries in and below a folder: path -> `file`, or the kind of an entry that is not
    a plain file.

    Folders themselves and bytecode caches are left out. A link counts as a link, wherever it leads.
    A missing folder has no entries.
    """
    kinds: dict[str, str] = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        kind = name_kind(entry.lstat().st_mode)
        if kind != "folder":
            kinds[entry.name] = kind
        elif entry.name != "__pycache__":
            kinds |= {f"{entry.name}/{name}": inner for name, inner in kinds_in(entry).items()}
    return kinds
