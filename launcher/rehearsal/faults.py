"""Fault injection from outside: a hook that does to a run what machines do and what a wrong trainer
would.

`launcher.trainer.training` knows nothing of it. A fault of machines happens once: where it struck
is written into the run's folder, and the attempt after it runs through.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from launcher.rehearsal.registry import FULL_DISK_BYTES
from launcher.trainer.callbacks import Callback, StepInfo
from launcher.trainer.trained_model import TrainedModel
from launcher.trainer.training import Trainer
from proxies.core.canon import Json
from proxies.data.tokens import TokenStore

FaultKind = Literal["kill", "hang", "nan", "disk_full", "sigterm", "drop_moments", "shift_batch"]
SIGNAL_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault, and where it strikes."""

    kind: FaultKind
    step: int = 0
    """Updates made before it strikes; of a wrong resume: the fewest updates made before the resume
    that goes wrong."""
    supervisor_pid: int = 0
    """Whom `sigterm` tells, as a scheduler would."""


class FaultInjector(Callback):
    """One fault in one rank's run."""

    def __init__(self, fault: Fault) -> None:
        self._fault, self._step = fault, 0

    def begin(self, run: Trainer, step: int, carried: Json) -> None:
        """Put a wrong resume's fault in; arm the others."""
        self._run, self._step = run, step
        kind = self._fault.kind
        if kind == "nan":
            run.source = cast(
                TrainedModel, _NanModel(run.source, lambda: self._step == self._fault.step)
            )
        if not step or step < self._fault.step:
            return
        if kind == "shift_batch":
            run.store = _ShiftedStore(
                run.store, run.decision.batch_tokens // run.decision.shape.seq_len
            )
        elif kind == "drop_moments":
            run.optimizer.state.clear()

    def before_update(self, seen: StepInfo) -> None:
        """Strike between the gradients of a step and its update."""
        if seen.step == self._fault.step and self._fault.kind in (
            "kill",
            "hang",
            "sigterm",
            "disk_full",
        ):
            self._strike()

    def after_update(self, seen: StepInfo) -> dict[str, Json]:
        """Count."""
        self._step = seen.step + 1
        return {}

    def _strike(self) -> None:
        kind, rank = self._fault.kind, self._run.rank
        if kind == "disk_full":  # a full disk is every rank's of the machine
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, hard))
        elif kind == "sigterm":
            if self._once(rank == 0):
                os.kill(self._fault.supervisor_pid, signal.SIGTERM)
                self._wait_for_signal()
        elif self._once(rank == self._run.num_ranks - 1):
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(1.0)

    def _once(self, mine: bool) -> bool:
        """Whether this rank is to strike, and has not."""
        if not mine:
            return False
        mark = fired(self._run.run_dir, self._fault.kind)
        if mark.exists():
            return False
        mark.write_text(str(os.getpid()))
        return True

    def _wait_for_signal(self) -> None:
        """Some steps of a small model would pass before the supervisor has signalled its ranks."""
        until = time.monotonic() + SIGNAL_SECONDS
        while not self._run.interrupted() and time.monotonic() < until:
            time.sleep(0.01)


class _NanModel:
    """A model whose loss is not a number where a step trains that is to strike."""

    def __init__(self, source: TrainedModel, strikes: Callable[[], bool]) -> None:
        self._source, self._strikes = source, strikes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def loss(self, module: nn.Module, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Of the model itself, or not a number."""
        loss = self._source.loss(module, ids_BT, targets_BT)
        return loss * torch.nan if self._strikes() else loss


class _ShiftedStore(TokenStore):
    """A store of which later data are drawn than were asked for."""

    def __init__(self, store: TokenStore, num_sequences: int) -> None:
        self.__dict__.update(store.__dict__)  # the same maps: they were verified when it was opened
        self._shift = num_sequences

    def train_batch(
        self, *, seed: int, first_sequence: int, num_sequences: int, seq_len: int
    ) -> NDArray[np.int64]:
        """As of any store, elsewhere in the data."""
        first = first_sequence + self._shift
        return super().train_batch(
            seed=seed, first_sequence=first, num_sequences=num_sequences, seq_len=seq_len
        )


def fired(run_dir: Path, kind: FaultKind) -> Path:
    """The file that says that a fault was there."""
    return run_dir / f"struck-{kind}"
