"""Files in a run's folder: where checkpoints are, which of them are complete, and messages about
those that cannot be used.

A checkpoint is complete if its folder has its final name. This module needs no third-party package.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from forerun._launcher.main_run import event_log, metrics_file
from forerun._launcher.main_run.progress_output import print_progress
from forerun._proxies.core.errors import ExitCode, InputError
from forerun._proxies.core.plain_files import name_kind

CHECKPOINTS, ROLLBACKS_FILE = "checkpoints", "rollbacks.json"
"""Names in a run's folder: the folder of all checkpoints, and the list of rollbacks, which is
written before the run goes back to a checkpoint and loads it.
"""
_COMPLETE = re.compile(r"step-(\d{8})")


class CheckpointError(InputError):
    """A run must not use this checkpoint, or must not resume."""


class CorruptError(CheckpointError):
    """A file of a checkpoint or of its run was damaged or tampered with."""

    exit_code = ExitCode.CORRUPT


def name_checkpoint(step: int) -> str:
    """Return the name of the folder of the complete checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def list_complete_checkpoints(root: Path) -> dict[int, Path]:
    """Return the folders of complete checkpoints by number of optimizer steps, newest first."""
    if not root.is_dir():
        return {}
    folders = {
        int(match[1]): folder
        for folder in root.iterdir()
        if (match := _COMPLETE.fullmatch(folder.name))
    }
    return dict(sorted(folders.items(), reverse=True))


def explain_expected_checkpoint(run_dir: Path, digest: str) -> str:
    """Return the reason why this run must have a complete checkpoint; empty if nothing shows
    that it has saved one.

    Args:
        run_dir: The run's folder.
        digest: Digest of the frozen config. Events of other configs in the same log do not count.
    """
    events = [entry for entry in event_log.read_events(run_dir) if entry.digest == digest]
    resumed_step = max(
        (entry.step or 0 for entry in events if entry.kind in ("launched", "restarted")), default=0
    )
    if resumed_step:
        return f"{event_log.EVENT_LOG_FILE} says that it resumed from step {resumed_step}"
    saved_steps = [
        line.get("step")
        for line in metrics_file.read_lines(run_dir)
        if line.get("event") == "saved"
    ]
    return (
        f"{metrics_file.METRICS_FILE} says that it saved at step {saved_steps[-1]}"
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


def report_refused_checkpoint(run_dir: Path, digest: str, checkpoint: RefusedCheckpoint) -> None:
    """Print a refused checkpoint on stderr, and record a corrupt one in the run's event log; a full
    disk may prevent that. Call it on one rank only.
    """
    print_progress(checkpoint.text)
    if checkpoint.corrupt:
        try:
            event_log.append_event(
                run_dir, "corrupt", checkpoint.text, step=checkpoint.step, digest=digest
            )
        except OSError as error:
            print_progress(f"{run_dir / event_log.EVENT_LOG_FILE}: {error.strerror}; not recorded")


def list_file_kinds(folder: Path) -> dict[str, str]:
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
            kinds |= {
                f"{entry.name}/{name}": inner for name, inner in list_file_kinds(entry).items()
            }
    return kinds
