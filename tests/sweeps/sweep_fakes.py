"""Runs and hosts that cost nothing: losses follow from the spec, faults from a script."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import time
from pathlib import Path

from proxies.core import canon
from proxies.core.hyperparameters import Hparams
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import Curve, Numerics, RunResult, RunSpec
from sweeps.run.pool import Finished, HostAnswer

CLIFF_LOG2_LR = -5.5
STEPS_PER_CALL = 3


def make_spec(
    *, log2_lr: float = -8.0, seed: int = 0, width: int = 32, num_steps: int = 4, num_slots: int = 3
):
    shape = Shape(
        num_layers=1,
        width=width,
        num_heads=2,
        num_kv_heads=2,
        ffn_width=64,
        vocab_size=256,
        seq_len=8,
    )
    return RunSpec(
        optimizer="adamw",
        shape=shape,
        base_shape=shape,
        parametrization=named("mup"),
        hparams=Hparams(learning_rate=2.0**log2_lr),
        schedule=Schedule(kind="cosine", num_steps=num_steps),
        batch_tokens=16,
        data_id="toy",
        seed=seed,
        numerics=Numerics(num_slots=num_slots),
    )


def make_run(point: dict, **more) -> RunSpec:
    """The run of a search's point."""
    return make_spec(log2_lr=math.log2(point["learning_rate"]), **more)


def make_specs(num: int, **kwargs) -> list[RunSpec]:
    return [make_spec(seed=seed, **kwargs) for seed in range(num)]


def bank_key(spec: RunSpec) -> str:
    return f"width {spec.shape.width}"


def num_slots(spec: RunSpec) -> int:
    return spec.numerics.num_slots


def curve_of(spec: RunSpec, num_steps: int) -> Curve:
    """Its first steps: where the end is lower, so is the way there, but for some noise."""
    log2_lr = math.log2(spec.hparams.learning_rate)
    losses = tuple(
        3.0 + 0.02 * (log2_lr + 6.0) ** 2 + 3.0 / step + 0.3 * math.sin(7.0 * log2_lr + step)
        for step in range(1, num_steps + 1)
    )
    return Curve(
        steps=tuple(range(1, num_steps + 1)),
        train_loss_nats=losses,
        grad_norm=(1.0 + spec.seed,) * num_steps,
    )


def pruned_outcome(
    spec: RunSpec, num_steps: int, reason: str = "looked at"
) -> tuple[RunResult, Curve]:
    """What its first steps give."""
    curve = curve_of(spec, num_steps)
    result = RunResult(
        id=spec.id,
        status="pruned",
        loss_nats=None,
        num_steps=num_steps,
        tokens=num_steps,
        last_train_loss_nats=curve.train_loss_nats[-1],
        curve_id=canon.content_id(curve),
        flops=0.5,
        seconds=0.25,
        environment={},
        reason=reason,
    )
    return result, curve


def outcome(spec: RunSpec) -> tuple[RunResult, Curve]:
    """What the run of `spec` gives, wherever and whenever."""
    log2_lr = math.log2(spec.hparams.learning_rate)
    diverged = log2_lr > CLIFF_LOG2_LR
    loss = None if diverged else 2.0 + 0.02 * (log2_lr + 6.0) ** 2 + 1e-4 * spec.seed
    curve = curve_of(spec, spec.schedule.num_steps)
    result = RunResult(
        id=spec.id,
        status="diverged" if diverged else "finished",
        loss_nats=loss,
        num_steps=spec.schedule.num_steps,
        last_train_loss_nats=curve.train_loss_nats[-1],
        curve_id=canon.content_id(curve),
        flops=1.0,
        tokens=spec.num_tokens,
        seconds=0.5,
        environment={},
        reason="loss above the cliff" if diverged else "",
    )
    return result, curve


def finished(slot: int, spec: RunSpec) -> Finished:
    result, curve = outcome(spec)
    return Finished(slot=slot, result=canon.to_json(result), curve=canon.to_json(curve))


