"""Faults, planted into a run from outside: hooks that do to it what machines do, and what a wrong trainer would.

`launcher.training` has no word of them. A fault of machines happens once: where it struck is written into the run's
folder, and the attempt after it runs through.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from launcher.hooks import GoBack, Hook, Seen
from launcher.rehearsal.recording import RecordedStore
from launcher.training import Trainer
from proxies.canon import Json

Fault = Literal["kill", "hang", "nan", "disk_full", "sigterm", "other_seed", "drop_moments", "shift_batch"]
FULL_DISK_BYTES = 48 * 1024
"""No file may grow beyond it: less than a rank's part of a small checkpoint, more than a line of metrics."""
SIGNAL_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plant:
    """A fault, and where it strikes."""

    fault: Fault
    step: int = 0
    """Updates made before it strikes; of a wrong resume: the fewest updates made before the resume that goes wrong."""
    supervisor_pid: int = 0
    """Whom `sigterm` tells, as a scheduler would."""


class Planted(Hook):
    """One fault in one rank's run."""

    def __init__(self, plant: Plant) -> None:
        self._plant, self._step = plant, 0

    def begin(self, run: Trainer, step: int, carried: Json) -> None:
        """Put a wrong resume's fault in; arm the others."""
        self._run, self._step = run, step
        fault, store = self._plant.fault, run.store
        assert isinstance(store, RecordedStore)
        if fault == "nan":
            run.model.register_forward_hook(self._poisoned)
        if not step or step < self._plant.step:
            return
        if fault == "other_seed":
            store.seed_shift = 1
        elif fault == "shift_batch":
            store.sequence_shift = run.decision.batch_tokens // run.decision.shape.seq_len
        elif fault == "drop_moments":
            run.optimizer.state.clear()

    def before_update(self, seen: Seen) -> GoBack | None:
        """Strike between the gradients of a step and its update."""
        if seen.step == self._plant.step and self._plant.fault in ("kill", "hang", "sigterm", "disk_full"):
            self._strike()
        return None

    def after_update(self, seen: Seen) -> dict[str, Json]:
        """Count."""
        self._step = seen.step + 1
        return {}

    def _strike(self) -> None:
        fault, rank = self._plant.fault, self._run.rank
        if fault == "disk_full":  # a full disk is every rank's of the machine
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, hard))
        elif fault == "sigterm":
            if self._once(rank == 0):
                os.kill(self._plant.supervisor_pid, signal.SIGTERM)
                self._wait_for_signal()
        elif self._once(rank == self._run.num_ranks - 1):
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(1.0)

    def _once(self, mine: bool) -> bool:
        """Whether this rank is to strike, and has not."""
        if not mine:
            return False
        mark = struck(self._run.run_dir, self._plant.fault)
        if mark.exists():
            return False
        mark.write_text(str(os.getpid()))
        return True

    def _wait_for_signal(self) -> None:
        """Some steps of a small model would pass before the supervisor has told its ranks."""
        until = time.monotonic() + SIGNAL_SECONDS
        while not self._run.interrupted() and time.monotonic() < until:
            time.sleep(0.01)

    def _poisoned(self, module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> Tensor:
        return output * torch.nan if torch.is_grad_enabled() and self._step == self._plant.step else output


def struck(run_dir: Path, fault: Fault) -> Path:
    """The file that says that a fault was there."""
    return run_dir / f"struck-{fault}"
