"""The engine for one trial at a time: forerun's decoder or a user's model, up to the largest size
that fits the device.

It has the interface of a bank (an engine that trains K trials as one batched model) with one slot.
It supports what a bank does not: gradient accumulation, activation checkpointing, batch warmup, and
users' models. The same trial in a bank gives the same curve up to rounding. A run repeats to the
bit on a CPU; on a GPU, up to the order of atomic additions.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forerun._proxies.core.numbers import ParameterNumbers
from forerun._proxies.core.schedule import compute_lr_multiplier
from forerun._proxies.core.spec import DIVERGED_ABOVE_NATS, RunSpec
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.model.compilation import forbid_uncompiled_fallback
from forerun._proxies.model.loss import compute_token_loss, get_loss_weights
from forerun._proxies.model.optimizer import (
    MOMENTS,
    build_torch_optimizer,
    clip_gradients,
    enable_skipping,
    get_moments,
    group_parameters,
    restore_moments,
    set_rates,
)
from forerun._proxies.model.precision import PRECISIONS
from forerun._proxies.training.engine import Engine, copy_to_device
from forerun._proxies.training.memory import keep_freed_memory
from forerun._proxies.training.run_progress import RunProgress, read_batch, read_validation_ids
from forerun._proxies.training.slot_state import SlotState, StateError, resume_progress
from forerun._proxies.training.torch_device import set_arithmetic
from forerun._proxies.training.trainable_model import BuiltModel, DecoderModel, build_decoder


@dataclass(kw_only=True, slots=True)
class _Trial:
    """The run in the engine's slot, with its model and optimizer."""

    progress: RunProgress
    built: BuiltModel
    optimizer: torch.optim.Optimizer
    groups: tuple[ParameterNumbers, ...]
    """Numbers of each parameter group of the optimizer."""
    has_diverged: Tensor | None = None
    """Float32 scalar that is 1 after a step whose loss or gradient was not finite; the optimizer
    then skips its updates. None if the optimizer does not support this, so that the host decides on
    every update."""


class SingleTrialEngine(Engine):
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
            (`forerun._proxies.training.engine`); None for 1 on a GPU, 0 on a CPU.
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
        super().__init__(device, num_microbatches, steps_ahead, diverged_above_nats)
        self._store, self._build, self._compile_backend = store, build, compile_backend
        self._trial: _Trial | None = None

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
        build = build_decoder if spec.factory is None else self._build
        assert build is not None, "a run with a factory needs an engine with `build`"
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
        groups = group_parameters(built.numbers, parameters)
        trial = _Trial(
            progress=RunProgress(spec, num_microbatches=self._num_microbatches),
            built=built,
            optimizer=build_torch_optimizer(spec.optimizer, groups, fused=self._steps_ahead > 0),
            groups=tuple(numbers for numbers, _ in groups),
        )
        has_diverged = torch.zeros((), dtype=torch.float32, device=self.device)
        if enable_skipping(trial.optimizer, has_diverged):
            trial.has_diverged = has_diverged
        if state is not None:
            trial.progress = self._restore(trial, state)
        self._trial = trial

    def _restore(self, trial: _Trial, state: SlotState) -> RunProgress:
        """Restore the model and optimizer of a new trial from a state, and return the progress.

        Raises:
            StateError: The state does not fit the run.
        """
        tensors = _get_module_tensors(trial)
        moments = {
            name: tensor for name, tensor in state.tensors.items() if name.startswith(MOMENTS)
        }
        run = resume_progress(
            trial.progress.spec, state, {**tensors, **moments}, self._num_microbatches
        )
        try:
            restore_moments(trial.optimizer, dict(trial.built.module.named_parameters()), moments)
        except ValueError as error:
            raise StateError(str(error)) from error
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(state.tensors[name])
        return run

    @property
    def _runs(self) -> dict[int, RunProgress]:
        return {} if self._trial is None else {0: self._trial.progress}

    def _get_tensors(self, index: int) -> Mapping[str, Tensor]:
        trial = self._get_trial()
        parameters = dict(trial.built.module.named_parameters())
        return {**_get_module_tensors(trial), **get_moments(trial.optimizer, parameters)}

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
        forbid_uncompiled_fallback()
        # A new trial has a new model, and graphs of the previous model must not count toward
        # torch's limit on recompilations.
        torch.compiler.reset()
        module.compile(backend=self._compile_backend, fullgraph=is_full_graph)

    def evict(self, index: int) -> None:
        """Free the slot, also in the middle of a run."""
        self._trial = None

    @property
    def model(self) -> nn.Module:
        """The module of the run.

        Raises:
            ValueError: The slot is empty.
        """
        return self._get_trial().built.module

    @property
    def numbers(self) -> tuple[ParameterNumbers, ...]:
        """Numbers that the parameters of the run's model are trained with.

        Raises:
            ValueError: The slot is empty.
        """
        return self._get_trial().built.numbers

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

    def _launch_step(self, ahead: int) -> Tensor:
        trial = self._get_trial()
        spec, step = trial.progress.spec, trial.progress.step + ahead
        if self.noise is not None and isinstance(trial.built, DecoderModel):
            weights = dict(trial.built.module.named_parameters())
            self.noise.measure_if_due(
                spec, step, trial.built.module, weights, self._store, self._num_microbatches
            )
        loss, norm = self._forward_backward(trial, step)
        values_2K = torch.stack([loss, norm.double()])[:, None]
        if trial.has_diverged is not None:
            # The device itself decides whether the update is skipped.
            is_nonfinite = 1 - values_2K.isfinite().all().float()
            torch.maximum(trial.has_diverged, is_nonfinite, out=trial.has_diverged)
            _update(trial, step, norm)
        elif values_2K.isfinite().all():
            _update(trial, step, norm)
        return values_2K

    def _forward_backward(self, trial: _Trial, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch's loss in nats per token, and its gradient's norm.

        The gradients are left in the parameters.
        """
        ids_BT = copy_to_device(read_batch(self._store, trial.progress.spec, step), self.device)
        trial.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        pass_sequences = trial.progress.spec.compute_pass_sequences(self._num_microbatches)
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
            return trial.built.compute_loss(ids_BT[:, :-1], ids_BT[:, 1:])
        weights = get_loss_weights(trial.progress.spec.hparams.run_wide)
        return compute_token_loss(
            self._compute_logits(trial, ids_BT[:, :-1]), ids_BT[:, 1:], weights
        )

    @torch.no_grad()
    def _validate(self) -> list[float]:
        trial = self._get_trial()
        spec, module = trial.progress.spec, trial.built.module.eval()
        held_out_BT = read_validation_ids(self._store, spec.shape.seq_len).to(self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part_BT in torch.split(
            held_out_BT, spec.compute_pass_sequences(self._num_microbatches)
        ):
            total += self._compute_loss(trial, part_BT).double() * len(part_BT)
        module.train()
        return [total.item() / len(held_out_BT)]


def _get_module_tensors(trial: _Trial) -> dict[str, Tensor]:
    """Return the parameters and buffers of the module by name, not copied."""
    module = trial.built.module
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _update(trial: _Trial, step: int, norm: Tensor) -> None:
    """Clip the gradients, and make an optimizer step at the learning rates of the schedule."""
    spec = trial.progress.spec
    clip_gradients(trial.built.module.parameters(), spec.hparams, norm)
    set_rates(trial.optimizer, trial.groups, compute_lr_multiplier(spec.schedule, step))
    trial.optimizer.step()
