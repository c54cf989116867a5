"""The language of the project: what a run is, and what came of it. Standard library only.

Every record is frozen, keyword-only and slotted, validates itself on creation (all problems at once), and has a
canonical JSON form (`proxies.canon`). A run's identity is the sha256 of its spec: nothing is paid for twice.

Units: losses in nats per token, batches in tokens, durations in optimizer steps, learning rates absolute.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from proxies import canon
from proxies.checks import Checks

Family = Literal["llama"]
Parametrization = Literal["sp", "mup"]
ScheduleKind = Literal["cosine", "linear", "wsd", "constant"]
Status = Literal["finished", "diverged", "pruned", "failed"]
Dtype = Literal["float32", "float64", "bfloat16"]

MAX_SEED = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A decoder transformer's shape. `llama`: RMSNorm, SwiGLU, rotary positions, no biases."""

    num_layers: int
    width: int
    """Residual stream, d_model."""
    num_heads: int
    num_kv_heads: int
    ffn_width: int
    vocab_size: int
    seq_len: int
    """Tokens per training sequence."""
    family: Family = "llama"
    tied: bool = False
    """Embedding and readout share one matrix."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("num_layers", "width", "num_heads", "num_kv_heads", "ffn_width", "seq_len")
        checks.whole("vocab_size", least=2)
        checks.one_of("family", ("llama",))
        checks.that(type(self.tied) is bool, f"tied = {self.tied!r}: true or false is wanted")
        if checks.fine:
            heads, kv_heads = self.num_heads, self.num_kv_heads
            checks.that(self.width % heads == 0, f"num_heads = {heads} does not divide width = {self.width}")
            checks.that(heads % kv_heads == 0, f"num_kv_heads = {kv_heads} does not divide num_heads = {heads}")
        if checks.fine:
            odd = f"head_dim = {self.head_dim} is odd: rotary positions turn pairs"
            checks.that(self.head_dim % 2 == 0, odd)
        checks.done()

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.width // self.num_heads

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    def at_width(self, width: int) -> Shape:
        """This shape at another width: same depth, head dim, GQA ratio and FFN ratio.

        Raises:
            SpecError: the width does not hold whole heads, or the FFN would not be a whole number.
        """
        checks = Checks(self)
        whole = width > 0 and width % self.head_dim == 0
        checks.that(whole, f"width = {width} is no multiple of the head dim {self.head_dim}")
        checks.that(self.ffn_width * width % self.width == 0,
                    f"width = {width} gives the FFN width {self.ffn_width * width / self.width:g}: "
                    "choose a ratio that stays whole")  # fmt: skip
        checks.done()
        num_heads, ratio = width // self.head_dim, self.num_heads // self.num_kv_heads
        uneven = f"width = {width} has {num_heads} heads, not a multiple of {ratio} per kv head"
        checks.that(num_heads % ratio == 0, uneven)
        checks.done()
        return dataclasses.replace(
            self,
            width=width,
            num_heads=num_heads,
            num_kv_heads=num_heads // ratio,
            ffn_width=self.ffn_width * width // self.width,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hparams:
    """Hyperparameters at the base shape; a parametrization carries them to any other.

    Weight decay is PyTorch AdamW's: each step multiplies a weight by `1 - lr * weight_decay`.
    """

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None never clips."""
    embedding_multiplier: float = 1.0
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.number("learning_rate", above=0)
        checks.number("weight_decay", least=0)
        checks.number("beta1", least=0, below=1)
        checks.number("beta2", least=0, below=1)
        checks.number("eps", above=0)
        checks.number("embedding_multiplier", above=0)
        checks.number("output_multiplier", above=0)
        if self.clip_norm is not None:
            checks.number("clip_norm", above=0)
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Learning rate over steps, as a share of the peak (`proxies.schedule.lr_multiplier`)."""

    kind: ScheduleKind
    num_steps: int
    warmup_steps: int = 0
    decay_steps: int = 0
    """Length of the final decay; only `wsd` has one."""
    final_fraction: float = 0.0
    """Where the decay would end, as a share of the peak, one step after the last."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.one_of("kind", ("cosine", "linear", "wsd", "constant"))
        checks.whole("num_steps")
        checks.whole("warmup_steps", "decay_steps", least=0)
        checks.number("final_fraction", least=0, most=1)
        if checks.fine:
            checks.that(
                self.warmup_steps + self.decay_steps <= self.num_steps,
                f"warmup_steps = {self.warmup_steps} and decay_steps = {self.decay_steps} "
                f"exceed num_steps = {self.num_steps}",
            )
            wanted = "some" if self.kind == "wsd" else "none"
            checks.that(
                (self.kind == "wsd") == (self.decay_steps > 0),
                f"decay_steps = {self.decay_steps}: `{self.kind}` needs {wanted}",
            )
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """How the arithmetic is done. Part of a run's identity: other numerics are another run."""

    dtype: Dtype = "float32"
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """`torch.set_float32_matmul_precision`."""
    num_slots: int = 1
    """K, the trials a bank holds at once; a batched product may round differently at another K."""
    num_threads: int = 1

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.one_of("dtype", ("float32", "float64", "bfloat16"))
        checks.one_of("matmul_precision", ("highest", "high", "medium"))
        checks.whole("num_slots", "num_threads")
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """One proxy run, wholly: what it computes follows from this and the data of that id."""

    shape: Shape
    base_shape: Shape
    parametrization: Parametrization
    hparams: Hparams
    schedule: Schedule
    batch_tokens: int
    """Tokens per optimizer step."""
    data_id: str
    seed: int
    numerics: Numerics
    optimizer: Literal["adamw"] = "adamw"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.one_of("parametrization", ("sp", "mup"))
        checks.one_of("optimizer", ("adamw",))
        checks.whole("batch_tokens")
        checks.whole("seed", least=0)
        checks.that(type(self.seed) is not int or self.seed <= MAX_SEED, f"seed = {self.seed} > {MAX_SEED}")
        checks.that(bool(self.data_id), "data_id is empty")
        if checks.fine:
            checks.that(
                self.batch_tokens % self.shape.seq_len == 0,
                f"batch_tokens = {self.batch_tokens} is no multiple of seq_len = {self.shape.seq_len}",
            )
            checks.that(
                (self.shape.vocab_size, self.shape.family) == (self.base_shape.vocab_size, self.base_shape.family),
                "shape and base_shape differ in family or vocab_size: width (and depth) are what scales",
            )
        checks.done()

    @property
    def id(self) -> str:
        """Content id: sha256 of the canonical JSON."""
        return canon.content_id(self)

    @property
    def num_tokens(self) -> int:
        """Tokens the run trains on."""
        return self.batch_tokens * self.schedule.num_steps

    @property
    def batch_sequences(self) -> int:
        """Sequences per optimizer step."""
        return self.batch_tokens // self.shape.seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """What a run logged: one entry per logged step, all of one length."""

    steps: tuple[int, ...]
    """Optimizer steps done, counted from 1."""
    train_loss_nats: tuple[float, ...]
    """Loss of that step's batch, before its update."""
    grad_norm: tuple[float, ...]
    """Global norm before clipping."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        lengths = {len(self.steps), len(self.train_loss_nats), len(self.grad_norm)}
        checks.that(len(lengths) == 1, f"columns of different lengths: {sorted(lengths)}")
        checks.that(list(self.steps) == sorted(set(self.steps)), "steps are not strictly increasing")
        checks.that(all(map(math.isfinite, self.train_loss_nats + self.grad_norm)), "a value is not finite")
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What came of a run. `loss_nats` is the validation loss at the end, and only a finished run has one."""

    id: str
    status: Status
    loss_nats: float | None
    num_steps: int
    """Optimizer steps done."""
    last_train_loss_nats: float | None
    """Last finite training loss; what a diverged run reached."""
    curve_id: str
    """Content id of its `Curve`."""
    flops: float
    """Model FLOPs spent, causal convention (`proxies.flops`)."""
    tokens: int
    seconds: float
    """Worker wall-clock time, this run's share of its bank."""
    environment: dict[str, str]
    reason: str = ""
    """Why it is not finished, in a sentence."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.one_of("status", ("finished", "diverged", "pruned", "failed"))
        checks.that(len(self.id) == canon.ID_LENGTH, f"id = {self.id!r} is no sha256")
        checks.that(
            (self.loss_nats is not None) == (self.status == "finished"),
            f"status = {self.status} with loss_nats = {self.loss_nats}: finished runs, and only they, have one",
        )
        if self.loss_nats is not None:
            checks.number("loss_nats", least=0)
        if self.last_train_loss_nats is not None:
            checks.number("last_train_loss_nats", least=0)
        checks.whole("num_steps", "tokens", least=0)
        checks.number("flops", least=0)
        checks.number("seconds", least=0)
        checks.that(self.status == "finished" or bool(self.reason), f"status = {self.status} without a reason")
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A spec with its result: what the verdict and the fits read."""

    spec: RunSpec
    result: RunResult

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.that(self.spec.id == self.result.id, f"result {self.result.id[:12]} is of another spec")
        checks.done()
