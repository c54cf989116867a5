"""Fake runs and fake hosts.

The loss of a fake run follows from its spec. A host is the part of a worker that trains runs; a
fake host trains nothing, and its fault is given by a name and a seed.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import math
import os
import time
from pathlib import Path

from forerun._proxies.core import canon
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Curve, EndedRun, Numerics, RunResult, RunSpec
from forerun._sweeps.run.pool import Report

CLIFF_LOG2_LR = -5.5
"""Base-2 logarithm of the learning rate above which a fake run diverges."""
STEPS_PER_CALL = 3
"""Maximum number of steps that a fake host makes in one call."""


def make_spec(
    *,
    log2_lr: float = -8.0,
    seed: int = 0,
    width: int = 32,
    num_steps: int = 4,
    num_slots: int = 3,
) -> RunSpec:
    """Return a small run; its fake outcome depends on the learning rate and the seed."""
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
        parametrization=get_parametrization("mup"),
        hparams=Hparams(learning_rate=2.0**log2_lr),
        schedule=Schedule(kind="cosine", num_steps=num_steps),
        batch_tokens=16,
        data_id="toy",
        seed=seed,
        numerics=Numerics(num_slots=num_slots),
    )


def make_run(point: dict, **more) -> RunSpec:
    """Return the run of a search's point."""
    return make_spec(log2_lr=math.log2(point["learning_rate"]), **more)


def make_specs(num: int, **kwargs) -> list[RunSpec]:
    """Return runs that differ in their seeds only."""
    return [make_spec(seed=seed, **kwargs) for seed in range(num)]


def get_bank_key(spec: RunSpec) -> str:
    """Return the key of a run's bank. Runs with one key may train together as one batched model."""
    return f"width {spec.shape.width}"


def make_curve(spec: RunSpec, num_steps: int) -> Curve:
    """Return the curve of a run's first steps, which is lower where the final loss is lower, except
    for some noise.
    """
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


def make_pruned_outcome(
    spec: RunSpec, num_steps: int, reason: str = "looked at"
) -> tuple[RunResult, Curve]:
    """Return the result and curve of a run that was stopped after `num_steps`."""
    curve = make_curve(spec, num_steps)
    result = RunResult(
        id=spec.id,
        status="pruned",
        loss_nats=None,
        num_steps=num_steps,
        tokens=num_steps,
        last_train_loss_nats=curve.train_loss_nats[-1],
        curve_id=canon.compute_content_id(curve),
        flops=0.5,
        seconds=0.25,
        environment={},
        reason=reason,
    )
    return result, curve


def make_outcome(spec: RunSpec) -> tuple[RunResult, Curve]:
    """Return the result and curve of a run, the same wherever and whenever it is trained."""
    log2_lr = math.log2(spec.hparams.learning_rate)
    diverged = log2_lr > CLIFF_LOG2_LR
    loss = None if diverged else 2.0 + 0.02 * (log2_lr + 6.0) ** 2 + 1e-4 * spec.seed
    curve = make_curve(spec, spec.schedule.num_steps)
    result = RunResult(
        id=spec.id,
        status="diverged" if diverged else "finished",
        loss_nats=loss,
        num_steps=spec.schedule.num_steps,
        last_train_loss_nats=curve.train_loss_nats[-1],
        curve_id=canon.compute_content_id(curve),
        flops=1.0,
        tokens=spec.num_tokens,
        seconds=0.5,
        environment={},
        reason="loss above the cliff" if diverged else "",
    )
    return result, curve


def make_ended_run(slot: int, spec: RunSpec) -> EndedRun:
    """Return a finished run as a host reports it."""
    return EndedRun(slot, *make_outcome(spec))


def spoil_loss(ended: EndedRun) -> EndedRun:
    """Return the run with a loss that no check admits; unpickling runs no checks."""
    result = copy.copy(ended.result)
    object.__setattr__(result, "loss_nats", math.nan)
    return ended._replace(result=result)


@dataclasses.dataclass
class FakeHost:
    """A host that trains nothing: in each of its slots, it counts the steps of one run.

    The host writes into `diary`, one per line, the runs that it begins, ends, saves and evicts.
    `fault` names a fault and the seed of the run that has it:

        crash SEED     the process exits, once
        segfault SEED  the process dies by a signal, every time
        raise SEED     training raises an error
        nan SEED       the result has an invalid loss
        hang SEED      a step takes an hour, once
        deaf SEED      the run does not pause where it should

    A fault that strikes once leaves a file next to the diary, `.fuse`, which prevents it from
    striking again, also in a new process.
    """

    diary: Path
    fault: str = ""
    step_seconds: float = 0.0
    bank_key: str = ""
    slots: dict = dataclasses.field(default_factory=dict)
    """Slot -> [spec, steps done]."""
    may_continue: bool = False
    """Whether a call that was sent ahead may continue the last one."""

    def advance(self, call):
        """See `forerun._sweeps.run.pool.Host`."""
        if call.is_ahead:
            if not self.may_continue:
                return Report(
                    steps={slot: step for slot, (_, step) in self.slots.items()}, skipped=True
                )
            call = dataclasses.replace(self.last, admit=())
        self.may_continue, self.last = False, call
        answer = self._advance(call)
        self.may_continue = not answer.needs_reply
        return answer

    def _advance(self, call):
        """Carry out a call that is not ahead."""
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
            if self._list_paused(call):
                break
            time.sleep(self.step_seconds)
            for slot, spec_and_step in sorted(self.slots.items()):
                spec_and_step[1] += 1
                spec, step = spec_and_step
                self._inject_fault(spec)
                if step >= spec.schedule.num_steps:
                    done.append(self._end(slot))
            if done:
                break
        if call.save:
            for spec, _ in self.slots.values():
                self._note("save", spec)
        paused = [
            EndedRun(slot, *make_pruned_outcome(self.slots[slot][0], call.hold[slot]))
            for slot in self._list_paused(call)
        ]
        steps = {slot: step for slot, (_, step) in self.slots.items()}
        return Report(finished=tuple(done), steps=steps, paused=tuple(paused))

    def _list_paused(self, call):
        """Return the slots whose runs have reached the step at which they must pause."""
        pauses = {slot: call.hold.get(slot) for slot in self.slots}
        return [
            slot
            for slot, (spec, step) in sorted(self.slots.items())
            if pauses[slot] is not None
            and step >= pauses[slot]
            and self.fault != f"deaf {spec.seed}"
        ]

    def _end(self, slot):
        """Take a run that is done out of its slot, and return its outcome."""
        spec, _ = self.slots.pop(slot)
        self._note("end", spec)
        ended = make_ended_run(slot, spec)
        return spoil_loss(ended) if self.fault == f"nan {spec.seed}" else ended

    def _inject_fault(self, spec):
        """Let the host's fault strike if it is due at a step of this run."""
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

    def _note(self, event, spec):
        with self.diary.open("a") as file:
            file.write(f"{event} {spec.id}\n")


@dataclasses.dataclass(frozen=True)
class FakeHostFactory:
    """A function that makes fake hosts, and can be pickled."""

    diary: str
    fault: str = ""
    step_seconds: float = 0.0

    def __call__(self) -> FakeHost:
        return FakeHost(Path(self.diary), self.fault, self.step_seconds)


def list_executions(diary: Path, event: str = "end") -> list[str]:
    """Return the ids of the runs that the diary notes for this kind of event, in order."""
    if not diary.exists():
        return []
    return [
        line.split()[1] for line in diary.read_text().splitlines() if line.startswith(event + " ")
    ]
