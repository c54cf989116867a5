"""A bank trains K trials of one shape as one batched model, and refills a slot when its trial ends.

A slot is the place of one trial in the bank. All slots have the same shape, batch and numerics.
Each has its own parametrization, hyperparameters, schedule, seed and step counter. Every operation
works on each slot separately, so on a CPU the curve of a slot is bitwise the same whatever is in
the other slots, for the same K and mode (empty slots compute zeros). A run that diverges ends with
a result, and its slot is cleared. The host reads the losses of a step once, from the step's report;
on a GPU, after the next step has been launched.

Shape suffixes: K slots, B sequences of a batch, T tokens of a sequence.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun._proxies.core.errors import InputError
from forerun._proxies.core.numbers import ForwardNumbers
from forerun._proxies.core.schedule import compute_lr_multiplier
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.model.compilation import (
    forbid_uncompiled_fallback,
    separate_recompile_counts,
)
from forerun._proxies.model.decoder import Decoder, Multipliers
from forerun._proxies.model.loss import LOSS_TERMS
from forerun._proxies.model.optimizer import IMPLEMENTATIONS
from forerun._proxies.model.precision import PRECISIONS
from forerun._proxies.parametrization.parametrization import (
    compute_forward_numbers,
    compute_parameter_table,
    draw_initial_tensor,
)
from forerun._proxies.training.engine import Engine, pin_memory
from forerun._proxies.training.gradient_noise import GradientNoiseProbe
from forerun._proxies.training.memory import keep_freed_memory
from forerun._proxies.training.run_progress import RunProgress, read_batch, read_validation_ids
from forerun._proxies.training.slot_state import SlotState, resume_progress
from forerun._proxies.training.torch_device import set_arithmetic

NUM_WARMUPS = 3
"""Number of calls before a CUDA graph is recorded, in which libraries and the compiler allocate
their buffers (torch's notes on CUDA graphs)."""


class NoGpuError(InputError):
    """CUDA graphs are required, and there is no GPU; a retry on this worker cannot succeed."""

    refuses_study = True
    """Tells the driver to end the study with this error rather than to retry the run
    (`forerun._sweeps.run.pool.Report.ends_study`)."""


class CudaGraph:
    """A function without arguments that is recorded as a CUDA graph on the current device.

    The function may read and write tensors at fixed addresses, and must not synchronize with the
    device. It is called `NUM_WARMUPS` times before it is recorded. It returns one tensor, which
    each call overwrites.

    Raises:
        RuntimeError: The function cannot be recorded. If memory ran out, the error's context says
            so, where `forerun._proxies.core.failures.classify` finds it.
    """

    def __init__(self, step: Callable[[], Tensor]) -> None:
        # Warm up on a side stream, as the notes of torch require.
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(NUM_WARMUPS):
                step()
        torch.cuda.current_stream().wait_stream(side_stream)
        self._graph = torch.cuda.CUDAGraph()
        # If the end of a recording fails, torch leaves its own stream as the current one. The outer
        # context restores the stream from before.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(self._graph):
            self._result = step()

    def __call__(self) -> Tensor:
        """Replay the recorded function, and return its result."""
        self._graph.replay()
        return self._result


_EMPTY_SLOT = ForwardNumbers(embedding=0.0, attention=0.0, residual=0.0, output=0.0)
"""Forward multipliers of an empty slot, whose model computes zeros."""


class Bank(Engine):
    """An engine with K slots for runs that have the same shape, batch, numerics and corpus.

    Args:
        shape: Shape of the models.
        batch_tokens: Tokens per batch of each run.
        numerics: Number of slots, data types and mode of the computation.
        store: The corpus.
        optimizer: Name of the recipe that updates all runs.
        device: Device to train on; None for the GPU if there is one.
        compile_backend: Backend of `torch.compile`, if the numerics require compilation.
        num_microbatches: Number of passes that a batch is split into, with accumulated gradients;
            the result is the same up to rounding.
        steps_ahead: Number of steps that are launched before a report is read
            (`forerun._proxies.training.engine`); None for 1 on a GPU, 0 on a CPU.

    Raises:
        ValueError: The vocabulary of the corpus does not fit the shape, or `numerics` requires what
            only `forerun._proxies.training.single_trial` supports (accumulation, checkpointing).
        NoGpuError: `numerics` requires CUDA graphs, and there is no GPU.
    """

    def __init__(
        self,
        shape: Shape,
        batch_tokens: int,
        numerics: Numerics,
        store: TokenStore,
        *,
        optimizer: str,
        device: torch.device | str | None = None,
        compile_backend: str = "inductor",
        num_microbatches: int = 1,
        steps_ahead: int | None = None,
    ) -> None:
        super().__init__(device, num_microbatches, steps_ahead)
        _check(shape, numerics, store, self.device)
        if numerics.compiled:
            # Free the previous compiled bank now: its model is in a reference cycle with its
            # compiled wrapper.
            gc.collect()
        keep_freed_memory()
        set_arithmetic(numerics)
        self.shape, self.numerics, self._store = shape, numerics, store
        self._num_sequences = batch_tokens // shape.seq_len
        self._part_sequences = math.ceil(self._num_sequences / num_microbatches)
        precision = PRECISIONS[numerics.dtype]
        dtype, num_slots = precision.weights, numerics.num_slots
        self.model = Decoder(
            shape,
            num_trials=num_slots,
            device=self.device,
            fused_loss=numerics.fused_loss,
            compute=precision.compute,
        )
        self.optimizer = IMPLEMENTATIONS[optimizer].bank(
            self.model, num_slots, dtype, self.device, compiled=numerics.compiled
        )
        if numerics.compiled:
            _compile(self.model, compile_backend)
        self._slots: list[RunProgress | None] = [None] * num_slots
        self._make_buffers(shape.seq_len, dtype)
        # Without CUDA graphs, store None and not the bound method, which would be a reference cycle
        # that delays freeing the memory.
        self._recorded = CudaGraph(self._train_step) if numerics.cuda_graphs else None

    def _make_buffers(self, seq_len: int, dtype: torch.dtype) -> None:
        """Make the fixed buffers of a step's inputs.

        A recorded CUDA graph reads the same addresses on every replay.
        """
        num_slots, device = self.numerics.num_slots, self.device
        self._loss_weights = {
            name: torch.zeros(num_slots, dtype=dtype, device=device) for name in LOSS_TERMS
        }
        stacked = stack_forward_numbers([_EMPTY_SLOT] * num_slots, dtype, device)
        self._forward = dataclasses.replace(stacked, loss_weights=self._loss_weights)
        self._ids_KBT = torch.zeros(
            num_slots, self._num_sequences, seq_len + 1, dtype=torch.int64
        ).to(device)
        self._lr_multiplier_K1 = torch.zeros(num_slots, 1, dtype=torch.float64, device=device)
        # Slots that train: they are occupied, and all their losses and gradients were finite so
        # far. The host may launch further steps before it reads that a step was not finite; these
        # steps do not change the slot.
        self._active_K1 = torch.zeros(num_slots, 1, dtype=torch.bool, device=device)

    def admit(self, index: int, spec: RunSpec, state: SlotState | None = None) -> None:
        """Start a run in a free slot, from its initial weights or from a saved state.

        Args:
            index: Number of the slot.
            spec: The run.
            state: State of this run to resume from; None to start from its initial weights.

        Raises:
            ValueError: The slot is taken, or the run does not fit this bank.
            StateError: The state is not of this run; the slot stays free.
        """
        if self._slots[index] is not None:
            raise ValueError(f"slot {index} is taken")
        bank_key = (self.shape, self._num_sequences, self.numerics, self._store.manifest.data_id)
        if (spec.shape, spec.batch_sequences, spec.numerics, spec.data_id) != bank_key:
            raise ValueError(
                f"run {spec.id[:12]} belongs to another bank: shape, batch, numerics or data differ"
            )
        if spec.factory or spec.command or spec.schedule.batch_warmup_steps:
            raise ValueError(
                f"run {spec.id[:12]}: a factory, a command or batch warmup needs one trial at a "
                "time"
            )
        run = RunProgress(spec, num_microbatches=self._num_microbatches)
        if state is not None:
            run = resume_progress(
                spec, state, self.optimizer.get_state(index), self._num_microbatches
            )
        parameters = compute_parameter_table(spec)
        weights = {
            parameter.name: draw_initial_tensor(parameter, spec.seed) for parameter in parameters
        }
        self.optimizer.admit(index, parameters, weights, spec.hparams)
        if state is not None:
            self.optimizer.restore(index, state.tensors, run.step)
        self._slots[index] = run
        self._active_K1[index] = True
        self._set_forward()

    def _get_tensors(self, index: int) -> Mapping[str, Tensor]:
        return self.optimizer.get_state(index)

    @property
    def _runs(self) -> dict[int, RunProgress]:
        return {i: run for i, run in enumerate(self._slots) if run is not None}

    def evict(self, index: int) -> None:
        """Free a slot, also in the middle of a run."""
        self.optimizer.clear(index)
        self._slots[index] = None
        self._active_K1[index] = False
        self._set_forward()

    def _launch_step(self, ahead: int) -> Tensor:
        if self.noise is not None:
            self._measure_noise(self.noise, ahead)
        self._copy_inputs(ahead)
        return self._train_step() if self._recorded is None else self._recorded()

    def _copy_inputs(self, ahead: int) -> None:
        """Copy the batches and the learning rates (as shares of the peak) to a step's buffers."""
        ids_KBT = torch.zeros(self._ids_KBT.shape, dtype=torch.int64)
        multipliers = [0.0] * len(self._slots)
        for i, run in self._runs.items():
            spec, step = run.spec, run.step + ahead
            ids_KBT[i] = read_batch(self._store, spec, step)
            multipliers[i] = compute_lr_multiplier(spec.schedule, step)
        lr_K1 = torch.tensor(multipliers, dtype=torch.float64)[:, None]
        for buffer, values in ((self._ids_KBT, ids_KBT), (self._lr_multiplier_K1, lr_K1)):
            buffer.copy_(pin_memory(values, self.device), non_blocking=True)

    def _measure_noise(self, noise: GradientNoiseProbe, ahead: int) -> None:
        """Measure the gradient noise of the slots for which it is due, each as a single model."""
        for i, run in self._runs.items():
            weights = {name: parameter[i] for name, parameter in self.model.named_parameters()}
            noise.measure_if_due(
                run.spec,
                run.step + ahead,
                self.model,
                weights,
                self._store,
                self._num_microbatches,
            )

    def _train_step(self) -> Tensor:
        """Make one step of all active slots on the inputs in the buffers.

        Returns:
            Losses and gradient norms, [2, K].
        """
        losses_K = self._forward_backward()
        norms_K = self.optimizer.gather_gradients()
        # A slot whose loss or gradient is not finite stops training, on the device itself.
        self._active_K1 &= (losses_K.isfinite() & norms_K.isfinite())[:, None]
        self.optimizer.step(self._lr_multiplier_K1, self._active_K1, norms_K[:, None])
        return torch.stack([losses_K, norms_K])

    def _forward_backward(self) -> Tensor:
        """Return the loss of each slot's batch, [K], and leave the gradients in the parameters."""
        total_K = torch.zeros(
            len(self._slots), dtype=self.optimizer.weights_KP.dtype, device=self.device
        )
        for part_KBT in torch.split(self._ids_KBT, self._part_sequences, dim=1):
            # The mean over the batch is the mean of the parts, weighted by their sequences.
            losses_K = self._compute_losses(part_KBT) * (part_KBT.shape[1] / self._num_sequences)
            # The losses are independent, so the gradient of their sum is each slot's own gradient.
            losses_K.sum().backward()  # type: ignore[no-untyped-call]
            total_K += losses_K.detach()
        return total_K

    def _compute_losses(self, ids_KBT: Tensor) -> Tensor:
        losses_K: Tensor = self.model(ids_KBT[..., :-1], self._forward, ids_KBT[..., 1:])
        return losses_K

    @torch.no_grad()
    def _validate(self) -> list[float]:
        """Return the validation loss of every slot, [K], in nats, on the same windows."""
        held_out_BT = read_validation_ids(self._store, self.shape.seq_len).to(self.device)
        total_K = torch.zeros(len(self._slots), dtype=torch.float64, device=self.device)
        for part_BT in torch.split(held_out_BT, self._part_sequences):
            part_KBT = part_BT.expand(len(self._slots), -1, -1)
            total_K += self._compute_losses(part_KBT).double() * len(part_BT)
        return (total_K / len(held_out_BT)).tolist()

    def _set_forward(self) -> None:
        """Copy the forward multipliers of all slots to their buffers."""
        multipliers = [
            _EMPTY_SLOT if run is None else compute_forward_numbers(run.spec) for run in self._slots
        ]
        stacked = stack_forward_numbers(multipliers, self.optimizer.weights_KP.dtype, self.device)
        for field in dataclasses.fields(ForwardNumbers):
            getattr(self._forward, field.name).copy_(getattr(stacked, field.name))
        for name, weight_K in self._loss_weights.items():
            values = [
                0.0 if run is None else run.spec.hparams.run_wide[name] for run in self._slots
            ]
            weight_K.copy_(torch.tensor(values))


def stack_forward_numbers(
    numbers: Sequence[ForwardNumbers], dtype: torch.dtype, device: torch.device
) -> Multipliers:
    """Return the forward multipliers of a bank's trials, as tensors [K, 1, 1]."""
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(ForwardNumbers):
        values = [getattr(trial, field.name) for trial in numbers]
        columns[field.name] = torch.tensor(values, dtype=dtype, device=device)[:, None, None]
    return Multipliers(**columns)


def _check(shape: Shape, numerics: Numerics, store: TokenStore, device: torch.device) -> None:
    """Check that a bank supports these settings.

    Raises:
        ValueError: A setting needs a single trial, or the vocabulary is too small.
        NoGpuError: CUDA graphs are required, and there is no GPU.
    """
    problems = []
    single_trial_options = ("microbatch_tokens", "activation_checkpointing")
    if unsupported := [option for option in single_trial_options if getattr(numerics, option)]:
        problems.append(f"{', '.join(unsupported)}: only a single trial can do that, not a bank")
    vocab_size = store.manifest.vocab_size
    if shape.vocab_size < vocab_size:
        problems.append(
            f"vocab_size = {shape.vocab_size} is smaller than the corpus's {vocab_size}"
        )
    if problems:
        raise ValueError("; ".join(problems))
    if numerics.cuda_graphs and device.type != "cuda":
        raise NoGpuError(
            "cuda_graphs: needs a GPU, and none is visible here: give one with cluster.worker_gpus"
        )


def _compile(model: Decoder, backend: str) -> None:
    forbid_uncompiled_fallback()
    # Graphs are compiled for fixed sizes, so that compiling the validation when another slot's run
    # ends never changes the rounding of training.
    model.compile(backend=backend, fullgraph=True, dynamic=False, **separate_recompile_counts())
