"""Checkpoints that are written while the training continues.

A save copies this rank's weights and moments to the host's memory. A thread does the rest: it
writes the copy, hashes the files, and renames the folder. The threads of all ranks communicate over
a process group of their own, because on the training's group their messages would mix with those of
the next step. At most one save is under way at a time. If a save fails, every rank learns of it at
the end of the next step.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forerun._launcher.main_run.checkpoint_folders import (
    CheckpointError,
    list_complete_checkpoints,
)
from forerun._launcher.main_run.trainer import checkpoints
from forerun._launcher.main_run.trainer.callbacks import Columns
from forerun._launcher.main_run.trainer.checkpoints import Manifest
from forerun._launcher.main_run.trainer.ranks import (
    TrainerError,
    agree,
    gather,
    get_local_part,
    run_on_first_rank,
)


class SaveError(TrainerError):
    """A checkpoint or a rollback could not be written; earlier ones are unchanged."""


class Saver:
    """A saver of one rank's checkpoints. `save` and `settle` are collective."""

    def __init__(
        self,
        root: Path,
        *,
        keep: int,
        reach_steps: int = 0,
        report: Callable[[Columns], object] = lambda _: None,
    ) -> None:
        """Prepare to save.

        Args:
            root: Folder of the run's checkpoints.
            keep: See `checkpoints.choose_kept_steps`.
            reach_steps: See `checkpoints.choose_kept_steps`.
            report: Called in a thread with the metrics line of a complete save.
        """
        self._root, self._report = root, report
        self._complete = partial(checkpoints.complete, keep=keep, reach_steps=reach_steps)
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._problem = ""

    @property
    def failed(self) -> bool:
        """Whether this rank's last save has failed; `settle` raises the error on all ranks."""
        return bool(self._problem)

    def save(self, manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Begin to save a checkpoint; the training may continue at once.

        Args:
            manifest: Content of the checkpoint, without its files.
            model: Model, whose weights are saved.
            optimizer: Optimizer, whose moments are saved.

        Raises:
            SaveError: The save before this one failed.
        """
        began, step = time.perf_counter(), manifest.step
        self.settle()
        state = checkpoints.stage_tensors(model, optimizer)
        wait_seconds = time.perf_counter() - began  # for the save before, and for the copy

        def write() -> None:
            try:
                self._write(manifest, state)
                seconds = time.perf_counter() - began
                times: Columns = {"seconds": seconds, "wait_seconds": wait_seconds}
                self._report({"event": "saved", "step": step, **times})
            except Exception as error:  # any error: the training thread must know of it
                self._problem = f"the checkpoint after step {step} could not be written ({error})"

        self._thread = threading.Thread(target=write, name="save", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until no save is under way.

        Raises:
            SaveError: A save failed on some rank since the last call.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, ""
        try:
            agree(lambda: _refuse(problem))
        except TrainerError as error:
            folders = list_complete_checkpoints(self._root).values()
            kept = ", ".join(sorted(folder.name for folder in folders)) or "none"
            raise SaveError(f"{error}; complete checkpoints on disk: {kept}") from error

    def _write(self, manifest: Manifest, state: dict[str, Any]) -> None:
        """Write a staged state as a complete checkpoint; every rank's thread calls this."""
        agree(lambda: _refuse_not_finite(state["model"]), self._group)
        part = run_on_first_rank(lambda: checkpoints.begin(self._root, manifest.step), self._group)
        try:
            hashes = agree(lambda: checkpoints.write_tensors(part, state, self._group), self._group)
            by_rank = gather(hashes, self._group)
            files = {name: sha256 for hashes in by_rank for name, sha256 in hashes.items()}
            run_on_first_rank(
                lambda: self._complete(part, replace(manifest, files=files)), self._group
            )
        except TrainerError:
            if dist.get_rank() == 0:  # frees space on a full disk for the last messages
                shutil.rmtree(part, ignore_errors=True)
            raise


def _refuse(problem: str) -> None:
    """Raise `CheckpointError` if there is a problem."""
    if problem:
        raise CheckpointError(problem)


def _refuse_not_finite(weights: dict[str, Tensor]) -> None:
    """Refuse to save weights that are not finite: a run could not continue from them.

    Raises:
        CheckpointError: A weight is not finite.
    """
    for name, weight in weights.items():
        if not bool(get_local_part(weight).isfinite().all()):
            raise CheckpointError(f"{name} is not finite")
