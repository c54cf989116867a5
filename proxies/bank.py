"""A bank: K trials of one shape trained as one batched model, a slot refilled as its trial ends.

Slots share the shape, batch and numerics; each has its own parametrization, hyperparameters, schedule, seed and step
counter. Every operation works row by row, so a slot's curve is bitwise the same whatever its neighbours are, at one K
(empty slots compute zeros). A diverging slot is stopped as data and cleared.
"""

from __future__ import annotations

import math
import platform
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from proxies import canon, flops
from proxies.model import Decoder, token_loss
from proxies.numbers import ForwardNumbers
from proxies.optimizer import BankAdamW
from proxies.parametrization import (
    forward_numbers,
    initial_tensor,
    parameter_table,
    stack_forward_numbers,
)
from proxies.schedule import lr_multiplier
from proxies.spec import Curve, Numerics, RunResult, RunSpec, Shape
from proxies.tokens import TokenStore

VALIDATION_SEQUENCES = 256
DIVERGED_ABOVE_NATS = 1.0
"""Over ln(vocabulary), the loss of knowing nothing, a run past its warmup counts as diverged."""

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_EMPTY = ForwardNumbers(embedding=0.0, attention=0.0, output=0.0)


@dataclass(slots=True)
class _Slot:
    spec: RunSpec
    forward: ForwardNumbers
    step: int = 0
    seconds: float = 0.0
    losses_nats: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)


