"""Checkpoints written while the run trains on.

A save copies this rank's weights and moments to the host's memory, and a thread does the rest: it
writes the copy, hashes the files and renames the folder. What the ranks have to say to each other
about it goes over a process group of its own: on the training's group their messages would meet
those of the next step. One save is under way at most. A save that fails is reported at the next
step's end, on every rank.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launcher.trainer import checkpoints
from launcher.trainer.checkpoints import CheckpointError, Manifest
from launcher.trainer.ranks import TrainerError, together


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint is complete; a line of the metrics."""

    event: Literal["saved"] = "saved"
    step: int
    seconds: float
    """From the copy to the rename."""
    wait_seconds: float
    """That the training waited: for the save before, and for the copy."""


class SaveError(TrainerError):
    """A checkpoint could not be written; those before it are as they were."""


class Saver:
    """One rank's saves. `save` and `settle` are collective: all ranks call them together."""

    def __init__(self, root: Path, digest: str, keep: int, reach_steps: int = 0) -> None:
        """`keep` and `reach_steps`: see `checkpoints.kept_steps`."""
        self._root, self._digest, self._keep, self._reach_steps = root, digest, keep, reach_steps
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._saved: deque[Saved] = deque()
        self._problem = ""

    @property
    def failed(self) -> bool:
        """Whether this rank knows that a save has failed: `settle` tells it to all of them."""
        return bool(self._problem)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        carried: dict[str, Any],
        num_rollbacks: int,
    ) -> None:
        """Begin to save what there is after `step` updates; training may go on at once.

        Raises:
            SaveError: the save before this one failed.
        """
        began = time.perf_counter()
        self.settle()
        state = checkpoints.staged(model, optimizer)
        wait_seconds = time.perf_counter() - began
        manifest = Manifest(
            schema_version=checkpoints.SCHEMA_VERSION,
            digest=self._digest,
            step=step,
            files={},
            carried=carried,
            num_rollbacks=num_rollbacks,
        )

        def write() -> None:
            try:
                self._write(manifest, state)
                seconds = time.perf_counter() - began
                self._saved.append(Saved(step=step, seconds=seconds, wait_seconds=wait_seconds))
            except Exception as error:  # whatever it is: the training thread must hear of it
                self._problem = f"the checkpoint after step {step} could not be written ({error})"

        self._thread = threading.Thread(target=write, name="save", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until no save is under way.

        Raises:
            SaveError: one failed since the last call, on whichever rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, ""
        try:
            together(lambda: _raise_if(problem))
        except TrainerError as error:
            kept = (
                ", ".join(sorted(f.name for f in self._root.glob("step-*") if not f.suffix))
                or "none"
            )
            raise SaveError([f"{error}; complete checkpoints on disk: {kept}"]) from error

    def finished(self) -> list[Saved]:
        """The saves that became complete since the last call; not collective."""
        return [self._saved.popleft() for _ in range(len(self._saved))]

    def _write(self, manifest: Manifest, state: dict[str, Any]) -> None:
        """In the thread, on every rank."""
        part = checkpoints.part_of(self._root, manifest.step)
        try:
            together(lambda: _refuse_not_finite(state["model"]), self._group)
            self._on_first_rank(lambda: checkpoints.begin(self._root, manifest.step))
            mine = together(
                lambda: checkpoints.write_tensors(part, state, self._group), self._group
            )
            hashes: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(hashes, mine, self._group)
            whole = replace(
                manifest, files={name: sha256 for each in hashes for name, sha256 in each.items()}
            )
            self._on_first_rank(
                lambda: checkpoints.complete(
                    part, whole, keep=self._keep, reach_steps=self._reach_steps
                )
            )
        except TrainerError:
            if dist.get_rank() == 0:
                # frees space on a full disk for the last messages
                shutil.rmtree(part, ignore_errors=True)
            raise

    def _on_first_rank(self, work: Callable[[], object]) -> None:
        def named() -> None:
            try:
                if dist.get_rank() == 0:
                    work()
            except OSError as error:
                raise CheckpointError(str(error)) from error

        together(named, self._group)


def _refuse_not_finite(weights: dict[str, Tensor]) -> None:
    """A run that resumed from these would never get on."""
    for name, weight in weights.items():
        mine = weight.to_local() if isinstance(weight, DTensor) else weight
        if not bool(mine.isfinite().all()):
            raise CheckpointError(f"{name} is not finite")


def _raise_if(problem: str) -> None:
    if problem:
        raise CheckpointError(problem)
