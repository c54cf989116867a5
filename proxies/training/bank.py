"""A bank trains K trials of one shape as one batched model, and refills a slot when its trial ends.

Slots share the shape, the batch and the numerics. Each has its own parametrization,
hyperparameters, schedule, seed and step counter. Every operation works on each slot separately, so
on a CPU the curve of a slot is bitwise the same whatever is in the other slots, for the same K and
mode (empty slots compute zeros). A run that diverges ends with a result, and its slot is cleared.
The host reads the losses of a step once, from the step's report; on a GPU, after the next step has
been launched.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from proxies.core.errors import InputError
from proxies.core.numbers import ForwardNumbers
from proxies.core.schedule import lr_multiplier
from proxies.core.shape import Shape
from proxies.core.spec import DIVERGED_ABOVE_NATS, Curve, Numerics, RunResult, RunSpec
from proxies.data.tokens import TokenStore
from proxies.model.bank_adamw import fail_past_recompile_limit, isolated
from proxies.model.decoder import Decoder
from proxies.model.loss import LOSS_TERMS
from proxies.model.optimizer import IMPLEMENTATIONS
from proxies.model.precision import PRECISIONS
from proxies.parametrization.parametrization import (
    forward_numbers,
    initial_tensor,
    parameter_table,
    stack_forward_numbers,
)
from proxies.training.gradient_noise import NoiseLooks
from proxies.training.memory import keep_freed_memory
from proxies.training.outcome import RunProgress, batch_of, environment, validation_ids
from proxies.training.slot_state import SlotState, captured, resumed
from proxies.training.step_loop import Ended, StepReport, default_steps_ahead, pinned, run_steps
from proxies.training.torch_device import set_arithmetic

NUM_WARMUPS = 3
"""Number of calls before a CUDA graph is recorded, in which libraries and the compiler allocate
their buffers (torch's notes on CUDA graphs)."""


class NoGpuError(InputError):
    """CUDA graphs are required, and there is no GPU; a retry on this worker cannot succeed."""

    refuses_study = True


class CudaGraph:
    """A function without arguments that is recorded as a CUDA graph on the current device.

    The function may read and write tensors at fixed addresses, and must not synchronize with the
    device. It is called `NUM_WARMUPS` times before it is recorded. It returns one tensor, which
    each call overwrites.

    Raises:
        RuntimeError: The function cannot be recorded. If memory ran out, the error's context says
            so, where `proxies.core.failures.classify` finds it.
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
        # If the end of a recording fails, torch leaves its recording stream as the current one. The
        # outer context restores ours.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(self._graph):
            self._result = step()

    def __call__(self) -> Tensor:
        """Replay the recorded function, and return its result."""
        self._graph.replay()
        return self._result


_EMPTY = ForwardNumbers(embedding=0.0, attention=0.0, residual=0.0, output=0.0)
"""Forward multipliers of an empty slot."""


@dataclass(slots=True)
class _Slot:
    """The run in a slot."""

    progress: RunProgress
    forward: ForwardNumbers


_LaunchedStep = tuple[dict[int, _Slot], StepReport]
"""A step that has been launched: its runs by slot, and its report [2, K] of losses and gradient
norms."""


class Bank:
    """An engine with K slots for runs that have the same shape, batch, numerics and corpus.

    Args:
        shape: Shape of the models.
        batch_tokens: Tokens per batch of each run.
        numerics: Number of slots, data types and mode of the computation.
        store: The corpus.
        optimizer: Optimizer of all runs.
        device: Device to train on; None for the GPU if there is one.
        compile_backend: Backend of `torch.compile`, if the numerics require compilation.
        num_microbatches: Number of passes that a batch is split into, with accumulated gradients;
            the result is the same up to rounding.
        steps_ahead: Number of steps that are launched before a report is read
            (`proxies.training.step_loop`); None for 1 on a GPU, 0 on a CPU.

    Raises:
        ValueError: The vocabulary of the corpus does not fit the shape, or `numerics` requires what
            only `proxies.training.solo` supports (accumulation, checkpointing).
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
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._steps_ahead = default_steps_ahead(self.device) if steps_ahead is None else steps_ahead
        self._lap_began = 0.0
        _check(shape, numerics, store, self.device)
        if numerics.compiled:
            # Free the previous compiled bank now: its model is in a reference cycle with its
            # compiled wrapper.
            gc.collect()
        keep_freed_memory()
        set_arithmetic(numerics)
        self.shape, self.numerics, self._store = shape, numerics, store
        self._num_sequences, self._num_microbatches = (
            batch_tokens // shape.seq_len,
            num_microbatches,
        )
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
        self._slots: list[_Slot | None] = [None] * num_slots
        self.noise: NoiseLooks | None = None
        """Collects the gradient noise of the runs, if the caller sets it."""
        self._make_buffers(shape.seq_len, dtype)
        # Without CUDA graphs, store None and not the bound method, which would be a reference cycle
        # that delays freeing the memory.
        self._recorded = CudaGraph(self._train_step) if numerics.cuda_graphs else None

    def _make_buffers(self, seq_len: int, dtype: torch.dtype) -> None:
        """Make the fixed buffers of a step's inputs.

        A recorded CUDA graph reads the same addresses on every replay.
        """
        self._weights_K = {
            name: torch.zeros(self.numerics.num_slots, dtype=dtype, device=self.device)
            for name in LOSS_TERMS
        }
        stacked = stack_forward_numbers([_EMPTY] * self.numerics.num_slots, dtype, self.device)
        self._forward = dataclasses.replace(stacked, loss_weights=self._weights_K)
        self._ids_KBT = torch.zeros(
            self.numerics.num_slots, self._num_sequences, seq_len + 1, dtype=torch.int64
        ).to(self.device)
        self._share_K1 = torch.zeros(
            self.numerics.num_slots, 1, dtype=torch.float64, device=self.device
        )
        # Slots that train: occupied, and with finite losses and gradients so far. A step that was
        # launched after a non-finite one that is not read yet changes nothing.
        self._active_K1 = torch.zeros(
            self.numerics.num_slots, 1, dtype=torch.bool, device=self.device
        )

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
            run = resumed(spec, state, self.optimizer.state(index), self._num_microbatches)
        numbers = parameter_table(spec)
        weights = {parameter.name: initial_tensor(parameter, spec.seed) for parameter in numbers}
        self.optimizer.admit(index, numbers, weights, spec.hparams)
        if state is not None:
            self.optimizer.restore(index, state.tensors, run.step)
        self._slots[index] = _Slot(progress=run, forward=forward_numbers(spec))
        self._active_K1[index] = True
        self._set_forward()

    def state(self, index: int) -> SlotState:
        """Return the state of the run in a slot, which can resume in any bank that it fits."""
        return captured(self._runs[index], self.device, self.optimizer.state(index))

    @property
    def steps(self) -> dict[int, int]:
        """Optimizer steps done, by occupied slot."""
        return {i: run.step for i, run in self._runs.items()}

    @property
    def environment(self) -> dict[str, str]:
        """Everything besides the spec that the arithmetic of this engine depends on."""
        return environment(self.device)

    @property
    def _runs(self) -> dict[int, RunProgress]:
        return {i: slot.progress for i, slot in enumerate(self._slots) if slot is not None}

    def evict(self, index: int) -> None:
        """Free a slot, also in the middle of a run."""
        self.optimizer.clear(index)
        self._slots[index] = None
        self._active_K1[index] = False
        self._set_forward()

    def pause_at(self, index: int, step: int | None) -> None:
        """Set the step at which the run in a slot pauses.

        `advance` does nothing while a run has done that many steps or more; None removes the pause.
        """
        self._runs[index].pause_step = step

    def pruned(self, index: int, num_steps: int, reason: str) -> tuple[RunResult, Curve]:
        """Return the result and curve of a run as if it was pruned after `num_steps`.

        The bank does not change.
        """
        return self._runs[index].pruned(num_steps, reason, self.device)

    def predict(self, ids_KBT: Tensor) -> Tensor:
        """Return the logits of every slot's model, in the arithmetic of training.

        Args:
            ids_KBT: Token ids, [K, B, T].

        Returns:
            Logits, [K, B * T, V].
        """
        logits_KNV: Tensor = self.model(ids_KBT.to(self.device), self._forward)
        return logits_KNV

    @property
    def free_slots(self) -> list[int]:
        """Indices of the empty slots."""
        return [i for i, slot in enumerate(self._slots) if slot is None]

    def advance(self, num_steps: int, seconds: float = math.inf) -> list[Ended]:
        """Make optimizer steps, until a run ends or has to pause.

        Args:
            num_steps: Maximum number of steps.
            seconds: Time limit for starting new steps, in seconds.

        Returns:
            Slot, result and curve of each run that ended; none if a run has to pause.
        """
        self._lap_began = time.perf_counter()
        return run_steps(
            num_steps,
            seconds,
            self._steps_ahead,
            may_begin=lambda ahead: (
                bool(self._runs) and all(run.goes_on(ahead) for run in self._runs.values())
            ),
            alone=self._needs_noise,
            begin=self._launch_step,
            settle=self._finish_step,
        )

    def _needs_noise(self, ahead: int) -> bool:
        """Return whether gradient noise is measured before the step after `ahead` unread ones."""
        noise, runs = self.noise, self._runs.values()
        return noise is not None and any(
            noise.due(run.spec, run.step + ahead, self._num_microbatches) for run in runs
        )

    def _launch_step(self, ahead: int) -> _LaunchedStep:
        """Launch the step after `ahead` steps whose reports are not read yet."""
        busy = {i: slot for i, slot in enumerate(self._slots) if slot is not None}
        if self.noise is not None:
            self._measure_noise(self.noise, busy, ahead)
        self._copy_inputs(busy, ahead)
        report_2K = self._train_step() if self._recorded is None else self._recorded()
        return busy, StepReport(report_2K)

    def _finish_step(self, launched: _LaunchedStep) -> list[Ended]:
        """Read the report of a step, end the runs that it ends, and free their slots."""
        busy, report = launched
        losses, norms = report.read()
        # Leave out runs that ended in the step before.
        busy = {i: slot for i, slot in busy.items() if self._slots[i] is slot}
        reasons = {
            i: slot.progress.record(losses[i], norms[i], DIVERGED_ABOVE_NATS)
            for i, slot in busy.items()
        }
        done = [i for i, slot in busy.items() if not reasons[i] and slot.progress.finished]
        validation = self._validate() if done else []
        began, self._lap_began = self._lap_began, time.perf_counter()
        ended = []
        for i, slot in busy.items():
            slot.progress.seconds += (self._lap_began - began) / len(busy)
            if reasons[i] or i in done:
                validation_nats = validation[i] if i in done else math.nan
                ended.append((i, *slot.progress.outcome(reasons[i], validation_nats, self.device)))
                self.evict(i)
        return ended

    def _copy_inputs(self, busy: dict[int, _Slot], ahead: int) -> None:
        """Copy the batches and the multipliers of the learning rates to the buffers of a step."""
        ids_KBT = torch.zeros(self._ids_KBT.shape, dtype=torch.int64)
        shares = [0.0] * len(self._slots)
        for i, slot in busy.items():
            spec, step = slot.progress.spec, slot.progress.step + ahead
            ids_KBT[i] = batch_of(self._store, spec, step)
            shares[i] = lr_multiplier(spec.schedule, step)
        share_K1 = torch.tensor(shares, dtype=torch.float64)[:, None]
        for buffer, values in ((self._ids_KBT, ids_KBT), (self._share_K1, share_K1)):
            buffer.copy_(pinned(values, self.device), non_blocking=True)

    def _measure_noise(self, noise: NoiseLooks, busy: dict[int, _Slot], ahead: int) -> None:
        """Measure the gradient noise of the slots for which it is due, each as a single model."""
        for i, slot in busy.items():
            weights = {name: parameter[i] for name, parameter in self.model.named_parameters()}
            spec, step = slot.progress.spec, slot.progress.step + ahead
            noise.look(spec, step, self.model, weights, self._store, self._num_microbatches)

    def _train_step(self) -> Tensor:
        """Make one step of all active slots on the inputs in the buffers.

        Returns:
            Losses and gradient norms, [2, K].
        """
        losses_K = self._forward_backward()
        norms_K = self.optimizer.gather_gradients()
        # A slot whose loss or gradient is not finite stops training, on the device itself.
        self._active_K1 &= (losses_K.isfinite() & norms_K.isfinite())[:, None]
        self.optimizer.step(self._share_K1, self._active_K1, norms_K[:, None])
        return torch.stack([losses_K, norms_K])

    def _forward_backward(self) -> Tensor:
        """Return the loss of each slot's batch, [K], and leave the gradients in the parameters."""
        total_K = torch.zeros(
            len(self._slots), dtype=self.optimizer.weights_KP.dtype, device=self.device
        )
        for part_KBT in torch.split(self._ids_KBT, self._part_sequences, dim=1):
            # The mean over the batch is the mean of the parts, weighted by their sequences.
            losses_K = self._losses(part_KBT) * (part_KBT.shape[1] / self._num_sequences)
            # The losses are independent, so the gradient of their sum is each slot's own gradient.
            losses_K.sum().backward()  # type: ignore[no-untyped-call]
            total_K += losses_K.detach()
        return total_K

    def _losses(self, ids_KBT: Tensor) -> Tensor:
        losses_K: Tensor = self.model(ids_KBT[..., :-1], self._forward, ids_KBT[..., 1:])
        return losses_K

    @torch.no_grad()
    def _validate(self) -> list[float]:
        """Return the validation loss of every slot, [K], in nats, on the same windows."""
        held_out_BT = validation_ids(self._store, self.shape.seq_len).to(self.device)
        total_K = torch.zeros(len(self._slots), dtype=torch.float64, device=self.device)
        for part_BT in torch.split(held_out_BT, self._part_sequences):
            part_KBT = part_BT.expand(len(self._slots), -1, -1)
            total_K += self._losses(part_KBT).double() * len(part_BT)
        return (total_K / len(held_out_BT)).tolist()

    def _set_forward(self) -> None:
        """Copy the forward multipliers of all slots to their buffers."""
        numbers = [_EMPTY if slot is None else slot.forward for slot in self._slots]
        stacked = stack_forward_numbers(numbers, self.optimizer.weights_KP.dtype, self.device)
        for field in dataclasses.fields(ForwardNumbers):
            getattr(self._forward, field.name).copy_(getattr(stacked, field.name))
        for name, weight_K in self._weights_K.items():
            values = [
                0.0 if slot is None else slot.progress.spec.hparams.run_wide[name]
                for slot in self._slots
            ]
            weight_K.copy_(torch.tensor(values))


def _check(shape: Shape, numerics: Numerics, store: TokenStore, device: torch.device) -> None:
    """Check that a bank supports these settings.

    Raises:
        ValueError: A setting needs a single trial, or the vocabulary is too small.
        NoGpuError: CUDA graphs are required, and there is no GPU.
    """
    problems = []
    solo_options = ("microbatch_tokens", "activation_checkpointing")
    if unsupported := [option for option in solo_options if getattr(numerics, option)]:
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
    # Beyond a limit on recompilations, torch would silently run uncompiled: make it an error, and
    # count recompilations for each bank separately. Graphs are compiled for fixed sizes, so that
    # compiling the validation when another slot's run ends never changes the rounding of training.
    fail_past_recompile_limit()
    model.compile(backend=backend, fullgraph=True, dynamic=False, **isolated())
