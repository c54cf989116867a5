"""The progress of a run that is training, and its result at the end, for every engine.

A bank and the engine of a single trial share one rule of divergence, one validation set, and one
form of result.
"""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun._proxies.core import canon
from forerun._proxies.core.branches import (
    TRUNK,
    TRUNK_STEPS,
    compute_flops_between,
    compute_trunk_id,
)
from forerun._proxies.core.notation import format_loss
from forerun._proxies.core.spec import Curve, RunResult, RunSpec, Status
from forerun._proxies.data.tokens import TokenStore

VALIDATION_SEQUENCES = 256
"""Maximum number of windows of the validation set."""


def get_environment(device: torch.device) -> dict[str, str]:
    """Return everything except the spec that arithmetic on a device depends on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def read_validation_ids(store: TokenStore, seq_len: int) -> Tensor:
    """Return the validation windows, which are the same for every run.

    Args:
        store: The corpus.
        seq_len: Number of tokens in a window, T, without its next token.

    Returns:
        Token ids, [B, T + 1].

    Raises:
        DataError: The split has no window of that length.
    """
    num_sequences = max(1, min(VALIDATION_SEQUENCES, store.count_windows("validation", seq_len)))
    return torch.from_numpy(
        store.read_validation_batch(num_sequences=num_sequences, seq_len=seq_len)
    )


def read_batch(
    store: TokenStore, spec: RunSpec, step: int, num_sequences: int | None = None
) -> Tensor:
    """Return the batch of an update.

    Args:
        store: The corpus.
        spec: The run.
        step: Number of updates before this update.
        num_sequences: Number of sequences, from the first of the batch; None for the batch itself.

    Returns:
        Token ids on the CPU, [B, T + 1].

    Raises:
        DataError: The training split has no window of that length.
    """
    first, count = spec.schedule.count_sequences(step, spec.batch_sequences)
    batch_BT = store.read_train_batch(
        seed=spec.seed,
        first_sequence=first,
        num_sequences=num_sequences or count,
        seq_len=spec.shape.seq_len,
    )
    return torch.from_numpy(batch_BT)


@dataclass(slots=True)
class RunProgress:
    """The progress of a run that is training, with what it has logged."""

    spec: RunSpec
    step: int = 0
    """Number of optimizer steps done."""
    seconds: float = 0.0
    num_microbatches: int = 1
    """Largest number of passes that a batch was split into so far, for lack of memory."""
    losses_nats: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    trunk_steps: int = 0
    """Number of these steps that a shorter run of the same trunk has made
    (`forerun._proxies.core.branches`)."""
    pause_step: int | None = None
    """Step at which the run pauses; None if it does not."""

    def can_step(self, num_begun: int) -> bool:
        """Return whether the next step may start: the run is neither at its end nor at its pause.

        A run that resumed from a state beyond its pause is paused.

        Args:
            num_begun: Number of steps that were launched and are not read yet.
        """
        step = self.step + num_begun
        return step < self.spec.schedule.num_steps and (
            self.pause_step is None or step < self.pause_step
        )

    @property
    def is_finished(self) -> bool:
        """Whether every step of the schedule is done."""
        return self.step == self.spec.schedule.num_steps

    def record(self, loss_nats: float, grad_norm: float, diverged_above_nats: float) -> str:
        """Record one more step.

        The run has diverged if the loss or the gradient is not finite; such a step does not count,
        because its update was not made. It has also diverged if the loss after the warmup is above
        ln(vocabulary) + `diverged_above_nats`.

        Args:
            loss_nats: Loss of the batch before the update.
            grad_norm: Norm of the gradient before clipping.
            diverged_above_nats: Excess over ln(vocabulary) at which a loss counts as diverged.

        Returns:
            The reason why the run has diverged; empty if it has not.
        """
        if not (math.isfinite(loss_nats) and math.isfinite(grad_norm)):
            return f"loss or gradient not finite at step {self.step + 1}"
        self.losses_nats.append(loss_nats)
        self.grad_norms.append(grad_norm)
        self.step += 1
        ceiling = math.log(self.spec.shape.vocab_size) + diverged_above_nats
        # A loss is measured before the update of its step. So the first loss after an update beyond
        # the warmup is that of step `warmup_steps + 2`
        if self.step > self.spec.schedule.warmup_steps + 1 and loss_nats > ceiling:
            limit = f"{format_loss(ceiling)} nats, worse than a uniform guess"
            return f"loss {format_loss(loss_nats)} at step {self.step} is above {limit}"
        return ""

    def make_result(
        self,
        status: Status,
        device: torch.device,
        *,
        reason: str = "",
        num_steps: int | None = None,
        validation_nats: float = math.nan,
    ) -> tuple[RunResult, Curve]:
        """Return the result and the curve of a run that ends now, or is pruned.

        Args:
            status: How the run ends. It has diverged instead if it has finished and its validation
                loss is not finite.
            device: Device that it was trained on.
            reason: Reason why it has diverged, or is pruned.
            num_steps: Number of steps that count, which a pruned run may have exceeded; None for
                all.
            validation_nats: Validation loss of a finished run.
        """
        if status == "finished" and not math.isfinite(validation_nats):
            status, reason = "diverged", "validation loss not finite"
        num_steps = self.step if num_steps is None else num_steps
        spec = self.spec
        curve = Curve(
            steps=tuple(range(1, num_steps + 1)),
            train_loss_nats=tuple(self.losses_nats[:num_steps]),
            grad_norm=tuple(self.grad_norms[:num_steps]),
        )
        # Also record settings because of which the result equals that of an ordinary run only up to
        # rounding: split batches, and a continued trunk.
        run_environment = get_environment(device)
        if self.num_microbatches > 1:
            run_environment["num_microbatches"] = str(self.num_microbatches)
        if self.trunk_steps:
            run_environment |= {TRUNK: compute_trunk_id(spec), TRUNK_STEPS: str(self.trunk_steps)}
        result = RunResult(
            id=spec.id,
            status=status,
            loss_nats=validation_nats if status == "finished" else None,
            num_steps=num_steps,
            last_train_loss_nats=curve.train_loss_nats[-1] if num_steps else None,
            curve_id=canon.compute_content_id(curve),
            flops=float(compute_flops_between(spec, self.trunk_steps, num_steps)),
            tokens=spec.count_tokens_by(num_steps),
            seconds=self.seconds,
            environment=run_environment,
            reason=reason,
        )
        return result, curve
