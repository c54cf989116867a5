"""Faults injected into a run from outside: a callback that does what machines and wrong trainers
do.

`forerun._launcher.main_run.trainer.training` does not know of faults. A fault of a machine happens
once: a file in the run's folder records that it struck, and the next attempt runs to its end.
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

from forerun._launcher.main_run.rehearsal.registry import FULL_DISK_BYTES
from forerun._launcher.main_run.trainer.callbacks import Callback, Columns, StepInfo
from forerun._launcher.main_run.trainer.model_builder import TrainedModel
from forerun._proxies.data.tokens import TokenStore

FaultKind = Literal["kill", "hang", "nan", "disk_full", "sigterm", "drop_moments", "shift_batch"]
SIGNAL_SECONDS = 30.0
"""Maximum seconds for the supervisor to pass a signal on to the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault, and the step at which it strikes."""

    kind: FaultKind
    step: int = 0
    """Number of updates made before it strikes. A wrong resume (`drop_moments`, `shift_batch`)
    strikes when the run resumes after at least this many updates."""
    supervisor_pid: int = 0
    """Process that `sigterm` signals, as a scheduler would."""

    def to_text(self) -> str:
        """Return the fault as `KIND:STEP:SUPERVISOR_PID`."""
        return f"{self.kind}:{self.step}:{self.supervisor_pid}"

    @classmethod
    def from_text(cls, text: str) -> Fault:
        """Return the fault that `to_text` wrote."""
        kind, step, pid = text.split(":")
        return cls(kind=cast(FaultKind, kind), step=int(step), supervisor_pid=int(pid))


class FaultInjector(Callback):
    """One fault in one rank's run."""

    def __init__(self, fault: Fault) -> None:
        self._fault, self._step = fault, 0

    def begin(self, step: int, carried: Any) -> None:
        """Inject the fault of a wrong resume, and prepare the others."""
        self._step = step
        run, fault = self.run, self._fault
        if fault.kind == "nan":
            run.source = cast(TrainedModel, _NanModel(run.source, lambda: self._step == fault.step))
        elif step and step >= fault.step:
            if fault.kind == "shift_batch":
                num_sequences = run.decision.batch_tokens // run.decision.shape.seq_len
                run.store = _ShiftedStore(run.store, num_sequences)
            elif fault.kind == "drop_moments":
                run.optimizer.state.clear()

    def before_update(self, info: StepInfo) -> None:
        """Strike between the gradients of a step and its update."""
        if info.step != self._fault.step:
            return
        kind, rank = self._fault.kind, self.run.rank
        if kind == "disk_full":  # on every rank, because they share the machine's disk
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, hard))
        elif kind == "sigterm" and rank == 0 and self._is_first_time():
            os.kill(self._fault.supervisor_pid, signal.SIGTERM)
            # A small model would make some more steps before the supervisor signals its ranks.
            deadline = time.monotonic() + SIGNAL_SECONDS
            while not self.run.interrupted() and time.monotonic() < deadline:
                time.sleep(0.01)
        elif kind in ("kill", "hang") and rank == self.run.num_ranks - 1 and self._is_first_time():
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(1.0)

    def after_update(self, info: StepInfo) -> Columns:
        """Count the updates."""
        self._step = info.step + 1
        return {}

    def _is_first_time(self) -> bool:
        """Record that the fault strikes; return whether it has not struck before."""
        mark = get_mark_path(self.run.run_dir, self._fault.kind)
        if mark.exists():
            return False
        mark.write_text(str(os.getpid()))
        return True


class _NanModel:
    """A model whose training loss is NaN at a step."""

    def __init__(self, source: TrainedModel, strikes: Callable[[], bool]) -> None:
        self._source, self._strikes = source, strikes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def forward(
        self, module: nn.Module, ids_BT: Tensor, targets_BT: Tensor | None = None
    ) -> Tensor:
        """Return the model's logits or loss, or NaN in place of the loss."""
        output = self._source.forward(module, ids_BT, targets_BT)
        return output * torch.nan if targets_BT is not None and self._strikes() else output


class _ShiftedStore(TokenStore):
    """A corpus that gives the rows of a later position than asked for."""

    def __init__(self, store: TokenStore, num_sequences: int) -> None:
        self.__dict__.update(store.__dict__)  # the same maps: they were verified when opened
        self._shift = num_sequences

    def read_train_batch(self, *, first_sequence: int, **rows: int) -> NDArray[np.int64]:
        """Return rows like any corpus, from a later position."""
        return super().read_train_batch(first_sequence=first_sequence + self._shift, **rows)


def get_mark_path(run_dir: Path, kind: FaultKind) -> Path:
    """Return the file that records that a fault has struck."""
    return run_dir / f"struck-{kind}"
