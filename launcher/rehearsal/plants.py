"""Faults, planted into a run from outside: hooks that do to it what machines do, and what a wrong trainer would.

`launcher.trainer.training` has no word of them. A fault of machines happens once: where it struck is written into the
run's folder, and the attempt after it runs through.
"""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from launcher.frozen.frozen import Decision
from launcher.rehearsal.recording import RecordedStore
from launcher.trainer.hooks import GoBack, Hook, Seen
from launcher.trainer.training import Trainer
from proxies.core.canon import Json

Fault = Literal[
    "kill", "hang", "nan", "spike", "disk_full", "sigterm", "other_seed", "drop_moments", "shift_batch", "keep_data",
]  # fmt: skip
FULL_DISK_BYTES = 48 * 1024
"""No file may grow beyond it: less than a rank's part of a small checkpoint, more than a line of metrics."""
SIGNAL_SECONDS = 30.0
SPIKE_NATS, BELOW_CEILING_NATS = 0.75, 0.25
"""What a spike's loss is above a uniform guess's, and at least below the run's own ceiling, which would end it."""


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
        self._plant, self._step, self._armed = plant, 0, False

    def begin(self, run: Trainer, step: int, carried: Json) -> None:
        """Put a wrong resume's fault in; arm the others."""
        self._run, self._step = run, step
        fault, store = self._plant.fault, run.store
        assert isinstance(store, RecordedStore)
        if fault in ("nan", "spike") and not self._armed:  # a run that went back begins again
            run.model.register_forward_hook(self._poisoned if fault == "nan" else self._lifted)
            self._armed = True
        if fault == "keep_data":
            run.rollbacks = tuple(dataclasses.replace(back, skipped_sequences=0) for back in run.rollbacks)
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

    def _lifted(self, module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> Tensor:
        """On the spike's data, and nowhere else: a sure guess at one token, as loud as gives the spike's loss."""
        run, schedule = self._run, self._run.decision.learning_rate.schedule
        batch = run.decision.batch_tokens // run.decision.shape.seq_len
        first, after = (
            schedule.sequences(step, batch)[0]
            for step in (self._plant.step, self._plant.step + run.decision.spikes.patience_steps)
        )
        if not (torch.is_grad_enabled() and first <= run.first_sequence(self._step) < after):
            return output
        vocab_size = output.shape[-1]
        others = torch.zeros(vocab_size - 1, device=output.device, dtype=output.dtype)
        return output * 0 + torch.cat((others.new_full((1,), loudness(run.decision)), others))


def spike_nats(decision: Decision) -> float:
    """The training loss of a spike's step."""
    return min(
        math.log(decision.shape.vocab_size) + SPIKE_NATS, decision.abort.train_loss_above_nats - BELOW_CEILING_NATS
    )


def loudness(decision: Decision) -> float:
    """The logit of a token that does not come, all others' being 0, with which the loss is the spike's."""
    return math.log(max(math.exp(spike_nats(decision)) - decision.shape.vocab_size + 1, 1.0))


def struck(run_dir: Path, fault: Fault) -> Path:
    """The file that says that a fault was there."""
    return run_dir / f"struck-{fault}"
