"""One trial alone: our decoder or a user's own model, at any size that a device holds.

The bank's interface with one slot, and what a batched model cannot do: gradient accumulation,
activation checkpointing, `torch.compile`, batch warmup. The same trial in a bank gives the same
curve up to rounding. On a CPU a run repeats bit by bit; on a GPU up to the order of its atomic
additions.
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
    progress: RunProgress
    built: BuiltModel
    optimizer: torch.optim.Optimizer
    rates: tuple[ParameterNumbers, ...]
    """One per group of the optimizer."""
    lost: Tensor | None = None
    """float32 scalar, 1 from the first step whose loss or gradient was not finite: the optimizer
    then changes nothing.
    None: it cannot be told so, and the host decides about every update."""


class Solo:
    """One slot for one run at a time.

    Args:
        store: the corpus.
        diverged_above_nats: over ln(vocabulary), the loss at which a run past its warmup has
            diverged.
        build: makes the model of a run that names a factory.
        device: where to train; None: the GPU if there is one.
        compile_backend: of `torch.compile`, for runs whose numerics ask for it.
        num_microbatches: least number of passes that a batch is split into: the same up to
            rounding.
        steps_ahead: steps begun before a step's report is read (`proxies.training.step_loop`);
            None: one on a GPU.

    Attributes:
        noise: takes the gradient noise of the run, where somebody puts it there; a user's own model
            has none, for it may change as it computes.
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
        """Start a run from its own initial weights, or go on from a `state` of it.

        Raises:
            ValueError: the slot is taken or is not slot 0, the run is of another corpus, or a built
                model's numbers are not those of its parameters.
            StateError: the state is not one of this run; the slot is free.
        """
        self._refuse(index, spec)
        keep_freed_memory()
        if spec.numerics.compiled or (spec.factory is not None and self.device.type == "cuda"):
            # of a model before this one: compiled, it lies in a circle, and holds its memory till
            # then
            gc.collect()
        numerics = spec.numerics
        set_arithmetic(numerics)
        build = our_model if spec.factory is None else self._build
        assert build is not None, "a factory's model has nobody to build it"
        built = build(spec)
        module = built.module.train().to(self.device, PRECISIONS[numerics.dtype].weights)
        parameters = dict(module.named_parameters())
        if unlike := sorted(parameters.keys() ^ {n.name for n in built.numbers}):
            raise ValueError(
                f"the model's parameters and their numbers differ in {', '.join(unlike)}"
            )
        if numerics.compiled:
            self._compile(module, whole=spec.factory is None)
        groups = grouped(built.numbers, parameters)
        trial = _Trial(
            progress=RunProgress(spec, num_microbatches=self._num_microbatches),
            built=built,
            optimizer=torch_optimizer(spec.optimizer, groups, fused=self._steps_ahead > 0),
            rates=tuple(rates for rates, _ in groups),
        )
        lost = torch.zeros((), dtype=torch.float32, device=self.device)
        trial.lost = lost if skips_on(trial.optimizer, lost) else None
        if state is not None:
            trial.progress = self._restored(trial, state)
        self._trial = trial

    def _restored(self, trial: _Trial, state: SlotState) -> RunProgress:
        """Put a fresh trial where `state` was taken. Raises StateError."""
        own = _tensors(trial)
        moments = {
            name: tensor for name, tensor in state.tensors.items() if name.startswith(MOMENTS)
        }
        run = resumed(trial.progress.spec, state, {**own, **moments}, self._num_microbatches)
        try:
            restore_moments(trial.optimizer, dict(trial.built.module.named_parameters()), moments)
        except ValueError as error:
            raise StateError(str(error)) from error
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state.tensors[name])
        return run

    def state(self, index: int) -> SlotState:
        """What the run in the slot can go on from."""
        trial = self._held()
        parameters = dict(trial.built.module.named_parameters())
        return captured(
            trial.progress,
            self.device,
            {**_tensors(trial), **moments_of(trial.optimizer, parameters)},
        )

    @property
    def steps(self) -> dict[int, int]:
        """Optimizer steps done, by occupied slot."""
        return {} if self._trial is None else {0: self._trial.progress.step}

    @property
    def environment(self) -> dict[str, str]:
        """What this engine's arithmetic depends on besides the spec."""
        return environment(self.device)

    def _refuse(self, index: int, spec: RunSpec) -> None:
        manifest = self._store.manifest
        refusals = {
            f"slot {index} is taken": index == 0 and self._trial is None,
            f"run {spec.id[:12]} uses another corpus": spec.data_id == manifest.data_id,
            (
                f"vocab_size = {spec.shape.vocab_size} is smaller than the corpus's "
                f"{manifest.vocab_size}"
            ): (spec.shape.vocab_size >= manifest.vocab_size),
        }
        if problems := [problem for problem, holds in refusals.items() if not holds]:
            raise ValueError("; ".join(problems))

    def _compile(self, module: nn.Module, *, whole: bool) -> None:
        # Past a limit on recompilations torch would quietly run uncompiled. A new trial is a new
        # model, and what was compiled for the last one must not count against it.
        fail_past_recompile_limit()
        torch.compiler.reset()
        module.compile(backend=self._compile_backend, fullgraph=whole)

    def evict(self, index: int) -> None:
        """Free the slot, whatever it is doing."""
        self._trial = None

    def pause_at(self, index: int, step: int | None) -> None:
        """Have `advance` do nothing while the run has done `step` steps or more; None: go on."""
        self._held().progress.pause_step = step

    def pruned(self, index: int, num_steps: int, reason: str) -> tuple[RunResult, Curve]:
        """The outcome of the run if it is given up as it was after `num_steps`; nothing changes
        here.
        """
        return self._held().progress.pruned(num_steps, reason, self.device)

    @property
    def free_slots(self) -> list[int]:
        """[0], or nothing while a run is in it."""
        return [] if self._trial else [0]

    @property
    def model(self) -> nn.Module:
        """The run's module.

        Raises:
            ValueError: the slot is empty.
        """
        return self._held().built.module

    def _held(self) -> _Trial:
        if self._trial is None:
            raise ValueError("no run is admitted")
        return self._trial

    def predict(self, ids_BT: Tensor) -> Tensor:
        """Logits [N, V] of token ids [B, T], in the arithmetic of training.

        Raises:
            ValueError: the slot is empty.
        """
        return self._logits(self._held(), ids_BT.to(self.device))

    def _logits(self, trial: _Trial, ids_BT: Tensor) -> Tensor:
        with self._arithmetic(trial):
            return trial.built(ids_BT)

    def _arithmetic(self, trial: _Trial) -> torch.autocast:
        """Of a user's own model: what it would cast where, nobody but torch.autocast knows. Ours
        casts by itself.
        """
        own = not isinstance(trial.built, DecoderModel)
        bfloat16 = trial.progress.spec.numerics.dtype == "bfloat16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=own and bfloat16)

    def advance(self, num_steps: int, seconds: float = math.inf) -> list[Ended]:
        """Up to `num_steps` optimizer steps, none begun after `seconds`; returns early, with (0,
        result, curve), when the run ends.
        """
        if (trial := self._trial) is None:
            return []
        self._lap_began = time.perf_counter()
        return run_steps(
            num_steps,
            seconds,
            self._steps_ahead,
            may_begin=trial.progress.goes_on,
            alone=lambda ahead: self._looks(trial, trial.progress.step + ahead),
            begin=lambda ahead: self._begin(trial, trial.progress.step + ahead),
            settle=lambda report: self._settle(trial, report),
        )

    def _looks(self, trial: _Trial, step: int) -> bool:
        """Whether the gradient noise is looked at before update `step`."""
        ours = isinstance(trial.built, DecoderModel)
        return (
            ours
            and self.noise is not None
            and self.noise.due(trial.progress.spec, step, self._num_microbatches) > 0
        )

    def _begin(self, trial: _Trial, step: int) -> StepReport:
        """Make update `step`, if its batch's loss in nats per token and gradient's norm, reported,
        are finite.
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
        if trial.lost is not None:
            torch.maximum(trial.lost, 1 - values_2.isfinite().all().float(), out=trial.lost)
            _update(trial, step, norm)
        elif all(map(math.isfinite, report.read())):
            _update(trial, step, norm)
        return report

    def _settle(self, trial: _Trial, report: StepReport) -> list[Ended]:
        """Read a step; the run's outcome, if it ends there."""
        if self._trial is not trial:
            return []  # it ended in the step before
        run = trial.progress
        loss_nats, grad_norm = report.read()
        reason = run.record(loss_nats, grad_norm, self._diverged_above_nats)
        done = not reason and run.finished
        validation_nats = self._validation_loss(trial) if done else math.nan
        began, self._lap_began = self._lap_began, time.perf_counter()
        run.seconds += self._lap_began - began
        if not (reason or done):
            return []
        self.evict(0)
        return [(0, *run.outcome(reason, validation_nats, self.device))]

    def _forward_backward(self, trial: _Trial, step: int) -> tuple[Tensor, Tensor]:
        """The batch's loss in nats per token and its gradient's norm; the gradients are left in the
        parameters.
        """
        ids_BT = to_device(batch_of(self._store, trial.progress.spec, step), self.device)
        trial.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part_BT in torch.split(
            ids_BT, trial.progress.spec.pass_sequences(self._num_microbatches)
        ):
            # The mean over the whole batch is the parts' means weighted by their tokens.
            loss = self._loss(trial, part_BT) * (len(part_BT) / len(ids_BT))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        gradients = [p.grad for p in trial.built.module.parameters() if p.grad is not None]
        return total, torch.nn.utils.get_total_norm(gradients)

    def _loss(self, trial: _Trial, ids_BT: Tensor) -> Tensor:
        if isinstance(trial.built, DecoderModel):
            return trial.built.loss(ids_BT[:, :-1], ids_BT[:, 1:])
        weights = loss_weights(trial.progress.spec.hparams.run_wide)
        return token_loss(self._logits(trial, ids_BT[:, :-1]), ids_BT[:, 1:], weights)

    @torch.no_grad()
    def _validation_loss(self, trial: _Trial) -> float:
        spec, module = trial.progress.spec, trial.built.module.eval()
        held_BT = validation_ids(self._store, spec.shape.seq_len).to(self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part_BT in torch.split(held_BT, spec.pass_sequences(self._num_microbatches)):
            total += self._loss(trial, part_BT).double() * len(part_BT)
        module.train()
        return total.item() / len(held_BT)


def _tensors(trial: _Trial) -> dict[str, Tensor]:
    """The module's parameters and buffers by name, as they are."""
    module = trial.built.module
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _update(trial: _Trial, step: int, norm: Tensor) -> None:
    """Clip by the norm and step, every group at its peak rate times the schedule's share."""
    spec = trial.progress.spec
    clip_gradients(trial.built.module.parameters(), spec.hparams, norm)
    set_rates(trial.optimizer, trial.rates, lr_multiplier(spec.schedule, step))
    trial.optimizer.step()