def environment() -> dict[str, str]:
    """What arithmetic depends on besides the spec."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "device": "cpu",
    }


class Bank:
    """K slots for runs of one bank key.

    Raises:
        ValueError: the vocabulary of the corpus does not fit the shape, or `numerics` asks for bfloat16 on a CPU.
    """

    def __init__(
        self,
        shape: Shape,
        batch_tokens: int,
        numerics: Numerics,
        store: TokenStore,
        *,
        diverged_above_nats: float = DIVERGED_ABOVE_NATS,
    ) -> None:
        if numerics.dtype not in _DTYPES:
            raise ValueError(f"dtype = {numerics.dtype!r}: a CPU bank trains in {' or '.join(_DTYPES)}")
        if store.manifest.vocab_size > shape.vocab_size:
            raise ValueError(
                f"vocab_size = {shape.vocab_size} is smaller than the corpus's {store.manifest.vocab_size}"
            )
        torch.set_num_threads(numerics.num_threads)
        torch.set_float32_matmul_precision(numerics.matmul_precision)
        self.shape, self.numerics, self._store = shape, numerics, store
        self._ceiling_nats = math.log(shape.vocab_size) + diverged_above_nats
        self._num_sequences = batch_tokens // shape.seq_len
        self._dtype = _DTYPES[numerics.dtype]
        num_slots = numerics.num_slots
        self.model = Decoder(shape, num_trials=num_slots)
        self.optimizer = BankAdamW(self.model, num_slots, self._dtype)
        self._slots: list[_Slot | None] = [None] * num_slots
        self._set_forward()

    def admit(self, index: int, spec: RunSpec) -> None:
        """Start a run from its own initial weights in a free slot.

        Raises:
            ValueError: the slot is taken, or the run belongs to another bank.
        """
        if self._slots[index] is not None:
            raise ValueError(f"slot {index} is taken")
        mine = (self.shape, self._num_sequences, self.numerics, self._store.manifest.data_id)
        if (spec.shape, spec.batch_sequences, spec.numerics, spec.data_id) != mine:
            raise ValueError(f"run {spec.id[:12]} belongs to another bank: shape, batch, numerics or data differ")
        numbers = parameter_table(spec.parametrization, spec.shape, spec.base_shape, spec.hparams)
        weights = {parameter.name: initial_tensor(parameter, spec.seed) for parameter in numbers}
        self.optimizer.admit(index, numbers, weights, spec.hparams)
        forward = forward_numbers(spec.parametrization, spec.shape, spec.base_shape, spec.hparams)
        self._slots[index] = _Slot(spec=spec, forward=forward)
        self._set_forward()

    def evict(self, index: int) -> None:
        """Free a slot, whatever it is doing."""
        self.optimizer.clear(index)
        self._slots[index] = None
        self._set_forward()

    def predict(self, ids_KBT: Tensor) -> Tensor:
        """Logits of every slot's model, [K, N, V], for token ids [K, B, T]."""
        logits_KNV: Tensor = self.model(ids_KBT, self._forward)
        return logits_KNV

    @property
    def free_slots(self) -> list[int]:
        """Indices of the empty slots."""
        return [i for i, slot in enumerate(self._slots) if slot is None]

    def advance(self, num_steps: int) -> list[tuple[int, RunResult, Curve]]:
        """Up to `num_steps` optimizer steps; returns early, with (slot, result, curve), when runs end."""
        ended: list[tuple[int, RunResult, Curve]] = []
        for _ in range(num_steps):
            if ended or not any(self._slots):
                break
            ended = self._advance_once()
        return ended

    def _advance_once(self) -> list[tuple[int, RunResult, Curve]]:
        started = time.perf_counter()
        losses_K = self._forward_backward()
        busy = [(i, slot) for i, slot in enumerate(self._slots) if slot is not None]
        norms_K = self.optimizer.gather_gradients()
        finite_K = (losses_K.isfinite() & norms_K.isfinite()).tolist()
        multiplier_K1 = torch.zeros(len(self._slots), 1, dtype=self._dtype)
        active_K1 = torch.zeros(len(self._slots), 1, dtype=torch.bool)
        for i, slot in busy:
            multiplier_K1[i] = lr_multiplier(slot.spec.schedule, slot.step)
            active_K1[i] = finite_K[i]
        self.optimizer.step(multiplier_K1, active_K1, norms_K[:, None])
        losses, norms = losses_K.tolist(), norms_K.tolist()
        for i, slot in busy:
            if finite_K[i]:
                slot.losses_nats.append(losses[i])
                slot.grad_norms.append(norms[i])
                slot.step += 1
        trouble = {i: reason for i, slot in busy if (reason := self._diverged(slot, finite_K[i]))}
        done = [i for i, slot in busy if i not in trouble and slot.step == slot.spec.schedule.num_steps]
        validation = self._validate() if done else []
        spent = (time.perf_counter() - started) / len(busy)
        ended = []
        for i, slot in busy:
            slot.seconds += spent
            if i in trouble or i in done:
                ended.append((i, *_outcome(slot, trouble.get(i, ""), validation[i] if i in done else math.nan)))
                self.evict(i)
        return ended

    def _forward_backward(self) -> Tensor:
        batches = [
            self._zeros()
            if slot is None
            else torch.from_numpy(
                self._store.train_batch(
                    seed=slot.spec.seed,
                    step=slot.step,
                    num_sequences=self._num_sequences,
                    seq_len=self.shape.seq_len,
                )
            )
            for slot in self._slots
        ]
        ids_KBT = torch.stack(batches)
        losses_K = token_loss(self.predict(ids_KBT[..., :-1]), ids_KBT[..., 1:])
        # The gradient of a sum of independent losses is each one's own.
        losses_K.sum().backward()  # type: ignore[no-untyped-call]
        return losses_K.detach()

    def _zeros(self) -> Tensor:
        return torch.zeros(self._num_sequences, self.shape.seq_len + 1, dtype=torch.int64)

    @torch.no_grad()
    def _validate(self) -> list[float]:
        """Validation loss of every slot, [K] nats, on the same windows for all."""
        num_sequences = min(VALIDATION_SEQUENCES, self._store.num_windows("validation", self.shape.seq_len))
        held_BT = torch.from_numpy(
            self._store.validation_batch(num_sequences=num_sequences, seq_len=self.shape.seq_len)
        )
        total_K = torch.zeros(len(self._slots), dtype=torch.float64)
        for part_BT in torch.split(held_BT, self._num_sequences):
            ids_KBT = part_BT.expand(len(self._slots), -1, -1)
            loss_K = token_loss(self.predict(ids_KBT[..., :-1]), ids_KBT[..., 1:])
            total_K += loss_K.double() * len(part_BT)
        return (total_K / num_sequences).tolist()

    def _diverged(self, slot: _Slot, finite: bool) -> str:
        if not finite:
            return f"loss or gradient not finite at step {slot.step + 1}"
        loss, ceiling = slot.losses_nats[-1], self._ceiling_nats
        if slot.step > slot.spec.schedule.warmup_steps + 1 and loss > ceiling:
            return f"loss {loss:.3f} over {ceiling:.3f} nats, that of knowing nothing and more, at step {slot.step}"
        return ""

    def _set_forward(self) -> None:
        numbers = [_EMPTY if slot is None else slot.forward for slot in self._slots]
        self._forward = stack_forward_numbers(numbers, self._dtype)


def _outcome(slot: _Slot, reason: str, validation_nats: float) -> tuple[RunResult, Curve]:
    spec = slot.spec
    if not reason and not math.isfinite(validation_nats):
        reason = "validation loss not finite"
    curve = Curve(
        steps=tuple(range(1, slot.step + 1)),
        train_loss_nats=tuple(slot.losses_nats),
        grad_norm=tuple(slot.grad_norms),
    )
    tokens = slot.step * spec.batch_tokens
    result = RunResult(
        id=spec.id,
        status="diverged" if reason else "finished",
        loss_nats=None if reason else validation_nats,
        num_steps=slot.step,
        last_train_loss_nats=slot.losses_nats[-1] if slot.losses_nats else None,
        curve_id=canon.content_id(curve),
        flops=float(flops.flops_per_token(spec.shape)) * tokens,
        tokens=tokens,
        seconds=slot.seconds,
        environment=environment(),
        reason=reason,
    )
    return result, curve
