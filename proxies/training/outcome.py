"""What every engine holds of a run while it trains, and what it says when the run ends.

One rule of divergence, one validation set, one form of result: a bank and a trial alone are told
apart by nothing here.
"""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, field

import torch
from torch import Tensor

from proxies.core import canon
from proxies.core.branches import TRUNK, TRUNK_STEPS, flops_between, trunk_id
from proxies.core.notation import format_loss
from proxies.core.spec import Curve, RunResult, RunSpec, Status
from proxies.data.tokens import TokenStore

VALIDATION_SEQUENCES = 256


def environment(device: torch.device) -> dict[str, str]:
    """What arithmetic depends on besides the spec."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def validation_ids(store: TokenStore, seq_len: int, most: int | None = None) -> Tensor:
    """The windows every run is judged on: ids [B, T + 1], so many at most; None:
    `VALIDATION_SEQUENCES`.

    Raises:
        DataError: the split holds no window of that length.
    """
    most = VALIDATION_SEQUENCES if most is None else most
    num_sequences = max(1, min(most, store.num_windows("validation", seq_len)))
    return torch.from_numpy(store.validation_batch(num_sequences=num_sequences, seq_len=seq_len))


def batch_of(
    store: TokenStore, spec: RunSpec, step: int, num_sequences: int | None = None
) -> Tensor:
    """The batch of update `step` of a run, or so many sequences from its first on: ids [B, T + 1],
    on the CPU.

    Raises:
        DataError: the training split holds no window of that length.
    """
    first, count = spec.schedule.sequences(step, spec.batch_sequences)
    batch_BT = store.train_batch(
        seed=spec.seed,
        first_sequence=first,
        num_sequences=num_sequences or count,
        seq_len=spec.shape.seq_len,
    )
    return torch.from_numpy(batch_BT)


@dataclass(slots=True)
class RunProgress:
    """A run under way: how far it is, and what it has logged."""

    spec: RunSpec
    step: int = 0
    """Optimizer steps done."""
    seconds: float = 0.0
    num_microbatches: int = 1
    """The most passes that any batch so far was split into because of too little memory."""
    losses_nats: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    trunk_steps: int = 0
    """Of these, how many a shorter run of its trunk has made (`proxies.core.branches`)."""
    pause_step: int | None = None
    """Where somebody wants to look at it before it goes on."""

    def goes_on(self, num_begun: int = 0) -> bool:
        """Whether a step may begin while so many are not yet read: it is neither at its end nor
        where it is to pause.

        A run that went on from a state beyond its pause is there at once.
        """
        step = self.step + num_begun
        return step < self.spec.schedule.num_steps and (
            self.pause_step is None or step < self.pause_step
        )

    @property
    def finished(self) -> bool:
        """Whether every step of the schedule is done."""
        return self.step == self.spec.schedule.num_steps

    def record(self, loss_nats: float, grad_norm: float, diverged_above_nats: float) -> str:
        """Take in one more step: its batch's loss before the update, and its gradient's norm before
        clipping.

        Returns:
            Why the run has diverged; empty if it has not. A step whose loss or gradient is not
            finite does not count: its update was not made. Past the warmup, a loss
            `diverged_above_nats` over ln(vocabulary) is divergence.
        """
        if not (math.isfinite(loss_nats) and math.isfinite(grad_norm)):
            return f"loss or gradient not finite at step {self.step + 1}"
        self.losses_nats.append(loss_nats)
        self.grad_norms.append(grad_norm)
        self.step += 1
        ceiling = math.log(self.spec.shape.vocab_size) + diverged_above_nats
        if self.step > self.spec.schedule.warmup_steps + 1 and loss_nats > ceiling:
            limit = f"{format_loss(ceiling)} nats, worse than a uniform guess"
            return f"loss {format_loss(loss_nats)} at step {self.step} is above {limit}"
        return ""

    def outcome(
        self, reason: str, validation_nats: float, device: torch.device
    ) -> tuple[RunResult, Curve]:
        """The result and the curve of a run that ends here: diverged for a `reason`, else
        finished.
        """
        if not reason and not math.isfinite(validation_nats):
            reason = "validation loss not finite"
        return self._ended(
            "diverged" if reason else "finished", self.step, reason, validation_nats, device
        )

    def pruned(self, num_steps: int, reason: str, device: torch.device) -> tuple[RunResult, Curve]:
        """The same of a run that is given up, as it was after `num_steps`: it may have gone on
        meanwhile.
        """
        return self._ended("pruned", num_steps, reason, math.nan, device)

    def _ended(
        self,
        status: Status,
        num_steps: int,
        reason: str,
        validation_nats: float,
        device: torch.device,
    ) -> tuple[RunResult, Curve]:
        spec = self.spec
        curve = Curve(
            steps=tuple(range(1, num_steps + 1)),
            train_loss_nats=tuple(self.losses_nats[:num_steps]),
            grad_norm=tuple(self.grad_norms[:num_steps]),
        )
        # Equal up to rounding only.
        parts = (
            {"num_microbatches": str(self.num_microbatches)} if self.num_microbatches > 1 else {}
        )
        trunk = (
            {TRUNK: trunk_id(spec), TRUNK_STEPS: str(self.trunk_steps)} if self.trunk_steps else {}
        )
        result = RunResult(
            id=spec.id,
            status=status,
            loss_nats=validation_nats if status == "finished" else None,
            num_steps=num_steps,
            last_train_loss_nats=curve.train_loss_nats[-1] if num_steps else None,
            curve_id=canon.content_id(curve),
            flops=float(flops_between(spec, self.trunk_steps, num_steps)),
            tokens=spec.tokens_by(num_steps),
            seconds=self.seconds,
            environment=environment(device) | parts | trunk,
            reason=reason,
        )
        return result, curve
