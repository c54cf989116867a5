"""A bank: K trials of one shape trained as one batched model, a slot refilled as its trial ends.

Slots share the shape, batch and numerics; each has its own parametrization, hyperparameters,
schedule, seed and step counter. Every operation works row by row, so on a CPU a slot's curve is
bitwise the same whatever its neighbours are, at one K and mode (empty slots compute zeros). A
diverging slot is stopped as data and cleared. The host learns how a step went once, from its
report; on a GPU, after the next one has begun.
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
"""Runs before the recording, in which libraries and the compiler make what they keep (torch's notes
on CUDA graphs)."""


class NoGpuError(InputError):
    """Steps are to be recorded, and there is no GPU here: no further attempt of this study can
    help.
    """

    refuses_study = True


class CudaGraph:
    """A function without arguments, recorded on the current CUDA device.

    It may read and write tensors that stay where they are, must not ask the device for anything,
    and is run `NUM_WARMUPS` times before. What it returns is one tensor, overwritten by every call.

    Raises:
        RuntimeError: it cannot be recorded. Where that was for want of memory, its context says so,
            and `proxies.core.failures.classify` finds it there.
    """

    def __init__(self, step: Callable[[], Tensor]) -> None:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(NUM_WARMUPS):
                step()
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        # Where the end of a recording fails, torch leaves its own stream the current one: what
        # comes next needs ours.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(self._graph):
            self._result = step()

    def __call__(self) -> Tensor:
        """Replay it."""
        self._graph.replay()
        return self._result


_EMPTY = ForwardNumbers(embedding=0.0, attention=0.0, residual=0.0, output=0.0)


@dataclass(slots=True)
class _Slot:
    progress: RunProgress
    forward: ForwardNumbers


_Begun = tuple[dict[int, _Slot], StepReport]
"""Who a step trains, by slot, and what it will have found, [2, K]: losses and gradient norms."""


class Bank:
    """K slots for runs of one bank key.

    Raises:
        ValueError: the vocabulary of the corpus does not fit the shape, or `numerics` asks for what
            `proxies.training.solo` does (accumulation, checkpointing), what several ranks do.
        NoGpuError: they ask for CUDA graphs, and there is no GPU.
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
        """Args other than a run's own: optimizer: name of the runs' recipe
        (`proxies.core.optimizers.RECIPES`). device: where to train; None: the GPU if there is one.
        compile_backend: of `torch.compile`, where the numerics ask for it. num_microbatches: passes
        that a batch is split into, gradients accumulated: the same up to rounding. steps_ahead:
        steps begun before a step's report is read (`proxies.training.step_loop`); None: one on a
        GPU.
        """
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._steps_ahead = default_steps_ahead(self.device) if steps_ahead is None else steps_ahead
        self._lap_began = 0.0
        _refuse(shape, numerics, store, self.device)
        if numerics.compiled:
            # of a compiled bank before this one: its model lies in a circle with its compiled self
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
        """Takes the gradient noise of the runs, where somebody puts it there."""
        # What a step reads, at one place for good: a recorded one knows no other.
        self._weights_K = {
            name: torch.zeros(num_slots, dtype=dtype, device=self.device) for name in LOSS_TERMS
        }
        stacked = stack_forward_numbers([_EMPTY] * num_slots, dtype, self.device)
        self._forward = dataclasses.replace(stacked, loss_weights=self._weights_K)
        self._ids_KBT = torch.zeros(
            num_slots, self._num_sequences, shape.seq_len + 1, dtype=torch.int64
        ).to(self.device)
        self._share_K1 = torch.zeros(num_slots, 1, dtype=torch.float64, device=self.device)
        # Who trains: occupied, and every loss and gradient finite so far. A step begun beyond one
        # that was not, and not yet read, changes nothing.
        self._active_K1 = torch.zeros(num_slots, 1, dtype=torch.bool, device=self.device)
        # Not the bound method itself where nothing is recorded: a circle, whose memory would wait
        # for the collector.
        self._recorded = CudaGraph(self._trained) if numerics.cuda_graphs else None

    def admit(self, index: int, spec: RunSpec, state: SlotState | None = None) -> None:
        """Start a run in a free slot from its own initial weights, or go on from a `state` of it.

        Raises:
            ValueError: the slot is taken, or the run belongs to another bank.
            StateError: the state is not one of this run; the slot is free.
        """
        if self._slots[index] is not None:
            raise ValueError(f"slot {index} is taken")
        mine = (self.shape, self._num_sequences, self.numerics, self._store.manifest.data_id)
        if (spec.shape, spec.batch_sequences, spec.numerics, spec.data_id) != mine:
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
        """What the run of an occupied slot can go on from, in any slot of any bank of its key."""
        return captured(self._runs[index], self.device, self.optimizer.state(index))

    @property
    def steps(self) -> dict[int, int]:
        """Optimizer steps done, by occupied slot."""
        return {i: run.step for i, run in self._runs.items()}

    @property
    def environment(self) -> dict[str, str]:
        """What this engine's arithmetic depends on besides the spec."""
        return environment(self.device)

    @property
    def _runs(self) -> dict[int, RunProgress]:
        return {i: slot.progress for i, slot in enumerate(self._slots) if slot is not None}

    def evict(self, index: int) -> None:
        """Free a slot, whatever it is doing."""
        self.optimizer.clear(index)
        self._slots[index] = None
        self._active_K1[index] = False
        self._set_forward()

    def pause_at(self, index: int, step: int | None) -> None:
        """Have `advance` do nothing while the run of an occupied slot has done `step` steps or
        more; None: go on.
        """
        self._runs[index].pause_step = step

    def pruned(self, index: int, num_steps: int, reason: str) -> tuple[RunResult, Curve]:
        """The outcome of a run if it is given up as it was after `num_steps`; nothing changes
        here.
        """
        return self._runs[index].pruned(num_steps, reason, self.device)

    def predict(self, ids_KBT: Tensor) -> Tensor:
        """Logits of every slot's model, [K, N, V], for token ids [K, B, T], in the arithmetic of
        training.
        """
        logits_KNV: Tensor = self.model(ids_KBT.to(self.device), self._forward)
        return logits_KNV

    @property
    def free_slots(self) -> list[int]:
        """Indices of the empty slots."""
        return [i for i, slot in enumerate(self._slots) if slot is None]

    def advance(self, num_steps: int, seconds: float = math.inf) -> list[Ended]:
        """Up to `num_steps` optimizer steps, none begun after `seconds`; returns early, with (slot,
        result, curve), when runs end, or with nothing when one is where it was to pause.
        """
        self._lap_began = time.perf_counter()
        return run_steps(
            num_steps,
            seconds,
            self._steps_ahead,
            may_begin=lambda ahead: (
                bool(self._runs) and all(run.goes_on(ahead) for run in self._runs.values())
            ),
            alone=self._looks,
            begin=self._begin,
            settle=self._settle,
        )

    def _looks(self, ahead: int) -> bool:
        """Whether the gradient noise of a run is looked at before the step after `ahead` more."""
        noise, runs = self.noise, self._runs.values()
        return noise is not None and any(
            noise.due(r.spec, r.step + ahead, self._num_microbatches) for r in runs
        )

    def _begin(self, ahead: int) -> _Begun:
        """Begin the step after `ahead` that are not yet read."""
        busy = {i: slot for i, slot in enumerate(self._slots) if slot is not None}
        if self.noise is not None:
            self._look(self.noise, busy, ahead)
        self._hand_over(busy, ahead)
        report_2K = self._trained() if self._recorded is None else self._recorded()
        return busy, StepReport(report_2K)

    def _settle(self, begun: _Begun) -> list[Ended]:
        """Read a step: take it in, end the runs that it ends and free their slots."""
        busy, report = begun
        losses, norms = report.read()
        # not who ended in the step before
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

    def _hand_over(self, busy: dict[int, _Slot], ahead: int) -> None:
        """What the step is to read: batches, and the share of its rates that each trains at."""
        ids_KBT = torch.zeros(self._ids_KBT.shape, dtype=torch.int64)
        shares = [0.0] * len(self._slots)
        for i, slot in busy.items():
            spec, step = slot.progress.spec, slot.progress.step + ahead
            ids_KBT[i] = batch_of(self._store, spec, step)
            shares[i] = lr_multiplier(spec.schedule, step)
        share_K1 = torch.tensor(shares, dtype=torch.float64)[:, None]
        for static, values in ((self._ids_KBT, ids_KBT), (self._share_K1, share_K1)):
            static.copy_(pinned(values, self.device), non_blocking=True)

    def _look(self, noise: NoiseLooks, busy: dict[int, _Slot], ahead: int) -> None:
        """Measure the gradient noise of slots that are at such a step, each as a model alone."""
        for i, slot in busy.items():
            weights = {name: parameter[i] for name, parameter in self.model.named_parameters()}
            spec, step = slot.progress.spec, slot.progress.step + ahead
            noise.look(spec, step, self.model, weights, self._store, self._num_microbatches)

    def _trained(self) -> Tensor:
        """One step of all who train, on what was handed over: their losses and gradient norms, [2,
        K].
        """
        losses_K = self._forward_backward()
        norms_K = self.optimizer.gather_gradients()
        self._active_K1 &= (losses_K.isfinite() & norms_K.isfinite())[:, None]
        self.optimizer.step(self._share_K1, self._active_K1, norms_K[:, None])
        return torch.stack([losses_K, norms_K])

    def _forward_backward(self) -> Tensor:
        total_K = torch.zeros(
            len(self._slots), dtype=self.optimizer.weights_KP.dtype, device=self.device
        )
        for part_KBT in torch.split(self._ids_KBT, self._part_sequences, dim=1):
            # The mean over the whole batch is the parts' means weighted by their sequences; a whole
            # one's weight is 1.
            losses_K = self._losses(part_KBT) * (part_KBT.shape[1] / self._num_sequences)
            # The gradient of a sum of independent losses is each one's own.
            losses_K.sum().backward()  # type: ignore[no-untyped-call]
            total_K += losses_K.detach()
        return total_K

    def _losses(self, ids_KBT: Tensor) -> Tensor:
        losses_K: Tensor = self.model(ids_KBT[..., :-1], self._forward, ids_KBT[..., 1:])
        return losses_K

    @torch.no_grad()
    def _validate(self) -> list[float]:
        """Validation loss of every slot, [K] nats, on the same windows for all."""
        held_BT = validation_ids(self._store, self.shape.seq_len).to(self.device)
        total_K = torch.zeros(len(self._slots), dtype=torch.float64, device=self.device)
        for part_BT in torch.split(held_BT, self._part_sequences):
            total_K += self._losses(part_BT.expand(len(self._slots), -1, -1)).double() * len(
                part_BT
            )
        return (total_K / len(held_BT)).tolist()

    def _set_forward(self) -> None:
        numbers = [_EMPTY if slot is None else slot.forward for slot in self._slots]
        fresh = stack_forward_numbers(numbers, self.optimizer.weights_KP.dtype, self.device)
        for field in dataclasses.fields(ForwardNumbers):
            getattr(self._forward, field.name).copy_(getattr(fresh, field.name))
        for name, weight_K in self._weights_K.items():
            values = [
                0.0 if slot is None else slot.progress.spec.hparams.run_wide[name]
                for slot in self._slots
            ]
            weight_K.copy_(torch.tensor(values))


def _refuse(shape: Shape, numerics: Numerics, store: TokenStore, device: torch.device) -> None:
    alone = [n for n in ("microbatch_tokens", "activation_checkpointing") if getattr(numerics, n)]
    vocab_size = store.manifest.vocab_size
    refusals = {
        f"{', '.join(alone)}: only a single trial can do that, not a bank": not alone,
        f"vocab_size = {shape.vocab_size} is smaller than the corpus's {vocab_size}": shape.vocab_size  # noqa: E501
        >= vocab_size,
    }
    if problems := [problem for problem, holds in refusals.items() if not holds]:
        raise ValueError("; ".join(problems))
    if numerics.cuda_graphs and device.type != "cuda":
        raise NoGpuError(
            "cuda_graphs: needs a GPU, and none is visible here: give one with cluster.worker_gpus"
        )


def _compile(model: Decoder, backend: str) -> None:
    # Past a limit on recompilations torch would quietly run uncompiled. Each bank counts its own;
    # and a graph is for its very sizes, so that what a neighbour's end makes it compile
    # (validation) never changes how training rounds.
    fail_past_recompile_limit()
    model.compile(backend=backend, fullgraph=True, dynamic=False, **isolated())
