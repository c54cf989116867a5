"""Rollbacks of a main run: recorded before they are acted on, so that a kill at any instant resumes
to the same run.

`RUN_DIR/rollbacks.json` is the truth. What the run trains on at a step, how it clips, and which
checkpoints are still of its path are functions of it; a rollback is nothing but one more entry
there, and a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from launcher.base import chronicle, metrics
from launcher.base.run_files import ROLLBACKS_FILE
from launcher.trainer.callbacks import RollbackOrder
from launcher.trainer.checkpoint_saver import SaveError
from launcher.trainer.checkpoints import CheckpointError, CorruptError, Manifest
from launcher.trainer.ranks import TrainerError, together
from proxies.core import canon
from proxies.core.checks import Checks
from proxies.core.notation import counted
from proxies.core.plain_files import read_plain

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback(RollbackOrder):
    """The run went back: to the newest good checkpoint until `to_step`, and as before up to that
    step.
    """

    at_step: int
    """Updates made when it was decided."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("at_step", "to_step", "skipped_sequences", least=0)
        if self.clip_norm is not None:
            checks.number("clip_norm", above=0)
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """The file."""

    digest: str
    """The digest of the launch config."""
    rollbacks: tuple[Rollback, ...]


def skipped_sequences(rollbacks: Sequence[Rollback], step: int) -> int:
    """By how many sequences the data of update `step` lies farther than the schedule says."""
    return sum(rollback.skipped_sequences for rollback in rollbacks if rollback.to_step <= step)


def clip_norm(rollbacks: Sequence[Rollback], step: int, frozen: float | None) -> float | None:
    """In force at update `step`: the last rollback's from before it, or the frozen one."""
    return next(
        (rollback.clip_norm for rollback in reversed(rollbacks) if rollback.to_step <= step), frozen
    )


def on_path(rollbacks: Sequence[Rollback], manifest: Manifest) -> bool:
    """Whether a checkpoint is of the run as it is now: of before each rollback that it does not
    know of.
    """
    return all(
        manifest.step <= rollback.to_step for rollback in rollbacks[manifest.num_rollbacks :]
    )


def read(run_dir: Path, digest: str) -> tuple[Rollback, ...]:
    """The run's rollbacks, oldest first.

    Raises:
        CorruptError: the file is not one of ours.
        CheckpointError: it is of another launch config.
    """
    path = run_dir / ROLLBACKS_FILE
    if not path.exists():
        return ()
    try:
        record = canon.decode(_Record, canon.parse(read_plain(path)))
    except ValueError as error:
        raise CorruptError(
            f"{path}: {error}; restore it: without it the run's data order is not known"
        ) from error
    if record.digest != digest:
        raise CheckpointError(
            f"{path} belongs to the launch config {record.digest[:16]}..., this one is "
            f"{digest[:16]}...: resume "
            "with that config, or start this one in another folder"
        )
    return record.rollbacks


def shared(run_dir: Path, digest: str) -> tuple[Rollback, ...]:
    """The same on every rank, as rank 0 reads it: another host's view of a file just renamed may be
    older; collective.

    Raises:
        CheckpointError: see `read`; on rank 0.
    """
    told: list[tuple[Rollback, ...] | None] = [None]
    try:
        told = [read(run_dir, digest) if dist.get_rank() == 0 else None]
    finally:
        dist.broadcast_object_list(told, src=0)
    return told[0] or ()


def write(run_dir: Path, digest: str, rollbacks: tuple[Rollback, ...]) -> None:
    """On disk when this returns. One rank only.

    Raises:
        CheckpointError: it cannot be written; the file is as it was.
    """
    path = run_dir / ROLLBACKS_FILE
    try:
        canon.write_atomic(path, canon.pretty(_Record(digest=digest, rollbacks=rollbacks)))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror}), so the run is not rolled back"
        ) from error


def add(run_dir: Path, digest: str, rollbacks: tuple[Rollback, ...], new: Rollback) -> None:
    """Record one more; from there on it is what a run that was killed does too. Collective.

    Raises:
        SaveError: it cannot be written.
    """
    try:
        together(
            lambda: write(run_dir, digest, (*rollbacks, new)) if dist.get_rank() == 0 else None
        )
    except TrainerError as error:
        raise SaveError(error.problems) from error


def tell(run_dir: Path, digest: str, rollbacks: Sequence[Rollback], start: int) -> None:
    """Say in the chronicle and in the metrics what is not yet said there, the run being at step
    `start`.

    One rank only. Whoever was killed before it could say so is made up for.
    """
    entries = chronicle.entries(run_dir)
    chronicled = [
        e.data.get("number") for e in entries if (e.kind, e.digest) == ("rolled_back", digest)
    ]
    told = [
        line.get("number") for line in metrics.read(run_dir) if line.get("event") == "rolled_back"
    ]
    for number, rollback in enumerate(rollbacks, start=1):
        if number not in chronicled:
            chronicle.record(
                run_dir,
                "rolled_back",
                f"rollback {number}: {rollback.reason}; went back to step {rollback.to_step}, from "
                "the checkpoint of "
                f"step {start}, skipping {counted(rollback.skipped_sequences, 'sequence')} of the "
                "data, "
                + (
                    "clipping nothing"
                    if rollback.clip_norm is None
                    else f"clipping at {rollback.clip_norm:g}"
                ),
                step=rollback.at_step,
                digest=digest,
                data={"number": number, "from_step": start, **asdict(rollback)},
            )
        if number not in told:
            line = {name: value for name, value in asdict(rollback).items() if name != "at_step"}
            metrics.append(
                run_dir, {"event": "rolled_back", "step": start, "number": number, **line}
            )
