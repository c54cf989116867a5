"""The engine for one trial at a time: forerun's decoder or a user's model, up to the largest size
that fits the device.

It has the interface of a bank with one slot, and supports what a batched model does not: gradient
accumulation, activation checkpointing, batch warmup, and users' models. The same trial in a bank
gives the same curve up to rounding. A run repeats to the bit on a CPU; on a GPU, up to the order of
atomic additions.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from proxies.core.numbers import ParameterNumbers
from proxies.core.schedule import lr_multiplier
from proxies.core.spec import DIVERGED_ABOVE_NATS, Curve, RunResult, RunSpec
from proxies.data.tokens import TokenStore
from proxies.model.bank_adamw import fail_past_recompile_limit
from proxies.model.loss import loss_weights, token_loss
from proxies.model.optimizer import (
    MOMENTS,
    clip_gradients,
    grouped,
    moments_of,
    restore_moments,
    set_rates,
    skips_on,
    torch_optimizer,
)
from proxies.model.precision import PRECISIONS
from proxies.training.gradient_noise import NoiseLooks
from proxies.training.memory import keep_freed_memory
from proxies.training.outcome import RunProgress, batch_of, environment, validation_ids
from proxies.training.slot_state import SlotState, StateError, captured, resumed
from proxies.training.step_loop import Ended, StepReport, default_steps_ahead, run_steps, to_device
from proxies.training.torch_device import set_arithmetic
from proxies.training.trainable_model import BuiltModel, DecoderModel, our_model


@dataclass(kw_only=True, slots=True)
class _Trial:
    """The run in the slot, with its model and optimizer."""

    progress: RunProgress
    built: BuiltModel
    optimizer: torch.optim.Optimizer
    rates: tuple[ParameterNumbers, ...]
    """Numbers of each parameter group of the optimizer."""
    has_diverged: Tensor | None = None
    """Float32 scalar that is 1 after a step whose loss or gradient was not finite; the optimizer
    then skips its updates. None if the optimizer does not support this, so that the host decides on
    every update."""


class Solo:
    """An engine with one slot, for one run at a time.

    Args:
        store: The corpus.
        diverged_above_nats: Excess over ln(vocabulary), in nats, at which the loss of a run after
            its warmup counts as diverged.
        build: Builds the model of a run that has a factory.
        device: Device to train on; None for the GPU if there is one.
        compile_backend: Backend of `torch.compile`, for runs whose numerics require compilation.
        num_microbatches: Minimum number of passes that a batch is split into; the result is the
            same up to rounding.
        steps_ahead: Number of steps that are launched before a report is read
            (`proxies.training.step_loop`); None for 1 on a GPU, 0 on a CPU.

    Attributes:
        noise: Collects the gradient noise of the run, if the caller sets it. It is not measured for
            a user's model, which may change its state in a forward pass.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        diverged_above_nats: float = DIVERGED_ABOVE_NATS,
        build: Callable[[RunSpec], BuiltModel] | None = None,
        device: torch.device | str | None = None,
        compile_backend: str = "inductor",
        num_microbatches: int = 1,
        steps_ahead: int | None = None,
    ) -> None:
        self._store, self._diverged_above_nats, self._build = store, diverged_above_nats, build
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._compile_backend, self._num_microbatches = compile_backend, num_microbatches
        self._steps_ahead = default_steps_ahead(self.device) if steps_ahead is None else steps_ahead
        self._trial: _Trial | None = None
        self._lap_began = 0.0
        self.noise: NoiseLooks | None = None

    def admit(self, index: int, spec: RunSpec, state: SlotState | None = None) -> None:
        """Start a run in the slot, from its initial weights or from a saved state.

        Args:
            index: Number of the slot, 0.
            spec: The run.
            state: State of this run to resume from; None to start from its initial weights.

        Raises:
            ValueError: The slot is taken or is not slot 0, the run has another corpus, or the
                numbers of a built model do not match its parameters.
            StateError: The state is not of this run; the slot stays free.
        """
        self._check(index, spec)
        keep_freed_memory()
        if spec.numerics.compiled or (spec.factory is not None and self.device.type == "cuda"):
            # Free the previous model now: if compiled, it is in a reference cycle with its compiled
            # wrapper.
            gc.collect()
        numerics = spec.numerics
        set_arithmetic(numerics)
        build = our_model if spec.factory is None else self._build
        assert build is not None, "Solo has no `build` function for the run's factory"
        built = build(spec)
        module = built.module.train().to(self.device, PRECISIONS[numerics.dtype].weights)
        parameters = dict(module.named_parameters())
        names = {numbers.name for numbers in built.numbers}
        if differences := sorted(parameters.keys() ^ names):
            raise ValueError(
                f"the model's parameters and their numbers differ in {', '.join(differences)}"
            )
        if numerics.compiled:
            self._compile(module, is_full_graph=spec.factory is None)
        groups = grouped(built.numbers, parameters)
        trial = _Trial(
            progress=RunProgress(spec, num_microbatches=self._num_microbatches),
            built=built,
            optimizer=torch_optimizer(spec.optimizer, groups, fused=self._steps_ahead > 0),
            rates=tuple(rates for rates, _ in groups),
        )
        has_diverged = torch.zeros((), dtype=torch.float32, device=self.device)
        trial.has_diverged = has_diverged if skips_on(trial.optimizer, has_diverged) else None
        if state is not None:
            trial.progress = self._restore(trial, state)
        self._trial = trial

    def _restore(self, trial: _Trial, state: SlotState) -> RunProgress:
        """Restore the model and optimizer of a new trial from a state, and return the progress.

        Raises:
            StateError: The state does not fit the run.
        """
        tensors = _get_tensors(trial)
        moments = {
            name: tensor for name, tensor in state.tensors.items() if name.startswith(MOMENTS)
        }
        run = resumed(trial.progress.spec, state, {**tensors, **moments}, self._num_microbatches)
        try:
            restore_moments(trial.optimizer, dict(trial.built.module.named_parameters()), moments)
        except ValueError as error:
            raise StateError(str(error)) from error
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(state.tensors[name])
        return run

    def state(self, index: int) -> SlotState:
        """Return the state of the run, which it can resume from."""
        trial = self._get_trial()
        parameters = dict(trial.built.module.named_parameters())
        return captured(
            trial.progress,
            self.device,
            {**_get_tensors(trial), **moments_of(trial.optimizer, parameters)},
        )

    @property
    def steps(self) -> dict[int, int]:
        """Optimizer steps done, by occupied slot."""
        return {} if self._trial is None else {0: self._trial.progress.step}

    @property
    def environment(self) -> dict[str, str]:
        """Everything besides the spec that the arithmetic of this engine depends on."""
        return environment(self.device)

    def _check(self, index: int, spec: RunSpec) -> None:
        """Check that a run can be admitted; raise ValueError if it cannot."""
        manifest = self._store.manifest
        problems = []
        if index != 0 or self._trial is not None:
            problems.append(f"slot {index} is taken")
        if spec.data_id != manifest.data_id:
            problems.append(f"run {spec.id[:12]} uses another corpus")
        if spec.shape.vocab_size < manifest.vocab_size:
            problems.append(
                f"vocab_size = {spec.shape.vocab_size} is smaller than the corpus's "
                f"{manifest.vocab_size}"
            )
        if problems:
            raise ValueError("; ".join(problems))

    def _compile(self, module: nn.Module, *, is_full_graph: bool) -> None:
        # Beyond a limit on recompilations, torch would silently run uncompiled: make it an error. A
        # new trial has a new model, and graphs of the previous one must not count toward the limit.
        fail_past_recompile_limit()
        torch.compiler.reset()
        module.compile(backend=self._compile_backend, fullgraph=is_full_graph)

    def evict(self, index: int) -> None:
        """Free the slot, also in the middle of a run."""
        self._trial = None

    def pause_at(self, index: int, step: int | None) -> None:
        """Set the step at which the run pauses.

        `advance` does nothing while the run has done that many steps or more; None removes the
        pause.
        """
        self._get_trial().progress.pause_step = step

    def pruned(self, index: int, num_steps: int, reason: str) -> tuple[RunResult, Curve]:
        """Return the result and curve of the run as if it was pruned after `num_steps`.

        The engine does not change.
        """
        return self._get_trial().progress.pruned(num_steps, reason, self.device)

    @property
    def free_slots(self) -> list[int]:
        """The free slots: [0], or [] while a run is admitted."""
        return [] if self._trial else [0]

    @property
    def model(self) -> nn.Module:
        """The module of the run.

        Raises:
            ValueError: The slot is empty.
        """
        return self._get_trial().built.module

    def _get_trial(self) -> _Trial:
        if self._trial is None:
            raise ValueError("no run is admitted")
        return self._trial

    def predict(self, ids_BT: Tensor) -> Tensor:
        """Return the logits [B * T, V] of token ids [B, T], in the arithmetic of training.

        Raises:
            ValueError: The slot is empty.
        """
        return self._compute_logits(self._get_trial(), ids_BT.to(self.device))

    def _compute_logits(self, trial: _Trial, ids_BT: Tensor) -> Tensor:
        with self._make_autocast(trial):
            return trial.built(ids_BT)

    def _make_autocast(self, trial: _Trial) -> torch.autocast:
        """Return the autocast context of a trial; it is active for users' models in bfloat16.

        forerun's decoder casts by itself.
        """
        is_user_model = not isinstance(trial.built, DecoderModel)
        is_bfloat16 = trial.progress.spec.numerics.dtype == "bfloat16"
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=is_user_model and is_bfloat16
        )

    def advance(self, num_steps: int, seconds: float = math.inf) -> list[Ended]:
        """Make optimizer steps, until the run ends or has to pause.

        Args:
            num_steps: Maximum number of steps.
            seconds: Time limit for starting new steps, in seconds.

        Returns:
            Slot, result and curve of the run if it ended, else nothing.
        """
        if (trial := self._trial) is None:
            return []
        self._lap_began = time.perf_counter()
        return run_steps(
            num_steps,
            seconds,
            self._steps_ahead,
            may_begin=trial.progress.goes_on,
            alone=lambda ahead: self._needs_noise(trial, trial.progress.step + ahead),
            begin=lambda ahead: self._launch_step(trial, trial.progress.step + ahead),
            settle=lambda report: self._finish_step(trial, report),
        )

    def _needs_noise(self, trial: _Trial, step: int) -> bool:
        """Return whether gradient noise is measured before update `step`."""
        is_decoder = isinstance(trial.built, DecoderModel)
        return (
            is_decoder
            and self.noise is not None
            and self.noise.due(trial.progress.spec, step, self._num_microbatches) > 0
        )

    def _launch_step(self, trial: _Trial, step: int) -> StepReport:
        """Launch update `step`; it is skipped if the loss or the gradient is not finite.

        Returns:
            The report of the batch's loss, in nats per token, and of the gradient's norm.
        """
        if self.noise is not None and isinstance(trial.built, DecoderModel):
            module, spec = trial.built.module, trial.progress.spec
            self.noise.look(
                spec,
                step,
                module,
                dict(module.named_parameters()),
                self._store,
                self._num_microbatches,
            )
        loss, norm = self._forward_backward(trial, step)
        values_2 = torch.stack([loss, norm.double()])
        report = StepReport(values_2)
        if trial.has_diverged is not None:
            # The device itself decides whether the update is skipped.
            is_nonfinite = 1 - values_2.isfinite().all().float()
            torch.maximum(trial.has_diverged, is_nonfinite, out=trial.has_diverged)
            _update(trial, step, norm)
        elif all(map(math.isfinite, report.read())):
            _update(trial, step, norm)
        return report

    def _finish_step(self, trial: _Trial, report: StepReport) -> list[Ended]:
        """Read the report of a step, and return the outcome of the run if it ends there."""
        if self._trial is not trial:
            return []  # the run ended in the step before
        run = trial.progress
        loss_nats, grad_norm = report.read()
        reason = run.record(loss_nats, grad_norm, self._diverged_above_nats)
        done = not reason and run.finished
        validation_nats = self._compute_validation_loss(trial) if done else math.nan
        began, self._lap_began = self._lap_began, time.perf_counter()
        run.seconds += self._lap_began - began
        if not (reason or done):
            return []
        self.evict(0)
        return [(0, *run.outcome(reason, validation_nats, self.device))]

    def _forward_backward(self, trial: _Trial, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch's loss in nats per token, and its gradient's norm.

        The gradients are left in the parameters.
        """
        ids_BT = to_device(batch_of(self._store, trial.progress.spec, step), self.device)
        trial.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        pass_sequences = trial.progress.spec.pass_sequences(self._num_microbatches)
        for part_BT in torch.split(ids_BT, pass_sequences):
            # The mean over the batch is the mean of the parts, weighted by their sequences.
            loss = self._compute_loss(trial, part_BT) * (len(part_BT) / len(ids_BT))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        gradients = [
            parameter.grad
            for parameter in trial.built.module.parameters()
            if parameter.grad is not None
        ]
        return total, torch.nn.utils.get_total_norm(gradients)

    def _compute_loss(self, trial: _Trial, ids_BT: Tensor) -> Tensor:
        if isinstance(trial.built, DecoderModel):
            return trial.built.loss(ids_BT[:, :-1], ids_BT[:, 1:])
        weights = loss_weights(trial.progress.spec.hparams.run_wide)
        return token_loss(self._compute_logits(trial, ids_BT[:, :-1]), ids_BT[:, 1:], weights)

    @torch.no_grad()
    def _compute_validation_loss(self, trial: _Trial) -> float:
        """Return the mean loss on the validation windows, in nats per token."""
        spec, module = trial.progress.spec, trial.built.module.eval()
        held_out_BT = validation_ids(self._store, spec.shape.seq_len).to(self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part_BT in torch.split(held_out_BT, spec.pass_sequences(self._num_microbatches)):
            total += self._compute_loss(trial, part_BT).double() * len(part_BT)
        module.train()
        return total.item() / len(held_out_BT)


def _get_tensors(trial: _Trial) -> dict[str, Tensor]:
    """Return the parameters and buffers of the module by name, not copied."""
    module = trial.built.module
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _update(trial: _Trial, step: int, norm: Tensor) -> None:
    """Clip the gradients, and make an optimizer step at the learning rates of the schedule."""
    spec = trial.progress.spec
    clip_gradients(trial.built.module.parameters(), spec.hparams, norm)
    set_rates(trial.optimizer, trial.rates, lr_multiplier(spec.schedule, step))
    trial.optimizer.step()
