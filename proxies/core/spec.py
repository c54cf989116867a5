"""Records of a run: its full specification, its loss curve, and its result.

Every record is frozen, keyword-only, and slotted, validates itself on creation (all problems at
once), and has a canonical JSON form (`forerun._proxies.core.canon`). The identity of a run is the
sha256 of its spec, so that no run is paid for twice.

Units: losses in nats per token, batches in tokens, durations in optimizer steps, absolute learning
rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from forerun._proxies.core import canon
from forerun._proxies.core.checks import Checks
from forerun._proxies.core.flops import compute_flops_per_token
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.optimizers import RECIPES, RecipeName
from forerun._proxies.core.powers import Ratios
from forerun._proxies.core.programs import Command, Factory
from forerun._proxies.core.rules import Parametrization, find_run_problems
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape

Status = Literal["finished", "diverged", "pruned", "failed"]
Dtype = Literal["float32", "float64", "bfloat16"]
MainRunDtype = Literal["float32", "bfloat16"]
MatmulPrecision = Literal["highest", "high", "medium"]
"""Precision of float32 matrix products."""

MAX_SEED = 2**31 - 1
DIVERGED_ABOVE_NATS = 1.0
"""A run past its warmup counts as diverged when its loss is this far above ln(vocabulary), the loss
of a uniform guess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """Settings of the arithmetic, which are part of a run's identity."""

    dtype: Dtype = "float32"
    """Precision. `bfloat16`: weights, sums of gradients, and moments stay float32; everything else,
    the residual stream included, has the main run's precision (`forerun._proxies.model.precision`).
    A user's own model computes under autocast."""
    matmul_precision: MatmulPrecision = "highest"
    """Argument of `torch.set_float32_matmul_precision`."""
    num_slots: int = 1
    """Trials that a bank trains at once, K; a batched product may round differently at another
    K."""
    num_threads: int = 1
    """Threads of torch on a CPU; a sum may round differently with another number."""
    microbatch_tokens: int | None = None
    """Tokens per forward and backward pass, with accumulated gradients; None for the whole batch at
    once."""
    activation_checkpointing: bool = False
    """Whether blocks are recomputed in the backward pass: less memory, a third more time."""
    compiled: bool = False
    """Whether the model is compiled by `torch.compile`."""
    cuda_graphs: bool = False
    """Whether a whole step is recorded as a CUDA graph and replayed, with the same arithmetic."""
    fused_loss: bool = False
    """Whether the cross-entropy is computed from hidden states in parts, so that the logits of a
    batch are never in memory at once."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_one_of("dtype", get_args(Dtype))
        checks.require_one_of("matmul_precision", get_args(MatmulPrecision))
        checks.require_whole("num_slots", "num_threads")
        if self.microbatch_tokens is not None:
            checks.require_whole("microbatch_tokens")
        for name in ("microbatch_tokens", "activation_checkpointing"):
            checks.require(
                self.num_slots == 1 or not getattr(self, name),
                f"num_slots = {self.num_slots}: {name} needs one trial at a time",
            )
        checks.raise_problems()


class _CachedId:
    """A place to store the id of a spec, once it is computed. It is not a field of the dataclass,
    so equality, JSON, and copies ignore it.
    """

    __slots__ = ("_id",)
    _id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec(_CachedId):
    """Full description of one proxy run: with the data, it determines what the run computes."""

    shape: Shape = field(metadata=canon.SHARED)
    base_shape: Shape = field(metadata=canon.SHARED)
    """Shape at which the hyperparameters are set."""
    parametrization: Parametrization = field(metadata=canon.SHARED)
    hparams: Hparams
    schedule: Schedule
    batch_tokens: int
    """Tokens per optimizer step."""
    data_id: str
    """Content id of the corpus."""
    seed: int
    numerics: Numerics = field(metadata=canon.SHARED)
    optimizer: RecipeName
    """Name of the recipe that assigns an optimizer to each parameter
    (`forerun._proxies.core.optimizers.RECIPES`)."""
    base_batch_tokens: int | None = None
    """Batch of the base run in tokens; None unless the parametrization scales with batch or
    duration."""
    base_num_tokens: int | None = None
    """Training tokens of the base run; None like `base_batch_tokens`."""
    factory: Factory | None = field(default=None, metadata=canon.SHARED)
    """Function of the user that builds the model; None for `forerun._proxies.model.decoder`."""
    command: Command | None = field(default=None, metadata=canon.SHARED)
    """Command of the user that trains the model; None if forerun trains it."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_one_of("optimizer", tuple(RECIPES))
        checks.require_whole("batch_tokens")
        checks.require_whole("seed", least=0)
        checks.require(
            type(self.seed) is not int or self.seed <= MAX_SEED, f"seed = {self.seed} > {MAX_SEED}"
        )
        checks.require(bool(self.data_id), "data_id is empty")
        self._check_base_tokens(checks)
        self._check_user_code(checks)
        by_shape = self.optimizer in RECIPES and RECIPES[self.optimizer].rates_by_shape
        checks.require(
            by_shape == self.parametrization.rates_by_shape,
            f"optimizer = {self.optimizer!r} with muon_rate = {self.parametrization.muon_rate!r}: "
            "must fit each other",
        )
        if checks.has_no_problem:
            self._check_batch(checks)
            self._check_base_shape(checks)
        if checks.has_no_problem:
            checks.problems += find_run_problems(
                self.parametrization, self.ratios, self.hparams, tied=self.shape.tied
            )
        checks.raise_problems()

    def _check_base_tokens(self, checks: Checks) -> None:
        base = (self.base_batch_tokens, self.base_num_tokens)
        if self.parametrization.needs_tokens or self.hparams.needs_tokens:
            checks.require_whole("base_batch_tokens", "base_num_tokens")
        else:
            checks.require(
                base == (None, None),
                f"base tokens = {base}: {self.parametrization} does not scale with them",
            )

    def _check_user_code(self, checks: Checks) -> None:
        """Check that nothing is asked for that a user's own model or trainer cannot do."""
        if self.factory is None and self.command is None:
            return
        checks.require(
            self.factory is None or self.command is None,
            "factory and command: give only one of them",
        )
        owner = "a command" if self.factory is None else "a factory's model"
        checks.require(
            self.numerics.num_slots == 1,
            f"num_slots = {self.numerics.num_slots}: {owner} trains one trial at a time",
        )
        checks.require(
            not self.numerics.activation_checkpointing,
            f"activation_checkpointing: {owner} must do that itself",
        )

    def _check_batch(self, checks: Checks) -> None:
        seq_len, stages = self.shape.seq_len, self.schedule.batch_warmup_stages
        checks.require(
            self.batch_tokens % (seq_len * stages) == 0,
            f"batch_tokens = {self.batch_tokens} is not a multiple of seq_len = {seq_len}"
            + (f" times batch_warmup_stages = {stages}" if stages > 1 else ""),
        )
        checks.require(
            stages == 1 or self.numerics.num_slots == 1,
            f"num_slots = {self.numerics.num_slots}: batch warmup needs one trial at a time",
        )
        microbatch, smallest_batch = self.numerics.microbatch_tokens, self.batch_tokens // stages
        checks.require(
            microbatch is None or (microbatch % seq_len == 0 and smallest_batch % microbatch == 0),
            f"microbatch_tokens = {microbatch}: must be a multiple of seq_len = {seq_len} that "
            f"divides {smallest_batch}",
        )

    def _check_base_shape(self, checks: Checks) -> None:
        fixed = ["family", "vocab_size", "tied", "qk_norm"]
        if self.shape.family == "gpt2":
            fixed.append("seq_len")  # learned positions are parameters
        differing = [
            name for name in fixed if getattr(self.shape, name) != getattr(self.base_shape, name)
        ]
        checks.require(
            not differing,
            f"shape and base_shape differ in {', '.join(differing)}: only width and depth may "
            "differ",
        )

    @property
    def id(self) -> str:
        """Content id: sha256 of the canonical JSON, computed at its first use."""
        try:
            return self._id
        except AttributeError:
            object.__setattr__(self, "_id", canon.compute_content_id(self))
            return self._id

    @property
    def num_tokens(self) -> int:
        """Tokens that the run trains on."""
        return int(self.batch_tokens * self.schedule.num_full_batches)

    def count_tokens_by(self, num_steps: int) -> int:
        """Return the tokens that the first `num_steps` steps train on."""
        return (
            self.schedule.count_sequences(num_steps, self.batch_sequences)[0] * self.shape.seq_len
        )

    @property
    def flops(self) -> int:
        """Training FLOPs of the whole run, causal convention (`forerun._proxies.core.flops`)."""
        return compute_flops_per_token(self.shape) * self.num_tokens

    @property
    def batch_sequences(self) -> int:
        """Sequences of a full batch."""
        return self.batch_tokens // self.shape.seq_len

    def compute_pass_sequences(self, num_microbatches: int) -> int:
        """Return the maximum number of sequences of a forward pass.

        Args:
            num_microbatches: Minimum number of passes of a batch.
        """
        tokens = self.numerics.microbatch_tokens or self.batch_tokens
        return min(math.ceil(self.batch_sequences / num_microbatches), tokens // self.shape.seq_len)

    @property
    def user_values(self) -> dict[str, float | int | str]:
        """Values of the user's own code by name, at this run's size."""
        return {value.name: value.compute_value(self.ratios) for value in self.hparams.own}

    @property
    def ratios(self) -> Ratios:
        """Ratios to the base run."""
        return Ratios(
            width=self.shape.width / self.base_shape.width,
            depth=self.shape.num_layers / self.base_shape.num_layers,
            batch=self.batch_tokens / (self.base_batch_tokens or self.batch_tokens),
            duration=self.num_tokens / (self.base_num_tokens or self.num_tokens),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The log of a run: one entry per logged step in each column."""

    steps: tuple[int, ...]
    """Optimizer steps done, counted from 1."""
    train_loss_nats: tuple[float, ...]
    """Loss of that step's batch, before its update."""
    grad_norm: tuple[float, ...]
    """Global gradient norm before clipping; empty if the trainer does not log it."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        lengths = {len(self.steps), len(self.train_loss_nats), len(self.grad_norm or self.steps)}
        checks.require(len(lengths) == 1, f"columns of different lengths: {sorted(lengths)}")
        checks.require(
            list(self.steps) == sorted(set(self.steps)), "steps are not strictly increasing"
        )
        checks.require(
            all(map(math.isfinite, self.train_loss_nats + self.grad_norm)), "a value is not finite"
        )
        checks.raise_problems()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The outcome of a run."""

    id: str
    """Id of the run's spec."""
    status: Status
    loss_nats: float | None
    """Validation loss at the end, in nats per token; None unless the run finished."""
    num_steps: int = field(metadata=canon.SHARED)
    """Optimizer steps done."""
    last_train_loss_nats: float | None
    """Last finite training loss in nats per token, also of a run that diverged."""
    curve_id: str
    """Content id of its `Curve`."""
    flops: float = field(metadata=canon.SHARED)
    """Training FLOPs spent, causal convention (`forerun._proxies.core.flops`)."""
    tokens: int = field(metadata=canon.SHARED)
    """Tokens trained on."""
    seconds: float
    """Wall-clock seconds of the worker; for a run in a bank, its share."""
    environment: dict[str, str] = field(metadata=canon.SHARED)
    """Versions and hardware. Many results share this object: do not change it."""
    reason: str = ""
    """Reason why the run did not finish, in a sentence."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_one_of("status", get_args(Status))
        checks.require(len(self.id) == canon.ID_LENGTH, f"id = {self.id!r} is not a sha256")
        checks.require(
            (self.loss_nats is not None) == (self.status == "finished"),
            f"status = {self.status} with loss_nats = {self.loss_nats}: only a finished run has a "
            "loss",
        )
        for name in ("loss_nats", "last_train_loss_nats"):
            if getattr(self, name) is not None:
                checks.require_number(name, least=0)
        checks.require_whole("num_steps", "tokens", least=0)
        checks.require_number("flops", least=0)
        checks.require_number("seconds", least=0)
        checks.require(
            self.status == "finished" or bool(self.reason),
            f"status = {self.status} without a reason",
        )
        checks.raise_problems()


class EndedRun(NamedTuple):
    """A run that has ended, with the number of its slot, which is free again.

    A run that is paused at a rung (a size and duration of the study's ladder) is reported by the
    same record, with its result so far.
    """

    slot: int
    result: RunResult
    curve: Curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A spec with its result: the input of the verdict and the fits."""

    spec: RunSpec
    result: RunResult

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require(
            self.spec.id == self.result.id, f"result {self.result.id[:12]} is of another spec"
        )
        checks.raise_problems()
