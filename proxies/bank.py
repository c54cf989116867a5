"""A bank: K trials of one shape trained as one batched model, a slot refilled as its trial ends.

Slots share the shape, batch and numerics; each has its own parametrization, hyperparameters, schedule, seed and step
counter. Every operation works row by row, so a slot's curve is bitwise the same whatever its neighbours are, at one K
(empty slots compute zeros). A diverging slot is stopped as data and cleared.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from proxies.data.tokens import TokenStore
from proxies.model import Decoder, token_loss
from proxies.numbers import ForwardNumbers
from proxies.optimizer import BankAdamW
from proxies.outcome import Progress, environment, validation_ids
from proxies.parametrization import (
    forward_numbers,
    initial_tensor,
    parameter_table,
    stack_forward_numbers,
)
from proxies.schedule import lr_multiplier
from proxies.shape import Shape
from proxies.slot_state import SlotState, captured, resumed
from proxies.spec import DIVERGED_ABOVE_NATS, Curve, Numerics, RunResult, RunSpec

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_CPU = torch.device("cpu")
_EMPTY = ForwardNumbers(embedding=0.0, attention=0.0, residual=0.0, output=0.0)


@dataclass(slots=True)
class _Slot:
    progress: Progress
    forward: ForwardNumbers


class Bank:
    """K slots for runs of one bank key.

    Raises:
        ValueError: the vocabulary of the corpus does not fit the shape, or `numerics` asks for what `proxies.solo`
            does: bfloat16, accumulation, checkpointing, compilation.
    """

    def __init__(
        self,
        shape: Shape,
        batch_tokens: int,
        numerics: Numerics,
        store: TokenStore,
        *,
        diverged_above_nats: float = DIVERGED_ABOVE_NATS,
        num_microbatches: int = 1,
    ) -> None:
        """`num_microbatches`: passes that a batch is split into, gradients accumulated: the same up to rounding."""
        if numerics.dtype not in _DTYPES:
            raise ValueError(f"dtype = {numerics.dtype!r}: a CPU bank trains in {' or '.join(_DTYPES)}")
        if numerics.microbatch_tokens or numerics.activation_checkpointing or numerics.compiled:
            raise ValueError("microbatch_tokens, activation_checkpointing and compiled want one trial at a time")
        if store.manifest.vocab_size > shape.vocab_size:
            raise ValueError(
                f"vocab_size = {shape.vocab_size} is smaller than the corpus's {store.manifest.vocab_size}"
            )
        torch.set_num_threads(numerics.num_threads)
        torch.set_float32_matmul_precision(numerics.matmul_precision)
        self.shape, self.numerics, self._store = shape, numerics, store
        self._diverged_above_nats = diverged_above_nats
        self._num_sequences = batch_tokens // shape.seq_len
        self._num_microbatches, self._part_sequences = (
            num_microbatches,
            math.ceil(self._num_sequences / num_microbatches),
        )
        self._dtype = _DTYPES[numerics.dtype]
        num_slots = numerics.num_slots
        self.model = Decoder(shape, num_trials=num_slots)
        self.optimizer = BankAdamW(self.model, num_slots, self._dtype)
        self._slots: list[_Slot | None] = [None] * num_slots
        self._set_forward()

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
            raise ValueError(f"run {spec.id[:12]} belongs to another bank: shape, batch, numerics or data differ")
        if spec.factory or spec.command or spec.schedule.batch_warmup_steps:
            raise ValueError(f"run {spec.id[:12]}: a factory, a command or batch warmup wants one trial at a time")
        run = Progress(spec, num_microbatches=self._num_microbatches)
        if state is not None:
            run = resumed(spec, state, self.optimizer.state(index), self._num_microbatches)
        numbers = parameter_table(spec)
        weights = {parameter.name: initial_tensor(parameter, spec.seed) for parameter in numbers}
        self.optimizer.admit(index, numbers, weights, spec.hparams.clip_norm)
        if state is not None:
            self.optimizer.restore(index, state.tensors, run.step)
        self._slots[index] = _Slot(progress=run, forward=forward_numbers(spec))
        self._set_forward()

    def state(self, index: int) -> SlotState:
        """What the run of an occupied slot can go on from, in any slot of any bank of its key."""
        return captured(self._runs[index], _CPU, self.optimizer.state(index))

    @property
    def steps(self) -> dict[int, int]:
        """Optimizer steps done, by occupied slot."""
        return {i: run.step for i, run in self._runs.items()}

    @property
    def environment(self) -> dict[str, str]:
        """What this engine's arithmetic depends on besides the spec."""
        return environment(_CPU)

    @property
    def _runs(self) -> dict[int, Progress]:
        return {i: slot.progress for i, slot in enumerate(self._slots) if slot is not None}

    def evict(self, index: int) -> None:
        """Free a slot, whatever it is doing."""
        self.optimizer.clear(index)
        self._slots[index] = None
        self._set_forward()

    def pause_at(self, index: int, step: int | None) -> None:
        """Have `advance` do nothing while the run of an occupied slot has done `step` steps or more; None: go on."""
        self._runs[index].pause_step = step

    def losses(self, index: int) -> tuple[float, ...]:
        """Training losses of the run of an occupied slot so far, [step] nats."""
        return tuple(self._runs[index].losses_nats)

    def prune(self, index: int, num_steps: int, reason: str) -> tuple[RunResult, Curve]:
        """Give up the run of an occupied slot, as it was after `num_steps`; the slot is free."""
        ended = self._runs[index].pruned(num_steps, reason, _CPU)
        self.evict(index)
        return ended

    def predict(self, ids_KBT: Tensor) -> Tensor:
        """Logits of every slot's model, [K, N, V], for token ids [K, B, T]."""
        logits_KNV: Tensor = self.model(ids_KBT, self._forward)
        return logits_KNV

    @property
    def free_slots(self) -> list[int]:
        """Indices of the empty slots."""
        return [i for i, slot in enumerate(self._slots) if slot is None]

    def advance(self, num_steps: int, seconds: float = math.inf) -> list[tuple[int, RunResult, Curve]]:
        """Up to `num_steps` optimizer steps, none begun after `seconds`; returns early, with (slot, result, curve),
        when runs end, or with nothing when one is where it was to pause.
        """
        until = time.monotonic() + seconds
        ended: list[tuple[int, RunResult, Curve]] = []
        for _ in range(num_steps):
            runs = self._runs.values()
            if ended or not runs or any(run.paused for run in runs) or time.monotonic() > until:
                break
            ended = self._advance_once()
        return ended

    def _advance_once(self) -> list[tuple[int, RunResult, Curve]]:
        started = time.perf_counter()
        losses_K = self._forward_backward()
        busy = list(self._runs.items())
        norms_K = self.optimizer.gather_gradients()
        finite_K = (losses_K.isfinite() & norms_K.isfinite()).tolist()
        multiplier_K1 = torch.zeros(len(self._slots), 1, dtype=self._dtype)
        active_K1 = torch.zeros(len(self._slots), 1, dtype=torch.bool)
        for i, run in busy:
            multiplier_K1[i] = lr_multiplier(run.spec.schedule, run.step)
            active_K1[i] = finite_K[i]
        self.optimizer.step(multiplier_K1, active_K1, norms_K[:, None])
        losses, norms = losses_K.tolist(), norms_K.tolist()
        for i, run in busy:
            if finite_K[i]:
                run.record(losses[i], norms[i])
        trouble = {i: why for i, run in busy if (why := run.trouble(finite_K[i], self._diverged_above_nats))}
        done = [i for i, run in busy if i not in trouble and run.finished]
        validation = self._validate() if done else []
        spent = (time.perf_counter() - started) / len(busy)
        ended = []
        for i, run in busy:
            run.seconds += spent
            if i in trouble or i in done:
                validation_nats = validation[i] if i in done else math.nan
                ended.append((i, *run.outcome(trouble.get(i, ""), validation_nats, _CPU)))
                self.evict(i)
        return ended

    def _forward_backward(self) -> Tensor:
        ids_KBT = torch.stack([self._zeros() if slot is None else self._batch(slot.progress) for slot in self._slots])
        total_K = torch.zeros(len(self._slots), dtype=self._dtype)
        for part_KBT in torch.split(ids_KBT, self._part_sequences, dim=1):
            # The mean over the whole batch is the parts' means weighted by their sequences; a whole one's weight is 1.
            share = part_KBT.shape[1] / ids_KBT.shape[1]
            losses_K = token_loss(self.predict(part_KBT[..., :-1]), part_KBT[..., 1:]) * share
            # The gradient of a sum of independent losses is each one's own.
            losses_K.sum().backward()  # type: ignore[no-untyped-call]
            total_K += losses_K.detach()
        return total_K

    def _batch(self, run: Progress) -> Tensor:
        first, count = run.sequences
        return torch.from_numpy(
            self._store.train_batch(
                seed=run.spec.seed, first_sequence=first, num_sequences=count, seq_len=self.shape.seq_len
            )
        )

    def _zeros(self) -> Tensor:
        return torch.zeros(self._num_sequences, self.shape.seq_len + 1, dtype=torch.int64)

    @torch.no_grad()
    def _validate(self) -> list[float]:
        """Validation loss of every slot, [K] nats, on the same windows for all."""
        held_BT = validation_ids(self._store, self.shape.seq_len)
        total_K = torch.zeros(len(self._slots), dtype=torch.float64)
        for part_BT in torch.split(held_BT, self._part_sequences):
            ids_KBT = part_BT.expand(len(self._slots), -1, -1)
            loss_K = token_loss(self.predict(ids_KBT[..., :-1]), ids_KBT[..., 1:])
            total_K += loss_K.double() * len(part_BT)
        return (total_K / len(held_BT)).tolist()

    def _set_forward(self) -> None:
        numbers = [_EMPTY if slot is None else slot.forward for slot in self._slots]
        self._forward = stack_forward_numbers(numbers, self._dtype)
