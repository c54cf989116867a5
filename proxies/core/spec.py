"""The language of the project: what a run is, and what came of it. Standard library only.

Every record is frozen, keyword-only and slotted, validates itself on creation (all problems at
once), and has a canonical JSON form (`proxies.core.canon`). A run's identity is the sha256 of its
spec: nothing is paid for twice.

Units: losses in nats per token, batches in tokens, durations in optimizer steps, learning rates
absolute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from proxies.core import canon
from proxies.core.checks import Checks
from proxies.core.flops import flops_per_token
from proxies.core.hyperparameters import Hparams
from proxies.core.optimizers import RECIPES, RecipeName
from proxies.core.powers import Ratios
from proxies.core.programs import Command, Factory
from proxies.core.rules import Parametrization, refusals
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape

Status = Literal["finished", "diverged", "pruned", "failed"]
Dtype = Literal["float32", "float64", "bfloat16"]
Precision = Literal["float32", "bfloat16"]
MatmulPrecision = Literal["highest", "high", "medium"]
"""Of products in a main run."""

MAX_SEED = 2**31 - 1
DIVERGED_ABOVE_NATS = 1.0
"""A run past its warmup counts as diverged when its loss is this far above ln(vocabulary), that of
a uniform guess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """How the arithmetic is done. Part of a run's identity: other numerics are another run."""

    dtype: Dtype = "float32"
    """`bfloat16`: weights, gradients' sums and moments stay float32, all else is as the main run
    has it, the residual stream too (`proxies.model.precision`). A user's own model computes under
    autocast."""
    matmul_precision: MatmulPrecision = "highest"
    """`torch.set_float32_matmul_precision`."""
    num_slots: int = 1
    """K, the trials a bank holds at once; a batched product may round differently at another K."""
    num_threads: int = 1
    microbatch_tokens: int | None = None
    """Tokens per forward and backward pass, gradients accumulated; None: the whole batch at
    once."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, a third more time."""
    compiled: bool = False
    """`torch.compile`."""
    cuda_graphs: bool = False
    """A whole step recorded once and replayed: the same arithmetic without its launches. Of a GPU
    alone."""
    fused_loss: bool = False
    """Cross-entropy from hidden states, part by part: a batch's logits are never whole in
    memory."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.one_of("dtype", ("float32", "float64", "bfloat16"))
        checks.one_of("matmul_precision", get_args(MatmulPrecision))
        checks.whole("num_slots", "num_threads")
        if self.microbatch_tokens is not None:
            checks.whole("microbatch_tokens")
        if self.num_slots != 1:
            alone = [
                n for n in ("microbatch_tokens", "activation_checkpointing") if getattr(self, n)
            ]
            checks.that(
                not alone,
                f"num_slots = {self.num_slots}: {', '.join(alone)} needs one trial at a time",
            )
        checks.done()


class _KeepsId:
    """A place for an id once it is known. No field: no part of equality, JSON, copies or
    pickles.
    """

    __slots__ = ("_id",)
    _id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec(_KeepsId):
    """One proxy run, wholly: what it computes follows from this and the data of that id."""

    shape: Shape = field(metadata=canon.SHARED)
    base_shape: Shape = field(metadata=canon.SHARED)
    parametrization: Parametrization = field(metadata=canon.SHARED)
    hparams: Hparams
    schedule: Schedule
    batch_tokens: int
    """Tokens per optimizer step."""
    data_id: str
    seed: int
    numerics: Numerics = field(metadata=canon.SHARED)
    optimizer: RecipeName
    """Name of the recipe that assigns an optimizer to each parameter
    (`proxies.core.optimizers.RECIPES`)."""
    base_batch_tokens: int | None = None
    """The base run's, where the parametrization scales with batch or duration; else None."""
    base_num_tokens: int | None = None
    factory: Factory | None = field(default=None, metadata=canon.SHARED)
    """Builds the model, where it is not `proxies.model.decoder`'s."""
    command: Command | None = field(default=None, metadata=canon.SHARED)
    """Trains, where it is not us who do."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.one_of("optimizer", tuple(RECIPES))
        checks.whole("batch_tokens")
        checks.whole("seed", least=0)
        checks.that(
            type(self.seed) is not int or self.seed <= MAX_SEED, f"seed = {self.seed} > {MAX_SEED}"
        )
        checks.that(bool(self.data_id), "data_id is empty")
        base = (self.base_batch_tokens, self.base_num_tokens)
        if self.parametrization.needs_tokens or self.hparams.needs_tokens:
            checks.whole("base_batch_tokens", "base_num_tokens")
        elif base != (None, None):
            checks.that(
                False, f"base tokens = {base}: {self.parametrization} does not scale with them"
            )
        checks.that(
            self.factory is None or self.command is None,
            "factory and command: give only one of them",
        )
        rule = self.parametrization.muon_rate
        by_shape = self.optimizer in RECIPES and RECIPES[self.optimizer].rates_by_shape
        said = f"optimizer = {self.optimizer!r} with muon_rate = {rule!r}: must fit each other"
        checks.that(by_shape == self.parametrization.rates_by_shape, said)
        own = (
            "a factory's model"
            if self.factory is not None
            else "a command"
            if self.command is not None
            else ""
        )
        several = f"num_slots = {self.numerics.num_slots}: {own} trains one trial at a time"
        checks.that(not own or self.numerics.num_slots == 1, several)
        recomputes = f"activation_checkpointing: {own} must do that itself"
        checks.that(not own or not self.numerics.activation_checkpointing, recomputes)
        if checks.fine:
            self._check_batch(checks)
            fixed = (
                "family",
                "vocab_size",
                "tied",
                "qk_norm",
                *(("seq_len",) if self.shape.family == "gpt2" else ()),
            )
            unlike = [
                name
                for name in fixed
                if getattr(self.shape, name) != getattr(self.base_shape, name)
            ]
            problem = (
                f"shape and base_shape differ in {', '.join(unlike)}: only width and depth "
                "may differ"
            )
            checks.that(not unlike, problem)
        if checks.fine:
            checks.problems += refusals(
                self.parametrization, self.ratios, self.hparams, tied=self.shape.tied
            )
        checks.done()

    def _check_batch(self, checks: Checks) -> None:
        seq_len, stages = self.shape.seq_len, self.schedule.batch_warmup_stages
        checks.that(
            self.batch_tokens % (seq_len * stages) == 0,
            f"batch_tokens = {self.batch_tokens} is not a multiple of seq_len = {seq_len}"
            + (f" times batch_warmup_stages = {stages}" if stages > 1 else ""),
        )
        checks.that(
            stages == 1 or self.numerics.num_slots == 1,
            f"num_slots = {self.numerics.num_slots}: batch warmup needs one trial at a time",
        )
        micro, smallest = self.numerics.microbatch_tokens, self.batch_tokens // stages
        checks.that(
            micro is None or (micro % seq_len == 0 and smallest % micro == 0),
            f"microbatch_tokens = {micro}: must be a multiple of seq_len = {seq_len} that divides "
            f"{smallest}",
        )

    @property
    def id(self) -> str:
        """Content id: sha256 of the canonical JSON; worked out when it is first asked for."""
        try:
            return self._id
        except AttributeError:
            object.__setattr__(self, "_id", canon.content_id(self))
            return self._id

    @property
    def num_tokens(self) -> int:
        """Tokens the run trains on."""
        return int(self.batch_tokens * self.schedule.num_full_batches)

    def tokens_by(self, num_steps: int) -> int:
        """Tokens trained on once so many steps are done."""
        return self.schedule.sequences(num_steps, self.batch_sequences)[0] * self.shape.seq_len

    @property
    def flops(self) -> int:
        """Training FLOPs of the whole run, causal convention (`proxies.core.flops`)."""
        return flops_per_token(self.shape) * self.num_tokens

    @property
    def batch_sequences(self) -> int:
        """Sequences per optimizer step, the batch at its full size."""
        return self.batch_tokens // self.shape.seq_len

    def pass_sequences(self, num_microbatches: int) -> int:
        """Sequences per forward pass, at most, of a batch in so many passes at least."""
        tokens = self.numerics.microbatch_tokens or self.batch_tokens
        return min(-(-self.batch_sequences // num_microbatches), tokens // self.shape.seq_len)

    @property
    def own_values(self) -> dict[str, float | int | str]:
        """What the user's own code gets by name, at this run's size."""
        return {one.name: one.at(self.ratios) for one in self.hparams.own}

    @property
    def ratios(self) -> Ratios:
        """Against the base run."""
        return Ratios(
            width=self.shape.width / self.base_shape.width,
            depth=self.shape.num_layers / self.base_shape.num_layers,
            batch=self.batch_tokens / (self.base_batch_tokens or self.batch_tokens),
            duration=self.num_tokens / (self.base_num_tokens or self.num_tokens),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """What a run logged: one entry per logged step, all of one length."""

    steps: tuple[int, ...]
    """Optimizer steps done, counted from 1."""
    train_loss_nats: tuple[float, ...]
    """Loss of that step's batch, before its update."""
    grad_norm: tuple[float, ...]
    """Global norm before clipping; empty where a trainer logs none."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        lengths = {len(self.steps), len(self.train_loss_nats), len(self.grad_norm or self.steps)}
        checks.that(len(lengths) == 1, f"columns of different lengths: {sorted(lengths)}")
        checks.that(
            list(self.steps) == sorted(set(self.steps)), "steps are not strictly increasing"
        )
        checks.that(
            all(map(math.isfinite, self.train_loss_nats + self.grad_norm)), "a value is not finite"
        )
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What came of a run. `loss_nats` is the validation loss at the end, and only a finished run
    has one.
    """

    id: str
    status: Status
    loss_nats: float | None
    num_steps: int = field(metadata=canon.SHARED)
    """Optimizer steps done."""
    last_train_loss_nats: float | None
    """Last finite training loss; what a diverged run reached."""
    curve_id: str
    """Content id of its `Curve`."""
    flops: float = field(metadata=canon.SHARED)
    """Model FLOPs spent, causal convention (`proxies.core.flops`)."""
    tokens: int = field(metadata=canon.SHARED)
    seconds: float
    """Worker wall-clock time, this run's share of its bank."""
    environment: dict[str, str] = field(metadata=canon.SHARED)
    """Versions and hardware: one object for many results, not to be altered."""
    reason: str = ""
    """Why it is not finished, in a sentence."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.one_of("status", ("finished", "diverged", "pruned", "failed"))
        checks.that(len(self.id) == canon.ID_LENGTH, f"id = {self.id!r} is not a sha256")
        checks.that(
            (self.loss_nats is not None) == (self.status == "finished"),
            f"status = {self.status} with loss_nats = {self.loss_nats}: only a finished run has a "
            "loss",
        )
        for name in ("loss_nats", "last_train_loss_nats"):
            if getattr(self, name) is not None:
                checks.number(name, least=0)
        checks.whole("num_steps", "tokens", least=0)
        checks.number("flops", least=0)
        checks.number("seconds", least=0)
        checks.that(
            self.status == "finished" or bool(self.reason),
            f"status = {self.status} without a reason",
        )
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A spec with its result: what the verdict and the fits read."""

    spec: RunSpec
    result: RunResult

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.that(
            self.spec.id == self.result.id, f"result {self.result.id[:12]} is of another spec"
        )
        checks.done()
        # one text for both: a study has thousands
        object.__setattr__(self.result, "id", self.spec.id)