@dataclasses.dataclass
class FakeHost:
    """A bank of counters. Executions are noted in `diary` (one line per begin and end), faults come
    from `fault`: `crash SEED` kills the process once, `segfault SEED` by its own signal, `raise
    SEED`, `nan SEED`, `hang SEED`, `deaf SEED` does not wait where it is to be looked at.
    """

    diary: Path
    fault: str = ""
    step_seconds: float = 0.0
    bank_key: str = ""
    slots: dict = dataclasses.field(default_factory=dict)
    may_go_on: bool = False

    def advance(self, call):
        if call.ahead:
            if not self.may_go_on:
                return HostAnswer(
                    steps={slot: step for slot, (_, step) in self.slots.items()}, skipped=True
                )
            call = dataclasses.replace(self.last, admit=())
        self.may_go_on, self.last = False, call
        answer = self._advance(call)
        self.may_go_on = not answer.needs_reply
        return answer

    def _advance(self, call):
        if call.bank_key != self.bank_key:
            self.bank_key, self.slots = call.bank_key, {}
        for slot in self.slots.keys() - (call.hold.keys() - {slot for slot, _ in call.admit}):
            self._note("evict", self.slots.pop(slot)[0])
        for slot, data in call.admit:
            assert slot not in self.slots and slot < call.num_slots, (
                "admitted into an occupied slot"
            )
            self.slots[slot] = [canon.decode(RunSpec, data), 0]
            self._note("begin", self.slots[slot][0])
        done = []
        for _ in range(STEPS_PER_CALL if call.seconds else 0):
            if self._waiting(call):
                break
            time.sleep(self.step_seconds)
            for slot, held in sorted(self.slots.items()):
                held[1] += 1
                self._inject(held[0])
                if held[1] >= held[0].schedule.num_steps:
                    done.append(self._end(slot))
            if done:
                break
        if call.save:
            for spec, _ in self.slots.values():
                self._note("save", spec)
        paused = []
        for slot in self._waiting(call):
            result, curve = pruned_outcome(self.slots[slot][0], call.hold[slot])
            paused.append(
                Finished(slot=slot, result=canon.to_json(result), curve=canon.to_json(curve))
            )
        steps = {slot: step for slot, (_, step) in self.slots.items()}
        return HostAnswer(finished=tuple(done), steps=steps, paused=tuple(paused))

    def _waiting(self, call):
        """Slots whose runs are where they are to be looked at."""
        pauses = {slot: call.hold.get(slot) for slot in self.slots}
        return [
            slot
            for slot, (spec, step) in sorted(self.slots.items())
            if pauses[slot] is not None
            and step >= pauses[slot]
            and self.fault != f"deaf {spec.seed}"
        ]

    def _end(self, slot):
        spec, _ = self.slots.pop(slot)
        self._note("end", spec)
        end = finished(slot, spec)
        if self.fault == f"nan {spec.seed}":
            end.result["loss_nats"] = math.nan
        return end

    def _inject(self, spec):
        kind, _, seed = self.fault.partition(" ")
        if not kind or spec.seed != int(seed):
            return
        fuse = self.diary.with_suffix(".fuse")
        if kind == "crash" and not fuse.exists():
            fuse.touch()
            os._exit(1)
        if kind == "segfault":
            ctypes.string_at(0)
        if kind == "raise":
            raise ValueError("the corpus is not there")
        if kind == "hang" and not fuse.exists():
            fuse.touch()
            time.sleep(3600)

    def _note(self, what, spec):
        with self.diary.open("a") as file:
            file.write(f"{what} {spec.id}\n")


@dataclasses.dataclass(frozen=True)
class FakeHostFactory:
    diary: str
    fault: str = ""
    step_seconds: float = 0.0

    def __call__(self) -> FakeHost:
        return FakeHost(Path(self.diary), self.fault, self.step_seconds)


def executions(diary: Path, what: str = "end") -> list[str]:
    """Run ids as noted, in order."""
    if not diary.exists():
        return []
    return [
        line.split()[1] for line in diary.read_text().splitlines() if line.startswith(what + " ")
    ]
